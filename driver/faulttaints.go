package driver

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// taintBroken puts the taints of faults on devices. Where the API server drops taints, devices that nobody
// new should get are withheld instead.
func (f fleet) taintBroken(resources resourceslice.DriverResources, layout deviceslices.Layout, api apiLimits) {
	if f.broken == nil || len(f.broken.devices) == 0 {
		return
	}
	for _, pool := range resources.Pools {
		for i := range pool.Slices {
			pool.Slices[i].Devices = slices.DeleteFunc(pool.Slices[i].Devices, func(d resourceapi.Device) bool {
				return api.noTaints && f.broken.devices[d.Name].keepsAway()
			})
			for n := range pool.Slices[i].Devices {
				device := &pool.Slices[i].Devices[n]
				for _, taint := range f.broken.devices[device.Name].taints {
					// Kubernetes 1.34 refuses an effect of None.
					if !api.noTaints && (taint.Effect != resourceapi.DeviceTaintEffectNone || layout != deviceslices.Combined) {
						device.Taints = append(device.Taints, taint)
					}
				}
			}
		}
	}
}

// keepAway says that nobody new should get some device. Nil is no fault.
func (c *conditions) keepAway() bool {
	if c == nil {
		return false
	}
	for _, condition := range c.devices {
		if condition.keepsAway() {
			return true
		}
	}
	return false
}

// keepsAway says that nobody new should get the device.
func (c condition) keepsAway() bool {
	return slices.ContainsFunc(c.taints, func(t resourceapi.DeviceTaint) bool {
		return t.Effect == resourceapi.DeviceTaintEffectNoSchedule || t.Effect == resourceapi.DeviceTaintEffectNoExecute
	})
}
