package shadow_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
	driverslices "github.com/simgpu/simgpu/driver/slices"
	"github.com/simgpu/simgpu/placement"
	"github.com/simgpu/simgpu/placement/shadow"
	"github.com/simgpu/simgpu/profiles"
)

// h100s is a node with so many H100s.
func h100s(t *testing.T, count int) *placement.Snapshot {
	t.Helper()
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	node, err := hardware.New(hardware.Config{NodeName: "node-1", Catalogue: catalogue, Groups: []inventory.GPUGroup{{Model: "h100-sxm5-80gb", Count: count, MIGMode: inventory.MIGDynamic}}})
	if err != nil {
		t.Fatal(err)
	}
	resources, err := driverslices.Resources(node, driverslices.Split)
	if err != nil {
		t.Fatal(err)
	}
	var list resourceapi.ResourceSliceList
	pool := resources.Pools["node-1"].Slices
	for i, slice := range pool {
		list.Items = append(list.Items, resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: string(rune('a' + i))},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: "gpu.nvidia.com", NodeName: new("node-1"), Devices: slice.Devices, SharedCounters: slice.SharedCounters,
				Pool: resourceapi.ResourcePool{Name: "node-1", Generation: 1, ResourceSliceCount: int64(len(pool))},
			},
		})
	}
	class := resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "mig.nvidia.com"}, Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
		CEL: &resourceapi.CELDeviceSelector{Expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'"},
	}}}}
	return placement.New(&list, &resourceapi.DeviceClassList{Items: []resourceapi.DeviceClass{class}})
}

const manifests = `
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: small}
spec: {spec: {devices: {requests: [{name: r, exactly: {deviceClassName: mig.nvidia.com, selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'"}}]}}]}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: small}
spec:
  replicas: 2
  template:
    spec:
      resourceClaims: [{name: gpu, resourceClaimTemplateName: small}]
---
apiVersion: v1
kind: Service
metadata: {name: small}
---
apiVersion: serving.kserve.io/v1alpha2
kind: LLMInferenceService
metadata:
  name: qwen
  annotations:
    serving.kserve.io/exp-dra-device-class: mig.nvidia.com
    serving.kserve.io/exp-dra-cel-selector: device.attributes['gpu.nvidia.com'].profile == '4g.40gb'
spec: {model: {uri: hf://a/b}}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: alone}
spec: {devices: {requests: [{name: r, exactly: {deviceClassName: mig.nvidia.com, selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '2g.20gb'"}}]}}]}}
`

func units(t *testing.T, s *placement.Snapshot, content string) []shadow.Unit {
	t.Helper()
	path := filepath.Join(t.TempDir(), "manifests.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	list, skipped, err := shadow.ReadUnits(s, "", path)
	if err != nil {
		t.Fatal(err)
	}
	if content == manifests && (len(skipped) != 1 || skipped[0] != "Service/small") {
		t.Errorf("skipped: %v", skipped)
	}
	return list
}

func TestResolve(t *testing.T) {
	for order, want := range map[shadow.Order][]string{
		// The scheduler's first choice for the small ones is in the way of the half that has one place alone.
		shadow.AsListed: {
			"small-1 gpu-0-mig-1g10gb-19-0", "small-2 gpu-0-mig-1g10gb-19-1", "qwen-kserve ", "alone gpu-0-mig-2g20gb-14-2",
		},
		shadow.LargestFirst: {
			"qwen-kserve gpu-0-mig-4g40gb-5-0", "alone gpu-0-mig-2g20gb-14-4", "small-1 gpu-0-mig-1g10gb-19-6", "small-2 ",
		},
	} {
		t.Run(string(order), func(t *testing.T) {
			s := h100s(t, 1)
			report, err := shadow.Resolve(t.Context(), s, units(t, s, manifests), order)
			if err != nil {
				t.Fatal(err)
			}
			for i, result := range report.Results {
				device := ""
				if len(result.Devices) > 0 {
					_, device, _ = strings.Cut(result.Devices[0], "=")
				}
				if got := result.Name + " " + device; got != want[i] {
					t.Errorf("%d: %s (%s), want %s", i, got, result.Why, want[i])
				}
				if (device == "") == (result.Why == "") {
					t.Errorf("%s has %q and the reason %q", result.Name, device, result.Why)
				}
			}
			if len(s.Claims) > 0 {
				t.Error("the snapshot has changed")
			}
			before, after := report.Before[0].Sets[0], report.After[0].Sets[0]
			if before.Largest != "gpu-0" || before.Counters["memory"].Free != "81152Mi" || after.Counters["memory"].Free == "81152Mi" {
				t.Errorf("before %+v, after %+v", before, after)
			}
		})
	}
}

// TestNeverFits: what cannot fit is told by its counters, where a search through all combinations would take long.
func TestNeverFits(t *testing.T) {
	s := h100s(t, 16)
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "many"}}
	for _, name := range []string{"a", "b"} {
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "mig.nvidia.com", Count: 20,
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: "device.attributes['gpu.nvidia.com'].profile == '3g.40gb'"}}},
		}})
	}
	report, err := shadow.Resolve(t.Context(), s, []shadow.Unit{{Name: "many", Claims: []*resourceapi.ResourceClaim{claim}}}, shadow.AsListed)
	if err != nil {
		t.Fatal(err)
	}
	if why := report.Results[0].Why; !strings.Contains(why, "needed") || !strings.Contains(why, "free in all") {
		t.Error(why)
	}
}

func TestReadUnitsSaysWhatIsMissing(t *testing.T) {
	s := placement.New(&corev1.NodeList{})
	path := filepath.Join(t.TempDir(), "pod.yaml")
	pod := "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {resourceClaims: [{name: gpu, resourceClaimTemplateName: none}]}\n"
	if err := os.WriteFile(path, []byte(pod), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := shadow.ReadUnits(s, "", path); err == nil || !strings.Contains(err.Error(), `p: ResourceClaimTemplate "none" is neither in the files nor in the cluster`) {
		t.Error(err)
	}
}

// TestReadUnitsInANamespace: a manifest that names none refers to what the namespace has, as when it is applied there.
func TestReadUnitsInANamespace(t *testing.T) {
	template := resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "gpu"}}
	s := placement.New(&resourceapi.ResourceClaimTemplateList{Items: []resourceapi.ResourceClaimTemplate{template}})
	path := filepath.Join(t.TempDir(), "pod.yaml")
	pod := "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {resourceClaims: [{name: gpu, resourceClaimTemplateName: gpu}]}\n"
	if err := os.WriteFile(path, []byte(pod), 0o600); err != nil {
		t.Fatal(err)
	}
	units, _, err := shadow.ReadUnits(s, "team-a", path)
	if err != nil || len(units) != 1 || units[0].Claims[0].Namespace != "team-a" {
		t.Errorf("%+v, %v", units, err)
	}
	if _, _, err := shadow.ReadUnits(s, "team-b", path); err == nil {
		t.Error("a template of another namespace was taken")
	}
}
