package explain_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/simgpu/simgpu/placement"
	"github.com/simgpu/simgpu/placement/explain"
)

const driver = "gpu.example.com"

// cluster has two nodes. Each has a GPU of four units as a whole, its halves and its quarters, which share counters. The GPU
// of node-b is tainted.
func cluster(t *testing.T) *placement.Snapshot {
	t.Helper()
	s := &placement.Snapshot{}
	for _, node := range []string{"node-a", "node-b"} {
		slice := func(name string) *resourceapi.ResourceSlice {
			return &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: node + "-" + name},
				Spec:       resourceapi.ResourceSliceSpec{Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 2}},
			}
		}
		counters, devices := slice("counters"), slice("devices")
		set := resourceapi.CounterSet{Name: "gpu", Counters: map[string]resourceapi.Counter{}}
		for unit := range 4 {
			set.Counters[fmt.Sprintf("unit-%d", unit)] = resourceapi.Counter{Value: resource.MustParse("1")}
		}
		counters.Spec.SharedCounters = []resourceapi.CounterSet{set}
		for size := 4; size > 0; size /= 2 {
			for start := 0; start < 4; start += size {
				device := resourceapi.Device{
					Name:       fmt.Sprintf("part-%d-%d", size, start),
					Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"size": {IntValue: new(int64(size))}},
					ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
						CounterSet: "gpu", Counters: map[string]resourceapi.Counter{},
					}},
				}
				for unit := start; unit < start+size; unit++ {
					device.ConsumesCounters[0].Counters[fmt.Sprintf("unit-%d", unit)] = resourceapi.Counter{Value: resource.MustParse("1")}
				}
				if size == 4 && node == "node-b" {
					device.Taints = []resourceapi.DeviceTaint{{Key: "broken", Value: "fan", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
				}
				devices.Spec.Devices = append(devices.Spec.Devices, device)
			}
		}
		s.Slices = append(s.Slices, counters, devices)
		s.Nodes = append(s.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, Labels: map[string]string{"kubernetes.io/hostname": node}}})
	}
	s.Classes = []*resourceapi.DeviceClass{{
		ObjectMeta: metav1.ObjectMeta{Name: "gpu"},
		Spec:       resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{cel("device.driver == '" + driver + "'")}},
	}}
	return s
}

func cel(expression string) resourceapi.DeviceSelector {
	return resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}
}

// claim for so many devices that meet the expressions.
func claim(name string, count int64, expressions ...string) *resourceapi.ResourceClaim {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu", Count: count}
	for _, expression := range expressions {
		exactly.Selectors = append(exactly.Selectors, cel(expression))
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "r", Exactly: exactly}}}},
	}
}

// firstAvailable is a claim for a device that meets the first expression that it can get.
func firstAvailable(expressions ...string) *resourceapi.ResourceClaim {
	c := claim("c", 1)
	request := resourceapi.DeviceRequest{Name: "r"}
	for i, expression := range expressions {
		request.FirstAvailable = append(request.FirstAvailable, resourceapi.DeviceSubRequest{
			Name: fmt.Sprintf("choice-%d", i), DeviceClassName: "gpu", Selectors: []resourceapi.DeviceSelector{cel(expression)},
		})
	}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{request}
	return c
}

// all is a claim for all devices of a node that meet the expression.
func all(expression string) *resourceapi.ResourceClaim {
	c := claim("c", 0, expression)
	c.Spec.Devices.Requests[0].Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	return c
}

// share is a claim for a part of a device's memory.
func share(memory string) *resourceapi.ResourceClaim {
	c := claim("c", 1, size(4))
	c.Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}}
	return c
}

// shared leaves one device of 34Gi, of which another claim has some.
func shared(used string) func(*placement.Snapshot) {
	return func(s *placement.Snapshot) {
		s.Nodes, s.Slices = s.Nodes[:1], []*resourceapi.ResourceSlice{withoutCounters(s.Slices[1])}
		device := &s.Slices[0].Spec.Devices[0]
		device.AllowMultipleAllocations = new(true)
		device.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("34Gi")}}
		s.Slices[0].Spec.Devices = s.Slices[0].Spec.Devices[:1]
		other := claim("other", 1)
		give(s, other, "node-a/part-4-0")
		result := &other.Status.Allocation.Devices.Results[0]
		result.ShareID = new(types.UID("5a5b3f1e-0000-4000-8000-000000000000"))
		result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(used)}
	}
}

