package smi

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/deviceapi/sensors"
)

// noValue is what the log writes for something without a value.
const noValue = "N/A"

// entry is a line of the log, or a section of it with entries.
type entry struct {
	label   string // in text; "" for a section: its entries stand where it would
	tag     string // in XML
	value   string
	xml     string // the value in XML where it is another one
	entries []entry
	section bool
	// display is the name by which a section can be asked for alone.
	display string
	// indent moves the line further to the right in text.
	indent int
	// narrow is a line whose value stands where older drivers put all values.
	narrow bool
}

func line(label, tag, value string) entry { return entry{label: label, tag: tag, value: value} }

func section(label, tag string, entries ...entry) entry {
	return entry{label: label, tag: tag, entries: entries, section: true}
}

func (e entry) as(display string) entry { e.display = display; return e }

// displays are what Log can be asked for, in the order of the help text. Some have no
// section in a simulation.
var displays = []string{
	"MEMORY", "UTILIZATION", "ECC", "TEMPERATURE", "POWER", "CLOCK", "COMPUTE", "PIDS", "PERFORMANCE", "SUPPORTED_CLOCKS",
	"PAGE_RETIREMENT", "ACCOUNTING", "ENCODER_STATS", "SUPPORTED_GPU_TARGET_TEMP", "VOLTAGE", "FBC_STATS", "ROW_REMAPPER",
	"GSP_FIRMWARE_VERSION", "POWER_SMOOTHING", "POWER_PROFILES",
}

// UnknownDisplayError is a name that is none of a section of the log.
type UnknownDisplayError struct{ Display string }

func (e *UnknownDisplayError) Error() string {
	return fmt.Sprintf("Display type %q is not known: use %s.", e.Display, strings.Join(displays, ", "))
}

// ParseDisplays reads a list such as MEMORY,ECC. It fails with an UnknownDisplayError.
func ParseDisplays(list string) ([]string, error) {
	var chosen []string
	for name := range strings.SplitSeq(list, ",") {
		name = strings.ToUpper(strings.TrimSpace(name))
		if !slices.Contains(displays, name) {
			return nil, &UnknownDisplayError{Display: name}
		}
		chosen = append(chosen, name)
	}
	return chosen, nil
}

// Log writes all that is known of each GPU as text: nvidia-smi -q. With displays it
// writes those sections alone.
func (r *Report) Log(displays ...string) string {
	l := textLog{column: 42}
	if r.driverMajor() >= 580 {
		l.column = 55
	}
	l.WriteString("\n==============NVSMI LOG==============\n\n")
	for _, e := range r.head() {
		l.entry(e, 0)
	}
	l.WriteString("\n")
	l.entry(line("Attached GPUs", "", strconv.Itoa(r.total)), 0)
	for _, g := range r.gpus {
		fmt.Fprintf(&l, "GPU %s\n", deviceapi.BusID(g.PCIBusID))
		for _, e := range g.log() {
			if len(displays) == 0 || slices.Contains(displays, e.display) {
				l.entry(e, 1)
			}
		}
		l.WriteString("\n")
	}
	return l.String()
}

// XML writes the same as an XML document: nvidia-smi -q -x.
func (r *Report) XML() string {
	dtd := "nvsmi_device_v12.dtd"
	if r.driverMajor() >= 580 {
		dtd = "nvsmi_device_v13.dtd"
	}
	var l xmlLog
	fmt.Fprintf(&l, "<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM %q>\n<nvidia_smi_log>\n", dtd)
	for _, e := range append(r.head(), line("", "attached_gpus", strconv.Itoa(r.total))) {
		l.entry(e, 1)
	}
	for _, g := range r.gpus {
		fmt.Fprintf(&l, "\t<gpu id=%q>\n", deviceapi.BusID(g.PCIBusID))
		for _, e := range g.log() {
			l.entry(e, 2)
		}
		l.WriteString("\t</gpu>\n")
	}
	l.WriteString("</nvidia_smi_log>\n")
	return l.String()
}

