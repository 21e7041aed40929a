// Package alpha holds the tests of what the driver does with features that are alpha in Kubernetes, in a cluster with
// their gates on.
package alpha

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	resourcealpha "k8s.io/api/resource/v1alpha3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/e2e/harness"
)

// suite is a cluster with one node and one simulated H100.
var suite *harness.Suite

func TestMain(m *testing.M) {
	harness.Main(m, &suite, harness.Config{
		Name: "alpha",
		FeatureGates: map[string]bool{
			"DRAOptionalNodeOperations":   true,
			"DRAPartitionableDevicesType": true,
			"DRAResourcePoolStatus":       true,
		},
		RuntimeConfig: map[string]string{"resource.k8s.io/v1alpha3": "true"},
		WithoutChart:  true,
	})
}

// values are those of the chart for one H100 that can be partitioned, with these alpha features.
func values(alpha map[string]any) map[string]any {
	return map[string]any{
		"alpha": alpha,
		"inventory": map[string]any{"rules": []any{map[string]any{
			"name": "test",
			"gpus": []any{map[string]any{"model": "h100-sxm5-80gb", "count": 1, "migMode": "dynamic"}},
		}}},
	}
}

// install has the driver use these alpha features, and no others.
func install(t *testing.T, alpha map[string]any) {
	t.Helper()
	if err := suite.InstallChart(t.Context(), values(alpha)); err != nil {
		t.Fatal(err)
	}
}

// published waits until all slices with devices are right.
func published(t *testing.T, what string, right func(resourceapi.ResourceSliceSpec) error) {
	t.Helper()
	suite.Eventually(t, what, func(ctx context.Context) error {
		list, err := suite.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + harness.DriverName})
		if err != nil {
			return err
		}
		var wrong []error
		devices := 0
		for _, slice := range list.Items {
			if slice.Spec.Pool.ResourceSliceCount != int64(len(list.Items)) {
				wrong = append(wrong, fmt.Errorf("%d slices of %d", len(list.Items), slice.Spec.Pool.ResourceSliceCount))
			}
			if len(slice.Spec.Devices) > 0 {
				devices += len(slice.Spec.Devices)
				wrong = append(wrong, right(slice.Spec))
			}
		}
		if devices != 26 {
			wrong = append(wrong, fmt.Errorf("%d devices, want the GPU and its 25 partitions", devices))
		}
		return errors.Join(wrong...)
	})
}

// TestPartitionTypes has the API server count the partitions that still fit.
func TestPartitionTypes(t *testing.T) {
	const attribute = "simgpu.dev/partitionType"
	install(t, map[string]any{"partitionTypes": true})
	published(t, "slices that name "+attribute, func(slice resourceapi.ResourceSliceSpec) error {
		if got := slice.PartitionTypeAttribute; got == nil || *got != attribute {
			return fmt.Errorf("the slice has the partition type attribute %v", got)
		}
		for _, device := range slice.Devices {
			if value := device.Attributes[attribute].StringValue; value == nil || *value != device.Name {
				return fmt.Errorf("device %s has the partition type %v", device.Name, value)
			}
		}
		return nil
	})

	empty := partitions(t, "empty")
	for name, allocatable := range empty {
		if allocatable != 1 {
			t.Errorf("on the empty GPU %s can be allocated %d times, want 1", name, allocatable)
		}
	}
	ns := suite.Namespace(t)
	claim := suite.CreateClaim(t, ns, harness.Claim("half", harness.Partition("slice", "3g.40gb")))
	suite.Running(t, suite.CreatePod(t, ns, harness.Pod("half", []harness.Use{{Claim: "half"}})))
	taken := suite.Devices(t, claim)["slice"]

	var fitting []string
	for name, allocatable := range partitions(t, "beside-half") {
		if allocatable == 1 {
			fitting = append(fitting, name)
		}
	}
	slices.Sort(fitting)
	// Of seven compute slices are four left, of eight memory slices 4 to 7.
	want := []string{
		"gpu-0-mig-1g10gb-19-4", "gpu-0-mig-1g10gb-19-5", "gpu-0-mig-1g10gb-19-6",
		"gpu-0-mig-1g10gb-me-20-4", "gpu-0-mig-1g10gb-me-20-5", "gpu-0-mig-1g10gb-me-20-6",
		"gpu-0-mig-1g20gb-15-4", "gpu-0-mig-1g20gb-15-6", "gpu-0-mig-2g20gb-14-4", "gpu-0-mig-3g40gb-9-4",
	}
	if taken != "gpu-0-mig-3g40gb-9-0" || !slices.Equal(fitting, want) {
		t.Errorf("beside %s can be allocated\n%v, want\n%v", taken, fitting, want)
	}
}