// withoutCounters is a slice that is its pool alone, of devices that consume nothing.
func withoutCounters(slice *resourceapi.ResourceSlice) *resourceapi.ResourceSlice {
	slice = slice.DeepCopy()
	slice.Spec.Pool.ResourceSliceCount = 1
	for i := range slice.Spec.Devices {
		slice.Spec.Devices[i].ConsumesCounters = nil
	}
	return slice
}

// size is the expression for devices of that size.
func size(n int) string { return fmt.Sprintf("device.attributes['%s'].size == %d", driver, n) }

// give a claim of the snapshot devices, as NODE/DEVICE.
func give(s *placement.Snapshot, c *resourceapi.ResourceClaim, devices ...string) {
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for _, device := range devices {
		node, name, _ := strings.Cut(device, "/")
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: driver, Pool: node, Device: name})
	}
	s.Claims = append(s.Claims, c)
}

func TestClaim(t *testing.T) {
	for name, tc := range map[string]struct {
		claim   *resourceapi.ResourceClaim
		prepare func(*placement.Snapshot)
		outcome explain.Outcome
		says    []string
	}{
		"fits": {claim: claim("c", 1, size(2)), outcome: explain.Fits, says: []string{"free on node node-a"}},
		"has its device": {
			claim: func() *resourceapi.ResourceClaim {
				c := claim("c", 1)
				give(&placement.Snapshot{}, c, "node-a/part-4-0")
				return c
			}(), outcome: explain.Allocated,
			says: []string{"node-a/part-4-0"},
		},
		"no such class": {
			claim: func() *resourceapi.ResourceClaim {
				c := claim("c", 1)
				c.Spec.Devices.Requests[0].Exactly.DeviceClassName = "nic"
				return c
			}(),
			outcome: explain.Broken, says: []string{`DeviceClass "nic" does not exist; there are: gpu`},
		},
		"an attribute that no device has": {
			claim: claim("c", 1, "true", "device.attributes['"+driver+"'].colour == 'blue'"), outcome: explain.Broken,
			says: []string{"selector 2 fails on device node-a/part-4-0", "no such key: colour"},
		},
		"a value that no device has": {
			claim: claim("c", 1, size(3)), outcome: explain.Waits,
			says: []string{"selector 1 of the request", size(3), "leaves 0 of 7 devices", "size 1, 2, 4"},
		},
		"more than there are": {
			claim: claim("c", 3, size(2)), outcome: explain.Waits, says: []string{"leaves 2 of 7 devices", "3 are wanted"},
		},
		"tainted": {
			claim: claim("c", 1, size(4)), outcome: explain.Waits, says: []string{"broken=fan:NoSchedule"},
			prepare: func(s *placement.Snapshot) { s.Nodes = s.Nodes[1:]; s.Slices = s.Slices[2:] },
		},
		"allocated to another claim": {
			claim: claim("c", 1, size(4), "device.attributes['"+driver+"'].size > 0"), outcome: explain.Waits, says: []string{"part-4-0 to claim ns/other"},
			prepare: func(s *placement.Snapshot) { give(s, claim("other", 1), "node-a/part-4-0") },
		},
		"overlaps": {
			claim: claim("c", 1, size(4)), outcome: explain.Waits, says: []string{"unit-3 of gpu: 1 needed, 0 free, held by claim ns/other"},
			prepare: func(s *placement.Snapshot) { give(s, claim("other", 1), "node-a/part-1-3") },
		},
		"incomplete pool": {
			claim: claim("c", 1), outcome: explain.Waits, says: []string{"pool node-a is incomplete"},
			prepare: func(s *placement.Snapshot) { s.Nodes = s.Nodes[:1]; s.Slices = s.Slices[1:2] },
		},
		"no driver": {
			claim: claim("c", 1), outcome: explain.Waits, says: []string{"no node publishes any device"},
			prepare: func(s *placement.Snapshot) { s.Slices = nil },
		},
		"second choice": {
			claim: firstAvailable(size(4), size(2)), outcome: explain.Fits, says: []string{"free on node node-a"},
			prepare: func(s *placement.Snapshot) { s.Nodes = s.Nodes[:1]; give(s, claim("other", 1), "node-a/part-1-0") },
		},
		"no choice is left": {
			claim: firstAvailable(size(4), size(2)), outcome: explain.Waits, says: []string{`request "r/choice-1"`, "held by claim ns/other"},
			prepare: func(s *placement.Snapshot) {
				s.Nodes = s.Nodes[:1]
				give(s, claim("other", 1), "node-a/part-1-0", "node-a/part-1-2")
			},
		},
		"all of a kind": {claim: all(size(2)), outcome: explain.Fits, says: []string{"free on node node-a"}},
		"all of a kind, one in use": {
			claim: all(size(2)), outcome: explain.Waits, says: []string{"1 of the 2 devices that match on node node-a are allocated (part-2-2 to claim ns/other)"},
			prepare: func(s *placement.Snapshot) { s.Nodes = s.Nodes[:1]; give(s, claim("other", 1), "node-a/part-2-2") },
		},
		"admin access to what is in use": {
			claim: func() *resourceapi.ResourceClaim {
				c := claim("c", 1, size(4))
				c.Spec.Devices.Requests[0].Exactly.AdminAccess = new(true)
				return c
			}(), outcome: explain.Fits, says: []string{"free on node node-a"},
			prepare: func(s *placement.Snapshot) {
				s.Slices, s.Nodes = []*resourceapi.ResourceSlice{withoutCounters(s.Slices[1])}, s.Nodes[:1]
				give(s, claim("other", 1), "node-a/part-4-0")
			},
		},
		"a share": {claim: share("10Gi"), prepare: shared("20Gi"), outcome: explain.Fits, says: []string{"free on node node-a"}},
		"a share of what has too little left": {
			claim: share("10Gi"), prepare: shared("30Gi"), outcome: explain.Waits,
			says: []string{"part-4-0 has 4Gi of memory left, 10Gi wanted, held by claim ns/other"},
		},
		"none that have the same": {
			claim: func() *resourceapi.ResourceClaim {
				c := claim("c", 2)
				c.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: new(resourceapi.FullyQualifiedName(driver + "/size"))}}
				return c
			}(), outcome: explain.Waits, says: []string{"none that have the same " + driver + "/size, as claim c wants it"},
			prepare: func(s *placement.Snapshot) {
				s.Nodes = s.Nodes[:1]
				s.Slices = []*resourceapi.ResourceSlice{withoutCounters(s.Slices[1])}
				d := s.Slices[0].Spec.Devices
				s.Slices[0].Spec.Devices = []resourceapi.Device{d[0], d[1], d[3]} // one of each size
			},
		},
		"each alone, not all together": {
			claim: claim("c", 3, size(2)+" || "+size(4)), outcome: explain.Waits, says: []string{"do not fit beside each other"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := cluster(t)
			if tc.prepare != nil {
				tc.prepare(s)
			}
			e, err := explain.Claim(t.Context(), s, tc.claim)
			if err != nil {
				t.Fatal(err)
			}
			if e.Outcome != tc.outcome {
				t.Errorf("outcome %s, want %s: %s", e.Outcome, tc.outcome, e.Sentence)
			}
			for _, want := range tc.says {
				if !strings.Contains(e.Sentence, want) {
					t.Errorf("%q does not say %q", e.Sentence, want)
				}
			}
		})
	}
}

