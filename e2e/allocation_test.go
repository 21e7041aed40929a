package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/e2e/harness"
)

// TestThirdWaits has three pods want one of two slices: the third waits, and gets the slice of the first to go.
func TestThirdWaits(t *testing.T) {
	ns := suite.Namespace(t)
	var claims []*resourceapi.ResourceClaim
	for _, name := range []string{"first", "second", "third"} {
		claims = append(claims, suite.CreateClaim(t, ns, harness.Claim(name, harness.Partition("slice", "3g.40gb"))))
	}
	first := suite.CreatePod(t, ns, harness.Pod("first", []harness.Use{{Claim: "first"}}))
	suite.Running(t, first)
	suite.Running(t, suite.CreatePod(t, ns, harness.Pod("second", []harness.Use{{Claim: "second"}})))
	third := suite.CreatePod(t, ns, harness.Pod("third", []harness.Use{{Claim: "third"}}))
	if message := suite.Waiting(t, third); !strings.Contains(message, "cannot allocate all claims") {
		t.Errorf("the scheduler says %q", message)
	}
	freed := suite.Devices(t, claims[0])["slice"]
	if got := suite.Devices(t, claims[2]); len(got) != 0 {
		t.Fatalf("the third claim has %v while the pod waits", got)
	}

	suite.DeletePod(t, first)
	suite.Running(t, third)
	if got := suite.Devices(t, claims[2])["slice"]; got != freed {
		t.Errorf("the third claim has %s, want %s, which the first had", got, freed)
	}
}

// TestWholeGPUExcludesPartitions has a claim for the GPU and one for a partition of it exclude each other.
func TestWholeGPUExcludesPartitions(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("whole", harness.GPU("gpu")))
	suite.CreateClaim(t, ns, harness.Claim("slice", harness.Partition("slice", "1g.10gb")))
	suite.CreateClaim(t, ns, harness.Claim("whole-again", harness.GPU("gpu")))

	whole := suite.CreatePod(t, ns, harness.Pod("whole", []harness.Use{{Claim: "whole"}}))
	suite.Running(t, whole)
	slice := suite.CreatePod(t, ns, harness.Pod("slice", []harness.Use{{Claim: "slice"}}))
	suite.Waiting(t, slice)

	suite.DeletePod(t, whole)
	suite.Running(t, slice)
	again := suite.CreatePod(t, ns, harness.Pod("whole-again", []harness.Use{{Claim: "whole-again"}}))
	suite.Waiting(t, again)

	suite.DeletePod(t, slice)
	suite.Running(t, again)
	list := suite.Exec(t, again, "c0", "nvidia-smi", "-L")
	if !strings.HasPrefix(list, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-") || strings.Contains(list, "MIG") {
		t.Errorf("nvidia-smi -L shows\n%s", list)
	}
}

// TestContainersSeeTheirRequest gives two containers of one pod a request each of one claim.
func TestContainersSeeTheirRequest(t *testing.T) {
	ns := suite.Namespace(t)
	c := suite.CreateClaim(t, ns, harness.Claim("both", harness.Partition("small", "1g.10gb"), harness.Partition("large", "3g.40gb")))
	p := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("both",
		[]harness.Use{{Claim: "both", Request: "small"}},
		[]harness.Use{{Claim: "both", Request: "large"}},
		[]harness.Use{{Claim: "both"}},
	)))
	devices := suite.Devices(t, c)
	for container, want := range map[string][]string{
		"c0": {devices["small"]},
		"c1": {devices["large"]},
		"c2": {devices["small"], devices["large"]},
	} {
		if got := seen(suite.Exec(t, p, container, "env")); !slices.Equal(got, sorted(want)) {
			t.Errorf("container %s sees %v, want %v", container, got, sorted(want))
		}
		if got := strings.Count(suite.Exec(t, p, container, "nvidia-smi", "-L"), "  MIG "); got != len(want) {
			t.Errorf("nvidia-smi -L in container %s shows %d MIG devices, want %d", container, got, len(want))
		}
	}
}

