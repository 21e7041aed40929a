package order

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

// group is sections that share slices.
type group []section

// byGPU has the devices of each GPU together.
func byGPU(cards []card) []group {
	groups := make([]group, len(cards))
	for i := range cards {
		groups[i] = sections(cards[i : i+1])
	}
	return groups
}

// byProfile has the sections of all GPUs one after the other, in as few groups as fit a slice each. What
// is in a group does not depend on usage.
func byProfile(cards []card) []group {
	const most = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	var groups []group
	left := 0 // in the last group
	for _, s := range sections(cards) {
		for _, part := range s.split(most) {
			if len(part.members) > left {
				groups, left = append(groups, nil), most
			}
			last := len(groups) - 1
			groups[last] = append(groups[last], part)
			left -= len(part.members)
		}
	}
	return groups
}

// best returns the members in the best order: section by section, and within one as they were listed if
// that is still good enough. Nothing listed is a first time.
func (g group) best(listed []string) []choice {
	place := map[string]int{}
	for i, name := range listed {
		place[name] = i
	}
	var best []choice
	for _, s := range g {
		choices := s.choices()
		if len(listed) > 0 {
			old := slices.SortedFunc(slices.Values(s.members), func(a, b choice) int {
				return cmp.Compare(place[a.device().Name], place[b.device().Name])
			})
			if goodEnough(old, choices) {
				choices = old
			}
		}
		best = append(best, choices...)
	}
	return best
}

// find returns the members of those names in their order, nil if that is not all of them.
func (g group) find(names []string) []choice {
	byName := map[string]choice{}
	for _, s := range g {
		for _, c := range s.members {
			byName[c.device().Name] = c
		}
	}
	if len(names) != len(byName) {
		return nil
	}
	found := make([]choice, len(names))
	for i, name := range names {
		c, ok := byName[name]
		if !ok {
			return nil
		}
		found[i] = c
	}
	return found
}

func names(choices []choice) []string {
	names := make([]string, len(choices))
	for i, c := range choices {
		names[i] = c.device().Name
	}
	return names
}