func TestPod(t *testing.T) {
	pod := func(change func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}}
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("template")}}
		change(p)
		return p
	}
	asks := func(name corev1.ResourceName, count int64) corev1.Container {
		return corev1.Container{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{name: *resource.NewQuantity(count, resource.DecimalSI)}}}
	}
	for name, tc := range map[string]struct {
		pod     *corev1.Pod
		outcome explain.Outcome
		says    string
	}{
		"claim to be made": {pod(func(*corev1.Pod) {}), explain.Fits, "node-a"},
		"no template":      {pod(func(p *corev1.Pod) { p.Spec.ResourceClaims[0].ResourceClaimTemplateName = new("other") }), explain.Broken, `ResourceClaimTemplate "other", which does not exist`},
		"no claim": {pod(func(p *corev1.Pod) {
			p.Spec.ResourceClaims[0] = corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: new("none")}
		}), explain.Broken, `ResourceClaim "none", which does not exist`},
		"no claims at all": {pod(func(p *corev1.Pod) { p.Spec.ResourceClaims = nil }), explain.Fits, "asks for no devices"},
		"nowhere to run":   {pod(func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"zone": "moon"} }), explain.Waits, "nodeSelector"},
		"extended resource": {pod(func(p *corev1.Pod) {
			p.Spec.ResourceClaims = nil
			p.Spec.Containers = []corev1.Container{asks("example.com/gpu", 1)}
		}), explain.Fits, "node-a"},
		"extended resource by the name of its class": {pod(func(p *corev1.Pod) {
			p.Spec.ResourceClaims = nil
			p.Spec.InitContainers = []corev1.Container{asks("deviceclass.resource.kubernetes.io/gpu", 40)}
		}), explain.Waits, "publishes 7 devices, and 40 are wanted"},
		"tainted nodes": {pod(func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"tainted": "yes"} }), explain.Waits, "node-c has the taint full:NoSchedule"},
		"cordoned":      {pod(func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"cordoned": "yes"} }), explain.Waits, "node-d is cordoned"},
		"one node only": {pod(func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"kubernetes.io/hostname": "node-b"} }), explain.Waits, "broken=fan:NoSchedule"},
		"claim on that node": {pod(func(p *corev1.Pod) {
			p.Spec.ResourceClaims[0] = corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: new("has")}
		}), explain.Allocated, "node-a/part-4-0"},
	} {
		t.Run(name, func(t *testing.T) {
			s := cluster(t)
			s.Templates = []*resourceapi.ResourceClaimTemplate{{
				ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "template"},
				Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: claim("", 1, size(4)).Spec},
			}}
			s.Classes[0].Spec.ExtendedResourceName = new("example.com/gpu")
			s.Nodes = append(s.Nodes,
				&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-c", Labels: map[string]string{"tainted": "yes"}}, Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: "full", Effect: corev1.TaintEffectNoSchedule}}}},
				&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-d", Labels: map[string]string{"cordoned": "yes"}}, Spec: corev1.NodeSpec{Unschedulable: true}})
			if tc.outcome == explain.Allocated {
				give(s, claim("has", 1), "node-a/part-4-0")
			}
			e, err := explain.Pod(t.Context(), s, tc.pod)
			if err != nil {
				t.Fatal(err)
			}
			if e.Outcome != tc.outcome || !strings.Contains(e.Sentence, tc.says) {
				t.Errorf("%s: %s; want %s: %s", e.Outcome, e.Sentence, tc.outcome, tc.says)
			}
		})
	}
}

