package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
	driverslices "github.com/simgpu/simgpu/driver/slices"
	"github.com/simgpu/simgpu/e2e/harness"
	"github.com/simgpu/simgpu/profiles"
)

// TestCombinations has the real scheduler decide about every set of partitions that an H100 can and, one partition
// further, cannot hold at once.
//
// The pods are for a node that exists in the API alone, with the slices that the driver would publish for it: nothing
// has to start, so that all sets can be tried. What is possible is worked out here from the hardware's own rule:
// placements do not overlap, at most 7 compute slices, and one partition at a time has the media engines (+me).
func TestCombinations(t *testing.T) {
	ns := suite.Namespace(t)
	h100 := newPaperNode(t, "h100-sxm5-80gb")
	possible, impossible := combinations(h100.gpu.Devices)
	if len(possible) < 100 || len(impossible) < 100 {
		t.Fatalf("%d possible and %d impossible sets: the enumeration is broken", len(possible), len(impossible))
	}
	for _, known := range []string{"3g.40gb+4g.40gb", "3g.40gb+3g.40gb", strings.Repeat("1g.10gb+", 6) + "1g.10gb", "7g.80gb"} {
		if !slices.ContainsFunc(possible, func(set []string) bool { return strings.Join(set, "+") == known }) {
			t.Errorf("%s is possible on an H100 and not among the sets", known)
		}
	}
	for _, known := range []string{"1g.10gb+3g.40gb+3g.40gb", strings.Repeat("1g.10gb+", 7) + "2g.20gb", "1g.10gb+me+1g.10gb+me"} {
		if !slices.ContainsFunc(impossible, func(set []string) bool { return strings.Join(set, "+") == known }) {
			t.Errorf("%s is impossible on an H100 and not among the sets", known)
		}
	}

	for _, set := range possible {
		t.Run("possible/"+strings.Join(set, ","), func(t *testing.T) {
			if devices := h100.decide(t, ns, set, corev1.ConditionTrue); len(devices) != len(set) {
				t.Errorf("allocated %v", devices)
			}
		})
	}
	// The allocator's search for what does not fit grows fast with the number of requests: a sample of the small ones.
	for i, set := range impossible {
		if len(set) > 4 || i%3 != 0 {
			continue
		}
		t.Run("impossible/"+strings.Join(set, ","), func(t *testing.T) {
			if devices := h100.decide(t, ns, set, corev1.ConditionFalse); len(devices) > 0 {
				t.Errorf("allocated %v", devices)
			}
		})
	}
}

// combinations returns the sets of profiles that devices of one GPU can be divided into, and the sets that are one
// partition more than a possible one and impossible. Each set is sorted.
func combinations(devices []*hardware.Device) (possible, impossible [][]string) {
	var partitions []*profiles.Partition
	for _, d := range devices {
		if d.Partition != nil {
			partitions = append(partitions, d.Partition)
		}
	}
	fits := func(set []*profiles.Partition, p *profiles.Partition) bool {
		compute, media := p.Profile.Slices, strings.HasSuffix(p.Profile.Name, "+me")
		for _, other := range set {
			compute += other.Profile.Slices
			if p.Start < other.Start+other.Profile.Size && other.Start < p.Start+p.Profile.Size {
				return false
			}
			if media && strings.HasSuffix(other.Profile.Name, "+me") {
				return false
			}
		}
		return compute <= 7
	}
	found := map[string][]string{}
	tried := map[string][]string{}
	visited := map[string]bool{}
	var grow func(set []*profiles.Partition)
	grow = func(set []*profiles.Partition) {
		for _, p := range partitions {
			names := make([]string, 0, len(set)+1)
			places := make([]string, 0, len(set)+1)
			for _, q := range append(slices.Clip(set), p) {
				names = append(names, q.Profile.Name)
				places = append(places, fmt.Sprint(q.Profile.Name, q.Start))
			}
			key := strings.Join(sorted(names), "+")
			if !fits(set, p) {
				tried[key] = names
				continue
			}
			found[key] = names
			if place := strings.Join(sorted(places), "+"); !visited[place] {
				visited[place] = true
				grow(append(slices.Clip(set), p))
			}
		}
	}
	grow(nil)
	for _, key := range slices.Sorted(maps.Keys(found)) {
		possible = append(possible, found[key])
		delete(tried, key)
	}
	for _, key := range slices.Sorted(maps.Keys(tried)) {
		impossible = append(impossible, tried[key])
	}
	return possible, impossible
}

