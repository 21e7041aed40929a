package hardware

import (
	"fmt"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

// share lets several claims share each device of the GPU, as the vendor's driver does: memory is given out in
// whole MiB, and a number of shares limits how many claims there can be.
func (g *GPU) share(shares string) error {
	if shares == "" {
		return nil
	}
	limit := 0
	if shares != inventory.SharesMemory && shares != inventory.SharesUnlimited {
		var err error
		if limit, err = strconv.Atoi(shares); err != nil || limit < 1 {
			return fmt.Errorf("consumable shares %q: must be %s, %s or a number", shares, inventory.SharesMemory, inventory.SharesUnlimited)
		}
	}
	for _, device := range g.Devices {
		device.Published.AllowMultipleAllocations = new(true)
		name, memory := device.memoryCapacity()
		first := resource.NewQuantity(0, resource.BinarySI)
		if shares == inventory.SharesMemory {
			first = quantityOf(1)
		}
		byDefault := *first
		if shares == inventory.SharesMemory {
			byDefault = memory.Value
		}
		memory.RequestPolicy = policy(byDefault, *first, memory.Value, *quantityOf(1))
		device.Published.Capacity[name] = memory
		if limit > 0 {
			one, all := *resource.NewQuantity(1, resource.DecimalSI), *resource.NewQuantity(int64(limit), resource.DecimalSI)
			device.Published.Capacity[resourceapi.QualifiedName(g.Model.Vendor.SharesCapacity())] = resourceapi.DeviceCapacity{
				Value: all, RequestPolicy: policy(one, one, all, one),
			}
		}
	}
	return nil
}

func policy(byDefault, first, last, step resource.Quantity) *resourceapi.CapacityRequestPolicy {
	return &resourceapi.CapacityRequestPolicy{
		Default:    new(canonical(byDefault)),
		ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: new(canonical(first)), Max: new(canonical(last)), Step: new(canonical(step))},
	}
}

// canonical returns a copy of its own whose spelling is made up, so that it can be read in parallel.
func canonical(q resource.Quantity) resource.Quantity {
	q = q.DeepCopy()
	_ = q.String()
	return q
}

func quantityOf(mebibytes int64) *resource.Quantity {
	return new(quantity(profiles.Memory, mebibytes))
}

// memoryCapacity returns the capacity that is the device's memory.
func (d *Device) memoryCapacity() (resourceapi.QualifiedName, resourceapi.DeviceCapacity) {
	for _, countable := range d.GPU.Model.Vendor.Countables {
		if countable.Figure == profiles.Memory {
			name := resourceapi.QualifiedName(countable.Capacity)
			return name, d.Published.Capacity[name]
		}
	}
	return "", resourceapi.DeviceCapacity{}
}

// Shared is true of a device that several claims can have a share of.
func (d *Device) Shared() bool {
	return d.Published.AllowMultipleAllocations != nil && *d.Published.AllowMultipleAllocations
}

// ShareMiB returns how much memory of the device a share can use that consumed so much of its capacities. A
// share that took all, or none, can use all.
func (d *Device) ShareMiB(consumed map[string]resource.Quantity) int64 {
	name, memory := d.memoryCapacity()
	share, ok := consumed[string(name)]
	if !ok || share.IsZero() || share.Cmp(memory.Value) >= 0 {
		return d.MemoryMiB
	}
	return share.Value() / mib
}
