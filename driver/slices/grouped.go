package slices

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/simgpu/simgpu/driver/hardware"
)

// Grouped returns the pool of the node in the split layout, but with other groups of devices than GPUs in
// slices of their own, in their order. A group that is too large for a slice has several. The groups
// must have each device of the node once. The caller may change what it gets.
func Grouped(n *hardware.Node, groups [][]*hardware.Device) (resourceslice.DriverResources, error) {
	pool, err := counterSets(n)
	if err != nil {
		return resourceslice.DriverResources{}, fmt.Errorf("node %s cannot be published: %w", n.Name, err)
	}
	for _, group := range groups {
		devices := make([]resourceapi.Device, len(group))
		for i, device := range group {
			devices[i] = *device.Published.DeepCopy()
		}
		pool = append(pool, inChunks(devices)...)
	}
	return inPool(n, pool), nil
}
