package profiles

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Wanted is one partition of a layout.
type Wanted struct {
	Profile string
	// Start is the first memory slice; nil: wherever the vendor's driver would put it.
	Start *int
}

// LayoutFault says what is wrong with one of the wanted partitions.
type LayoutFault struct {
	Index  int // among the wanted
	Reason string
}

// LayoutError is a layout that no GPU can have.
type LayoutError struct{ Faults []LayoutFault }

func (e *LayoutError) Error() string {
	var texts []string
	for _, fault := range e.Faults {
		texts = append(texts, fmt.Sprintf("partition %d: %s", fault.Index, fault.Reason))
	}
	return strings.Join(texts, "\n")
}

// Layout divides a GPU for good: it finds a placement for each of the wanted partitions and returns them from left to
// right. Those with a start come first, the others follow in their order, each at the first placement that is free in
// the order of the vendor's driver. Where that leaves no room for a later one, earlier ones give way. The error is a
// *LayoutError, unless the model cannot be partitioned at all; it says what is exceeded and what would fit.
//
// It needs the figures of the profiles in the layout only. What partitions share is checked as far as it is known.
func (t *Table) Layout(wanted []Wanted) ([]*Partition, error) {
	if t.Model.Partitioning == nil {
		return nil, fmt.Errorf("model %s cannot be partitioned", t.Model.ID)
	}
	l := t.newLayout()
	var faults []LayoutFault
	var fixed, free []item
	for i, want := range wanted {
		profile, err := t.Profile(want.Profile)
		switch {
		case err != nil:
			faults = append(faults, LayoutFault{i, err.Error()})
		case want.Start == nil:
			free = append(free, item{i, profile, l.placements(profile)})
		case !slices.Contains(profile.Starts, *want.Start):
			faults = append(faults, LayoutFault{i, fmt.Sprintf("%s cannot start at memory slice %d; it can at %s", profile.Name, *want.Start, numbersText(profile.Starts))})
		default:
			fixed = append(fixed, item{i, profile, []int{*want.Start}})
		}
	}
	if len(faults) == 0 {
		if fault := l.fill(append(fixed, free...)); fault != nil {
			faults = append(faults, *fault)
		}
	}
	if len(faults) > 0 {
		return nil, &LayoutError{faults}
	}
	slices.SortFunc(l.taken, func(a, b *Partition) int { return cmp.Compare(a.Start, b.Start) })
	return l.taken, nil
}

// layout is a GPU that is being divided.
type layout struct {
	*Table
	// shared is what partitions share, where that is known.
	shared *Figures
	taken  []*Partition
}

// item is a wanted partition and where it may start.
type item struct {
	index   int
	profile *Profile
	starts  []int
}

func (t *Table) newLayout() *layout {
	l := &layout{Table: t}
	if shared, err := t.Partitionable(); err == nil {
		l.shared = &shared
	}
	return l
}

// placements is the order in which the vendor's driver tries the placements of a profile: first where fewest placements
// of any profile are lost, and of equal ones from left to right. The examples of the MIG user guide for the A100, 1g at 6,
// 4, 5, 0, 1, 2, 3, 2g at 4, 0, 2 and 3g at 4, 0, all follow from that.
func (t *Table) placements(profile *Profile) []int {
	lost := func(start int) int {
		n := 0
		for _, other := range t.Profiles {
			for _, at := range other.Starts {
				if start < at+other.Size && at < start+profile.Size {
					n++
				}
			}
		}
		return n
	}
	starts := slices.Clone(profile.Starts)
	slices.SortStableFunc(starts, func(a, b int) int { return cmp.Compare(lost(a), lost(b)) })
	return starts
}

