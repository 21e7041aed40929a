package smi

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/deviceapi/sensors"
)

// UnknownFieldError is a query for a property that the tool does not know. The
// text is that of the real tool.
type UnknownFieldError struct{ Field string }

func (e *UnknownFieldError) Error() string {
	return fmt.Sprintf("Field %q is not a valid field to query.", e.Field)
}

// Format says how a query is written: the value of --format.
type Format struct {
	NoHeader bool
	NoUnits  bool
}

// ParseFormat reads a list such as csv,noheader,nounits; csv must be in it.
func ParseFormat(list string) (Format, error) {
	var f Format
	csv := false
	for option := range strings.SplitSeq(list, ",") {
		switch strings.TrimSpace(option) {
		case "csv":
			csv = true
		case "noheader":
			f.NoHeader = true
		case "nounits":
			f.NoUnits = true
		default:
			return Format{}, fmt.Errorf("format option %q is not known: use csv, noheader, nounits", option)
		}
	}
	if !csv {
		return Format{}, errors.New("format must contain csv, the only one there is")
	}
	return f, nil
}

// notAvailable is what the real tool writes for a property without a value.
const notAvailable = "[N/A]"

// property is something that can be queried of a T.
type property[T any] struct {
	names []string // the first is the one that the header shows
	unit  string
	value func(*Report, T) string
}

func (p property[T]) header() string {
	if p.unit == "" {
		return p.names[0]
	}
	return p.names[0] + " [" + p.unit + "]"
}

// process is a holder of memory and where it holds it.
type process struct {
	deviceapi.Process
	gpu               gpu
	instance, compute string // N/A on the GPU as a whole
}

// everyProcess is the processes on the GPU and then those on its partitions.
func (g gpu) everyProcess() []process {
	var all []process
	for _, p := range g.Processes {
		all = append(all, process{p, g, noValue, noValue})
	}
	for _, part := range g.Partitions {
		for _, p := range part.Processes {
			all = append(all, process{p, g, strconv.Itoa(part.GPUInstanceID), strconv.Itoa(part.ComputeInstanceID)})
		}
	}
	return all
}

// GPUs writes properties of each GPU: nvidia-smi --query-gpu. It fails with an
// UnknownFieldError.
func (r *Report) GPUs(fields string, f Format) (string, error) {
	return query(r, gpuProperties(), fields, f, r.gpus)
}

// ComputeApps writes properties of each process: nvidia-smi --query-compute-apps.
// It fails with an UnknownFieldError.
func (r *Report) ComputeApps(fields string, f Format) (string, error) {
	var rows []process
	for _, g := range r.gpus {
		rows = append(rows, g.everyProcess()...)
	}
	return query(r, processProperties(), fields, f, rows)
}

// GPUFields and ComputeAppFields list what can be queried, one property a line
// with its other names.
func GPUFields() string        { return fieldList(gpuProperties()) }
func ComputeAppFields() string { return fieldList(processProperties()) }

func fieldList[T any](properties []property[T]) string {
	var b strings.Builder
	for _, p := range properties {
		fmt.Fprintf(&b, "%q\n", strings.Join(p.names, `" or "`))
	}
	return strings.ReplaceAll(b.String(), `\"`, `"`)
}

func query[T any](r *Report, known []property[T], fields string, f Format, rows []T) (string, error) {
	var columns []property[T]
	for name := range strings.SplitSeq(fields, ",") {
		name = strings.TrimSpace(name)
		at := slices.IndexFunc(known, func(p property[T]) bool { return slices.Contains(p.names, name) })
		if at < 0 {
			return "", &UnknownFieldError{Field: name}
		}
		columns = append(columns, known[at])
	}
	var b strings.Builder
	line := func(cell func(property[T]) string) {
		for i, c := range columns {
			if i > 0 {
				b.WriteString(", ")
			}
			b.WriteString(cell(c))
		}
		b.WriteString("\n")
	}
	if !f.NoHeader {
		line(property[T].header)
	}
	for _, row := range rows {
		line(func(p property[T]) string {
			value := p.value(r, row)
			if p.unit == "" || f.NoUnits || value == notAvailable {
				return value
			}
			return value + " " + p.unit
		})
	}
	return b.String(), nil
}

