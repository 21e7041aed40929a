package order

import (
	"cmp"
	"maps"
	"reflect"
	"slices"

	"github.com/simgpu/simgpu/driver/hardware"
)

// figures are what decides how the devices of a GPU get in each other's way.
type figures struct {
	// available is how much there is of each counter, and needs what each device takes of it.
	available []int64
	needs     [][]int64
	whole     []bool
	// multiple devices may be given out again while they are in use.
	multiple []bool
}

func figuresOf(gpu *hardware.GPU) figures {
	var f figures
	var counters []string
	if gpu.CounterSet != nil {
		counters = slices.Sorted(maps.Keys(gpu.CounterSet.Counters))
		for _, name := range counters {
			value := gpu.CounterSet.Counters[name].Value
			f.available = append(f.available, value.Value())
		}
	}
	for _, device := range gpu.Devices {
		needs := make([]int64, len(counters))
		for _, consumption := range device.Published.ConsumesCounters {
			for c, name := range counters {
				value := consumption.Counters[name].Value
				needs[c] += value.Value()
			}
		}
		multiple := device.Published.AllowMultipleAllocations
		f.needs = append(f.needs, needs)
		f.whole = append(f.whole, device.Partition == nil)
		f.multiple = append(f.multiple, multiple != nil && *multiple)
	}
	return f
}

// model is all GPUs of the same figures.
type model struct {
	figures
	empty *state
	// packed are the devices by how many others they rule out while the GPU is empty, fewest first, the
	// GPU as a whole last among equals, else in the vendor's order. rank is the place of each in it.
	packed, rank []int
	// seen are states met before.
	seen map[string]*state
}

// mostStates is how many states a model remembers: enough to look each up that claims come and go by.
const mostStates = 2000

func newModel(f figures) *model {
	m := &model{figures: f, seen: map[string]*state{}, rank: make([]int, len(f.needs))}
	m.empty = m.state(make([]bool, len(f.needs)))
	for i := range f.needs {
		m.packed = append(m.packed, i)
	}
	slices.SortStableFunc(m.packed, func(a, b int) int {
		return cmp.Or(cmp.Compare(m.empty.excludes[a], m.empty.excludes[b]), compareBool(m.whole[a], m.whole[b]))
	})
	for place, i := range m.packed {
		m.rank[i] = place
	}
	return m
}

func (m *model) of(f figures) bool { return reflect.DeepEqual(m.figures, f) }

// compareBool puts false before true.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// state is a GPU while some of its devices are in use. It is immutable.
type state struct {
	taken []bool
	// fits says which devices can be given out, and free is how many they are.
	fits []bool
	free int
	// excludes is how many devices that fit would not any more once a device is given out, itself included.
	excludes []int
}

func (m *model) state(taken []bool) *state {
	key := make([]byte, len(taken))
	for i, t := range taken {
		if t {
			key[i] = 1
		}
	}
	if s := m.seen[string(key)]; s != nil {
		return s
	}
	if len(m.seen) >= mostStates {
		clear(m.seen)
	}
	s := m.newState(taken)
	m.seen[string(key)] = s
	return s
}

func (m *model) newState(taken []bool) *state {
	s := &state{taken: taken, fits: make([]bool, len(taken)), excludes: make([]int, len(taken))}
	left := slices.Clone(m.available)
	for i := range taken {
		if taken[i] {
			subtract(left, left, m.needs[i])
		}
	}
	for i := range taken {
		if taken[i] {
			s.fits[i] = m.multiple[i]
		} else {
			s.fits[i] = covers(left, m.needs[i])
		}
		if s.fits[i] {
			s.free++
		}
	}
	rest := make([]int64, len(left))
	for i := range taken {
		if !s.fits[i] || taken[i] {
			continue // one more user of a device in use takes nothing from the others
		}
		subtract(rest, left, m.needs[i])
		for other := range taken {
			if s.fits[other] && !taken[other] && (other == i || !covers(rest, m.needs[other])) {
				s.excludes[i]++
			}
		}
	}
	return s
}

// with returns the state once a device has been given out.
func (m *model) with(s *state, device int) *state {
	taken := slices.Clone(s.taken)
	taken[device] = true
	return m.state(taken)
}

// subtract sets to = from - what.
func subtract(to, from, what []int64) {
	for i := range to {
		to[i] = from[i] - what[i]
	}
}

func covers(left, needs []int64) bool {
	for i, need := range needs {
		if need > left[i] {
			return false
		}
	}
	return true
}

// card is a GPU at one moment.
type card struct {
	*hardware.GPU
	model *model
	*state
	place int // among the GPUs of the node
}

func newCard(gpu *hardware.GPU, m *model, place int, taken map[string]bool) card {
	inUse := make([]bool, len(gpu.Devices))
	for i, device := range gpu.Devices {
		inUse[i] = taken[device.Name]
	}
	return card{GPU: gpu, model: m, state: m.state(inUse), place: place}
}
