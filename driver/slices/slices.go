// Package slices spreads the devices of a node over ResourceSlices. It owns the two layouts that
// Kubernetes versions demand and keeps every limit of the API by splitting, or says which one it cannot
// keep. It does not talk to an API server.
package slices

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/simgpu/simgpu/driver/hardware"
)

// Layout says where counter sets live.
type Layout int

const (
	// Combined has one slice per GPU with its counter set and its devices: Kubernetes 1.34 wants a counter
	// set in the slice of the devices that consume it.
	Combined Layout = iota + 1
	// Split has the counter sets first, in slices of their own, and then the devices of one GPU per slice:
	// Kubernetes 1.35 and later want either counter sets or devices in a slice.
	Split
)

func (l Layout) String() string {
	switch l {
	case Combined:
		return "combined"
	case Split:
		return "split"
	}
	return fmt.Sprintf("Layout(%d)", int(l))
}

// Limits that Kubernetes 1.34 has beside those of the API types; later versions dropped them.
const (
	maxSharedCountersPerSlice = 32
	maxDeviceCountersPerSlice = 1024
)

// LayoutFor returns the layout that an API server of that version accepts. It fails for versions
// before 1.34, which do not serve resource.k8s.io/v1.
func LayoutFor(v *version.Info) (Layout, error) {
	major, minor, err := numbers(v)
	switch {
	case err != nil:
		return 0, err
	case major < 1 || major == 1 && minor < 34:
		return 0, fmt.Errorf("the API server is Kubernetes %d.%d; 1.34 or later is needed", major, minor)
	case major == 1 && minor == 34:
		return Combined, nil
	}
	return Split, nil
}

// numbers reads the version, whose minor number some vendors end in a plus sign.
func numbers(v *version.Info) (major, minor int, err error) {
	major, majorErr := strconv.Atoi(v.Major)
	digits := len(v.Minor) - len(strings.TrimLeft(v.Minor, "0123456789"))
	minor, minorErr := strconv.Atoi(v.Minor[:digits])
	if majorErr != nil || minorErr != nil {
		return 0, 0, fmt.Errorf("the API server's version is not understood: major %q, minor %q", v.Major, v.Minor)
	}
	return major, minor, nil
}

// Resources returns the one pool of the node, named after it. A node without GPUs has one empty slice,
// which says that the driver is there and has nothing. The caller may change what it gets.
func Resources(n *hardware.Node, layout Layout) (resourceslice.DriverResources, error) {
	var pool []resourceslice.Slice
	var err error
	switch layout {
	case Combined:
		pool, err = combined(n)
	case Split:
		pool, err = split(n)
	default:
		err = fmt.Errorf("unknown layout %d", layout)
	}
	if err != nil {
		return resourceslice.DriverResources{}, fmt.Errorf("node %s cannot be published: %w", n.Name, err)
	}
	return inPool(n, pool), nil
}

func inPool(n *hardware.Node, pool []resourceslice.Slice) resourceslice.DriverResources {
	if len(pool) == 0 {
		pool = []resourceslice.Slice{{}}
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{n.Name: {Slices: pool}}}
}

func combined(n *hardware.Node) ([]resourceslice.Slice, error) {
	var pool []resourceslice.Slice
	for _, gpu := range n.GPUs {
		if err := checkGPU(gpu); err != nil {
			return nil, err
		}
		devices := published(gpu)
		if gpu.CounterSet == nil {
			pool = append(pool, inChunks(devices)...)
			continue
		}
		consumed := 0
		for i := range devices {
			consumed += counters(&devices[i])
		}
		for _, limit := range []limit{
			{"devices in a slice with counters", len(devices), resourceapi.ResourceSliceMaxDevices},
			{"shared counters in a slice", len(gpu.CounterSet.Counters), maxSharedCountersPerSlice},
			{"counters consumed in a slice", consumed, maxDeviceCountersPerSlice},
		} {
			if err := limit.check(gpu); err != nil {
				return nil, fmt.Errorf("%w, and Kubernetes 1.34 wants all devices of a counter set in one slice", err)
			}
		}
		pool = append(pool, resourceslice.Slice{SharedCounters: []resourceapi.CounterSet{*gpu.CounterSet.DeepCopy()}, Devices: devices})
	}
	return pool, nil
}

func split(n *hardware.Node) ([]resourceslice.Slice, error) {
	pool, err := counterSets(n)
	if err != nil {
		return nil, err
	}
	for _, gpu := range n.GPUs {
		pool = append(pool, inChunks(published(gpu))...)
	}
	return pool, nil
}

// counterSets returns the slices that have the counter sets alone.
func counterSets(n *hardware.Node) ([]resourceslice.Slice, error) {
	var sets []resourceapi.CounterSet
	for _, gpu := range n.GPUs {
		if err := checkGPU(gpu); err != nil {
			return nil, err
		}
		if gpu.CounterSet != nil {
			sets = append(sets, *gpu.CounterSet.DeepCopy())
		}
	}
	var pool []resourceslice.Slice
	for chunk := range slices.Chunk(sets, resourceapi.ResourceSliceMaxCounterSets) {
		pool = append(pool, resourceslice.Slice{SharedCounters: chunk})
	}
	return pool, nil
}

func published(gpu *hardware.GPU) []resourceapi.Device {
	var devices []resourceapi.Device
	for _, device := range gpu.Devices {
		devices = append(devices, *device.Published.DeepCopy())
	}
	return devices
}

// inChunks spreads devices over as many slices as they need. Any of them may get a taint, if it has no counters already, so
// that no slice may have more than the API allows then.
func inChunks(devices []resourceapi.Device) []resourceslice.Slice {
	var pool []resourceslice.Slice
	for chunk := range slices.Chunk(devices, resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures) {
		pool = append(pool, resourceslice.Slice{Devices: chunk})
	}
	return pool
}

// limit is something that the API counts.
type limit struct {
	what      string
	has, most int
}

func (l limit) check(gpu *hardware.GPU) error {
	if l.has <= l.most {
		return nil
	}
	return fmt.Errorf("GPU %d (%s) has %d %s, more than the %d that the API allows", gpu.Index, gpu.Model.ID, l.has, l.what, l.most)
}

// checkGPU checks what no splitting can change.
func checkGPU(gpu *hardware.GPU) error {
	var limits []limit
	if gpu.CounterSet != nil {
		limits = append(limits, limit{"counters in a set", len(gpu.CounterSet.Counters), resourceapi.ResourceSliceMaxCountersPerCounterSet})
	}
	for _, device := range gpu.Devices {
		published := &device.Published
		limits = append(limits,
			limit{"attributes and capacities of device " + device.Name, len(published.Attributes) + len(published.Capacity), resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice},
			limit{"counter sets consumed by device " + device.Name, len(published.ConsumesCounters), resourceapi.ResourceSliceMaxDeviceCounterConsumptionsPerDevice},
			limit{"counters consumed by device " + device.Name, counters(published), resourceapi.ResourceSliceMaxCountersPerDeviceCounterConsumption},
		)
	}
	for _, limit := range limits {
		if err := limit.check(gpu); err != nil {
			return err
		}
	}
	return nil
}

func counters(device *resourceapi.Device) int {
	n := 0
	for _, consumption := range device.ConsumesCounters {
		n += len(consumption.Counters)
	}
	return n
}