// gpuProperties are the properties of a GPU, in the order of the help text.
func gpuProperties() []property[gpu] {
	text := func(value func(gpu) string, names ...string) property[gpu] {
		return property[gpu]{names: names, value: func(_ *Report, g gpu) string {
			if v := value(g); v != "" {
				return v
			}
			return notAvailable
		}}
	}
	number := func(unit string, value func(gpu) (string, bool), names ...string) property[gpu] {
		return property[gpu]{names: names, unit: unit, value: func(_ *Report, g gpu) string {
			if v, known := value(g); known {
				return v
			}
			return notAvailable
		}}
	}
	fixed := func(value string, names ...string) property[gpu] {
		return text(func(gpu) string { return value }, names...)
	}
	unknown := func(unit string, names ...string) property[gpu] {
		return number(unit, func(gpu) (string, bool) { return "", false }, names...)
	}
	memory := func(value func(gpu) int64, names ...string) property[gpu] {
		return number("MiB", func(g gpu) (string, bool) { return strconv.FormatInt(mib(value(g)), 10), g.Whole }, names...)
	}
	load := func(value func(int) int, names ...string) property[gpu] {
		return number("%", func(g gpu) (string, bool) {
			percent, known := sensors.Load(g.GPUStatus)
			return strconv.Itoa(value(percent)), known
		}, names...)
	}
	draw := func(g gpu) (string, bool) {
		milliwatts, known := sensors.Power(g.GPUStatus)
		return watts(milliwatts), known
	}
	limit := func(g gpu) (string, bool) { return watts(g.PowerLimitWatts * 1000), g.PowerLimitWatts > 0 }
	pci := func(part int) func(gpu) string {
		return func(g gpu) string {
			if parts := pciParts(g.PCIBusID); parts != nil {
				return "0x" + parts[part]
			}
			return ""
		}
	}

	return []property[gpu]{
		{names: []string{"timestamp"}, value: func(r *Report, _ gpu) string { return r.timestamp() }},
		text(func(g gpu) string { return g.DriverVersion }, "driver_version"),
		{names: []string{"count"}, value: func(r *Report, _ gpu) string { return strconv.Itoa(r.total) }},
		text(func(g gpu) string { return g.ProductName }, "name", "gpu_name"),
		text(func(g gpu) string { return g.Serial }, "serial", "gpu_serial"),
		text(func(g gpu) string { return g.UUID }, "uuid", "gpu_uuid"),
		text(func(g gpu) string { return deviceapi.BusID(g.PCIBusID) }, "pci.bus_id", "gpu_bus_id"),
		text(pci(0), "pci.domain"),
		text(pci(1), "pci.bus"),
		text(pci(2), "pci.device"),
		unknown("", "pci.device_id"),
		unknown("", "pci.sub_device_id"),
		unknown("", "pcie.link.gen.current"),
		unknown("", "pcie.link.gen.max"),
		unknown("", "pcie.link.width.current"),
		unknown("", "pcie.link.width.max"),
		text(func(g gpu) string { return strconv.Itoa(g.index) }, "index"),
		fixed("Disabled", "display_mode"),
		fixed("Disabled", "display_active"),
		fixed("Enabled", "persistence_mode"),
		fixed("Disabled", "accounting.mode"),
		unknown("", "driver_model.current"),
		unknown("", "vbios_version"),
		unknown("%", "fan.speed"),
		text(gpu.performanceState, "pstate"),
		fixed("0x0000000000000000", "clocks_event_reasons.active", "clocks_throttle_reasons.active"),
		memory(func(g gpu) int64 { return g.MemoryBytes }, "memory.total"),
		memory(func(gpu) int64 { return 0 }, "memory.reserved"),
		memory(func(g gpu) int64 { return g.MemoryUsed }, "memory.used"),
		memory(func(g gpu) int64 { return max(g.MemoryBytes-g.MemoryUsed, 0) }, "memory.free"),
		fixed("Default", "compute_mode"),
		text(computeCapability, "compute_cap"),
		load(func(load int) int { return load }, "utilization.gpu"),
		load(sensors.MemoryTraffic, "utilization.memory"),
		load(func(int) int { return 0 }, "utilization.encoder"),
		load(func(int) int { return 0 }, "utilization.decoder"),
		fixed("Enabled", "ecc.mode.current"),
		fixed("Enabled", "ecc.mode.pending"),
		text(func(g gpu) string { return strconv.FormatInt(g.Health.ECCCorrected, 10) }, "ecc.errors.corrected.volatile.total"),
		text(func(g gpu) string { return strconv.FormatInt(g.Health.ECCUncorrected, 10) }, "ecc.errors.uncorrected.volatile.total"),
		text(func(g gpu) string { return strconv.FormatInt(g.Health.ECCCorrected, 10) }, "ecc.errors.corrected.aggregate.total"),
		text(func(g gpu) string { return strconv.FormatInt(g.Health.ECCUncorrected, 10) }, "ecc.errors.uncorrected.aggregate.total"),
		text(func(g gpu) string { return strconv.Itoa(sensors.Temperature(g.GPUStatus)) }, "temperature.gpu"),
		unknown("", "temperature.memory"),
		fixed("Enabled", "power.management"),
		number("W", draw, "power.draw"),
		number("W", draw, "power.draw.average"),
		number("W", draw, "power.draw.instant"),
		number("W", limit, "power.limit"),
		number("W", limit, "enforced.power.limit"),
		number("W", limit, "power.default_limit"),
		number("W", limit, "power.max_limit"),
		unknown("W", "power.min_limit"),
		unknown("MHz", "clocks.current.graphics", "clocks.gr"),
		unknown("MHz", "clocks.current.sm", "clocks.sm"),
		unknown("MHz", "clocks.current.memory", "clocks.mem"),
		unknown("MHz", "clocks.max.graphics", "clocks.max.gr"),
		unknown("MHz", "clocks.max.sm"),
		unknown("MHz", "clocks.max.memory", "clocks.max.mem"),
		text(migMode, "mig.mode.current"),
		text(migMode, "mig.mode.pending"),
	}
}

