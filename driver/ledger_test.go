package driver

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/simgpu/simgpu/driver/hardware"
)

// gpuWithCounter has devices a, b, c, ... that take one unit each of a counter.
func gpuWithCounter(available string, devices ...string) *hardware.GPU {
	counter := func(amount string) map[string]resourceapi.Counter {
		return map[string]resourceapi.Counter{"copy-engines": {Value: resource.MustParse(amount)}}
	}
	gpu := &hardware.GPU{UUID: "GPU-x", CounterSet: &resourceapi.CounterSet{Name: "set", Counters: counter(available)}}
	for _, name := range devices {
		gpu.Devices = append(gpu.Devices, &hardware.Device{Name: name, GPU: gpu, Published: resourceapi.Device{
			Name:             name,
			ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: "set", Counters: counter("1")}},
		}})
	}
	return gpu
}

func held(claim string, device *hardware.Device) holding {
	return holding{claim: claimRef{types.NamespacedName{Namespace: namespace, Name: claim}, types.UID(claim)}, device: device.Name, hardware: device}
}

func TestCounterThatIsEnoughForAnyTwoButNotForAll(t *testing.T) {
	gpu := gpuWithCounter("2", "a", "b", "c")
	var l ledger
	for i, claim := range []string{"first", "second"} {
		h := held(claim, gpu.Devices[i])
		if found := l.conflict(h); found != nil {
			t.Fatalf("%s: %+v", claim, found)
		}
		l.add(h)
	}
	third := held("third", gpu.Devices[2])
	found := l.conflict(third)
	if found == nil {
		t.Fatal("three units of two were given out")
	}
	expectError(t, &conflictError{claim: third.claim, device: "c", conflict: *found},
		"device c of claim team/third", "counter copy-engines", "device a of claim team/first", "device b of claim team/second")

	third.admin = true
	if found := l.conflict(third); found != nil {
		t.Errorf("administrative access: %+v", found)
	}
	l.remove("first")
	third.admin = false
	if found := l.conflict(third); found != nil {
		t.Errorf("after a release: %+v", found)
	}
}

func TestDevicesOfWhichLittleIsKnown(t *testing.T) {
	gpu := gpuWithCounter("9", "a", "b")
	a, b := held("new", gpu.Devices[0]), held("new", gpu.Devices[1])
	sharable := gpuWithCounter("9", "a").Devices[0]
	sharable.Published.AllowMultipleAllocations = new(true)
	for name, test := range map[string]struct {
		old      holding
		wanted   holding
		conflict bool
	}{
		"name only, same":           {holding{device: "a", gpu: unknownGPU}, a, true},
		"name only, another":        {holding{device: "a", gpu: unknownGPU}, b, false},
		"GPU known, same device":    {holding{device: "a", gpu: 0}, a, true},
		"GPU known, other device":   {holding{device: "old-name", gpu: 0}, b, true},
		"other GPU":                 {holding{device: "old-name", gpu: 1}, b, false},
		"shares of a device":        {holding{device: "a", shareID: "1"}, share(held("new", sharable), "2"), false},
		"shares of an unshared one": {holding{device: "a", shareID: "1"}, share(a, "2"), true},
		"share and whole device":    {holding{device: "a", shareID: "1"}, a, true},
		"the same share":            {holding{device: "a", shareID: "1"}, share(a, "1"), true},
		"fully known, fits beside":  {held("old", gpu.Devices[0]), b, false},
	} {
		t.Run(name, func(t *testing.T) {
			var l ledger
			l.add(test.old)
			if found := l.conflict(test.wanted); (found != nil) != test.conflict {
				t.Errorf("conflict %+v, want one: %v", found, test.conflict)
			}
		})
	}
}

func share(h holding, id string) holding {
	h.shareID = id
	return h
}