// fill takes all items, or says of one why it does not fit.
func (l *layout) fill(items []item) *LayoutFault {
	if most := l.Model.Partitioning.MaxInstances; len(items) > most {
		last := slices.MaxFunc(items, func(a, b item) int { return cmp.Compare(a.index, b.index) })
		return &LayoutFault{last.index, fmt.Sprintf("%s is one of %d partitions, and model %s can have %d", last.profile.Name, len(items), l.Model.ID, most)}
	}
	if l.search(items) {
		return nil
	}
	// The first that does not fit beside those before it tells why.
	for _, item := range items {
		start := slices.IndexFunc(item.starts, func(start int) bool { return l.obstacle(item.profile, start) == "" })
		if start >= 0 {
			l.take(item.profile, item.starts[start])
			continue
		}
		return &LayoutFault{item.index, fmt.Sprintf("%s does not fit beside %s: %s. %s", item.profile.Name, l.has(), l.obstacles(item), l.room())}
	}
	return nil
}

// search takes the items at the first placements, in their order, at which all fit.
func (l *layout) search(items []item) bool {
	if len(items) == 0 {
		return true
	}
	for _, start := range items[0].starts {
		if l.obstacle(items[0].profile, start) != "" {
			continue
		}
		l.take(items[0].profile, start)
		if l.search(items[1:]) {
			return true
		}
		l.taken = l.taken[:len(l.taken)-1]
	}
	return false
}

func (l *layout) take(profile *Profile, start int) {
	l.taken = append(l.taken, l.Partition(profile, start))
}

// obstacle says what a placement lacks, "" if nothing.
func (l *layout) obstacle(profile *Profile, start int) string {
	instances := 1
	used := profile.Figures
	for _, other := range l.taken {
		if start < other.Start+other.Profile.Size && other.Start < start+profile.Size {
			return fmt.Sprintf("%s by %s", memoryTaken(other), other)
		}
		if other.Profile == profile {
			instances++
		}
		for _, figure := range AllFigures() {
			*used.at(figure) += other.Profile.Figures.Get(figure)
		}
	}
	if l.shared != nil {
		for _, figure := range AllFigures() {
			if needs, has := used.Get(figure), l.shared.Get(figure); needs > has {
				return fmt.Sprintf("it needs %d %s, and %d of %d are left", profile.Figures.Get(figure), figure, has-(needs-profile.Figures.Get(figure)), has)
			}
		}
	}
	if instances > profile.MaxInstances {
		return fmt.Sprintf("it would be number %d, and there can be %d", instances, profile.MaxInstances)
	}
	return ""
}

// obstacles says what each placement of an item lacks.
func (l *layout) obstacles(item item) string {
	var order []string
	starts := map[string][]int{}
	for _, start := range item.starts {
		obstacle := l.obstacle(item.profile, start)
		if starts[obstacle] == nil {
			order = append(order, obstacle)
		}
		starts[obstacle] = append(starts[obstacle], start)
	}
	var texts []string
	for _, obstacle := range order {
		texts = append(texts, fmt.Sprintf("at %s %s", numbersText(starts[obstacle]), obstacle))
	}
	return strings.Join(texts, "; ")
}

// has names what is taken.
func (l *layout) has() string {
	var names []string
	for _, partition := range l.taken {
		names = append(names, partition.String())
	}
	return strings.Join(names, ", ")
}

// room names what fits beside what is taken.
func (l *layout) room() string {
	var fits []string
	for _, profile := range l.Profiles {
		var starts []int
		for _, start := range profile.Starts {
			if len(profile.Absent) == 0 && l.obstacle(profile, start) == "" {
				starts = append(starts, start)
			}
		}
		if len(starts) > 0 {
			fits = append(fits, fmt.Sprintf("%s at %s", profile.Name, numbersText(starts)))
		}
	}
	if len(fits) == 0 {
		return "Nothing more fits"
	}
	return "What fits: " + strings.Join(fits, "; ")
}

// String is the partition for people, as in 3g.40gb at 4.
func (p *Partition) String() string { return fmt.Sprintf("%s at %d", p.Profile.Name, p.Start) }

func memoryTaken(p *Partition) string {
	if p.Profile.Size == 1 {
		return fmt.Sprintf("memory slice %d is taken", p.Start)
	}
	return fmt.Sprintf("memory slices %d-%d are taken", p.Start, p.Start+p.Profile.Size-1)
}

func numbersText(numbers []int) string {
	var texts []string
	for _, n := range numbers {
		texts = append(texts, fmt.Sprint(n))
	}
	return strings.Join(texts, ", ")
}
