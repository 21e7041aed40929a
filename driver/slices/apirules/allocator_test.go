package apirules

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// scheduler allocates one device after the other, as kube-scheduler does.
type scheduler struct {
	slices    []*resourceapi.ResourceSlice
	features  structured.Features
	allocated sets.Set[structured.DeviceID]
	cache     *cel.Cache
}

// newScheduler sees what an API server stored. Its features beyond those of the default do not matter here.
func newScheduler(stored []resourceapi.ResourceSlice, partitions bool) *scheduler {
	s := &scheduler{
		features:  structured.Features{AdminAccess: true, PrioritizedList: true, PartitionableDevices: partitions},
		allocated: sets.New[structured.DeviceID](),
		cache:     cel.NewCache(10, cel.Features{}),
	}
	for i := range stored {
		s.slices = append(s.slices, &stored[i])
	}
	return s
}

// Get returns a class of that name for devices of that type.
func (s *scheduler) Get(name string) (*resourceapi.DeviceClass, error) {
	return &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
			CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf("device.attributes[device.driver].type == '%s'", name)},
		}}},
	}, nil
}

// List is not needed.
func (s *scheduler) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

// allocate returns a device of the type, nil if none is free.
func (s *scheduler) allocate(t *testing.T, kind string) *resourceapi.Device {
	t.Helper()
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim", UID: types.UID(fmt.Sprint(len(s.allocated)))},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name:    "device",
			Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: kind, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		}}}},
	}
	allocator, err := structured.NewAllocator(t.Context(), s.features, structured.AllocatedState{AllocatedDevices: s.allocated}, s, s.slices, s.cache)
	if err != nil {
		t.Fatal(err)
	}
	results, err := allocator.Allocate(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		t.Fatal(err)
	}
	if len(results) == 0 {
		return nil
	}
	result := results[0].Devices.Results[0]
	s.allocated.Insert(structured.MakeDeviceID(result.Driver, result.Pool, result.Device))
	for _, slice := range s.slices {
		for i := range slice.Spec.Devices {
			if device := &slice.Spec.Devices[i]; device.Name == result.Device {
				return device
			}
		}
	}
	t.Fatalf("device %s is in no slice", result.Device)
	return nil
}

// fill allocates devices of the type until none is free, and takes what they consume from the counters.
func (s *scheduler) fill(t *testing.T, kind string, left counters) (names []string) {
	t.Helper()
	for device := s.allocate(t, kind); device != nil; device = s.allocate(t, kind) {
		names = append(names, device.Name)
		left.take(t, device)
	}
	return names
}

// counters are what is left of each counter, under set/name.
type counters map[string]int64

func countersOf(slices []resourceapi.ResourceSlice) counters {
	left := counters{}
	for _, slice := range slices {
		for _, set := range slice.Spec.SharedCounters {
			for name, counter := range set.Counters {
				left[set.Name+"/"+name] = counter.Value.Value()
			}
		}
	}
	return left
}

func (c counters) take(t *testing.T, device *resourceapi.Device) {
	t.Helper()
	for _, consumption := range device.ConsumesCounters {
		for name, counter := range consumption.Counters {
			key := consumption.CounterSet + "/" + name
			if c[key] -= counter.Value.Value(); c[key] < 0 {
				t.Errorf("device %s overdraws counter %s", device.Name, key)
			}
		}
	}
}

// TestAllocated has the scheduler's allocator give out devices until none is left: of two GPUs each as a whole, or
// partitions that do not overlap, and with the gate of partitions off, in the scheduler or in both, nothing that
// overlaps.
func TestAllocated(t *testing.T) {
	const gpu, partition = "gpu", "mig"
	withPartitions(t, true)
	rendered := node{"h100-sxm5-80gb", "", 2}.mustRender(t, version)
	var stored []resourceapi.ResourceSlice
	for _, slice := range rendered {
		s, err := create(t, slice)
		if err != nil {
			t.Fatal(err)
		}
		stored = append(stored, s)
	}
	for name, test := range map[string]struct {
		partitions  bool
		first, then string
		want        int
	}{
		"GPUs first":                            {true, gpu, partition, 2},
		"partitions first":                      {true, partition, gpu, 14},
		"gate off in the scheduler, GPUs":       {false, gpu, partition, 0},
		"gate off in the scheduler, partitions": {false, partition, gpu, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s, left := newScheduler(stored, test.partitions), countersOf(stored)
			if names := s.fill(t, test.first, left); len(names) != test.want {
				t.Errorf("allocated %v, want %d of type %s", names, test.want, test.first)
			}
			if names := s.fill(t, test.then, left); len(names) > 0 {
				t.Errorf("allocated %v of type %s as well", names, test.then)
			}
		})
	}
}
