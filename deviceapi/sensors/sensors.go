// Package sensors makes up what only a physical GPU could measure: temperature, power draw, memory
// traffic. A reading is a function of the GPU's UUID, which makes GPUs differ, and of the load that its
// holders report, so that nvidia-smi and the metrics of a node agree, and the same state reads the same
// everywhere. What would need a figure that nobody sourced has no reading.
package sensors

import (
	"hash/fnv"

	"github.com/simgpu/simgpu/deviceapi"
)

// Load is the utilization of a GPU in percent. It is unknown of a GPU that works through partitions,
// and where the GPU itself is not visible.
func Load(g deviceapi.GPUStatus) (percent int, known bool) {
	if !g.Whole || g.MIGMode == deviceapi.MIGEnabled {
		return 0, false
	}
	return g.Utilization, true
}

// Temperature in degrees Celsius: near 30 when idle, near 65 under full load.
func Temperature(g deviceapi.GPUStatus) int {
	load, _ := Load(g)
	return 28 + vary(g.UUID, "temperature", 7) + load*35/100
}

// Power is the draw in milliwatts: a tenth of the limit when idle, nine tenths under full load. Without a
// known limit there is no known draw.
func Power(g deviceapi.GPUStatus) (milliwatts int, known bool) {
	load, _ := Load(g)
	limit := g.PowerLimitWatts * 1000
	return limit/10 + vary(g.UUID, "power", 2000) + limit*load/125, limit > 0
}

// MemoryTraffic is the share of time, in percent, in which memory is read or written: half the load of
// the processors.
func MemoryTraffic(load int) int { return load / 2 }

// vary is a stable number from 0 to n-1 that differs between GPUs.
func vary(uuid, what string, n uint32) int {
	sum := fnv.New32a()
	sum.Write([]byte(what + uuid))
	return int(sum.Sum32() % n)
}