// TestPodsShareAClaim has two pods see the same device.
func TestPodsShareAClaim(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("shared", harness.Partition("slice", "2g.20gb")))
	first := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("first", []harness.Use{{Claim: "shared"}})))
	second := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("second", []harness.Use{{Claim: "shared"}})))
	a, b := suite.Exec(t, first, "c0", "nvidia-smi", "-L"), suite.Exec(t, second, "c0", "nvidia-smi", "-L")
	if a != b || !strings.Contains(a, "MIG 2g.20gb") {
		t.Errorf("the pods see\n%sand\n%s", a, b)
	}
	suite.DeletePod(t, first)
	if after := suite.Exec(t, second, "c0", "nvidia-smi", "-L"); after != b {
		t.Errorf("once the other pod is gone, the second sees\n%s", after)
	}
}

// TestPodWithTwoClaims has one pod see the devices of both its claims.
func TestPodWithTwoClaims(t *testing.T) {
	ns := suite.Namespace(t)
	a := suite.CreateClaim(t, ns, harness.Claim("a", harness.Partition("slice", "1g.10gb")))
	b := suite.CreateClaim(t, ns, harness.Claim("b", harness.Partition("slice", "1g.20gb")))
	p := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("both", []harness.Use{{Claim: "a"}, {Claim: "b"}})))
	want := sorted([]string{suite.Devices(t, a)["slice"], suite.Devices(t, b)["slice"]})
	if got := seen(suite.Exec(t, p, "c0", "env")); !slices.Equal(got, want) {
		t.Errorf("the container sees %v, want %v", got, want)
	}
	list := suite.Exec(t, p, "c0", "nvidia-smi", "-L")
	if strings.Count(list, "GPU 0:") != 1 || !strings.Contains(list, "MIG 1g.10gb") || !strings.Contains(list, "MIG 1g.20gb") {
		t.Errorf("nvidia-smi -L shows\n%s", list)
	}
}

// TestSlicesAreWhatAnH100Publishes looks at the slices as any client of the API does.
func TestSlicesAreWhatAnH100Publishes(t *testing.T) {
	var list *resourceapi.ResourceSliceList
	suite.Eventually(t, "the slices of the node", func(ctx context.Context) (err error) {
		list, err = suite.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
			FieldSelector: "spec.driver=" + harness.DriverName + ",spec.nodeName=" + suite.Cluster.Node(1).Name(),
		})
		if err == nil && len(list.Items) != 2 {
			err = fmt.Errorf("%d slices, want 2: one with the counter set, one with the devices", len(list.Items))
		}
		return err
	})
	var devices, counters int
	for _, s := range list.Items {
		devices += len(s.Spec.Devices)
		for _, set := range s.Spec.SharedCounters {
			counters += len(set.Counters)
			if set.Name != "gpu-0-counter-set" {
				t.Errorf("counter set %q, want gpu-0-counter-set", set.Name)
			}
			memory := set.Counters["memory"].Value
			if memory.String() != "81152Mi" {
				t.Errorf("counter memory is %s, want 81152Mi", memory.String())
			}
		}
		if int(s.Spec.Pool.ResourceSliceCount) != len(list.Items) {
			t.Errorf("slice %s says that the pool has %d slices", s.Name, s.Spec.Pool.ResourceSliceCount)
		}
	}
	if devices != 26 || counters != 15 {
		t.Errorf("%d devices and %d counters, want 26 and 15", devices, counters)
	}
}

// seen lists the devices that the container's environment names, sorted.
func seen(env string) []string {
	var devices []string
	for line := range strings.Lines(env) {
		if name, ok := strings.CutPrefix(line, "SIMGPU_DEVICE_"); ok {
			name, _, _ = strings.Cut(name, "=")
			devices = append(devices, strings.ReplaceAll(strings.ToLower(name), "_", "-"))
		}
	}
	return sorted(devices)
}

func sorted(s []string) []string {
	slices.Sort(s)
	return s
}