func (r *Report) head() []entry {
	return []entry{
		line("Timestamp", "timestamp", r.now.Format(time.ANSIC)),
		line("Driver Version", "driver_version", r.gpus[0].DriverVersion),
		line("CUDA Version", "cuda_version", r.gpus[0].CUDAVersion),
	}
}

// log is everything about a GPU, in the order of the real tool.
func (g gpu) log() []entry {
	mode := migMode(g)
	if mode == "" {
		mode = noValue
	}
	pci := func(part int, label, tag string) entry {
		e := line(label, tag, noValue)
		if parts := pciParts(g.PCIBusID); parts != nil {
			e.value, e.xml = "0x"+parts[part], parts[part]
		}
		return e
	}
	entries := []entry{
		line("Product Name", "product_name", g.ProductName),
		line("Product Brand", "product_brand", known(brand(g.Brand))),
		line("Product Architecture", "product_architecture", known(g.Architecture)),
		line("Display Mode", "display_mode", "Disabled"),
		line("Display Active", "display_active", "Disabled"),
		line("Persistence Mode", "persistence_mode", "Enabled"),
		section("MIG Mode", "mig_mode",
			line("Current", "current_mig", mode),
			line("Pending", "pending_mig", mode)),
		g.logPartitions(),
		line("Accounting Mode", "accounting_mode", "Disabled").as("ACCOUNTING"),
		section("Driver Model", "driver_model",
			line("Current", "current_dm", noValue),
			line("Pending", "pending_dm", noValue)),
		line("Serial Number", "serial", known(g.Serial)),
		line("GPU UUID", "uuid", g.UUID),
		line("Minor Number", "minor_number", strconv.Itoa(g.Minor)),
		line("VBIOS Version", "vbios_version", noValue),
		line("MultiGPU Board", "multigpu_board", "No"),
		section("GPU Operation Mode", "gpu_operation_mode",
			line("Current", "current_gom", noValue),
			line("Pending", "pending_gom", noValue)),
		line("GSP Firmware Version", "gsp_firmware_version", noValue).as("GSP_FIRMWARE_VERSION"),
		section("PCI", "pci",
			pci(1, "Bus", "pci_bus"),
			pci(2, "Device", "pci_device"),
			pci(0, "Domain", "pci_domain"),
			line("Bus Id", "pci_bus_id", deviceapi.BusID(g.PCIBusID))),
		line("Fan Speed", "fan_speed", noValue),
		line("Performance State", "performance_state", g.performanceState()).as("PERFORMANCE"),
	}
	entries = append(entries, g.logMemory()...)
	entries = append(entries, line("Compute Mode", "compute_mode", "Default").as("COMPUTE"), g.logUtilization())
	entries = append(entries, g.logECC()...)
	entries = append(entries,
		section("Retired Pages", "retired_pages",
			line("Pending Page Blacklist", "pending_retirement", noValue)).as("PAGE_RETIREMENT"),
		line("Remapped Rows", "remapped_rows", noValue).as("ROW_REMAPPER"),
		section("Temperature", "temperature",
			line("GPU Current Temp", "gpu_temp", strconv.Itoa(sensors.Temperature(g.GPUStatus))+" C"),
			line("Memory Current Temp", "memory_temp", noValue)).as("TEMPERATURE"),
		g.logPower(),
		section("Clocks", "clocks",
			line("Graphics", "graphics_clock", noValue),
			line("SM", "sm_clock", noValue),
			line("Memory", "mem_clock", noValue),
			line("Video", "video_clock", noValue)).as("CLOCK"),
		section("Max Clocks", "max_clocks",
			line("Graphics", "graphics_clock", noValue),
			line("SM", "sm_clock", noValue),
			line("Memory", "mem_clock", noValue),
			line("Video", "video_clock", noValue)).as("CLOCK"),
		g.logProcesses())
	return entries
}

