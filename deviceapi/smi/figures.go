package smi

import (
	"hash/fnv"
	"math/bits"

	"github.com/simgpu/simgpu/deviceapi"
)

// vary is a stable number from 0 to n-1 that differs between devices.
func vary(uuid, what string, n uint32) int {
	sum := fnv.New32a()
	sum.Write([]byte(what + uuid))
	return int(sum.Sum32() % n)
}

// temperature in degrees Celsius: near 30 when idle, near 65 under full load.
func (g gpu) temperature() int {
	return 28 + vary(g.UUID, "temperature", 7) + g.load()*35/100
}

// power draw in milliwatts: a tenth of the limit when idle, nine tenths under full
// load. Without a known limit there is no known draw.
func (g gpu) power() (milliwatts int, known bool) {
	limit := g.PowerLimitWatts * 1000
	return limit/10 + vary(g.UUID, "power", 2000) + limit*g.load()/125, limit > 0
}

// load is the utilization where it is known, else 0.
func (g gpu) load() int {
	if !g.utilizationKnown() {
		return 0
	}
	return g.Utilization
}

// utilizationKnown is false for a partitioned GPU, where the real tool has none.
func (g gpu) utilizationKnown() bool {
	return g.Whole && g.MIGMode != deviceapi.MIGEnabled
}

// performanceState is P0 for the large data-center GPUs at all times, as captures
// show, and P8 for others without a process.
func (g gpu) performanceState() string {
	if g.MIGMode == deviceapi.MIGUnsupported && len(g.Processes) == 0 && g.load() == 0 {
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
