package driver

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/simgpu/simgpu/driver/hardware"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// removedTaint is on devices that are in use but that the inventory no longer has.
const removedTaint = "simgpu.dev/removed-from-inventory"

// fleet is the devices of a node and what of them is in use.
type fleet struct {
	// stock is nil while there is no good inventory.
	stock *stock
	// fault says why there is none, if that is known.
	fault error
	// inUse holds the names of devices that claims have.
	inUse map[string]bool
	// taken are those of them that claims have for themselves: not by administrative access.
	taken map[string]bool
	// lending says that whole GPUs are given out by the device plugin, and no devices to new claims.
	lending bool
	// lent GPUs are given out, by index.
	lent map[int]bool
	// broken is what faults do to devices; the same pointer says that it is the same.
	broken *conditions
}

// usageMatters is false where the same is published whatever is in use.
func (f fleet) usageMatters(api apiLimits) bool {
	return api.noPartitions || f.lending || len(f.lent) > 0 || slices.ContainsFunc(f.stock.gpus, func(g stockGPU) bool { return g.retiring })
}

// arrangement spreads the devices of a node over slices.
type arrangement func(*hardware.Node, deviceslices.Layout) (resourceslice.DriverResources, error)

// resourcesOf returns what a node publishes of its fleet, as arranged.
//
// Where partitions cannot be kept apart there are none, and a GPU with a partition in use is not
// offered as a whole either. Of a GPU that is on its way out only the devices in use are published,
// tainted, or not at all where taints are dropped. The same holds for GPUs that the device plugin gives out; of those that it
// has given out there is nothing.
func resourcesOf(nodeName, driverName string, f fleet, layout deviceslices.Layout, api apiLimits, arrange arrangement) (resourceslice.DriverResources, error) {
	node := &hardware.Node{Name: nodeName, DriverName: driverName}
	for _, gpu := range f.stock.gpus {
		node.GPUs = append(node.GPUs, gpu.GPU)
	}
	slices.SortStableFunc(node.GPUs, func(a, b *hardware.GPU) int { return cmp.Compare(a.PCIBusID, b.PCIBusID) })
	resources, err := arrange(node, layout)
	if err != nil {
		return resources, err
	}
	if api.noShares {
		unshared(resources)
	}
	f.taintBroken(resources, layout, api)
	if !f.usageMatters(api) {
		return resources, nil
	}

	for name, pool := range resources.Pools {
		for i := range pool.Slices {
			pool.Slices[i].Devices = f.offered(pool.Slices[i].Devices, api)
			if api.noPartitions {
				pool.Slices[i].SharedCounters = nil
			}
		}
		kept := slices.DeleteFunc(pool.Slices, func(s resourceslice.Slice) bool { return len(s.Devices)+len(s.SharedCounters) == 0 })
		if len(kept) == 0 {
			// A pool with an empty slice says that the driver is there and has nothing.
			kept = []resourceslice.Slice{{}}
		}
		pool.Slices = kept
		resources.Pools[name] = pool
	}
	return resources, nil
}

func (f fleet) offered(devices []resourceapi.Device, api apiLimits) []resourceapi.Device {
	var offered []resourceapi.Device
	for _, device := range devices {
		known := f.stock.device(device.Name)
		device = *device.DeepCopy()
		lending := f.lending && wholeOf(known.GPU) != nil
		retiring := f.stock.gpu(known.GPU.Index).retiring
		if f.lent[known.GPU.Index] || (lending || retiring) && (!f.inUse[device.Name] || api.noTaints) {
			continue
		}
		if retiring {
			device.Taints = append(device.Taints, resourceapi.DeviceTaint{Key: removedTaint, Effect: resourceapi.DeviceTaintEffectNoSchedule})
		}
		if lending {
			device.Taints = append(device.Taints, resourceapi.DeviceTaint{Key: lentTaint, Effect: resourceapi.DeviceTaintEffectNoSchedule})
		}
		// Partitions that exist for good need no counters.
		if api.noPartitions && known.GPU.CounterSet != nil {
			if known.Partition != nil || f.partitionInUse(known.GPU) {
				continue
			}
			device.ConsumesCounters = nil
		}
		offered = append(offered, device)
	}
	return offered
}

func (f fleet) partitionInUse(gpu *hardware.GPU) bool {
	return slices.ContainsFunc(gpu.Devices, func(d *hardware.Device) bool { return d.Partition != nil && f.inUse[d.Name] })
}

// stored is true if the slices in the API are the pool. The content of devices is not compared: what
// the API server drops is reported to the publisher by the writer of slices.
func stored(pool resourceslice.Pool, inAPI []resourceapi.ResourceSlice) bool {
	if len(inAPI) != len(pool.Slices) {
		return false
	}
	// Names begin with the index of the slice.
	slices.SortFunc(inAPI, func(a, b resourceapi.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
	for i, slice := range inAPI {
		same := slice.Spec.Pool.Generation == inAPI[0].Spec.Pool.Generation &&
			slice.Spec.Pool.ResourceSliceCount == int64(len(pool.Slices)) &&
			slices.EqualFunc(slice.Spec.Devices, pool.Slices[i].Devices, func(a, b resourceapi.Device) bool {
				return a.Name == b.Name && len(a.Taints) == len(b.Taints)
			}) &&
			slices.EqualFunc(slice.Spec.SharedCounters, pool.Slices[i].SharedCounters, func(a, b resourceapi.CounterSet) bool {
				return a.Name == b.Name
			})
		if !same {
			return false
		}
	}
	return true
}
