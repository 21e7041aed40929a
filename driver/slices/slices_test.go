package slices

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/version"
	"sigs.k8s.io/yaml"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

func TestLayoutFor(t *testing.T) {
	for name, test := range map[string]struct {
		major, minor string
		want         Layout
		err          string
	}{
		"too old":      {"1", "33", 0, "the API server is Kubernetes 1.33; 1.34 or later is needed"},
		"oldest":       {"1", "34", Combined, ""},
		"vendor's":     {"1", "34+", Combined, ""},
		"first split":  {"1", "35", Split, ""},
		"newest":       {"1", "37+", Split, ""},
		"some day":     {"2", "0", Split, ""},
		"not a number": {"1", "x", 0, `the API server's version is not understood: major "1", minor "x"`},
		"empty":        {"", "", 0, `the API server's version is not understood: major "", minor ""`},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := LayoutFor(&version.Info{Major: test.major, Minor: test.minor})
			if got != test.want {
				t.Errorf("got layout %s, want %s", got, test.want)
			}
			if text := fmt.Sprint(err); err != nil && text != test.err || err == nil && test.err != "" {
				t.Errorf("got error %v, want %s", err, test.err)
			}
		})
	}
}

func newNode(t *testing.T, groups ...inventory.GPUGroup) *hardware.Node {
	t.Helper()
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	node, err := hardware.New(hardware.Config{NodeName: "node-1", Groups: groups, Catalogue: catalogue})
	if err != nil {
		t.Fatal(err)
	}
	return node
}

func dynamic(model string, count int) inventory.GPUGroup {
	return inventory.GPUGroup{Model: model, Count: count, MIGMode: inventory.MIGDynamic, NUMANode: new(0)}
}

func disabled(model string, count int) inventory.GPUGroup {
	return inventory.GPUGroup{Model: model, Count: count, MIGMode: inventory.MIGDisabled, NUMANode: new(0)}
}

// specs are the ResourceSlices that the API server stores, in the order of their names.
func specs(t *testing.T, node *hardware.Node, layout Layout) []resourceapi.ResourceSliceSpec {
	t.Helper()
	resources, err := Resources(node, layout)
	if err != nil {
		t.Fatal(err)
	}
	if len(resources.Pools) != 1 {
		t.Fatalf("got %d pools, want one", len(resources.Pools))
	}
	pool, found := resources.Pools[node.Name]
	if !found {
		t.Fatalf("no pool %s", node.Name)
	}
	var specs []resourceapi.ResourceSliceSpec
	for _, slice := range pool.Slices {
		specs = append(specs, resourceapi.ResourceSliceSpec{
			Driver:         node.DriverName,
			NodeName:       &node.Name,
			Pool:           resourceapi.ResourcePool{Name: node.Name, Generation: 1, ResourceSliceCount: int64(len(pool.Slices))},
			SharedCounters: slice.SharedCounters,
			Devices:        slice.Devices,
		})
	}
	return specs
}

func rendered(t *testing.T, specs []resourceapi.ResourceSliceSpec) string {
	t.Helper()
	var documents strings.Builder
	for _, spec := range specs {
		document, err := yaml.Marshal(spec)
		if err != nil {
			t.Fatal(err)
		}
		documents.WriteString("---\n")
		documents.Write(document)
	}
	return documents.String()
}

// TestGolden holds what a node with one GPU publishes in both layouts: of a GPU that offers itself and its partitions,
// and of one that offers its partitions only. What the other models publish is in the tests of simgpuctl, in short.
func TestGolden(t *testing.T) {
	for _, model := range []string{"h100-sxm5-80gb", "a100-40gb"} {
		for _, layout := range []Layout{Combined, Split} {
			name := fmt.Sprintf("%s.%s", model, layout)
			t.Run(name, func(t *testing.T) {
				got := rendered(t, specs(t, newNode(t, dynamic(model, 1)), layout))
				file := filepath.Join("testdata", name+".yaml")
				if *update {
					if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(want), got); diff != "" {
					t.Errorf("%s differs; if that is meant, run the test with -update (-want +got):\n%s", file, diff)
				}
			})
		}
	}
}

// shape is a slice in short: its counter sets and its devices.
func shape(specs []resourceapi.ResourceSliceSpec) []string {
	var shapes []string
	for _, spec := range specs {
		var parts []string
		for _, set := range spec.SharedCounters {
			parts = append(parts, set.Name)
		}
		if n := len(spec.Devices); n > 0 {
			parts = append(parts, fmt.Sprintf("%s and %d more", spec.Devices[0].Name, n-1))
		}
		shapes = append(shapes, strings.Join(parts, ", "))
	}
	return shapes
}