// TestStepsAgreeWithTheAllocator: for one device, what the last step leaves on a node is what the allocator finds there,
// whatever else is in use.
func TestStepsAgreeWithTheAllocator(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 200 {
		s := cluster(t)
		for i := range random.IntN(6) {
			c := claim(fmt.Sprintf("c%d", i), 1, size(1<<random.IntN(3)))
			allocator, err := placement.NewAllocator(t.Context(), s, placement.NewCache())
			if err != nil {
				t.Fatal(err)
			}
			node := s.Nodes[random.IntN(2)]
			results, err := allocator.Allocate(t.Context(), node, c)
			if err != nil {
				t.Fatal(err)
			}
			if results != nil {
				c.Status.Allocation = &results[0]
			}
			s.Claims = append(s.Claims, c)
		}
		e, err := explain.Claim(t.Context(), s, claim("next", 1, size(1<<random.IntN(3))))
		if err != nil {
			t.Fatal(err)
		}
		steps := e.Requests[0].Steps
		for i, node := range e.Nodes {
			if left := steps[len(steps)-1].Left[i]; node.Fits != (left > 0) {
				t.Fatalf("round %d: %d devices are left on %s, and the allocator says %v: %+v", round, left, node.Name, node.Fits, e)
			}
		}
	}
}
