package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/e2e/harness"
)

// useOrder installs the chart with an order of devices, and with the default one again after the test. It returns when
// the first device is that one.
func useOrder(t *testing.T, first string, values map[string]any) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*harness.Patience)
		defer cancel()
		if err := suite.InstallChart(ctx, nil); err != nil {
			t.Error(err)
		}
	})
	if err := suite.InstallChart(t.Context(), values); err != nil {
		t.Fatal(err)
	}
	suite.DriverReady(t)
	suite.Eventually(t, "the order to be published", func(ctx context.Context) error {
		slice, err := deviceSlice(ctx)
		if err == nil && slice.Spec.Devices[0].Name != first {
			err = fmt.Errorf("the first device is %s, want %s", slice.Spec.Devices[0].Name, first)
		}
		return err
	})
}

// deviceSlice is the slice that has the node's devices.
func deviceSlice(ctx context.Context) (*resourceapi.ResourceSlice, error) {
	list, err := suite.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	list.Items = slices.DeleteFunc(list.Items, func(s resourceapi.ResourceSlice) bool { return len(s.Spec.Devices) == 0 })
	if len(list.Items) != 1 {
		return nil, fmt.Errorf("%d slices with devices, want one", len(list.Items))
	}
	return &list.Items[0], nil
}

// runWith has a pod get a partition, and returns the pod and the name of the partition.
func runWith(t *testing.T, ns, name, profile string) (*corev1.Pod, string) {
	t.Helper()
	claim := suite.CreateClaim(t, ns, harness.Claim(name, harness.Partition("slice", profile)))
	pod := suite.Running(t, suite.CreatePod(t, ns, harness.Pod(name, []harness.Use{{Claim: name}})))
	return pod, suite.Devices(t, claim)["slice"]
}

// TestPackedOrderLeavesRoom: the small partition goes where a large one is still possible. In the vendor's order it
// would be at start 0, and no 4g.40gb would fit.
func TestPackedOrderLeavesRoom(t *testing.T) {
	useOrder(t, "gpu-0-mig-1g10gb-19-6", map[string]any{"deviceOrder": "packed"})
	ns := suite.Namespace(t)
	if _, got := runWith(t, ns, "small", "1g.10gb"); got != "gpu-0-mig-1g10gb-19-6" {
		t.Errorf("1g.10gb is %s, want that at start 6", got)
	}
	if _, got := runWith(t, ns, "large", "4g.40gb"); got != "gpu-0-mig-4g40gb-5-0" {
		t.Errorf("4g.40gb is %s", got)
	}
}

// TestAdaptiveOrderFollowsUsage: what is in use decides where the next claim goes, at the cost of one write; and an order
// that is older than it should be, here because it may not change for ten minutes, is still one to allocate by.
func TestAdaptiveOrderFollowsUsage(t *testing.T) {
	useOrder(t, "gpu-0-mig-1g10gb-19-6", map[string]any{"deviceOrder": "adaptive", "deviceOrderInterval": "10m"})
	ns := suite.Namespace(t)
	before, err := deviceSlice(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	a, got := runWith(t, ns, "a", "1g.10gb")
	if got != "gpu-0-mig-1g10gb-19-6" {
		t.Errorf("the first claim has %s, want that at start 6", got)
	}
	b, got := runWith(t, ns, "b", "1g.10gb")
	if got != "gpu-0-mig-1g10gb-19-4" {
		t.Errorf("the second claim has %s, want that at start 4", got)
	}
	if slice, err := deviceSlice(t.Context()); err != nil || slice.ResourceVersion != before.ResourceVersion {
		t.Errorf("the order was the best for both claims, and yet it was written again (%v)", err)
	}

	// Beside the one at start 4, start 5 costs nothing that is not lost already; start 6 does.
	place := func(slice *resourceapi.ResourceSlice, start int) int {
		return slices.IndexFunc(slice.Spec.Devices, func(d resourceapi.Device) bool { return d.Name == fmt.Sprintf("gpu-0-mig-1g10gb-19-%d", start) })
	}
	suite.DeletePod(t, a)
	var after *resourceapi.ResourceSlice
	suite.Eventually(t, "another order", func(ctx context.Context) (err error) {
		if after, err = deviceSlice(ctx); err == nil && place(after, 5) > place(after, 6) {
			err = fmt.Errorf("start 5 comes after start 6")
		}
		return err
	})
	if after.Name != before.Name || after.Spec.Pool != before.Spec.Pool {
		t.Errorf("slice %s of pool %+v became %s of %+v: nothing but the order may change", before.Name, before.Spec.Pool, after.Name, after.Spec.Pool)
	}
	if _, got := runWith(t, ns, "c", "1g.10gb"); got != "gpu-0-mig-1g10gb-19-5" {
		t.Errorf("the third claim has %s, want that at start 5", got)
	}

	// Start 4 would be the best now. The order is too old to say so, and what it offers is free all the same.
	suite.DeletePod(t, b)
	if _, got := runWith(t, ns, "d", "1g.10gb"); got == "" || strings.HasSuffix(got, "-5") {
		t.Errorf("the fourth claim has %q", got)
	}
	if slice, err := deviceSlice(t.Context()); err != nil || slice.ResourceVersion != after.ResourceVersion {
		t.Errorf("the order was written again before its time (%v)", err)
	}
	page, err := suite.Scrape(t.Context(), t, 8080)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(page, "\nsimgpu_slice_reorders_total 1\n") {
		t.Errorf("the metrics do not count one write: %s", lineWith(page, "simgpu_slice_reorders_total"))
	}
}

func lineWith(page, name string) string {
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, name) {
			return line
		}
	}
	return "no " + name
}
