package replay

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/simgpu/simgpu/driver/hardware"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
	"github.com/simgpu/simgpu/placement"
)

// What manifests for this vendor's hardware name.
const (
	gpuClass       = "gpu.nvidia.com"
	partitionClass = "mig.nvidia.com"
)

// scheduler has the allocator of kube-scheduler choose devices from slices.
type scheduler struct {
	node      *Node
	classes   classes
	celCache  *cel.Cache
	counters  []*resourceapi.ResourceSlice // the slices that have counter sets only
	slices    []*resourceapi.ResourceSlice
	allocated sets.Set[structured.DeviceID]
	claims    map[string]*resourceapi.ResourceClaim
}

func newScheduler(node *Node) (*scheduler, error) {
	s := &scheduler{
		node: node, classes: classes{}, celCache: cel.NewCache(10, cel.Features{EnableConsumableCapacity: true}),
		allocated: sets.New[structured.DeviceID](), claims: map[string]*resourceapi.ResourceClaim{},
	}
	for _, class := range node.GPUs[0].Model.Vendor.DeviceClasses {
		s.classes[class.Name] = &resourceapi.DeviceClass{
			ObjectMeta: metav1.ObjectMeta{Name: class.Name},
			Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
				CEL: &resourceapi.CELDeviceSelector{Expression: class.Selector(node.DriverName)},
			}}},
		}
	}
	resources, err := deviceslices.Resources(node.Node, deviceslices.Split)
	if err != nil {
		return nil, err
	}
	for _, slice := range resources.Pools[node.Name].Slices {
		if len(slice.SharedCounters) > 0 {
			s.counters = append(s.counters, &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{SharedCounters: slice.SharedCounters}})
		}
	}
	return s, nil
}

// see has the scheduler go by slices with these devices.
func (s *scheduler) see(groups [][]*hardware.Device) {
	s.slices = nil
	for _, slice := range s.counters {
		s.slices = append(s.slices, slice.DeepCopy())
	}
	for _, group := range groups {
		slice := &resourceapi.ResourceSlice{}
		for _, device := range group {
			slice.Spec.Devices = append(slice.Spec.Devices, device.Published)
		}
		s.slices = append(s.slices, slice)
	}
	for i, slice := range s.slices {
		slice.Name = fmt.Sprintf("%05x-%s", i, s.node.Name)
		slice.Spec.Driver, slice.Spec.NodeName = s.node.DriverName, &s.node.Name
		slice.Spec.Pool = resourceapi.ResourcePool{Name: s.node.Name, Generation: 1, ResourceSliceCount: int64(len(s.slices))}
	}
}

// claim returns a claim for one device of a kind.
func (s *scheduler) claim(kind string) *resourceapi.ResourceClaim {
	if claim := s.claims[kind]; claim != nil {
		return claim
	}
	request := resourceapi.ExactDeviceRequest{DeviceClassName: gpuClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
	if kind != wholeGPU {
		request.DeviceClassName = partitionClass
		request.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes['%s'].profile == '%s'", s.node.DriverName, s.node.profiles[kind].Name),
		}}}
	}
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim", UID: types.UID(kind)},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "device", Exactly: &request}}}},
	}
	s.claims[kind] = claim
	return claim
}

// allocate returns the name of the device that a claim gets, "" if there is none.
func (s *scheduler) allocate(ctx context.Context, kind string) (string, error) {
	allocator, err := structured.NewAllocator(ctx, placement.Features(), structured.AllocatedState{
		AllocatedDevices: s.allocated, AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](), AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}, s.classes, s.slices, s.celCache)
	if err != nil {
		return "", err
	}
	results, err := allocator.Allocate(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.node.Name}}, []*resourceapi.ResourceClaim{s.claim(kind)})
	if err != nil || len(results) == 0 {
		return "", err
	}
	device := results[0].Devices.Results[0].Device
	s.allocated.Insert(s.id(device))
	return device, nil
}

func (s *scheduler) release(device string) { s.allocated.Delete(s.id(device)) }

func (s *scheduler) id(device string) structured.DeviceID {
	return structured.MakeDeviceID(s.node.DriverName, s.node.Name, device)
}

// classes are the DeviceClasses of the vendor.
type classes map[string]*resourceapi.DeviceClass

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class, found := c[name]; found {
		return class, nil
	}
	return nil, fmt.Errorf("no class %s", name)
}

func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	var list []*resourceapi.DeviceClass
	for _, class := range c {
		list = append(list, class)
	}
	return list, nil
}
