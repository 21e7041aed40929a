package smi

import (
	"math/bits"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/deviceapi/sensors"
)

// performanceState is P0 for the large data-center GPUs at all times, as captures
// show, and P8 for others without a process.
func (g gpu) performanceState() string {
	load, _ := sensors.Load(g.GPUStatus)
	if g.MIGMode == deviceapi.MIGUnsupported && len(g.Processes) == 0 && load == 0 {
		return "P8"
	}
	return "P0"
}

// bar1 is the BAR1 size of a partition in MiB as drivers up to 570 show it: the
// GPU's, the next power of two above its memory, by the partition's share of the
// memory in eighths, less one. Drivers from 580 on show figures that depend on the
// machine.
func bar1(g deviceapi.GPU, p deviceapi.Partition) int64 {
	total := int64(1) << bits.Len64(uint64(max(mib(g.MemoryBytes)-1, 0)))
	eighths := (16*p.MemoryBytes/g.MemoryBytes + 1) / 2
	return total*eighths/8 - 1
}

func mib(bytes int64) int64 { return bytes / deviceapi.MiB }
