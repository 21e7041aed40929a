package smi

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/deviceapi/sensors"
)

const (
	lineWidth    = 91 // of every line of the table
	nameWidth    = 27 // of a product name
	processWidth = 32 // of a process name
)

const (
	fullRule  = "+-----------------------------------------------------------------------------------------+\n"
	gpuRule   = "+-----------------------------------------+------------------------+----------------------+\n"
	gpuDouble = "|=========================================+========================+======================|\n"
	migRule   = "+------------------+----------------------------------+-----------+-----------------------+\n"
	migDouble = "|==================+==================================+===========+=======================|\n"
)

// Table writes the default output: GPUs, partitions, processes.
func (r *Report) Table() string {
	var b strings.Builder
	modern := r.driverMajor() >= 580
	r.header(&b, modern)
	for _, g := range r.gpus {
		g.rows(&b)
	}
	if r.partitioned() {
		b.WriteString("\n")
		r.partitions(&b, modern)
	}
	if !modern {
		b.WriteString(strings.Repeat(" ", lineWidth-2))
	}
	b.WriteString("\n")
	r.processes(&b)
	return b.String()
}

func (r *Report) driverMajor() int {
	major, _, _ := strings.Cut(r.gpus[0].DriverVersion, ".")
	n, err := strconv.Atoi(major)
	if err != nil {
		return 0
	}
	return n
}

func (r *Report) header(b *strings.Builder, modern bool) {
	driver, cuda := r.gpus[0].DriverVersion, r.gpus[0].CUDAVersion
	b.WriteString(r.now.Format("Mon Jan _2 15:04:05 2006") + "       \n")
	b.WriteString(fullRule)
	fmt.Fprintf(b, "| NVIDIA-SMI %-22s Driver Version: %-14s CUDA Version: %-9s|\n", driver, driver, cuda)
	if modern {
		b.WriteString(gpuRule)
	} else {
		b.WriteString("|" + gpuRule[1:])
	}
	b.WriteString("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n" +
		"| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n" +
		"|                                         |                        |               MIG M. |\n" +
		gpuDouble)
}

// rows are the three lines of a GPU.
func (g gpu) rows(b *strings.Builder) {
	ecc, mode := strconv.FormatInt(g.Health.ECCUncorrected, 10), "N/A"
	switch g.MIGMode {
	case deviceapi.MIGEnabled:
		ecc, mode = "On", "Enabled"
	case deviceapi.MIGDisabled:
		mode = "Disabled"
	}
	usage, limit := "N/A ", "N/A "
	if milliwatts, known := sensors.Power(g.GPUStatus); known {
		usage, limit = fmt.Sprintf("%dW", milliwatts/1000), fmt.Sprintf("%dW", g.PowerLimitWatts)
	}
	memory := "N/A  "
	if g.Whole {
		memory = fmt.Sprintf("%dMiB / %6dMiB", mib(g.MemoryUsed), mib(g.MemoryBytes))
	}
	utilization := "N/A"
	if load, known := sensors.Load(g.GPUStatus); known {
		utilization = fmt.Sprintf("%d%%", load)
	}
	fmt.Fprintf(b, "|%4d  %-*s    On  |   %16s Off |%21s |\n", g.index, nameWidth, cutEnd(g.ProductName, nameWidth), deviceapi.BusID(g.PCIBusID), ecc)
	fmt.Fprintf(b, "| N/A%6s    %-4s%14s / %5s |%23s |%8s      Default |\n",
		fmt.Sprintf("%dC", sensors.Temperature(g.GPUStatus)), g.performanceState(), usage, limit, memory, utilization)
	fmt.Fprintf(b, "|%41s|%24s|%21s |\n", "", "", mode)
	b.WriteString(gpuRule)
}

// partitioned says whether the report has a section on partitions.
func (r *Report) partitioned() bool {
	for _, g := range r.gpus {
		if g.MIGMode == deviceapi.MIGEnabled {
			return true
		}
	}
	return false
}

func (r *Report) partitions(b *strings.Builder, modern bool) {
	shared, bar1Line := "", "%18dMiB / %5dMiB  "
	if modern {
		shared, bar1Line = "Shared ", "%16dMiB / %5dMiB    "
	}
	b.WriteString(fullRule)
	fmt.Fprintf(b, "| %-*s|\n", lineWidth-3, "MIG devices:")
	b.WriteString(migRule)
	fmt.Fprintf(b, "| GPU  GI  CI  MIG |%33s |        Vol|        Shared         |\n", shared+"Memory-Usage")
	fmt.Fprintf(b, "|      ID  ID  Dev |%33s | SM     Unc| CE ENC  DEC  OFA  JPG |\n", shared+"BAR1-Usage")
	b.WriteString("|                  |                                  |        ECC|                       |\n" +
		migDouble)
	empty := true
	for _, g := range r.gpus {
		for i, p := range g.Partitions {
			empty = false
			fmt.Fprintf(b, "|%3d%5d%4d%4d  |%-34s|%3d%7d |%3d%4d%5d%5d%5d |\n",
				g.index, p.GPUInstanceID, p.ComputeInstanceID, i,
				fmt.Sprintf("%16dMiB / %5dMiB", mib(p.MemoryUsed), mib(p.MemoryBytes)),
				p.Multiprocessors, p.Health.ECCUncorrected,
				p.CopyEngines, p.Encoders, p.Decoders, p.OFAEngines, p.JPEGEngines)
			fmt.Fprintf(b, "|%18s|%34s|%11s|%23s|\n", "", fmt.Sprintf(bar1Line, 0, bar1(g.GPU, p.Partition)), "", "")
			b.WriteString(migRule)
		}
	}
	if empty {
		fmt.Fprintf(b, "|  %-*s|\n", lineWidth-4, "No MIG devices found")
		b.WriteString(fullRule)
	}
}

func (r *Report) processes(b *strings.Builder) {
	b.WriteString(fullRule)
	fmt.Fprintf(b, "| %-*s|\n", lineWidth-3, "Processes:")
	b.WriteString("|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n" +
		"|        ID   ID                                                               Usage      |\n" +
		"|=========================================================================================|\n")
	empty := true
	for _, g := range r.gpus {
		for _, p := range g.everyProcess() {
			empty = false
			instance, compute := "   "+noValue, "  "+noValue
			if p.instance != noValue {
				instance, compute = fmt.Sprintf("%5s", p.instance), fmt.Sprintf("%4s", p.compute)
			}
			fmt.Fprintf(b, "|%5d%-6s%-5s%16d      C   %-*s%11dMiB |\n",
				g.index, instance, compute, p.PID, processWidth, cutStart(p.Name, processWidth), mib(p.Memory))
		}
	}
	if empty {
		fmt.Fprintf(b, "|  %-*s|\n", lineWidth-4, "No running processes found")
	}
	b.WriteString(fullRule)
}

// cutEnd and cutStart shorten a text to width characters.
func cutEnd(text string, width int) string {
	if runes := []rune(text); len(runes) > width {
		return string(runes[:width-3]) + "..."
	}
	return text
}

func cutStart(text string, width int) string {
	if runes := []rune(text); len(runes) > width {
		return "..." + string(runes[len(runes)-width+3:])
	}
	return text
}