// processProperties are the properties of a process, in the order of the help text.
func processProperties() []property[process] {
	of := func(value func(process) string, names ...string) property[process] {
		return property[process]{names: names, value: func(_ *Report, p process) string {
			if v := value(p); v != "" {
				return v
			}
			return notAvailable
		}}
	}
	memory := of(func(p process) string { return strconv.FormatInt(mib(p.Memory), 10) }, "used_gpu_memory", "used_memory")
	memory.unit = "MiB"
	return []property[process]{
		{names: []string{"timestamp"}, value: func(r *Report, _ process) string { return r.timestamp() }},
		of(func(p process) string { return p.gpu.ProductName }, "gpu_name"),
		of(func(p process) string { return deviceapi.BusID(p.gpu.PCIBusID) }, "gpu_bus_id"),
		of(func(p process) string { return p.gpu.Serial }, "gpu_serial"),
		of(func(p process) string { return p.gpu.UUID }, "gpu_uuid"),
		of(func(p process) string { return strconv.Itoa(p.PID) }, "pid"),
		of(func(p process) string { return p.Name }, "process_name", "name"),
		memory,
	}
}

func (r *Report) timestamp() string { return r.now.Format("2006/01/02 15:04:05.000") }

// pciParts are domain, bus and device of a PCI address in hexadecimal, nil where it is none.
func pciParts(address string) []string {
	parts := strings.FieldsFunc(deviceapi.BusID(address), func(r rune) bool { return r == ':' || r == '.' })
	if len(parts) != 4 || len(parts[0]) != 8 {
		return nil
	}
	return []string{parts[0][4:], parts[1], parts[2]}
}

// watts has two decimals.
func watts(milliwatts int) string {
	return fmt.Sprintf("%d.%02d", milliwatts/1000, milliwatts%1000/10)
}

// computeCapability has two parts in the tool's output.
func computeCapability(g gpu) string {
	parts := strings.SplitN(g.ComputeCapability, ".", 3)
	if len(parts) < 2 {
		return g.ComputeCapability
	}
	return parts[0] + "." + parts[1]
}

func migMode(g gpu) string {
	switch g.MIGMode {
	case deviceapi.MIGEnabled:
		return "Enabled"
	case deviceapi.MIGDisabled:
		return "Disabled"
	default:
		return ""
	}
}
