package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/e2e/harness"
)

// gpus installs the chart with these GPUs on the node, and returns once they are published. Defer what it returns, which
// brings back the defaults.
func gpus(t *testing.T, groups ...any) (restore func()) {
	t.Helper()
	install := func(values map[string]any) {
		t.Helper()
		if err := suite.InstallChart(t.Context(), values); err != nil {
			t.Fatal(err)
		}
		// The kubelet brings a new inventory when it likes; a new pod has it at once.
		suite.RestartDriver(t)
	}
	install(map[string]any{"inventory": map[string]any{"rules": []any{map[string]any{"gpus": groups}}}})
	return func() { install(nil) }
}

func published(t *testing.T) []resourceapi.ResourceSlice {
	t.Helper()
	list, err := suite.Client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + suite.Cluster.Node(1).Name()})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(list.Items, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	return list.Items
}

// TestOtherModels has one node with a GPU of each way to be published, each of which a pod uses: an A30 and an RTX PRO 6000
// that are partitioned on demand, an H100 that is partitioned for good, and an L4.
func TestOtherModels(t *testing.T) {
	defer gpus(t,
		map[string]any{"model": "a30-24gb", "migMode": "dynamic"},
		map[string]any{"model": "rtx-pro-6000-96gb", "migMode": "dynamic"},
		map[string]any{"model": "h100-sxm5-80gb", "migMode": "static", "partitions": []any{
			map[string]any{"profile": "3g.40gb", "start": 4}, map[string]any{"profile": "1g.10gb", "count": 2},
		}},
		map[string]any{"model": "l4-24gb"},
	)()
	var names []string
	attributes := map[string]map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	for _, slice := range published(t) {
		for _, device := range slice.Spec.Devices {
			names = append(names, device.Name)
			attributes[device.Name] = device.Attributes
			if strings.HasPrefix(device.Name, "gpu-2") && len(device.ConsumesCounters) > 0 {
				t.Errorf("%s consumes counters", device.Name)
			}
		}
	}
	if len(names) != 13+31+3+1 {
		t.Errorf("%d devices are published: %v", len(names), names)
	}
	if want := []string{"gpu-2-mig-1g10gb-19-0", "gpu-2-mig-1g10gb-19-1", "gpu-2-mig-3g40gb-9-4", "gpu-3"}; !slices.Equal(names[len(names)-4:], want) {
		t.Errorf("the last devices are %v, want %v", names[len(names)-4:], want)
	}

	for name, tc := range map[string]struct {
		request resourceapi.DeviceRequest
		device  string // pattern
		shows   string // pattern of nvidia-smi -L
	}{
		"a30": {harness.Partition("gpu", "2g.12gb"), `^gpu-0-mig-2g12gb-5-[02]$`, `^GPU 0: NVIDIA A30 \(UUID: GPU-[0-9a-f-]{36}\)\n  MIG 2g\.12gb     Device  0: \(UUID: (MIG-[0-9a-f-]{36})\)\n$`},
		"rtx": {harness.Partition("gpu", "1g.24gb+me.all"), `^gpu-1-mig-1g24gb-meall-65-[0369]$`,
			`^GPU 0: NVIDIA RTX PRO 6000 Blackwell Server Edition \(UUID: GPU-[0-9a-f-]{36}\)\n  MIG 1g\.24gb\+me\.all +Device  0: \(UUID: (MIG-[0-9a-f-]{36})\)\n$`},
		"h100": {harness.Partition("gpu", "3g.40gb"), `^gpu-2-mig-3g40gb-9-4$`, `^GPU 0: NVIDIA H100 80GB HBM3 \(UUID: GPU-[0-9a-f-]{36}\)\n  MIG 3g\.40gb     Device  0: \(UUID: (MIG-[0-9a-f-]{36})\)\n$`},
		"l4":   {product("NVIDIA L4"), `^gpu-3$`, `^GPU 0: NVIDIA L4 \(UUID: (GPU-[0-9a-f-]{36})\)\n$`},
	} {
		t.Run(name, func(t *testing.T) {
			ns := suite.Namespace(t)
			claim := suite.CreateClaim(t, ns, harness.Claim(name, tc.request))
			pod := suite.Running(t, suite.CreatePod(t, ns, harness.Pod(name, []harness.Use{{Claim: name}})))
			device := suite.Devices(t, claim)["gpu"]
			if !regexp.MustCompile(tc.device).MatchString(device) {
				t.Errorf("the claim has %s, want %s", device, tc.device)
			}
			list := suite.Exec(t, pod, "c0", "nvidia-smi", "-L")
			found := regexp.MustCompile(tc.shows).FindStringSubmatch(list)
			if found == nil {
				t.Fatalf("nvidia-smi -L shows\n%s", list)
			}
			if uuid := attributes[device]["uuid"].StringValue; uuid != nil && *uuid != found[1] {
				t.Errorf("%s is published as %s, and the pod sees %s", device, *uuid, found[1])
			} else if uuid == nil && !strings.Contains(device, "gpu-0") && !strings.Contains(device, "gpu-1") {
				t.Errorf("%s is published without its uuid", device)
			}
			suite.DeletePod(t, pod)
		})
	}

	t.Run("the node shows what exists for good", func(t *testing.T) {
		list := suite.OnNode(t, "nvidia-smi", "-L")
		for _, want := range []string{"NVIDIA H100 80GB HBM3", "MIG 3g.40gb", "MIG 1g.10gb     Device  1", *attributes["gpu-2-mig-3g40gb-9-4"]["uuid"].StringValue} {
			if !strings.Contains(list, want) {
				t.Errorf("nvidia-smi -L on the node does not show %q:\n%s", want, list)
			}
		}
	})
}

// product asks for a whole GPU of that name.
func product(name string) resourceapi.DeviceRequest {
	request := harness.GPU("gpu")
	request.Exactly.Selectors = append(request.Exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.attributes['%s'].productName == '%s'", harness.DriverName, name),
	}})
	return request
}