// logPartitions has one section for each partition in text, and one around all in XML.
func (g gpu) logPartitions() entry {
	all := section("", "mig_devices")
	for i, p := range g.Partitions {
		all.entries = append(all.entries, section("MIG Device", "mig_device",
			line("Index", "index", strconv.Itoa(i)),
			line("GPU Instance ID", "gpu_instance_id", strconv.Itoa(p.GPUInstanceID)),
			line("Compute Instance ID", "compute_instance_id", strconv.Itoa(p.ComputeInstanceID)),
			section("Device Attributes", "device_attributes", section("Shared", "shared",
				line("Multiprocessor count", "multiprocessor_count", strconv.Itoa(p.Multiprocessors)),
				line("Copy Engine count", "copy_engine_count", strconv.Itoa(p.CopyEngines)),
				line("Encoder count", "encoder_count", strconv.Itoa(p.Encoders)),
				line("Decoder count", "decoder_count", strconv.Itoa(p.Decoders)),
				line("OFA count", "ofa_count", strconv.Itoa(p.OFAEngines)),
				line("JPG count", "jpg_count", strconv.Itoa(p.JPEGEngines)))),
			section("ECC Errors", "ecc_error_count", section("Volatile", "volatile_count",
				line("SRAM Uncorrectable", "sram_uncorrectable", strconv.FormatInt(p.Health.ECCUncorrected, 10)))),
			section("FB Memory Usage", "fb_memory_usage",
				line("Total", "total", mebibytes(p.MemoryBytes)),
				line("Reserved", "reserved", mebibytes(0)),
				line("Used", "used", mebibytes(p.MemoryUsed)),
				line("Free", "free", mebibytes(max(p.MemoryBytes-p.MemoryUsed, 0)))),
			section("BAR1 Memory", "bar1_memory_usage",
				line("Total", "total", fmt.Sprintf("%d MiB", bar1(g.GPU, p.Partition))),
				line("Used", "used", mebibytes(0)),
				line("Free", "free", fmt.Sprintf("%d MiB", bar1(g.GPU, p.Partition)))),
		))
	}
	if len(all.entries) == 0 {
		all.value = "None"
	}
	return all
}

// logMemory is that of the whole GPU, which the real tool does not tell where only
// partitions are visible.
func (g gpu) logMemory() []entry {
	memory := func(bytes int64) string {
		if !g.Whole {
			return ErrNoPermission.Error()
		}
		return mebibytes(bytes)
	}
	return []entry{
		section("FB Memory Usage", "fb_memory_usage",
			line("Total", "total", memory(g.MemoryBytes)),
			line("Reserved", "reserved", memory(0)),
			line("Used", "used", memory(g.MemoryUsed)),
			line("Free", "free", memory(max(g.MemoryBytes-g.MemoryUsed, 0)))).as("MEMORY"),
		section("BAR1 Memory Usage", "bar1_memory_usage",
			line("Total", "total", noValue),
			line("Used", "used", noValue),
			line("Free", "free", noValue)).as("MEMORY"),
	}
}

func (g gpu) logUtilization() entry {
	load, loaded := sensors.Load(g.GPUStatus)
	percent := func(n int) string {
		if !loaded {
			return noValue
		}
		return strconv.Itoa(n) + " %"
	}
	return section("Utilization", "utilization",
		line("GPU", "gpu_util", percent(load)),
		line("Memory", "memory_util", percent(sensors.MemoryTraffic(load))),
		line("Encoder", "encoder_util", percent(0)),
		line("Decoder", "decoder_util", percent(0)),
		line("JPEG", "jpeg_util", percent(0)),
		line("OFA", "ofa_util", percent(0))).as("UTILIZATION")
}

func (g gpu) logECC() []entry {
	counts := func(label, tag string) entry {
		return section(label, tag,
			line("SRAM Correctable", "sram_correctable", "0"),
			line("SRAM Uncorrectable Parity", "sram_uncorrectable_parity", "0"),
			line("SRAM Uncorrectable SEC-DED", "sram_uncorrectable_secded", "0"),
			line("DRAM Correctable", "dram_correctable", strconv.FormatInt(g.Health.ECCCorrected, 10)),
			line("DRAM Uncorrectable", "dram_uncorrectable", strconv.FormatInt(g.Health.ECCUncorrected, 10)))
	}
	return []entry{
		section("ECC Mode", "ecc_mode",
			line("Current", "current_ecc", "Enabled"),
			line("Pending", "pending_ecc", "Enabled")).as("ECC"),
		section("ECC Errors", "ecc_errors", counts("Volatile", "volatile"), counts("Aggregate", "aggregate")).as("ECC"),
	}
}

