package replay

import (
	"maps"
	"math/bits"
	"slices"

	"github.com/simgpu/simgpu/driver/hardware"
)

// board knows which devices of a GPU can be in use at once. A set of devices is a bit each, by their
// index in the GPU.
type board struct {
	devices   []*hardware.Device
	available []int64
	needs     [][]int64
	known     map[uint64]bool
}

func newBoard(gpu *hardware.GPU) *board {
	b := &board{devices: gpu.Devices, known: map[uint64]bool{}}
	counters := slices.Sorted(maps.Keys(gpu.CounterSet.Counters))
	for _, name := range counters {
		value := gpu.CounterSet.Counters[name].Value
		b.available = append(b.available, value.Value())
	}
	for _, device := range gpu.Devices {
		var needs []int64
		for _, name := range counters {
			value := device.Published.ConsumesCounters[0].Counters[name].Value
			needs = append(needs, value.Value())
		}
		b.needs = append(b.needs, needs)
	}
	return b
}

// possible is true if all devices of the set can be in use at once.
func (b *board) possible(set uint64) bool {
	if answer, known := b.known[set]; known {
		return answer
	}
	answer := true
	for c, left := range b.available {
		for rest := set; rest != 0; rest &= rest - 1 {
			left -= b.needs[bits.TrailingZeros64(rest)][c]
		}
		answer = answer && left >= 0
	}
	b.known[set] = answer
	return answer
}

// of returns the devices that a mix calls by that name.
func (n *Node) of(kind string) []int {
	if found, known := n.kinds[kind]; known {
		return found
	}
	var found []int
	for i, device := range n.board.devices {
		if n.is(device, kind) {
			found = append(found, i)
		}
	}
	n.kinds[kind] = found
	return found
}

func (n *Node) is(device *hardware.Device, kind string) bool {
	if device.Partition == nil || kind == wholeGPU {
		return device.Partition == nil && kind == wholeGPU
	}
	return device.Partition.Profile.Name == n.profiles[kind].Name
}
