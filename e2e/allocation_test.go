package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestThirdWaits has three pods want one of two slices: the third waits, and gets the slice of the first to go.
func TestThirdWaits(t *testing.T) {
	ns := suite.namespace(t)
	var claims []*resourceapi.ResourceClaim
	for _, name := range []string{"first", "second", "third"} {
		claims = append(claims, suite.createClaim(t, ns, claim(name, partition("slice", "3g.40gb"))))
	}
	first := suite.createPod(t, ns, pod("first", []use{{claim: "first"}}))
	suite.running(t, first)
	suite.running(t, suite.createPod(t, ns, pod("second", []use{{claim: "second"}})))
	third := suite.createPod(t, ns, pod("third", []use{{claim: "third"}}))
	if message := suite.waiting(t, third); !strings.Contains(message, "cannot allocate all claims") {
		t.Errorf("the scheduler says %q", message)
	}
	freed := suite.devices(t, claims[0])["slice"]
	if got := suite.devices(t, claims[2]); len(got) != 0 {
		t.Fatalf("the third claim has %v while the pod waits", got)
	}

	suite.deletePod(t, first)
	suite.running(t, third)
	if got := suite.devices(t, claims[2])["slice"]; got != freed {
		t.Errorf("the third claim has %s, want %s, which the first had", got, freed)
	}
}

// TestWholeGPUExcludesPartitions has a claim for the GPU and one for a partition of it exclude each other.
func TestWholeGPUExcludesPartitions(t *testing.T) {
	ns := suite.namespace(t)
	suite.createClaim(t, ns, claim("whole", gpu("gpu")))
	suite.createClaim(t, ns, claim("slice", partition("slice", "1g.10gb")))
	suite.createClaim(t, ns, claim("whole-again", gpu("gpu")))

	whole := suite.createPod(t, ns, pod("whole", []use{{claim: "whole"}}))
	suite.running(t, whole)
	slice := suite.createPod(t, ns, pod("slice", []use{{claim: "slice"}}))
	suite.waiting(t, slice)

	suite.deletePod(t, whole)
	suite.running(t, slice)
	again := suite.createPod(t, ns, pod("whole-again", []use{{claim: "whole-again"}}))
	suite.waiting(t, again)

	suite.deletePod(t, slice)
	suite.running(t, again)
	list := suite.exec(t, again, "c0", "nvidia-smi", "-L")
	if !strings.HasPrefix(list, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-") || strings.Contains(list, "MIG") {
		t.Errorf("nvidia-smi -L shows\n%s", list)
	}
}

// TestContainersSeeTheirRequest gives two containers of one pod a request each of one claim.
func TestContainersSeeTheirRequest(t *testing.T) {
	ns := suite.namespace(t)
	c := suite.createClaim(t, ns, claim("both", partition("small", "1g.10gb"), partition("large", "3g.40gb")))
	p := suite.running(t, suite.createPod(t, ns, pod("both",
		[]use{{claim: "both", request: "small"}},
		[]use{{claim: "both", request: "large"}},
		[]use{{claim: "both"}},
	)))
	devices := suite.devices(t, c)
	for container, want := range map[string][]string{
		"c0": {devices["small"]},
		"c1": {devices["large"]},
		"c2": {devices["small"], devices["large"]},
	} {
		if got := seen(suite.exec(t, p, container, "env")); !slices.Equal(got, sorted(want)) {
			t.Errorf("container %s sees %v, want %v", container, got, sorted(want))
		}
		if got := strings.Count(suite.exec(t, p, container, "nvidia-smi", "-L"), "  MIG "); got != len(want) {
			t.Errorf("nvidia-smi -L in container %s shows %d MIG devices, want %d", container, got, len(want))
		}
	}
}

// TestPodsShareAClaim has two pods see the same device.
func TestPodsShareAClaim(t *testing.T) {
	ns := suite.namespace(t)
	suite.createClaim(t, ns, claim("shared", partition("slice", "2g.20gb")))
	first := suite.running(t, suite.createPod(t, ns, pod("first", []use{{claim: "shared"}})))
	second := suite.running(t, suite.createPod(t, ns, pod("second", []use{{claim: "shared"}})))
	a, b := suite.exec(t, first, "c0", "nvidia-smi", "-L"), suite.exec(t, second, "c0", "nvidia-smi", "-L")
	if a != b || !strings.Contains(a, "MIG 2g.20gb") {
		t.Errorf("the pods see\n%sand\n%s", a, b)
	}
	suite.deletePod(t, first)
	if after := suite.exec(t, second, "c0", "nvidia-smi", "-L"); after != b {
		t.Errorf("once the other pod is gone, the second sees\n%s", after)
	}
}

// TestPodWithTwoClaims has one pod see the devices of both its claims.
func TestPodWithTwoClaims(t *testing.T) {
	ns := suite.namespace(t)
	a := suite.createClaim(t, ns, claim("a", partition("slice", "1g.10gb")))
	b := suite.createClaim(t, ns, claim("b", partition("slice", "1g.20gb")))
	p := suite.running(t, suite.createPod(t, ns, pod("both", []use{{claim: "a"}, {claim: "b"}})))
	want := sorted([]string{suite.devices(t, a)["slice"], suite.devices(t, b)["slice"]})
	if got := seen(suite.exec(t, p, "c0", "env")); !slices.Equal(got, want) {
		t.Errorf("the container sees %v, want %v", got, want)
	}
	list := suite.exec(t, p, "c0", "nvidia-smi", "-L")
	if strings.Count(list, "GPU 0:") != 1 || !strings.Contains(list, "MIG 1g.10gb") || !strings.Contains(list, "MIG 1g.20gb") {
		t.Errorf("nvidia-smi -L shows\n%s", list)
	}
}

// TestSlicesAreWhatAnH100Publishes looks at the slices as any client of the API does.
func TestSlicesAreWhatAnH100Publishes(t *testing.T) {
	var list *resourceapi.ResourceSliceList
	suite.eventually(t, "the slices of the node", func(ctx context.Context) (err error) {
		list, err = suite.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
			FieldSelector: "spec.driver=" + driverName + ",spec.nodeName=" + suite.cluster.Node(1).Name(),
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
