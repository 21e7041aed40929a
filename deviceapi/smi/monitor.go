package smi

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/simgpu/simgpu/deviceapi/sensors"
)

// absent is what the monitors write for something without a value.
const absent = "-"

// The heads of the monitors, which are written once.
const (
	DeviceMonitorHead = "" +
		"# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec    jpg    ofa   mclk   pclk \n" +
		"# Idx      W      C      C      %      %      %      %      %      %    MHz    MHz \n"
	ProcessMonitorHead = "" +
		"# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command \n" +
		"# Idx           #    C/G      %      %      %      %      %      %    name \n"
)

// DeviceMonitor writes one sample of each GPU: nvidia-smi dmon.
func (r *Report) DeviceMonitor() string {
	var b strings.Builder
	for _, g := range r.gpus {
		load, loaded := sensors.Load(g.GPUStatus)
		percent := func(n int) string {
			if !loaded {
				return absent
			}
			return strconv.Itoa(n)
		}
		power := absent
		if milliwatts, known := sensors.Power(g.GPUStatus); known {
			power = strconv.Itoa(milliwatts / 1000)
		}
		fmt.Fprintf(&b, "%5d", g.index)
		for _, value := range []string{
			power, strconv.Itoa(sensors.Temperature(g.GPUStatus)), absent, // the memory's
			percent(load), percent(sensors.MemoryTraffic(load)), percent(0), percent(0), percent(0), percent(0),
			absent, absent, // clocks
		} {
			fmt.Fprintf(&b, "%7s", value)
		}
		b.WriteString(" \n")
	}
	return b.String()
}

// ProcessMonitor writes one sample of each process: nvidia-smi pmon. What share of the
// load is a process's is not known.
func (r *Report) ProcessMonitor() string {
	var b strings.Builder
	row := func(index int, pid, kind, name string) {
		fmt.Fprintf(&b, "%5d%11s%6s", index, pid, kind)
		for range 6 {
			fmt.Fprintf(&b, "%7s", absent)
		}
		fmt.Fprintf(&b, "    %-15s\n", name)
	}
	for _, g := range r.gpus {
		processes := g.everyProcess()
		for _, p := range processes {
			row(g.index, strconv.Itoa(p.PID), "C", p.Name)
		}
		if len(processes) == 0 {
			row(g.index, absent, absent, absent)
		}
	}
	return b.String()
}