func (g gpu) logPower() entry {
	draw, limit := noValue, noValue
	if milliwatts, known := sensors.Power(g.GPUStatus); known {
		draw, limit = watts(milliwatts)+" W", watts(g.PowerLimitWatts*1000)+" W"
	}
	return section("GPU Power Readings", "gpu_power_readings",
		line("Average Power Draw", "average_power_draw", draw),
		line("Instantaneous Power Draw", "instant_power_draw", draw),
		line("Current Power Limit", "current_power_limit", limit),
		line("Requested Power Limit", "requested_power_limit", limit),
		line("Default Power Limit", "default_power_limit", limit),
		line("Min Power Limit", "min_power_limit", noValue),
		line("Max Power Limit", "max_power_limit", limit)).as("POWER")
}

func (g gpu) logProcesses() entry {
	all := section("Processes", "processes").as("PIDS")
	for _, p := range g.everyProcess() {
		fields := []entry{
			line("GPU instance ID", "gpu_instance_id", p.instance),
			line("Compute instance ID", "compute_instance_id", p.compute),
			line("Process ID", "pid", strconv.Itoa(p.PID)),
			line("Type", "type", "C"),
			line("Name", "process_name", p.Name),
			line("Used GPU Memory", "used_memory", mebibytes(p.Memory)),
		}
		for i := range fields {
			fields[i].narrow = true
			if i > 2 {
				fields[i].indent = 1
			}
		}
		all.entries = append(all.entries, section("", "process_info", fields...))
	}
	return all
}

func known(value string) string {
	if value == "" {
		return noValue
	}
	return value
}

// brand is the word of the tool for a brand: NVIDIA RTX for NvidiaRTX.
func brand(name string) string {
	if rest, ok := strings.CutPrefix(name, "Nvidia"); ok {
		return strings.TrimSpace("NVIDIA " + rest)
	}
	return name
}

func mebibytes(bytes int64) string { return fmt.Sprintf("%d MiB", mib(bytes)) }

// textLog writes entries as lines with values in a column.
type textLog struct {
	strings.Builder
	column int
}

func (l *textLog) entry(e entry, depth int) {
	if e.section && e.label == "" {
		for _, inner := range e.entries {
			l.entry(inner, depth)
		}
		return
	}
	label := strings.Repeat("    ", depth+e.indent) + e.label
	switch {
	case len(e.entries) > 0:
		l.WriteString(label + "\n")
		for _, inner := range e.entries {
			l.entry(inner, depth+1)
		}
	case e.section:
		fmt.Fprintf(l, "%-*s: None\n", l.column, label)
	case e.narrow:
		fmt.Fprintf(l, "%-42s: %s\n", label, e.value)
	default:
		fmt.Fprintf(l, "%-*s: %s\n", l.column, label, e.value)
	}
}

// xmlLog writes entries as elements.
type xmlLog struct{ strings.Builder }

func (l *xmlLog) entry(e entry, depth int) {
	indent := strings.Repeat("\t", depth)
	if !e.section {
		fmt.Fprintf(l, "%s<%s>", indent, e.tag)
		// A strings.Builder takes everything.
		_ = xml.EscapeText(l, []byte(cmp.Or(e.xml, e.value)))
		fmt.Fprintf(l, "</%s>\n", e.tag)
		return
	}
	fmt.Fprintf(l, "%s<%s>\n", indent, e.tag)
	if e.value != "" {
		fmt.Fprintf(l, "%s\t%s\n", indent, e.value)
	}
	for _, inner := range e.entries {
		l.entry(inner, depth+1)
	}
	fmt.Fprintf(l, "%s</%s>\n", indent, e.tag)
}
