package order

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
	"github.com/simgpu/simgpu/profiles"
)

const h100 = "h100-sxm5-80gb"

func newNode(t *testing.T, groups ...inventory.GPUGroup) *hardware.Node {
	t.Helper()
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	node, err := hardware.New(hardware.Config{NodeName: "node-1", Catalogue: catalogue, Groups: groups})
	if err != nil {
		t.Fatal(err)
	}
	return node
}

func h100s(count int) inventory.GPUGroup {
	return inventory.GPUGroup{Model: h100, Count: count, MIGMode: inventory.MIGDynamic}
}

// everyNode has nodes of each model of the catalogue in each mode that it has figures for.
func everyNode(t *testing.T, count int) map[string]*hardware.Node {
	t.Helper()
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	nodes := map[string]*hardware.Node{}
	for _, model := range catalogue.Models() {
		for _, mode := range []inventory.MIGMode{inventory.MIGDynamic, inventory.MIGDisabled} {
			node, err := hardware.New(hardware.Config{
				NodeName: "node-1", Catalogue: catalogue, Groups: []inventory.GPUGroup{{Model: model.ID, Count: count, MIGMode: mode}},
			})
			if err == nil {
				nodes[fmt.Sprintf("%d %s %s", count, model.ID, mode)] = node
			}
		}
	}
	if len(nodes) < 6 {
		t.Fatalf("only %d nodes", len(nodes))
	}
	return nodes
}

func listed(groups [][]*hardware.Device) []string {
	var names []string
	for _, device := range slices.Concat(groups...) {
		names = append(names, device.Name)
	}
	return names
}

// starts returns the placements of a profile in the order they are listed in, after the GPU's index.
func starts(groups [][]*hardware.Device, profile string) []string {
	var found []string
	for _, device := range slices.Concat(groups...) {
		if device.Partition != nil && device.Partition.Profile.Name == profile {
			found = append(found, fmt.Sprintf("%d:%d", device.GPU.Index, device.Partition.Start))
		}
	}
	return found
}

func set(names ...string) map[string]bool {
	m := map[string]bool{}
	for _, name := range names {
		m[name] = true
	}
	return m
}

func TestParse(t *testing.T) {
	for _, name := range Names() {
		if got, err := Parse(name); err != nil || string(got) != name {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
	}
	if _, err := Parse("best"); err == nil || !strings.Contains(err.Error(), "vendor, packed, adaptive") {
		t.Errorf("got %v", err)
	}
}

func TestVendorOrderIsThatOfTheHardware(t *testing.T) {
	for name, node := range everyNode(t, 2) {
		for _, layout := range []deviceslices.Layout{deviceslices.Combined, deviceslices.Split} {
			want, err := deviceslices.Resources(node, layout)
			if err != nil {
				t.Fatal(err)
			}
			got, err := NewPublisher(Vendor).Resources(node, layout, set(node.GPUs[0].Devices[0].Name))
			if err != nil {
				t.Fatal(err)
			}
			if diff := gocmp.Diff(want, got); diff != "" {
				t.Errorf("%s, %s: %s", name, layout, diff)
			}
		}
	}
}

// The known order of NVIDIA's driver is in no table here: it comes out of the counters.
func TestPackedIsNVIDIAsOrderOnH100(t *testing.T) {
	groups := NewPublisher(Packed).Groups(newNode(t, h100s(1)), deviceslices.Split, nil)
	for profile, want := range map[string][]string{
		"1g.10gb":    {"0:6", "0:4", "0:5", "0:0", "0:1", "0:2", "0:3"},
		"1g.10gb+me": {"0:6", "0:4", "0:5", "0:0", "0:1", "0:2", "0:3"},
		"1g.20gb":    {"0:6", "0:4", "0:0", "0:2"},
		"2g.20gb":    {"0:4", "0:0", "0:2"},
		"3g.40gb":    {"0:4", "0:0"},
	} {
		if got := starts(groups, profile); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", profile, got, want)
		}
	}
	names := listed(groups)
	if first, last := names[0], names[len(names)-1]; first != "gpu-0-mig-1g10gb-19-6" || last != "gpu-0" {
		t.Errorf("first %s, last %s; want the smallest and the whole GPU", first, last)
	}
}

// permutation fails unless the groups are all devices of the node, each once.
func permutation(t *testing.T, node *hardware.Node, groups [][]*hardware.Device) {
	t.Helper()
	var want []string
	for _, device := range node.Devices() {
		want = append(want, device.Name)
	}
	got := listed(groups)
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Fatalf("not the devices of the node, each once:\n%s", gocmp.Diff(want, got))
	}
}

// random takes and gives back devices as claims would, and calls visit after each step.
func random(node *hardware.Node, seed uint64, steps int, visit func(taken map[string]bool)) {
	r := rand.New(rand.NewPCG(seed, 0))
	devices := node.Devices()
	taken := map[string]bool{}
	for range steps {
		device := devices[r.IntN(len(devices))]
		overlaps := slices.ContainsFunc(devices, func(d *hardware.Device) bool { return taken[d.Name] && d.Overlaps(device) })
		switch {
		case taken[device.Name]:
			delete(taken, device.Name)
		case !overlaps || r.IntN(20) == 0: // a few things are in use that cannot be, as far as this package can tell
			taken[device.Name] = true
		}
		visit(taken)
	}
}

