package hardware

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

func catalogue(t *testing.T) *profiles.Catalogue {
	t.Helper()
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	return catalogue
}

func newNode(t *testing.T, catalogue *profiles.Catalogue, groups ...inventory.GPUGroup) *Node {
	t.Helper()
	node, err := New(Config{NodeName: "node-1", Groups: groups, Catalogue: catalogue})
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

func static(model string, count int, partitions ...inventory.Partition) inventory.GPUGroup {
	return inventory.GPUGroup{Model: model, Count: count, MIGMode: inventory.MIGStatic, Partitions: partitions, NUMANode: new(0)}
}

func device(t *testing.T, n *Node, name string) *Device {
	t.Helper()
	device, found := n.Device(name)
	if !found {
		t.Fatalf("no device %s", name)
	}
	return device
}

// spelled is a device as the API prints it, one line per fact.
func spelled(device resourceapi.Device) []string {
	var lines []string
	for name, attribute := range device.Attributes {
		switch {
		case attribute.StringValue != nil:
			lines = append(lines, fmt.Sprintf("attribute %s = %q", name, *attribute.StringValue))
		case attribute.VersionValue != nil:
			lines = append(lines, fmt.Sprintf("attribute %s = version %s", name, *attribute.VersionValue))
		case attribute.IntValue != nil:
			lines = append(lines, fmt.Sprintf("attribute %s = %d", name, *attribute.IntValue))
		}
	}
	for name, capacity := range device.Capacity {
		lines = append(lines, fmt.Sprintf("capacity %s = %s", name, capacity.Value.String()))
	}
	for _, consumption := range device.ConsumesCounters {
		for name, counter := range consumption.Counters {
			lines = append(lines, fmt.Sprintf("counter %s/%s = %s", consumption.CounterSet, name, counter.Value.String()))
		}
	}
	slices.Sort(lines)
	return lines
}

func names(devices []*Device) []string {
	var names []string
	for _, device := range devices {
		names = append(names, device.Name)
	}
	return names
}

func TestH100(t *testing.T) {
	node := newNode(t, catalogue(t), dynamic("h100-sxm5-80gb", 1))
	if node.DriverName != "gpu.nvidia.com" {
		t.Errorf("driver name: got %s, want gpu.nvidia.com", node.DriverName)
	}
	want := []string{
		"gpu-0",
		"gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1", "gpu-0-mig-1g10gb-19-2", "gpu-0-mig-1g10gb-19-3",
		"gpu-0-mig-1g10gb-19-4", "gpu-0-mig-1g10gb-19-5", "gpu-0-mig-1g10gb-19-6",
		"gpu-0-mig-1g10gb-me-20-0", "gpu-0-mig-1g10gb-me-20-1", "gpu-0-mig-1g10gb-me-20-2", "gpu-0-mig-1g10gb-me-20-3",
		"gpu-0-mig-1g10gb-me-20-4", "gpu-0-mig-1g10gb-me-20-5", "gpu-0-mig-1g10gb-me-20-6",
		"gpu-0-mig-1g20gb-15-0", "gpu-0-mig-1g20gb-15-2", "gpu-0-mig-1g20gb-15-4", "gpu-0-mig-1g20gb-15-6",
		"gpu-0-mig-2g20gb-14-0", "gpu-0-mig-2g20gb-14-2", "gpu-0-mig-2g20gb-14-4",
		"gpu-0-mig-3g40gb-9-0", "gpu-0-mig-3g40gb-9-4",
		"gpu-0-mig-4g40gb-5-0",
		"gpu-0-mig-7g80gb-0-0",
	}
	if diff := cmp.Diff(want, names(node.Devices())); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}

	gpu := node.GPUs[0]
	var counters []string
	for name, counter := range gpu.CounterSet.Counters {
		counters = append(counters, name+" = "+counter.Value.String())
	}
	slices.Sort(counters)
	wantCounters := []string{
		"copy-engines = 8", "decoders = 7", "encoders = 0", "jpeg-engines = 7",
		"memory = 81152Mi",
		"memory-slice-0 = 1", "memory-slice-1 = 1", "memory-slice-2 = 1", "memory-slice-3 = 1",
		"memory-slice-4 = 1", "memory-slice-5 = 1", "memory-slice-6 = 1", "memory-slice-7 = 1",
		"multiprocessors = 132", "ofa-engines = 1",
	}
	if diff := cmp.Diff(wantCounters, counters); diff != "" {
		t.Errorf("counters (-want +got):\n%s", diff)
	}
	if gpu.CounterSet.Name != "gpu-0-counter-set" {
		t.Errorf("counter set: got %s", gpu.CounterSet.Name)
	}

	whole := []string{
		`attribute addressingMode = "HMM"`,
		`attribute architecture = "Hopper"`,
		`attribute brand = "Nvidia"`,
		`attribute cudaComputeCapability = version 9.0.0`,
		`attribute cudaDriverVersion = version 13.0.0`,
		`attribute driverVersion = version 580.95.5`,
		`attribute productName = "NVIDIA H100 80GB HBM3"`,
		`attribute resource.kubernetes.io/numaNode = 0`,
		`attribute resource.kubernetes.io/pciBusID = "0000:11:00.0"`,
		`attribute resource.kubernetes.io/pcieRoot = "pci0000:10"`,
		`attribute type = "gpu"`,
		fmt.Sprintf(`attribute uuid = %q`, gpu.UUID),
		"capacity copyEngines = 8", "capacity decoders = 7", "capacity encoders = 0", "capacity jpegEngines = 7",
		"capacity memory = 81152Mi", "capacity multiprocessors = 132", "capacity ofaEngines = 1",
	}
	for _, counter := range wantCounters {
		whole = append(whole, "counter gpu-0-counter-set/"+counter)
	}
	if diff := cmp.Diff(whole, spelled(gpu.Devices[0].Published)); diff != "" {
		t.Errorf("whole GPU (-want +got):\n%s", diff)
	}

	partition := []string{
		`attribute addressingMode = "HMM"`,
		`attribute architecture = "Hopper"`,
		`attribute brand = "Nvidia"`,
		`attribute cudaComputeCapability = version 9.0.0`,
		`attribute cudaDriverVersion = version 13.0.0`,
		`attribute driverVersion = version 580.95.5`,
		fmt.Sprintf(`attribute parentUUID = %q`, gpu.UUID),
		`attribute productName = "NVIDIA H100 80GB HBM3"`,
		`attribute profile = "3g.40gb"`,
		`attribute resource.kubernetes.io/numaNode = 0`,
		`attribute resource.kubernetes.io/pciBusID = "0000:11:00.0"`,
		`attribute resource.kubernetes.io/pcieRoot = "pci0000:10"`,
		`attribute type = "mig"`,
		"capacity copyEngines = 3", "capacity decoders = 3", "capacity encoders = 0", "capacity jpegEngines = 3",
		"capacity memory = 40448Mi", "capacity multiprocessors = 60", "capacity ofaEngines = 0",
		"counter gpu-0-counter-set/copy-engines = 3", "counter gpu-0-counter-set/decoders = 3",
		"counter gpu-0-counter-set/encoders = 0", "counter gpu-0-counter-set/jpeg-engines = 3",
		"counter gpu-0-counter-set/memory = 40448Mi",
		"counter gpu-0-counter-set/memory-slice-4 = 1", "counter gpu-0-counter-set/memory-slice-5 = 1",
		"counter gpu-0-counter-set/memory-slice-6 = 1", "counter gpu-0-counter-set/memory-slice-7 = 1",
		"counter gpu-0-counter-set/multiprocessors = 60", "counter gpu-0-counter-set/ofa-engines = 0",
	}
	slice := device(t, node, "gpu-0-mig-3g40gb-9-4")
	if diff := cmp.Diff(partition, spelled(slice.Published)); diff != "" {
		t.Errorf("partition (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(&Instance{GPUInstanceID: 1, ComputeInstanceID: 0, GPUInstanceMinor: 12, ComputeInstanceMinor: 13}, slice.Instance); diff != "" {
		t.Errorf("instance of the partition (-want +got):\n%s", diff)
	}
	if slice.MemoryMiB != 40448 || gpu.Devices[0].MemoryMiB != 81559 {
		t.Errorf("memory that nvidia-smi shows: got %d and %d MiB, want 40448 and 81559", slice.MemoryMiB, gpu.Devices[0].MemoryMiB)
	}
	if gpu.DriverVersion != "580.95.05" || gpu.CUDAVersion != "13.0" {
		t.Errorf("versions that nvidia-smi shows: got %s and %s", gpu.DriverVersion, gpu.CUDAVersion)
	}
}

// TestStatic holds what the vendor's driver publishes of partitions that were created before it started.
func TestStatic(t *testing.T) {
	layout := []inventory.Partition{{Profile: "1g.10gb+me", Start: 0}, {Profile: "1g.20gb", Start: 2}, {Profile: "3g.40gb", Start: 4}}
	node := newNode(t, catalogue(t), static("h100-sxm5-80gb", 2, layout...))
	want := []string{
		"gpu-0-mig-1g10gb-me-20-0", "gpu-0-mig-1g20gb-15-2", "gpu-0-mig-3g40gb-9-4",
		"gpu-1-mig-1g10gb-me-20-0", "gpu-1-mig-1g20gb-15-2", "gpu-1-mig-3g40gb-9-4",
	}
	if diff := cmp.Diff(want, names(node.Devices())); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if node.GPUs[0].CounterSet != nil {
		t.Errorf("partitions that share nothing have counters: %v", node.GPUs[0].CounterSet)
	}
	fixed := device(t, node, "gpu-0-mig-1g20gb-15-2")
	if diff := cmp.Diff([]string{
		`attribute addressingMode = "HMM"`,
		`attribute architecture = "Hopper"`,
		`attribute brand = "Nvidia"`,
		`attribute cudaComputeCapability = version 9.0.0`,
		`attribute cudaDriverVersion = version 13.0.0`,
		`attribute driverVersion = version 580.95.5`,
		fmt.Sprintf(`attribute parentUUID = %q`, node.GPUs[0].UUID),
		`attribute productName = "NVIDIA H100 80GB HBM3"`,
		`attribute profile = "1g.20gb"`,
		`attribute resource.kubernetes.io/numaNode = 0`,
		`attribute resource.kubernetes.io/pciBusID = "0000:11:00.0"`,
		`attribute resource.kubernetes.io/pcieRoot = "pci0000:10"`,
		`attribute type = "mig"`,
		fmt.Sprintf(`attribute uuid = %q`, fixed.UUID),
		"capacity copyEngines = 1", "capacity decoders = 1", "capacity encoders = 0", "capacity jpegEngines = 1",
		"capacity memory = 20096Mi", "capacity memorySlice2 = 1", "capacity memorySlice3 = 1", "capacity multiprocessors = 26", "capacity ofaEngines = 0",
	}, spelled(fixed.Published)); diff != "" {
		t.Errorf("partition (-want +got):\n%s", diff)
	}

	// Created on demand or there for good, it is the same partition.
	onDemand := device(t, newNode(t, catalogue(t), dynamic("h100-sxm5-80gb", 1)), fixed.Name)
	if fixed.UUID != onDemand.UUID || *fixed.Instance != *onDemand.Instance || !slices.Equal(fixed.Files(), onDemand.Files()) {
		t.Errorf("%s is another partition than the one created on demand: %+v and %+v", fixed.Name, fixed, onDemand)
	}
	for _, a := range node.Devices() {
		for _, b := range node.Devices() {
			if got, want := a.Overlaps(b), a == b; got != want {
				t.Errorf("%s overlaps %s: %t, want %t", a.Name, b.Name, got, want)
			}
		}
	}
}

// TestStaticLargest keeps the limit of 32 attributes and capacities for the models with most memory slices.
func TestStaticLargest(t *testing.T) {
	for id, gpu := range divided(t) {
		for _, profile := range gpu.Table.Profiles {
			if len(profile.Absent) > 0 {
				continue
			}
			for _, device := range newNode(t, catalogue(t), static(id, 1, inventory.Partition{Profile: profile.Name, Start: profile.Starts[0]})).Devices() {
				if n := len(device.Published.Attributes) + len(device.Published.Capacity); n > resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
					t.Errorf("%s has %d attributes and capacities", device.Name, n)
				}
			}
		}
	}
}