func TestLayouts(t *testing.T) {
	for name, test := range map[string]struct {
		groups          []inventory.GPUGroup
		combined, split []string
	}{
		"no GPU": {nil, []string{""}, []string{""}},
		"two models": {
			[]inventory.GPUGroup{dynamic("h100-sxm5-80gb", 1), dynamic("a100-40gb", 1)},
			[]string{"gpu-0-counter-set, gpu-0 and 25 more", "gpu-1-counter-set, gpu-1-mig-1g10gb-15-0 and 24 more"},
			[]string{"gpu-0-counter-set, gpu-1-counter-set", "gpu-0 and 25 more", "gpu-1-mig-1g10gb-15-0 and 24 more"},
		},
		"whole GPUs have no counters": {
			[]inventory.GPUGroup{disabled("h100-sxm5-80gb", 2)},
			[]string{"gpu-0 and 0 more", "gpu-1 and 0 more"},
			[]string{"gpu-0 and 0 more", "gpu-1 and 0 more"},
		},
		"nine GPUs": {
			[]inventory.GPUGroup{disabled("a100-80gb", 1), dynamic("h100-sxm5-80gb", 9)},
			[]string{
				"gpu-0 and 0 more",
				"gpu-1-counter-set, gpu-1 and 25 more", "gpu-2-counter-set, gpu-2 and 25 more", "gpu-3-counter-set, gpu-3 and 25 more",
				"gpu-4-counter-set, gpu-4 and 25 more", "gpu-5-counter-set, gpu-5 and 25 more", "gpu-6-counter-set, gpu-6 and 25 more",
				"gpu-7-counter-set, gpu-7 and 25 more", "gpu-8-counter-set, gpu-8 and 25 more", "gpu-9-counter-set, gpu-9 and 25 more",
			},
			[]string{
				"gpu-1-counter-set, gpu-2-counter-set, gpu-3-counter-set, gpu-4-counter-set, gpu-5-counter-set, gpu-6-counter-set, gpu-7-counter-set, gpu-8-counter-set",
				"gpu-9-counter-set",
				"gpu-0 and 0 more",
				"gpu-1 and 25 more", "gpu-2 and 25 more", "gpu-3 and 25 more", "gpu-4 and 25 more", "gpu-5 and 25 more",
				"gpu-6 and 25 more", "gpu-7 and 25 more", "gpu-8 and 25 more", "gpu-9 and 25 more",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			node := newNode(t, test.groups...)
			if diff := cmp.Diff(test.combined, shape(specs(t, node, Combined))); diff != "" {
				t.Errorf("combined (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.split, shape(specs(t, node, Split))); diff != "" {
				t.Errorf("split (-want +got):\n%s", diff)
			}
		})
	}
}

// TestLimits holds everything the API server and the publishing helper check against what is published,
// for one GPU and for as many as a node can have.
func TestLimits(t *testing.T) {
	for _, count := range []int{1, 8, 254} {
		node := newNode(t, dynamic("h100-sxm5-80gb", count))
		for _, layout := range []Layout{Combined, Split} {
			t.Run(fmt.Sprintf("%d GPUs, %s", count, layout), func(t *testing.T) {
				checkLimits(t, specs(t, node, layout), layout)
			})
		}
	}
}

func checkLimits(t *testing.T, specs []resourceapi.ResourceSliceSpec, layout Layout) {
	t.Helper()
	counters := map[string]map[string]resourceapi.Counter{}
	devices := map[string]bool{}
	atMost := func(what string, n, most int) {
		t.Helper()
		if n > most {
			t.Errorf("%d %s, more than %d", n, what, most)
		}
	}
	for i, spec := range specs {
		if layout == Split && len(spec.SharedCounters) > 0 && len(spec.Devices) > 0 {
			t.Errorf("slice %d has both counter sets and devices", i)
		}
		atMost("counter sets", len(spec.SharedCounters), resourceapi.ResourceSliceMaxCounterSets)
		here, consumed := map[string]bool{}, 0
		for _, set := range spec.SharedCounters {
			if counters[set.Name] != nil {
				t.Errorf("counter set %s is published twice", set.Name)
			}
			counters[set.Name], here[set.Name] = set.Counters, true
			atMost("counters in a set", len(set.Counters), resourceapi.ResourceSliceMaxCountersPerCounterSet)
		}
		atMost("devices", len(spec.Devices), resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures)
		for _, device := range spec.Devices {
			if devices[device.Name] {
				t.Errorf("device %s is published twice", device.Name)
			}
			devices[device.Name] = true
			atMost("attributes and capacities of "+device.Name, len(device.Attributes)+len(device.Capacity), resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice)
			atMost("counter sets of "+device.Name, len(device.ConsumesCounters), resourceapi.ResourceSliceMaxDeviceCounterConsumptionsPerDevice)
			for _, consumption := range device.ConsumesCounters {
				atMost("counters of "+device.Name, len(consumption.Counters), resourceapi.ResourceSliceMaxCountersPerDeviceCounterConsumption)
				consumed += len(consumption.Counters)
				if layout == Combined && !here[consumption.CounterSet] {
					t.Errorf("%s consumes counters of %s, which is not in its slice", device.Name, consumption.CounterSet)
				}
			}
		}
		if layout == Combined {
			atMost("counters consumed in a slice", consumed, 1024)
		}
	}
	for _, spec := range specs {
		for _, device := range spec.Devices {
			for _, consumption := range device.ConsumesCounters {
				for name, counter := range consumption.Counters {
					available, found := counters[consumption.CounterSet][name]
					if !found || available.Value.Cmp(counter.Value) < 0 {
						t.Errorf("%s consumes %s of %s in %s, which has %s", device.Name, counter.Value.String(), name, consumption.CounterSet, available.Value.String())
					}
				}
			}
		}
	}
}

// oversized is a node whose one GPU has what no model in the catalogue has.
func oversized(devices, counters, attributes int) *hardware.Node {
	set := &resourceapi.CounterSet{Name: "gpu-0-counter-set", Counters: map[string]resourceapi.Counter{}}
	for i := range counters {
		set.Counters[fmt.Sprintf("counter-%d", i)] = resourceapi.Counter{Value: resource.MustParse("1")}
	}
	gpu := &hardware.GPU{Model: &profiles.Model{ID: "big"}}
	for i := range devices {
		published := resourceapi.Device{Name: fmt.Sprintf("device-%d", i), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}}
		for i := range attributes {
			published.Attributes[resourceapi.QualifiedName(fmt.Sprintf("attribute%d", i))] = resourceapi.DeviceAttribute{BoolValue: new(true)}
		}
		if counters > 0 {
			published.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set.Name, Counters: set.Counters}}
			gpu.CounterSet = set
		}
		gpu.Devices = append(gpu.Devices, &hardware.Device{Name: published.Name, GPU: gpu, Published: published})
	}
	return &hardware.Node{Name: "node-1", DriverName: "gpu.example.com", GPUs: []*hardware.GPU{gpu}}
}