func TestEachDeviceOnceInAnyOrderAndState(t *testing.T) {
	for name, node := range everyNode(t, 3) {
		for _, o := range Names() {
			for _, layout := range []deviceslices.Layout{deviceslices.Combined, deviceslices.Split} {
				t.Run(fmt.Sprintf("%s %s %s", name, o, layout), func(t *testing.T) {
					p, again := NewPublisher(Order(o)), NewPublisher(Order(o))
					var last [][]*hardware.Device
					random(node, 1, 40, func(taken map[string]bool) {
						groups := p.Groups(node, layout, taken)
						permutation(t, node, groups)
						if diff := gocmp.Diff(listed(groups), listed(again.Groups(node, layout, taken))); diff != "" {
							t.Fatalf("another order for the same usage: %s", diff)
						}
						if last != nil {
							checkChange(t, last, groups, o)
						}
						last = groups
					})
				})
			}
		}
	}
}

// checkChange fails if more than one slice differs, or a device has moved to another.
func checkChange(t *testing.T, before, after [][]*hardware.Device, o string) {
	t.Helper()
	changed := 0
	for i := range after {
		a, b := listed(before[i:i+1]), listed(after[i:i+1])
		if slices.Equal(a, b) {
			continue
		}
		changed++
		slices.Sort(a)
		slices.Sort(b)
		if !slices.Equal(a, b) {
			t.Fatalf("devices moved from slice to slice: %s", gocmp.Diff(a, b))
		}
	}
	if changed > 1 || changed > 0 && o != string(Adaptive) {
		t.Fatalf("%d slices changed", changed)
	}
}

// settle goes on until each slice is in its best order.
func settle(t *testing.T, p *Publisher, node *hardware.Node, layout deviceslices.Layout, taken map[string]bool) [][]*hardware.Device {
	t.Helper()
	for range 100 {
		groups := p.Groups(node, layout, taken)
		if !p.More() {
			return groups
		}
	}
	t.Fatal("there is always more to reorder")
	return nil
}

// TestAdaptiveTakesTheLeast compares what first fit makes of the adaptive order with a search through all devices.
func TestAdaptiveTakesTheLeast(t *testing.T) {
	for name, node := range everyNode(t, 3) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := NewPublisher(Adaptive)
			random(node, 2, 40, func(taken map[string]bool) {
				groups := settle(t, p, node, deviceslices.Split, taken)
				cost := costs(node, taken)
				seen := map[string]bool{}
				for _, device := range slices.Concat(groups...) {
					profile := ""
					if device.Partition != nil {
						profile = device.Partition.Profile.Name
					}
					if _, fits := cost[device.Name]; !fits || seen[profile] {
						continue
					}
					seen[profile] = true
					for _, other := range node.Devices() {
						c, fits := cost[other.Name]
						sameProfile := (other.Partition == nil) == (device.Partition == nil) && (other.Partition == nil || other.Partition.Profile.Name == profile)
						if fits && sameProfile && cmp.Or(cmp.Compare(c.excluded, cost[device.Name].excluded), cmp.Compare(c.free, cost[device.Name].free)) < 0 {
							t.Fatalf("with %v in use %s comes first and rules out %+v; %s would be %+v", taken, device.Name, cost[device.Name], other.Name, c)
						}
					}
				}
			})
		})
	}
}

type price struct{ excluded, free int }

// costs says what each device that fits would rule out, from the published counters.
func costs(node *hardware.Node, taken map[string]bool) map[string]price {
	prices := map[string]price{}
	for _, gpu := range node.GPUs {
		var used []*hardware.Device
		for _, device := range gpu.Devices {
			if taken[device.Name] {
				used = append(used, device)
			}
		}
		fit := func(with ...*hardware.Device) map[string]bool {
			fit := map[string]bool{}
			for _, device := range gpu.Devices {
				if !slices.Contains(used, device) && !slices.Contains(with, device) && possible(gpu, append(slices.Concat(used, with), device)) {
					fit[device.Name] = true
				}
			}
			return fit
		}
		now := fit()
		for _, device := range gpu.Devices {
			if now[device.Name] {
				prices[device.Name] = price{excluded: len(now) - len(fit(device)), free: len(now)}
			}
		}
	}
	return prices
}

func possible(gpu *hardware.GPU, devices []*hardware.Device) bool {
	if gpu.CounterSet == nil {
		return true
	}
	for name, counter := range gpu.CounterSet.Counters {
		left := counter.Value.Value()
		for _, device := range devices {
			for _, consumption := range device.Published.ConsumesCounters {
				value := consumption.Counters[name].Value
				left -= value.Value()
			}
		}
		if left < 0 {
			return false
		}
	}
	return true
}

