package slices

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

// classes are the DeviceClasses of a vendor for a driver name.
type classes map[string]*resourceapi.DeviceClass

func classesFor(t *testing.T, driverName string) classes {
	t.Helper()
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	list := classes{}
	for _, class := range catalogue.Vendors()[0].DeviceClasses {
		list[class.Name] = &resourceapi.DeviceClass{
			ObjectMeta: metav1.ObjectMeta{Name: class.Name},
			Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
				CEL: &resourceapi.CELDeviceSelector{Expression: class.Selector(driverName)},
			}}},
		}
	}
	return list
}

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

// scheduler allocates one claim after the other with the allocator of kube-scheduler.
type scheduler struct {
	node      *hardware.Node
	slices    []*resourceapi.ResourceSlice
	classes   classes
	allocated sets.Set[structured.DeviceID]
	cache     *cel.Cache
}

// newScheduler sees the split layout. The allocator of this library is that of Kubernetes 1.37, which
// finds nothing in the combined one.
func newScheduler(t *testing.T, node *hardware.Node) *scheduler {
	t.Helper()
	s := &scheduler{
		node:      node,
		classes:   classesFor(t, node.DriverName),
		allocated: sets.New[structured.DeviceID](),
		cache:     cel.NewCache(10, cel.Features{}),
	}
	for i, spec := range specs(t, node, Split) {
		s.slices = append(s.slices, &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%05x", i)}, Spec: spec})
	}
	return s
}

// allocate returns the name of the device that a claim gets, "" if there is none.
func (s *scheduler) allocate(t *testing.T, class, selector string) string {
	t.Helper()
	request := resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
	if selector != "" {
		request.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: selector}}}
	}
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim", UID: types.UID(fmt.Sprint(len(s.allocated)))},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &request}}}},
	}
	allocator, err := structured.NewAllocator(t.Context(),
		structured.Features{AdminAccess: true, PrioritizedList: true, PartitionableDevices: true, DeviceTaints: true, DeviceBindingAndStatus: true, ConsumableCapacity: true},
		structured.AllocatedState{AllocatedDevices: s.allocated}, s.classes, s.slices, s.cache)
	if err != nil {
		t.Fatal(err)
	}
	results, err := allocator.Allocate(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.node.Name}}, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		t.Fatal(err)
	}
	if len(results) == 0 {
		return ""
	}
	device := results[0].Devices.Results[0]
	s.allocated.Insert(structured.MakeDeviceID(device.Driver, device.Pool, device.Device))
	return device.Device
}

// TestAllocator has the scheduler's own allocator choose from what is published.
func TestAllocator(t *testing.T) {
	const (
		gpu = "gpu.nvidia.com"
		mig = "mig.nvidia.com"
	)
	profile := func(name string) string {
		return fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", name)
	}
	type claim struct{ class, selector, want string }
	for name, claims := range map[string][]claim{
		"two halves, then nothing is left": {
			{mig, profile("3g.40gb"), "gpu-0-mig-3g40gb-9-0"},
			{mig, profile("3g.40gb"), "gpu-0-mig-3g40gb-9-4"},
			{mig, profile("3g.40gb"), ""},
			{mig, profile("1g.10gb"), ""},
			{gpu, "", ""},
		},
		"the whole GPU leaves no partition": {
			{gpu, "", "gpu-0"},
			{mig, "", ""},
		},
		"a partition rules out the whole GPU": {
			{mig, profile("1g.10gb"), "gpu-0-mig-1g10gb-19-0"},
			{gpu, "", ""},
			{mig, profile("4g.40gb"), ""},
			{mig, profile("3g.40gb"), "gpu-0-mig-3g40gb-9-4"},
		},
		"one media extension at a time": {
			{mig, profile("1g.10gb+me"), "gpu-0-mig-1g10gb-me-20-0"},
			{mig, profile("1g.10gb+me"), ""},
		},
		"selection by capacity and standard attribute": {
			{mig, `device.capacity['gpu.nvidia.com'].memory.compareTo(quantity("40Gi")) < 0 && device.capacity['gpu.nvidia.com'].memory.compareTo(quantity("30Gi")) > 0 && ` +
				`device.attributes['resource.kubernetes.io'].pcieRoot == 'pci0000:10'`, "gpu-0-mig-3g40gb-9-0"},
		},
		"selection by version": {
			{gpu, "device.attributes['gpu.nvidia.com'].driverVersion.compareTo(semver('580.0.0')) > 0", "gpu-0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			scheduler := newScheduler(t, newNode(t, dynamic("h100-sxm5-80gb", 1)))
			var got, want []string
			for _, claim := range claims {
				got = append(got, scheduler.allocate(t, claim.class, claim.selector))
				want = append(want, claim.want)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAllocatorWithManyGPUs(t *testing.T) {
	scheduler := newScheduler(t, newNode(t, dynamic("h100-sxm5-80gb", 9)))
	for i := range 9 {
		if got, want := scheduler.allocate(t, "gpu.nvidia.com", ""), fmt.Sprintf("gpu-%d", i); got != want {
			t.Errorf("claim %d: got device %q, want %q", i, got, want)
		}
	}
	if got := scheduler.allocate(t, "mig.nvidia.com", ""); got != "" {
		t.Errorf("a partition of a GPU that is taken: %s", got)
	}
}

func TestAllocatorUnderAnotherDriverName(t *testing.T) {
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	node, err := hardware.New(hardware.Config{
		NodeName: "node-1", DriverName: "gpu.example.com", Catalogue: catalogue, Groups: []inventory.GPUGroup{dynamic("a100-40gb", 1)},
	})
	if err != nil {
		t.Fatal(err)
	}
	scheduler := newScheduler(t, node)
	if got, want := scheduler.allocate(t, "mig.nvidia.com", "device.attributes['gpu.example.com'].profile == '7g.40gb'"), "gpu-0-mig-7g40gb-0-0"; got != want {
		t.Errorf("got device %q, want %q", got, want)
	}
}
