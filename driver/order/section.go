package order

import (
	"cmp"
	"maps"
	"slices"

	"github.com/simgpu/simgpu/driver/hardware"
)

// section is devices between which a claim may choose: those of one profile, or all whole GPUs.
type section struct {
	name    string // of the profile; "" of whole GPUs
	members []choice
}

// choice is a device of a GPU at one moment.
type choice struct {
	card
	index int // among the devices of the GPU
}

func (c choice) device() *hardware.Device { return c.Devices[c.index] }
func (c choice) possible() bool           { return c.fits[c.index] }

// quality orders choices that are possible, the best first; equal ones are as good as each other.
func (c choice) quality(o choice) int {
	return cmp.Or(cmp.Compare(c.excludes[c.index], o.excludes[o.index]), cmp.Compare(c.free, o.free))
}

// position orders choices as they are listed where nothing else matters.
func (c choice) position(o choice) int {
	return cmp.Or(cmp.Compare(c.place, o.place), cmp.Compare(c.model.rank[c.index], o.model.rank[o.index]))
}

// sections returns all devices of the cards: those that rule out little first, whole GPUs last. Neither
// what is in a section nor the order of sections depends on usage.
func sections(cards []card) []section {
	members := map[string][]choice{}
	excludes := map[string]int{} // the fewest that a device of the section rules out
	for _, c := range cards {
		for i, device := range c.Devices {
			name := ""
			if device.Partition != nil {
				name = device.Partition.Profile.Name
			}
			if least, known := excludes[name]; !known || c.model.empty.excludes[i] < least {
				excludes[name] = c.model.empty.excludes[i]
			}
			members[name] = append(members[name], choice{card: c, index: i})
		}
	}
	names := slices.SortedFunc(maps.Keys(members), func(a, b string) int {
		return cmp.Or(compareBool(a == "", b == ""), cmp.Compare(excludes[a], excludes[b]), cmp.Compare(a, b))
	})
	all := make([]section, len(names))
	for i, name := range names {
		all[i] = section{name: name, members: members[name]}
	}
	return all
}

// split returns the section in parts of so many devices at most, those of one GPU together where they
// fit.
func (s section) split(most int) []section {
	parts := []section{{name: s.name}}
	for start := 0; start < len(s.members); {
		end := start + 1
		for end < len(s.members) && end-start < most && s.members[end].place == s.members[start].place {
			end++
		}
		last := &parts[len(parts)-1]
		if len(last.members)+end-start > most {
			parts = append(parts, section{name: s.name})
			last = &parts[len(parts)-1]
		}
		last.members = append(last.members, s.members[start:end]...)
		start = end
	}
	return parts
}

// choices returns the members in the order in which a row of claims would best take them, then those
// that are not possible, or not after the others.
func (s section) choices() []choice {
	var order []choice
	rest := slices.Clone(s.members)
	for {
		best := -1
		for i, c := range rest {
			if c.possible() && (best < 0 || cmp.Or(c.quality(rest[best]), c.position(rest[best])) < 0) {
				best = i
			}
		}
		if best < 0 {
			break
		}
		taken := rest[best]
		order = append(order, taken)
		rest = slices.Delete(rest, best, best+1)
		next := taken.model.with(taken.state, taken.index)
		for i := range rest {
			if rest[i].place == taken.place {
				rest[i].state = next
			}
		}
	}
	slices.SortFunc(rest, choice.position)
	return append(order, rest...)
}

// goodEnough is true where the first choice of an earlier order is as good as that of the best.
func goodEnough(old, best []choice) bool {
	i := slices.IndexFunc(old, choice.possible)
	return i < 0 || old[i].quality(best[0]) == 0
}