func TestAdaptive(t *testing.T) {
	const profile = "1g.10gb"
	for name, test := range map[string]struct {
		gpus  int
		taken []string
		// want is how the devices of the profile begin.
		want []string
	}{
		"empty: one GPU is filled after the other, each as the vendor places": {2, nil,
			[]string{"0:6", "0:4", "0:5", "0:0", "0:1", "0:2", "0:3", "1:6", "1:4", "1:5", "1:0", "1:1", "1:2", "1:3"}},
		"beside a 4g nothing is lost that was not": {2, []string{"gpu-1-mig-4g40gb-5-0"},
			[]string{"1:6", "1:4", "1:5", "0:6"}},
		"a hole that only this profile fits goes first": {2, []string{"gpu-1-mig-3g40gb-9-4", "gpu-1-mig-2g20gb-14-0", "gpu-1-mig-1g10gb-19-2", "gpu-0-mig-1g10gb-19-6"},
			[]string{"1:3", "0:4", "0:5"}},
		"the whole GPU": {2, []string{"gpu-0"},
			[]string{"1:6", "1:4", "1:5", "1:0", "1:1", "1:2", "1:3", "0:6"}},
	} {
		t.Run(name, func(t *testing.T) {
			groups := NewPublisher(Adaptive).Groups(newNode(t, h100s(test.gpus)), deviceslices.Split, set(test.taken...))
			if got := starts(groups, profile); !slices.Equal(got[:len(test.want)], test.want) {
				t.Errorf("got %v, want %v first", got, test.want)
			}
		})
	}
}

func TestAnOrderIsKeptAsLongAsItsFirstChoicesAreBest(t *testing.T) {
	node := newNode(t, h100s(8))
	p := NewPublisher(Adaptive)
	before := p.Groups(node, deviceslices.Split, nil)
	// What a row of claims for one profile takes first changes nothing that comes after.
	taken := map[string]bool{}
	for _, name := range []string{"gpu-0-mig-1g10gb-19-6", "gpu-0-mig-1g10gb-19-4"} {
		taken[name] = true
	}
	after := settle(t, p, node, deviceslices.Split, taken)
	if diff := gocmp.Diff(listed(before[:1]), listed(after[:1])); diff != "" {
		t.Errorf("the devices of 1g.10gb are listed in another order: %s", diff)
	}
	if again := p.Groups(node, deviceslices.Split, taken); gocmp.Diff(listed(after), listed(again)) != "" || p.More() {
		t.Error("the order changes though usage does not")
	}
	unchanged, err := p.Unchanged(node, deviceslices.Split, set("gpu-3-mig-4g40gb-5-0"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, slice := range unchanged.Pools["node-1"].Slices {
		for _, device := range slice.Devices {
			names = append(names, device.Name)
		}
	}
	if diff := gocmp.Diff(listed(after), names); diff != "" {
		t.Errorf("Unchanged changes: %s", diff)
	}
	if !p.More() {
		t.Error("a 4g in use changes nothing")
	}
}

func TestOtherHardwareIsOrderedAtOnce(t *testing.T) {
	p := NewPublisher(Adaptive)
	p.Groups(newNode(t, h100s(2)), deviceslices.Split, nil)
	taken := set("gpu-1-mig-4g40gb-5-0")
	three := newNode(t, h100s(3))
	got := listed(p.Groups(three, deviceslices.Split, taken))
	if want := listed(NewPublisher(Adaptive).Groups(three, deviceslices.Split, taken)); p.More() || !slices.Equal(got, want) {
		t.Errorf("more: %v; %s", p.More(), gocmp.Diff(want, got))
	}
}

// A device that may have several users is best given to another one before a new one is broken into.
func TestSharedDevicesAreFilledUp(t *testing.T) {
	node := newNode(t, inventory.GPUGroup{Model: h100, Count: 3, MIGMode: inventory.MIGDisabled})
	for _, device := range node.Devices() {
		device.Published.AllowMultipleAllocations = new(true)
	}
	got := listed(NewPublisher(Adaptive).Groups(node, deviceslices.Split, set("gpu-1")))
	if want := []string{"gpu-1", "gpu-0", "gpu-2"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestAdaptiveSlicesKeepTheLimits(t *testing.T) {
	for _, gpus := range []int{1, 2, 8, 9, 16, 32} {
		node := newNode(t, h100s(gpus))
		for _, layout := range []deviceslices.Layout{deviceslices.Combined, deviceslices.Split} {
			resources, err := NewPublisher(Adaptive).Resources(node, layout, nil)
			if err != nil {
				t.Fatal(err)
			}
			vendor, err := deviceslices.Resources(node, layout)
			if err != nil {
				t.Fatal(err)
			}
			got, most := resources.Pools["node-1"].Slices, len(vendor.Pools["node-1"].Slices)
			if len(got) > most {
				t.Errorf("%d GPUs, %s: %d slices, the vendor's order has %d", gpus, layout, len(got), most)
			}
			for i, slice := range got {
				if len(slice.Devices) > resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures {
					t.Errorf("%d GPUs, %s: slice %d has %d devices", gpus, layout, i, len(slice.Devices))
				}
				if layout == deviceslices.Split && len(slice.Devices) > 0 && len(slice.SharedCounters) > 0 {
					t.Errorf("%d GPUs: slice %d has devices and counters", gpus, i)
				}
			}
		}
	}
}