// paperNode is a Node with one GPU that only the API knows.
type paperNode struct {
	name string
	gpu  *hardware.GPU
}

func newPaperNode(t *testing.T, model string) paperNode {
	t.Helper()
	n := paperNode{name: "paper-" + model}
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	node, err := hardware.New(hardware.Config{
		NodeName:  n.name,
		Catalogue: catalogue,
		Groups:    []inventory.GPUGroup{{Model: model, Count: 1, MIGMode: inventory.MIGDynamic}},
	})
	if err != nil {
		t.Fatal(err)
	}
	n.gpu = node.GPUs[0]

	nodes := suite.Client.CoreV1().Nodes()
	_, err = nodes.Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: map[string]string{corev1.LabelHostname: n.name}},
		// Nothing but the pods of this test goes here.
		Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: "paper", Effect: corev1.TaintEffectNoSchedule}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := nodes.Delete(context.WithoutCancel(t.Context()), n.name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	status := corev1.NodeStatus{
		Capacity: corev1.ResourceList{
			corev1.ResourceCPU:  resource.MustParse("64"),
			corev1.ResourcePods: resource.MustParse("1000"),
		},
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Paper", LastHeartbeatTime: metav1.Now()}},
	}
	status.Allocatable = status.Capacity
	var created *corev1.Node
	err = retry.RetryOnConflict(retry.DefaultBackoff, func() (err error) {
		if created, err = nodes.Get(t.Context(), n.name, metav1.GetOptions{}); err != nil {
			return err
		}
		created.Status = status
		_, err = nodes.UpdateStatus(t.Context(), created, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	resources, err := driverslices.Resources(node, driverslices.Split)
	if err != nil {
		t.Fatal(err)
	}
	for pool, content := range resources.Pools {
		for i, s := range content.Slices {
			_, err := suite.Client.ResourceV1().ResourceSlices().Create(t.Context(), &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", n.name, i), OwnerReferences: []metav1.OwnerReference{{
					APIVersion: "v1", Kind: "Node", Name: n.name, UID: created.UID,
				}}},
				Spec: resourceapi.ResourceSliceSpec{
					Driver:         harness.DriverName,
					NodeName:       &n.name,
					Pool:           resourceapi.ResourcePool{Name: pool, Generation: 1, ResourceSliceCount: int64(len(content.Slices))},
					Devices:        s.Devices,
					SharedCounters: s.SharedCounters,
				},
			}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return n
}

// decide gives a pod for the node one claim with a request per profile, waits until the scheduler has decided as
// wanted, and returns the devices of the claim.
func (n paperNode) decide(t *testing.T, namespace string, set []string, want corev1.ConditionStatus) []string {
	t.Helper()
	var requests []resourceapi.DeviceRequest
	for i, profile := range set {
		requests = append(requests, harness.Partition(fmt.Sprintf("r%d", i), profile))
	}
	template := harness.Claim("", requests...)
	template.GenerateName = "set-"
	c := suite.CreateClaim(t, namespace, template)
	p := harness.Pod(c.Name, []harness.Use{{Claim: c.Name}})
	p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: n.name}
	p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	p = suite.CreatePod(t, namespace, p)
	defer n.undo(t, p, c)

	suite.Eventually(t, fmt.Sprintf("the scheduler to say PodScheduled=%s", want), func(ctx context.Context) error {
		current, err := suite.Client.CoreV1().Pods(namespace).Get(ctx, p.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range current.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status == want {
				if want == corev1.ConditionFalse && !strings.Contains(condition.Message, "cannot allocate all claims") {
					t.Errorf("refused for another reason: %s", condition.Message)
				}
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", current.Status.Conditions)
	})
	return slices.Sorted(maps.Values(suite.Devices(t, c)))
}

// undo removes the pod, whose end no kubelet will confirm, and the claim, and waits until its devices are free.
func (n paperNode) undo(t *testing.T, p *corev1.Pod, c *resourceapi.ResourceClaim) {
	t.Helper()
	pods, claims := suite.Client.CoreV1().Pods(p.Namespace), suite.Client.ResourceV1().ResourceClaims(c.Namespace)
	if err := pods.Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}); err != nil {
		t.Error(err)
	}
	if err := claims.Delete(t.Context(), c.Name, metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
	suite.Eventually(t, "the claim to be gone", func(ctx context.Context) error {
		_, err := claims.Get(ctx, c.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is still there (%w)", err)
	})
}
