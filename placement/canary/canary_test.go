package canary_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/placement"
	"github.com/simgpu/simgpu/placement/canary"
)

const gpu = corev1.ResourceName("example.com/gpu")

// pod that was created at 0 and scheduled after so many seconds, or never.
func pod(name string, after int, change func(*corev1.Pod)) *corev1.Pod {
	created := time.Unix(1000, 0)
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(created)}}
	p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{gpu: resource.MustParse("1")}}}}
	if after >= 0 {
		p.Spec.NodeName = "node-a"
		p.Status.Conditions = []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(created.Add(time.Duration(after) * time.Second))},
			{Type: corev1.PodReady, Status: corev1.ConditionTrue},
		}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: 1}}
	}
	if change != nil {
		change(p)
	}
	return p
}

func TestCompare(t *testing.T) {
	extended := func(p *corev1.Pod) { p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{} }
	refused := func(p *corev1.Pod) {
		p.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "UnexpectedAdmissionError"}
	}
	claimed := func(p *corev1.Pod) {
		p.Spec.ResourceClaims, p.Spec.Containers = []corev1.PodResourceClaim{{Name: "gpu"}}, nil
	}
	nothing := func(p *corev1.Pod) { p.Spec.Containers = nil }
	s := &placement.Snapshot{
		Nodes: []*corev1.Node{
			{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}, Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{gpu: resource.MustParse("4")}}},
			{ObjectMeta: metav1.ObjectMeta{Name: "node-b"}},
		},
		Slices: []*resourceapi.ResourceSlice{{Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.example.com", NodeName: new("node-b"), Pool: resourceapi.ResourcePool{Name: "node-b", Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "gpu-0"}, {Name: "gpu-1"}},
		}}},
	}
	s.Pods = []*corev1.Pod{
		pod("extended", 1, extended), pod("claims", 5, claimed), pod("claims-3", 3, claimed), pod("no-device", 1, nothing), pod("waits", -1, claimed),
		pod("plugin", 2, nil), pod("refused", 2, refused), pod("undecided", -1, nil), pod("another's", 9, nil),
	}
	report := canary.Compare(s, gpu, func(p *corev1.Pod) bool { return p.Name != "another's" })
	want := canary.Report{
		Paths: []canary.Figures{
			{Path: canary.DRA, Pods: 4, Ready: 3, Pending: 1, Restarts: 3, Scheduled: 3 * time.Second, Longest: 5 * time.Second},
			{Path: canary.DevicePlugin, Pods: 2, Ready: 1, Failed: 1, Restarts: 1, Scheduled: 2 * time.Second, Longest: 2 * time.Second},
			{Path: canary.Undecided, Pods: 1, Pending: 1},
		},
		Nodes: []canary.Node{
			{Name: "node-a", Plugin: 4, PluginFree: 1}, // another's and the one with a claim for the resource count here
			{Name: "node-b", Devices: 2, DevicesFree: 2},
		},
	}
	if diff := cmp.Diff(want, report); diff != "" {
		t.Error(diff)
	}
}