func TestBeyondLimits(t *testing.T) {
	for name, test := range map[string]struct {
		node            *hardware.Node
		combined, split string // error, or the devices of each slice
	}{
		"devices with counters": {
			oversized(129, 2, 0),
			"node node-1 cannot be published: GPU 0 (big) has 129 devices in a slice with counters, more than the 128 that the API allows, and Kubernetes 1.34 wants all devices of a counter set in one slice",
			"[0 64 64 1]",
		},
		"devices that Kubernetes 1.34 alone lets share a slice": {oversized(65, 2, 0), "[65]", "[0 64 1]"},
		"devices without counters":                              {oversized(130, 0, 0), "[64 64 2]", "[64 64 2]"},
		"counters consumed": {
			oversized(40, 30, 0),
			"node node-1 cannot be published: GPU 0 (big) has 1200 counters consumed in a slice, more than the 1024 that the API allows, and Kubernetes 1.34 wants all devices of a counter set in one slice",
			"[0 40]",
		},
		"counters in a set": {
			oversized(1, 33, 0),
			"node node-1 cannot be published: GPU 0 (big) has 33 counters in a set, more than the 32 that the API allows",
			"node node-1 cannot be published: GPU 0 (big) has 33 counters in a set, more than the 32 that the API allows",
		},
		"attributes": {
			oversized(1, 0, 33),
			"node node-1 cannot be published: GPU 0 (big) has 33 attributes and capacities of device device-0, more than the 32 that the API allows",
			"node node-1 cannot be published: GPU 0 (big) has 33 attributes and capacities of device device-0, more than the 32 that the API allows",
		},
	} {
		t.Run(name, func(t *testing.T) {
			for layout, want := range map[Layout]string{Combined: test.combined, Split: test.split} {
				resources, err := Resources(test.node, layout)
				got := fmt.Sprint(err)
				if err == nil {
					var sizes []int
					for _, slice := range resources.Pools["node-1"].Slices {
						sizes = append(sizes, len(slice.Devices))
					}
					got = fmt.Sprint(sizes)
				}
				if got != want {
					t.Errorf("%s: got %s\nwant %s", layout, got, want)
				}
			}
		})
	}
}

func TestResourcesAreCopies(t *testing.T) {
	node := newNode(t, dynamic("h100-sxm5-80gb", 1))
	for _, layout := range []Layout{Combined, Split} {
		before := rendered(t, specs(t, node, layout))
		for _, spec := range specs(t, node, layout) {
			for i := range spec.Devices {
				spec.Devices[i].Taints = append(spec.Devices[i].Taints, resourceapi.DeviceTaint{Key: "k"})
				clear(spec.Devices[i].Attributes)
			}
			for _, set := range spec.SharedCounters {
				clear(set.Counters)
			}
		}
		if diff := cmp.Diff(before, rendered(t, specs(t, node, layout))); diff != "" {
			t.Errorf("%s: a change of the result changed the node (-before +after):\n%s", layout, diff)
		}
	}
}

func TestDevicesKeepTheirOrder(t *testing.T) {
	node := newNode(t, dynamic("a100-80gb", 2), dynamic("h100-sxm5-80gb", 2))
	var want []string
	for _, device := range node.Devices() {
		want = append(want, device.Name)
	}
	for _, layout := range []Layout{Combined, Split} {
		var got []string
		for _, spec := range specs(t, node, layout) {
			for _, device := range spec.Devices {
				got = append(got, device.Name)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: got devices %v, want %v", layout, got, want)
		}
	}
}