// partitions asks how many devices of each type can still be allocated.
func partitions(t *testing.T, name string) map[string]int32 {
	t.Helper()
	requests := suite.Client.ResourceV1alpha3().ResourcePoolStatusRequests()
	_, err := requests.Create(t.Context(), &resourcealpha.ResourcePoolStatusRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourcealpha.ResourcePoolStatusRequestSpec{Driver: harness.DriverName},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := requests.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	counts := map[string]int32{}
	suite.Eventually(t, "the status of the pool", func(ctx context.Context) error {
		request, err := requests.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if request.Status == nil {
			return errors.New("it has none")
		}
		if len(request.Status.Pools) != 1 || request.Status.Pools[0].ValidationError != nil {
			t.Fatalf("the status is %+v", request.Status)
		}
		for _, partition := range request.Status.Pools[0].PartitionSummary {
			if *partition.Total != 1 {
				t.Errorf("%d devices of type %s, want each to be a type of its own", *partition.Total, partition.Type)
			}
			counts[partition.Type] = *partition.Allocatable
		}
		return nil
	})
	if len(counts) != 26 {
		t.Errorf("%d types of partitions: %v", len(counts), counts)
	}
	return counts
}

// calls are how often the kubelet has called the driver for claims, by operation.
func calls(t *testing.T) map[string]string {
	t.Helper()
	page, err := suite.Scrape(t.Context(), t, 8080)
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]string{}
	for _, found := range regexp.MustCompile(`simgpu_claim_operation_duration_seconds_count\{operation="(\w+)"\} (\d+)`).FindAllStringSubmatch(page, -1) {
		counts[found[1]] = found[2]
	}
	return counts
}

// skip upgrades the driver to one whose devices ask for calls to be left out.
func skip(t *testing.T, operations ...resourceapi.SkipNodeOperation) {
	t.Helper()
	install(t, map[string]any{"skipNodeOperations": operations})
	published(t, "slices that ask for calls to be skipped", func(slice resourceapi.ResourceSliceSpec) error {
		if !slices.Equal(slice.SkipNodeOperations, operations) {
			return fmt.Errorf("the slice asks to skip %v, want %v", slice.SkipNodeOperations, operations)
		}
		return nil
	})
}

// allocated checks that the claim has the device and says so with the operations to skip.
func allocated(t *testing.T, claim *resourceapi.ResourceClaim, device string, operations ...resourceapi.SkipNodeOperation) {
	t.Helper()
	claim, err := suite.Client.ResourceV1().ResourceClaims(claim.Namespace).Get(t.Context(), claim.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if claim.Status.Allocation == nil || len(claim.Status.Allocation.Devices.Results) != 1 {
		t.Fatalf("claim %s has the allocation %+v", claim.Name, claim.Status.Allocation)
	}
	if r := claim.Status.Allocation.Devices.Results[0]; r.Device != device || !slices.Equal(r.SkipNodeOperations, operations) {
		t.Errorf("claim %s has %s and skips %v, want %s and %v", claim.Name, r.Device, r.SkipNodeOperations, device, operations)
	}
}

// expectCalls checks how often the kubelet has called the driver since it started.
func expectCalls(t *testing.T, when, prepare, unprepare string) {
	t.Helper()
	if got, want := calls(t), map[string]string{"prepare": prepare, "unprepare": unprepare}; !maps.Equal(got, want) {
		t.Errorf("%s: the kubelet has made the calls %v, want %v", when, got, want)
	}
}

// TestSkipAll has pods start and end without the driver: they get a claim, and see nothing of its device.
func TestSkipAll(t *testing.T) {
	skip(t, resourceapi.SkipNodeOperationAll)
	ns := suite.Namespace(t)
	for _, name := range []string{"a", "b"} {
		claim := suite.CreateClaim(t, ns, harness.Claim(name, harness.GPU("gpu")))
		pod := suite.Running(t, suite.CreatePod(t, ns, harness.Pod(name, []harness.Use{{Claim: name}})))
		allocated(t, claim, "gpu-0", resourceapi.SkipNodeOperationAll)
		out, err := suite.Command(t.Context(), "kubectl", "-n", ns, "exec", pod.Name, "--", "nvidia-smi", "-L")
		if err == nil || !strings.Contains(err.Error(), "executable file not found") {
			t.Errorf("nvidia-smi printed %q in the container, %v", out, err)
		}
		if environment := suite.Exec(t, pod, "c0", "env"); strings.Contains(environment, "NVIDIA") {
			t.Errorf("the container has the environment\n%s", environment)
		}
		if files := suite.OnDisk(t); len(files) > 0 {
			t.Errorf("the driver has %v for pod %s", files, name)
		}
		suite.DeletePod(t, pod)
		expectCalls(t, "after pod "+name, "0", "0")
	}
}

// TestSkipUnprepare has pods end without the driver. The next one gets the device nevertheless.
func TestSkipUnprepare(t *testing.T) {
	skip(t, resourceapi.SkipNodeOperationNodeUnprepareResources)
	ns := suite.Namespace(t)
	for i, name := range []string{"a", "b"} {
		claim := suite.CreateClaim(t, ns, harness.Claim(name, harness.GPU("gpu")))
		pod := suite.Running(t, suite.CreatePod(t, ns, harness.Pod(name, []harness.Use{{Claim: name}})))
		allocated(t, claim, "gpu-0", resourceapi.SkipNodeOperationNodeUnprepareResources)
		if list := suite.Exec(t, pod, "c0", "nvidia-smi", "-L"); !strings.Contains(list, "H100") {
			t.Errorf("the container sees\n%s", list)
		}
		suite.DeletePod(t, pod)
		expectCalls(t, "after pod "+name, fmt.Sprint(i+1), "0")
	}
	suite.Event(t, metav1.NamespaceDefault, "ClaimReleased", suite.Cluster.Node(1).Name(), "not allocated any more")

	// Claims that nobody has unprepared are released when the driver looks, as it does at its start.
	suite.RestartDriver(t)
	suite.Eventually(t, "nothing of claims to be on the node", func(context.Context) error {
		if files := suite.OnDisk(t); len(files) > 0 {
			return fmt.Errorf("there are %v", files)
		}
		return nil
	})
}