func TestCanonicalMemory(t *testing.T) {
	for name, test := range map[string]struct {
		node   *Node
		device string
		want   string
	}{
		"H100 1g":                {newNode(t, catalogue(t), dynamic("h100-sxm5-80gb", 1)), "gpu-0-mig-1g10gb-19-0", "9984Mi"},
		"A100 80GB 7g":           {newNode(t, catalogue(t), dynamic("a100-80gb", 1)), "gpu-0-mig-7g80gb-0-0", "79Gi"},
		"A100 40GB 7g":           {newNode(t, catalogue(t), dynamic("a100-40gb", 1)), "gpu-0-mig-7g40gb-0-0", "40320Mi"},
		"A100 80GB as a whole":   {newNode(t, catalogue(t), disabled("a100-80gb", 1)), "gpu-0", "80Gi"},
		"A100 40GB as a whole":   {newNode(t, catalogue(t), disabled("a100-40gb", 1)), "gpu-0", "40Gi"},
		"H100 without its parts": {newNode(t, catalogue(t), disabled("h100-sxm5-80gb", 1)), "gpu-0", "81559Mi"},
		"RTX PRO 6000":           {newNode(t, catalogue(t), dynamic("rtx-pro-6000-96gb", 1)), "gpu-0", "95Gi"},
	} {
		t.Run(name, func(t *testing.T) {
			memory := device(t, test.node, test.device).Published.Capacity["memory"].Value
			if got := memory.String(); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func TestCounts(t *testing.T) {
	for name, test := range map[string]struct {
		catalogue         *profiles.Catalogue
		group             inventory.GPUGroup
		devices, counters int
		whole             bool
	}{
		"Hopper offers both":                 {catalogue(t), dynamic("h100-sxm5-80gb", 1), 26, 15, true},
		"Hopper without partitions":          {catalogue(t), disabled("h100-sxm5-80gb", 1), 1, 0, true},
		"Ampere offers partitions":           {catalogue(t), dynamic("a100-40gb", 1), 25, 15, false},
		"Ampere or itself as a whole":        {catalogue(t), disabled("a100-40gb", 1), 1, 0, true},
		"RTX PRO 6000":                       {catalogue(t), dynamic("rtx-pro-6000-96gb", 1), 31, 19, true},
		"A30":                                {catalogue(t), dynamic("a30-24gb", 1), 13, 11, false},
		"a model that cannot be partitioned": {catalogue(t), disabled("l4-24gb", 1), 1, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			node := newNode(t, test.catalogue, test.group)
			gpu := node.GPUs[0]
			counters := 0
			if gpu.CounterSet != nil {
				counters = len(gpu.CounterSet.Counters)
			}
			if len(gpu.Devices) != test.devices || counters != test.counters {
				t.Errorf("got %d devices and %d counters, want %d and %d", len(gpu.Devices), counters, test.devices, test.counters)
			}
			whole, found := node.Device("gpu-0")
			if found != test.whole {
				t.Errorf("the whole GPU is a device: %t, want %t", found, test.whole)
			}
			if counters == 0 {
				if consumes := whole.Published.ConsumesCounters; consumes != nil {
					t.Errorf("it consumes counters: %v", consumes)
				}
				if capacity := slices.Collect(maps.Keys(whole.Published.Capacity)); !slices.Equal(capacity, []resourceapi.QualifiedName{"memory"}) {
					t.Errorf("its capacities are %v, want memory alone", capacity)
				}
			}
		})
	}
}

func TestIdentity(t *testing.T) {
	group := dynamic("h100-sxm5-80gb", 3)
	node := newNode(t, catalogue(t), group)
	gpu := node.GPUs[2]
	uuid := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	if rest, isGPU := strings.CutPrefix(gpu.UUID, "GPU-"); !isGPU || !uuid.MatchString(rest) {
		t.Errorf("UUID of a GPU: %s", gpu.UUID)
	}
	if rest, isMIG := strings.CutPrefix(gpu.Devices[1].UUID, "MIG-"); !isMIG || !uuid.MatchString(rest) {
		t.Errorf("UUID of a partition: %s", gpu.Devices[1].UUID)
	}
	if !regexp.MustCompile(`^165\d{10}$`).MatchString(gpu.Serial) {
		t.Errorf("serial number: %s", gpu.Serial)
	}
	seen := map[string]string{}
	for _, device := range node.Devices() {
		if other, found := seen[device.UUID]; found {
			t.Errorf("%s and %s both are %s", other, device.Name, device.UUID)
		}
		seen[device.UUID] = device.Name
	}

	// These may never change: what was written down about a GPU would no longer be found.
	if got, want := node.GPUs[0].UUID, "GPU-c4b532a6-29a9-8ad0-8b82-baa754581e52"; got != want {
		t.Errorf("UUID of node-1's first GPU: got %s, want %s", got, want)
	}

	other := group
	other.Seed = "other"
	for name, changed := range map[string]*Node{
		"seed": newNode(t, catalogue(t), other),
		"node": mustNew(t, Config{NodeName: "node-2", Groups: []inventory.GPUGroup{group}, Catalogue: catalogue(t)}),
	} {
		for i := range node.GPUs {
			if node.GPUs[i].UUID == changed.GPUs[i].UUID || node.GPUs[i].Serial == changed.GPUs[i].Serial || node.GPUs[i].Devices[1].UUID == changed.GPUs[i].Devices[1].UUID {
				t.Errorf("another %s leaves an identity of GPU %d as it was", name, i)
			}
		}
	}
}

func mustNew(t *testing.T, cfg Config) *Node {
	t.Helper()
	node, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return node
}

// TestGPUDependsOnItsOwnGroupOnly covers a driver that was restarted, or that rebuilds a GPU which the
// inventory no longer has: it must get the same one.
func TestGPUDependsOnItsOwnGroupOnly(t *testing.T) {
	rooted := dynamic("h100-sxm5-80gb", 3)
	rooted.PCIeRoot = "pci0000:b8"
	mixed := newNode(t, catalogue(t), disabled("a100-40gb", 2), rooted)
	alone := rooted
	alone.Count = 5
	same := newNode(t, catalogue(t), alone)
	for index := 2; index < 5; index++ {
		find := func(n *Node) *GPU {
			return n.GPUs[slices.IndexFunc(n.GPUs, func(g *GPU) bool { return g.Index == index })]
		}
		a, b := find(mixed), find(same)
		if a.UUID != b.UUID || a.PCIBusID != b.PCIBusID || a.Serial != b.Serial {
			t.Errorf("GPU %d: got %s %s %s and %s %s %s", index, a.UUID, a.PCIBusID, a.Serial, b.UUID, b.PCIBusID, b.Serial)
		}
		if diff := cmp.Diff(spelled(a.Devices[5].Published), spelled(b.Devices[5].Published)); diff != "" {
			t.Errorf("a partition of GPU %d (-mixed +alone):\n%s", index, diff)
		}
	}
}

func TestPCI(t *testing.T) {
	shared := dynamic("h100-sxm5-80gb", 2)
	shared.PCIeRoot = "pci0000:00"
	for name, test := range map[string]struct {
		groups []inventory.GPUGroup
		want   []string // index, address and root, in published order
	}{
		"roots of their own": {
			[]inventory.GPUGroup{disabled("h100-sxm5-80gb", 3)},
			[]string{"0 0000:11:00.0 pci0000:10", "1 0000:21:00.0 pci0000:20", "2 0000:31:00.0 pci0000:30"},
		},
		"a shared root, published by address": {
			[]inventory.GPUGroup{disabled("h100-sxm5-80gb", 1), shared},
			[]string{"1 0000:01:01.0 pci0000:00", "2 0000:01:02.0 pci0000:00", "0 0000:11:00.0 pci0000:10"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, gpu := range newNode(t, catalogue(t), test.groups...).GPUs {
				got = append(got, fmt.Sprintf("%d %s %s", gpu.Index, gpu.PCIBusID, gpu.PCIeRoot))
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("GPUs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMostGPUs(t *testing.T) {
	node := newNode(t, catalogue(t), disabled("h100-sxm5-80gb", 254))
	seen := map[string]bool{}
	for i, gpu := range node.GPUs {
		if gpu.Index != i {
			t.Errorf("GPU %d is published at %d", gpu.Index, i)
		}
		seen[gpu.PCIBusID] = true
	}
	if len(seen) != 254 {
		t.Errorf("254 GPUs have %d addresses", len(seen))
	}
}

func TestWithoutNUMANode(t *testing.T) {
	group := dynamic("h100-sxm5-80gb", 1)
	group.NUMANode = nil
	for _, device := range newNode(t, catalogue(t), group).Devices() {
		if value, found := device.Published.Attributes["resource.kubernetes.io/numaNode"]; found {
			t.Errorf("%s publishes the NUMA node %v", device.Name, value)
		}
	}
}

func TestDriverName(t *testing.T) {
	cfg := Config{NodeName: "node-1", DriverName: "gpu.example.com", Groups: []inventory.GPUGroup{dynamic("h100-sxm5-80gb", 1)}, Catalogue: catalogue(t)}
	node := mustNew(t, cfg)
	if node.DriverName != "gpu.example.com" {
		t.Errorf("got driver name %s", node.DriverName)
	}
	// Names without a domain are in the driver's own, whatever it is, so nothing else changes.
	same := newNode(t, catalogue(t), cfg.Groups...)
	for i, device := range node.Devices() {
		if diff := cmp.Diff(spelled(same.Devices()[i].Published), spelled(device.Published)); diff != "" {
			t.Errorf("%s (-vendor's driver name +another):\n%s", device.Name, diff)
		}
	}
	if empty := mustNew(t, Config{NodeName: "node-1", Catalogue: catalogue(t)}); empty.DriverName != "gpu.nvidia.com" || len(empty.Devices()) != 0 {
		t.Errorf("a node without GPUs: driver name %s, %d devices", empty.DriverName, len(empty.Devices()))
	}
}

func TestNewFaults(t *testing.T) {
	noBus := disabled("h100-sxm5-80gb", 1)
	noBus.PCIeRoot = "pci0000:ff"
	noRoot := disabled("h100-sxm5-80gb", 1)
	noRoot.PCIeRoot = "0000:40"
	clash := disabled("h100-sxm5-80gb", 1)
	clash.PCIeRoot = "pci0000:10"
	old := dynamic("h100-sxm5-80gb", 1)
	old.DriverVersion = "525.125"
	mixed := dynamic("h100-sxm5-80gb", 1)
	mixed.MIGMode = "mixed"
	for name, test := range map[string]struct {
		groups []inventory.GPUGroup
		want   string
	}{
		"all groups at fault": {
			[]inventory.GPUGroup{disabled("h1000", 1), disabled("a100-40gb", 1), disabled("a100-40gb", -1)},
			`GPU group 0: unknown model "h1000"; known models: a10-24gb, a100-40gb, a100-80gb, a30-24gb, b200-180gb, b300-288gb, gb200-186gb, ` +
				"gb300-288gb, gh200-144gb, gh200-96gb, h100-nvl-94gb, h100-pcie-80gb, h100-sxm5-80gb, h200-141gb, l4-24gb, l40s-48gb, rtx-pro-6000-96gb, t4-16gb, v100-16gb\n" +
				"GPU group 2: the count of model a100-40gb is negative: -1",
		},
		"absent figures": {
			[]inventory.GPUGroup{old},
			"GPU group 0: model h100-sxm5-80gb cannot be partitioned with driver version 525.125, nobody sourced: memory of 1g.10gb+me, 7g.80gb",
		},
		"unknown mode":      {[]inventory.GPUGroup{mixed}, `GPU group 0: unknown MIG mode "mixed" of model h100-sxm5-80gb`},
		"impossible layout": {[]inventory.GPUGroup{static("h100-sxm5-80gb", 1, inventory.Partition{Profile: "3g.40gb", Start: 1})}, "GPU group 0: partition 0: 3g.40gb cannot start at memory slice 1; it can at 0, 4"},
		"too many": {
			[]inventory.GPUGroup{disabled("h100-sxm5-80gb", 250), disabled("a100-40gb", 5)},
			"GPU group 1: 5 GPUs of model a100-40gb after 250 others are too many: a node can have 254",
		},
		"no bus left": {[]inventory.GPUGroup{noBus}, "GPU group 0: PCIe root pci0000:ff has no bus for GPU 0; choose one with a lower number"},
		"no root":     {[]inventory.GPUGroup{noRoot}, `GPU group 0: "0000:40" is not a PCIe root like pci0000:40`},
		"addresses clash": {
			// The 33rd GPU, on the second bus below its root, meets the first one of the root below that.
			[]inventory.GPUGroup{clash, disabled("h100-sxm5-80gb", 31), {Model: "h100-sxm5-80gb", Count: 1, MIGMode: inventory.MIGDisabled, PCIeRoot: "pci0000:0f"}},
			"GPUs 0 and 32 would both have the PCI address 0000:11:00.0; give one of them another pcieRoot",
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(Config{NodeName: "node-1", Groups: test.groups, Catalogue: catalogue(t)})
			if err == nil || err.Error() != test.want {
				t.Errorf("got error\n%v\nwant\n%s", err, test.want)
			}
		})
	}
}

func TestFiles(t *testing.T) {
	node := newNode(t, catalogue(t), dynamic("h100-sxm5-80gb", 2))
	control := []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
	if diff := cmp.Diff(append(slices.Clone(control), "/dev/nvidia1"), device(t, node, "gpu-1").Files()); diff != "" {
		t.Errorf("whole GPU (-want +got):\n%s", diff)
	}
	// GPU instance 2: 3 + 135x1 + 9x2 = 156.
	want := append(slices.Clone(control), "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap156", "/dev/nvidia-caps/nvidia-cap157")
	if diff := cmp.Diff(want, device(t, node, "gpu-1-mig-3g40gb-9-0").Files()); diff != "" {
		t.Errorf("partition (-want +got):\n%s", diff)
	}
}
