package hardware

import (
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// ledger adds up what devices consume, as a scheduler does, from what is published and nothing else.
type ledger map[string]int64

func ledgerOf(set *resourceapi.CounterSet) ledger {
	left := ledger{}
	for name, counter := range set.Counters {
		left[name] = counter.Value.Value()
	}
	return left
}

// take reports false, and takes nothing, where a counter does not suffice.
func (l ledger) take(device *resourceapi.Device) bool {
	for _, consumption := range device.ConsumesCounters {
		for name, counter := range consumption.Counters {
			if l[name] < counter.Value.Value() {
				return false
			}
		}
	}
	l.give(device, -1)
	return true
}

func (l ledger) give(device *resourceapi.Device, sign int64) {
	for _, consumption := range device.ConsumesCounters {
		for name, counter := range consumption.Counters {
			l[name] += sign * counter.Value.Value()
		}
	}
}

// fits reports whether one device of each profile can be in use at once, at any placements. "" is the
// whole GPU.
func (l ledger) fits(gpu *GPU, profiles []string) bool {
	if len(profiles) == 0 {
		return true
	}
	for _, device := range gpu.Devices {
		if profileOf(device) != profiles[0] || !l.take(&device.Published) {
			continue
		}
		fits := l.fits(gpu, profiles[1:])
		l.give(&device.Published, 1)
		if fits {
			return true
		}
	}
	return false
}

func profileOf(device *Device) string {
	if device.Partition == nil {
		return ""
	}
	return device.Partition.Profile.Name
}

func times(n int, profile string, more ...string) []string {
	var list []string
	for range n {
		list = append(list, profile)
	}
	return append(list, more...)
}

// TestCombinations holds what real hardware allows and forbids against the published counters.
func TestCombinations(t *testing.T) {
	h100 := newNode(t, catalogue(t), dynamic("h100-sxm5-80gb", 1)).GPUs[0]
	a100 := newNode(t, catalogue(t), dynamic("a100-40gb", 1)).GPUs[0]
	a30 := newNode(t, catalogue(t), dynamic("a30-24gb", 1)).GPUs[0]
	rtx := newNode(t, catalogue(t), dynamic("rtx-pro-6000-96gb", 1)).GPUs[0]
	for _, test := range []struct {
		gpu      *GPU
		profiles []string
		fits     bool
	}{
		{h100, []string{""}, true},
		{h100, []string{"", "1g.10gb"}, false},
		{h100, []string{"7g.80gb"}, true},
		{h100, []string{"7g.80gb", "1g.10gb"}, false},
		{h100, []string{"4g.40gb", "3g.40gb"}, true},
		{h100, []string{"4g.40gb", "4g.40gb"}, false},
		{h100, []string{"4g.40gb", "3g.40gb", "1g.10gb"}, false},
		{h100, []string{"3g.40gb", "3g.40gb"}, true},
		{h100, []string{"3g.40gb", "3g.40gb", "1g.10gb"}, false},
		{h100, []string{"4g.40gb", "2g.20gb", "1g.10gb"}, true},
		{h100, []string{"4g.40gb", "2g.20gb", "2g.20gb"}, false},
		{h100, []string{"3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"}, true},
		{h100, times(3, "2g.20gb", "1g.10gb"), true},
		{h100, times(4, "2g.20gb"), false},
		{h100, times(7, "1g.10gb"), true},
		{h100, times(8, "1g.10gb"), false},
		{h100, times(7, "1g.10gb", "2g.20gb"), false},
		{h100, times(6, "1g.10gb", "1g.20gb"), true},
		{h100, times(4, "1g.20gb"), true},
		{h100, times(5, "1g.20gb"), false},
		{h100, []string{"1g.10gb+me"}, true},
		{h100, []string{"1g.10gb+me", "1g.10gb+me"}, false},
		{h100, times(6, "1g.10gb", "1g.10gb+me"), true},
		{h100, []string{"3g.40gb", "3g.40gb", "1g.10gb+me"}, false},

		{a100, times(7, "1g.5gb"), true},
		{a100, []string{"4g.20gb", "3g.20gb"}, true},
		{a100, []string{"3g.20gb", "3g.20gb", "1g.5gb"}, false},
		{a100, times(4, "1g.10gb"), true},
		{a100, []string{"1g.5gb+me", "1g.5gb+me"}, false},

		{a30, times(4, "1g.6gb"), true},
		{a30, []string{"2g.12gb", "1g.6gb", "1g.6gb+me"}, true},
		{a30, []string{"2g.12gb+me", "1g.6gb+me"}, false},
		{a30, []string{"4g.24gb", "1g.6gb"}, false},

		{rtx, times(4, "1g.24gb"), true},
		{rtx, times(3, "1g.24gb", "1g.24gb+me"), true},
		{rtx, times(3, "1g.24gb-me", "1g.24gb+me.all"), true},
		{rtx, []string{"1g.24gb+me.all", "1g.24gb"}, false},
		{rtx, []string{"2g.48gb+gfx", "1g.24gb+gfx", "1g.24gb-me"}, true},
		{rtx, []string{"2g.48gb+me.all", "2g.48gb-me"}, true},
		{rtx, []string{"2g.48gb+me.all", "2g.48gb"}, false},
	} {
		t.Run(fmt.Sprintf("%s %q", test.gpu.Model.ID, test.profiles), func(t *testing.T) {
			if got := ledgerOf(test.gpu.CounterSet).fits(test.gpu, test.profiles); got != test.fits {
				t.Errorf("fits: %t, want %t", got, test.fits)
			}
		})
	}
}

// divided returns a GPU of each model that can be partitioned.
func divided(t *testing.T) map[string]*GPU {
	t.Helper()
	gpus := map[string]*GPU{}
	for _, model := range catalogue(t).Models() {
		if table, err := model.Known(""); err != nil {
			t.Fatal(err)
		} else if _, err := table.Partitionable(); err == nil {
			gpus[model.ID] = newNode(t, catalogue(t), dynamic(model.ID, 1)).GPUs[0]
		}
	}
	if len(gpus) < 10 {
		t.Fatalf("only %d models can be partitioned", len(gpus))
	}
	return gpus
}

// TestMaxInstances finds for every profile as many instances as the catalogue says, and no more.
func TestMaxInstances(t *testing.T) {
	for id, gpu := range divided(t) {
		for _, profile := range gpu.Table.Profiles {
			if len(profile.Absent) > 0 {
				continue
			}
			if !ledgerOf(gpu.CounterSet).fits(gpu, times(profile.MaxInstances, profile.Name)) {
				t.Errorf("%s: %d of %s do not fit", id, profile.MaxInstances, profile.Name)
			}
			if ledgerOf(gpu.CounterSet).fits(gpu, times(profile.MaxInstances+1, profile.Name)) {
				t.Errorf("%s: %d of %s fit", id, profile.MaxInstances+1, profile.Name)
			}
		}
	}
}

func TestOverlaps(t *testing.T) {
	node := newNode(t, catalogue(t), dynamic("h100-sxm5-80gb", 2))
	whole := newNode(t, catalogue(t), disabled("a100-80gb", 2))
	for name, test := range map[string]struct {
		node *Node
		a, b string
		want bool
	}{
		"itself":                      {node, "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-0", true},
		"whole GPU and a partition":   {node, "gpu-0", "gpu-0-mig-1g10gb-19-6", true},
		"same memory slice":           {node, "gpu-0-mig-3g40gb-9-0", "gpu-0-mig-1g10gb-19-3", true},
		"other memory slices":         {node, "gpu-0-mig-3g40gb-9-0", "gpu-0-mig-3g40gb-9-4", false},
		"both take the one OFA":       {node, "gpu-0-mig-1g10gb-me-20-0", "gpu-0-mig-1g10gb-me-20-6", true},
		"other GPU":                   {node, "gpu-0", "gpu-1", false},
		"whole GPU without counters":  {whole, "gpu-0", "gpu-0", true},
		"other GPU, without counters": {whole, "gpu-0", "gpu-1", false},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := device(t, test.node, test.a), device(t, test.node, test.b)
			if got := a.Overlaps(b); got != test.want {
				t.Errorf("%s overlaps %s: %t, want %t", test.a, test.b, got, test.want)
			}
			if got := b.Overlaps(a); got != test.want {
				t.Errorf("%s overlaps %s: %t, want %t", test.b, test.a, got, test.want)
			}
		})
	}
}

// TestPairsDecide proves that it is enough to compare devices two by two: of no model can more than two
// devices, none of which overlap, take more of a counter than there is.
func TestPairsDecide(t *testing.T) {
	for id, gpu := range divided(t) {
		t.Run(id, func(t *testing.T) {
			overlaps := map[[2]*Device]bool{}
			for _, a := range gpu.Devices {
				for _, b := range gpu.Devices {
					overlaps[[2]*Device{a, b}] = a.Overlaps(b)
				}
			}
			left := ledgerOf(gpu.CounterSet)
			sets := 0
			var grow func(chosen []*Device, from int)
			grow = func(chosen []*Device, from int) {
				sets++
			next:
				for i := from; i < len(gpu.Devices); i++ {
					candidate := gpu.Devices[i]
					for _, other := range chosen {
						if overlaps[[2]*Device{candidate, other}] {
							continue next
						}
					}
					if !left.take(&candidate.Published) {
						t.Fatalf("%s does not fit beside %v, though it overlaps none of them", candidate.Name, names(chosen))
					}
					grow(append(chosen, candidate), i+1)
					left.give(&candidate.Published, 1)
				}
			}
			grow(nil, 0)
			t.Logf("%d sets of devices fit", sets)
		})
	}
}
