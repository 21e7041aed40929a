package driver

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/faults"
	"github.com/simgpu/simgpu/driver/hardware"
)

const (
	// eccTaint is on devices with an ECC fault that has an effect. The vendor's driver has no taint for these.
	eccTaint = "simgpu.dev/ecc"
	// maxHealthMessage is what the kubelet keeps of a message, in bytes.
	maxHealthMessage = 1024
)

// conditions is what the faults on a node do to its devices. It is immutable.
type conditions struct {
	// devices are those with a fault, by name.
	devices map[string]condition
	// served is what the device API shows, by UUID of GPUs and partitions.
	served map[string]deviceapi.Health
}

// condition is what faults do to one device.
type condition struct {
	// taints are sorted by key, each key once.
	taints    []resourceapi.DeviceTaint
	unhealthy bool
	// message says what is broken.
	message string
}

// conditionsOf works out what the faults do to the devices of a stock.
func conditionsOf(s *stock, list []faults.Fault, driverName string) *conditions {
	c := &conditions{devices: map[string]condition{}, served: map[string]deviceapi.Health{}}
	for _, gpu := range s.gpus {
		for _, device := range gpu.Devices {
			if condition, broken := conditionOf(device, list, driverName); broken {
				c.devices[device.Name] = condition
			}
			health := healthOf(list, func(f faults.Fault) bool { return affects(f, device) })
			if health.Lost = false; device.Partition != nil && health != (deviceapi.Health{}) {
				c.served[device.UUID] = health
			}
		}
		health := healthOf(list, func(f faults.Fault) bool { return touches(f, gpu.GPU) })
		if health != (deviceapi.Health{}) {
			c.served[gpu.UUID] = health
		}
	}
	return c
}

// affects says whether a device suffers from a fault: from its own, that of its GPU and that of the node. A GPU
// is lost as a whole.
func affects(f faults.Fault, device *hardware.Device) bool {
	if f.Type == faults.GPULost {
		return touches(f, device.GPU)
	}
	return f.Device == "" || f.Device == device.Name || f.Device == gpuName(device.GPU)
}

// touches says whether a fault is anywhere on a GPU.
func touches(f faults.Fault, gpu *hardware.GPU) bool {
	return f.Device == "" || f.Device == gpuName(gpu) ||
		slices.ContainsFunc(gpu.Devices, func(d *hardware.Device) bool { return d.Name == f.Device })
}

// gpuName is the name of the GPU as a whole, which it has also where it is not offered as a whole.
func gpuName(gpu *hardware.GPU) string { return gpu.Model.Vendor.GPUName(gpu.Index) }

func conditionOf(device *hardware.Device, list []faults.Fault, driverName string) (condition, bool) {
	var c condition
	var messages []string
	health := device.GPU.Model.Vendor.Health
	for _, f := range list {
		if !affects(f, device) {
			continue
		}
		var taint resourceapi.DeviceTaint
		critical := false
		switch f.Type {
		case faults.XID:
			known := health.XIDs[f.XID]
			critical = !known.Application
			taint = resourceapi.DeviceTaint{Key: driverName + "/" + health.XIDTaint, Value: strconv.Itoa(f.XID), Effect: resourceapi.DeviceTaintEffectNone}
			messages = append(messages, xidMessage(f.XID, known.Meaning, known.Action, known.Application))
		case faults.GPULost:
			critical = true
			taint = resourceapi.DeviceTaint{Key: driverName + "/" + health.LostTaint}
			messages = append(messages, deviceapi.ErrDeviceLost.Error())
		case faults.ECC:
			if f.Effect != "" {
				taint = resourceapi.DeviceTaint{Key: eccTaint}
			}
			messages = append(messages, fmt.Sprintf("ECC errors: %d corrected, %d uncorrected", f.Correctable, f.Uncorrectable))
		default:
			continue
		}
		if critical {
			taint.Effect = resourceapi.DeviceTaintEffectNoSchedule
		}
		if f.Effect != "" {
			taint.Effect = f.Effect
		}
		// Who orders an effect that keeps pods away says that the device is broken.
		c.unhealthy = c.unhealthy || critical || severity(taint.Effect) > severity(resourceapi.DeviceTaintEffectNone)
		if taint.Key != "" {
			c.taint(taint)
		}
	}
	c.message = cut(strings.Join(messages, "; "), maxHealthMessage)
	return c, len(messages) > 0
}

// taint adds a taint. Of several with one key the one with the strongest effect counts, and the first of equals.
func (c *condition) taint(taint resourceapi.DeviceTaint) {
	i, found := slices.BinarySearchFunc(c.taints, taint.Key, func(t resourceapi.DeviceTaint, key string) int { return cmp.Compare(t.Key, key) })
	switch {
	case !found:
		c.taints = slices.Insert(c.taints, i, taint)
	case severity(taint.Effect) > severity(c.taints[i].Effect):
		c.taints[i] = taint
	}
}

func severity(effect resourceapi.DeviceTaintEffect) int {
	return slices.Index([]resourceapi.DeviceTaintEffect{"", resourceapi.DeviceTaintEffectNone,
		resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute}, effect)
}

func xidMessage(number int, meaning, action string, application bool) string {
	text := fmt.Sprintf("XID %d", number)
	if meaning != "" {
		text += ": " + meaning
	}
	switch {
	case application:
		text += " (an error of the application)"
	case action != "" && action != "none":
		text += " (" + action + ")"
	}
	return text
}

// cut shortens a text to so many bytes.
func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most-3], "") + "..."
}

// healthOf is what the device API shows of the faults that concern it.
func healthOf(list []faults.Fault, concerns func(faults.Fault) bool) deviceapi.Health {
	var h deviceapi.Health
	for _, f := range list {
		if !concerns(f) {
			continue
		}
		switch f.Type {
		case faults.XID:
			h.XID = f.XID
		case faults.GPULost:
			h.Lost = true
		case faults.ECC:
			h.ECCCorrected += f.Correctable
			h.ECCUncorrected += f.Uncorrectable
		}
	}
	return h
}
