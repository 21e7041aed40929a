package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
	"sigs.k8s.io/yaml"

	metadataapi "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"

	"github.com/simgpu/simgpu/e2e/harness"
)

// TestFeatures applies the manifests of demo/features, on the GPUs that they need, and looks at what their README files say
// that one should see.
func TestFeatures(t *testing.T) {
	values := map[string]any{}
	content, err := os.ReadFile(suite.Path("demo/features/values.yaml"))
	if err == nil {
		err = yaml.Unmarshal(content, &values)
	}
	if err != nil {
		t.Fatal(err)
	}
	install := func(ctx context.Context, values map[string]any) {
		t.Helper()
		if err := suite.InstallChart(ctx, values); err != nil {
			t.Fatal(err)
		}
		// The kubelet takes its time with the mounted inventory; a new pod gets it at once.
		for _, args := range [][]string{{"restart"}, {"status", "--timeout", harness.Patience.String()}} {
			args = append([]string{"-n", harness.DriverNamespace, "rollout", args[0], "daemonset/" + harness.DaemonSet}, args[1:]...)
			if _, err := suite.Command(ctx, "kubectl", args...); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Cleanup(func() { install(context.WithoutCancel(t.Context()), nil) })
	install(t.Context(), values)

	for _, feature := range []struct {
		name string
		test func(*testing.T, string)
	}{
		{"device-status", deviceStatus},
		{"extended-resource", extendedResource},
		{"shared-gpu", sharedGPU},
		{"first-available", firstAvailable},
		{"all-gpus", allGPUs},
		{"same-gpu", sameGPU},
		{"admin-access", adminAccess},
		{"device-metadata", deviceMetadata},
		{"claim-parameters", claimParameters},
		{"health", brokenDevices},
		{"binding-conditions", bindingConditions},
	} {
		t.Run(feature.name, func(t *testing.T) {
			ns := suite.Namespace(t)
			switch feature.name {
			case "admin-access":
				suite.Kubectl(t, "label", "namespace", ns, "resource.kubernetes.io/admin-access=true")
			case "binding-conditions":
				values["attachDelay"] = "2s"
				install(t.Context(), values)
			}
			applyFeature(t, ns, feature.name+"/manifests.yaml")
			feature.test(t, ns)
		})
	}
}

// TestFeaturesAreAllTested compares the folders with the tests and the table of README.md.
func TestFeaturesAreAllTested(t *testing.T) {
	source, err := os.ReadFile(suite.Path("e2e/features_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	index, err := os.ReadFile(suite.Path("demo/features/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	folders, err := os.ReadDir(suite.Path("demo/features"))
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range folders {
		if !folder.IsDir() {
			continue
		}
		if !strings.Contains(string(source), `{"`+folder.Name()+`", `) {
			t.Errorf("demo/features/%s has no test here", folder.Name())
		}
		if !strings.Contains(string(index), "]("+folder.Name()+"/README.md)") {
			t.Errorf("demo/features/README.md does not name %s", folder.Name())
		}
	}
}

func applyFeature(t *testing.T, namespace, file string) {
	t.Helper()
	suite.Kubectl(t, "-n", namespace, "apply", "-f", suite.Path("demo/features/"+file))
}

func runningPod(t *testing.T, namespace, name string) *corev1.Pod {
	t.Helper()
	return suite.Running(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}})
}

func claimNamed(t *testing.T, namespace, name string) *resourceapi.ResourceClaim {
	t.Helper()
	claim, err := suite.Client.ResourceV1().ResourceClaims(namespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return claim
}

// statusDevices waits until the driver says in the status of a claim that it has so many devices ready.
func statusDevices(t *testing.T, namespace, name string, want int) []resourceapi.AllocatedDeviceStatus {
	t.Helper()
	var devices []resourceapi.AllocatedDeviceStatus
	suite.Eventually(t, fmt.Sprintf("%d devices in the status of claim %s", want, name), func(context.Context) error {
		devices = claimNamed(t, namespace, name).Status.Devices
		for _, d := range devices {
			if d.Driver != harness.DriverName || !meta.IsStatusConditionTrue(d.Conditions, "Ready") {
				return fmt.Errorf("not ready: %+v", d)
			}
		}
		if len(devices) != want {
			return fmt.Errorf("devices %+v", devices)
		}
		return nil
	})
	return devices
}

func deviceStatus(t *testing.T, ns string) {
	pod := runningPod(t, ns, "worker")
	status := statusDevices(t, ns, "slice", 1)[0]
	var data struct{ UUID, ParentUUID, Profile, Memory string }
	if err := json.Unmarshal(status.Data.Raw, &data); err != nil {
		t.Fatal(err)
	}
	list := suite.Exec(t, pod, "worker", "nvidia-smi", "-L")
	if data.Profile != "3g.40gb" || data.Memory != "40448Mi" || !strings.Contains(list, data.UUID) || !strings.Contains(list, data.ParentUUID) {
		t.Errorf("the status says %+v, nvidia-smi -L\n%s", data, list)
	}

	// Another driver's entry in the same list, as a claim for a GPU and a NIC has it, would be refused for a device that the
	// claim does not have. Somebody else's condition on our entry is not, and stays when the driver writes again.
	patch := fmt.Sprintf(`{"apiVersion":"resource.k8s.io/v1","kind":"ResourceClaim","status":{"devices":[{"driver":%q,"pool":%q,"device":%q,
		"conditions":[{"type":"Burned-In","status":"True","reason":"Tested","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}]}}`,
		status.Driver, status.Pool, status.Device)
	claims := suite.Client.ResourceV1().ResourceClaims(ns)
	if _, err := claims.Patch(t.Context(), "slice", types.ApplyPatchType, []byte(patch), metav1.PatchOptions{FieldManager: "tester"}, "status"); err != nil {
		t.Fatal(err)
	}
	before := claimNamed(t, ns, "slice").ResourceVersion
	suite.RestartDriver(t)
	suite.RestartKubelet(t)
	if got := claimNamed(t, ns, "slice"); got.ResourceVersion != before || !meta.IsStatusConditionTrue(got.Status.Devices[0].Conditions, "Burned-In") {
		t.Errorf("restarts have written the claim: %+v", got.Status.Devices)
	}

	suite.DeletePod(t, pod)
	suite.Eventually(t, "the status to be empty again", func(context.Context) error {
		if left := claimNamed(t, ns, "slice").Status.Devices; len(left) > 0 {
			return fmt.Errorf("devices %+v", left)
		}
		return nil
	})
}

func extendedResource(t *testing.T, ns string) {
	pod := runningPod(t, ns, "cuda")
	if list := suite.Exec(t, pod, "cuda", "nvidia-smi", "-L"); strings.Count(list, "GPU ") != 1 || strings.Contains(list, "MIG") {
		t.Errorf("nvidia-smi -L shows\n%s", list)
	}
	made := pod.Status.ExtendedResourceClaimStatus
	if made == nil {
		t.Fatal("the pod has no claim for its extended resource")
	}
	statusDevices(t, ns, made.ResourceClaimName, 1)
}

func sharedGPU(t *testing.T, ns string) {
	memory := func(pod *corev1.Pod) string {
		return regexp.MustCompile(`\d+MiB / +\d+MiB`).FindString(suite.Exec(t, pod, "model", "nvidia-smi"))
	}
	small, large := runningPod(t, ns, "small"), runningPod(t, ns, "large")
	for pod, want := range map[*corev1.Pod]string{small: "24576MiB / 30720MiB", large: "32768MiB / 40960MiB"} {
		suite.Eventually(t, "nvidia-smi of "+pod.Name+" to show its share", func(context.Context) error {
			if got := strings.Join(strings.Fields(memory(pod)), " "); got != want {
				return fmt.Errorf("%q, want %q", got, want)
			}
			return nil
		})
	}
	a, b := claimNamed(t, ns, "small").Status.Allocation.Devices.Results[0], claimNamed(t, ns, "large").Status.Allocation.Devices.Results[0]
	if a.Device != b.Device || a.ShareID == nil || b.ShareID == nil || *a.ShareID == *b.ShareID {
		t.Errorf("no two shares of one device: %+v and %+v", a, b)
	}
	if status := statusDevices(t, ns, "small", 1)[0]; status.ShareID == nil || *status.ShareID != string(*a.ShareID) || !strings.Contains(string(status.Data.Raw), `"30Gi"`) {
		t.Errorf("status %+v", status)
	}
	third := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "third"}}
	suite.Waiting(t, third)
	suite.RestartDriver(t)
	if got := strings.Join(strings.Fields(memory(large)), " "); !strings.HasSuffix(got, "/ 40960MiB") {
		t.Errorf("after a restart of the driver the container sees %q", got)
	}
	suite.DeletePod(t, small)
	suite.Running(t, third)
}

func firstAvailable(t *testing.T, ns string) {
	runningPod(t, ns, "occupant")
	pod := runningPod(t, ns, "worker")
	var requests []string
	for _, r := range claimNamed(t, ns, "wishes").Status.Allocation.Devices.Results {
		requests = append(requests, r.Request)
	}
	if want := []string{"wish/halves", "wish/halves"}; !slices.Equal(requests, want) {
		t.Errorf("allocated for %v, want %v", requests, want)
	}
	if list := suite.Exec(t, pod, "worker", "nvidia-smi", "-L"); strings.Count(list, "MIG 3g.40gb") != 2 {
		t.Errorf("nvidia-smi -L shows\n%s", list)
	}
}

func allGPUs(t *testing.T, ns string) {
	pod := runningPod(t, ns, "training")
	if list := suite.Exec(t, pod, "training", "nvidia-smi", "-L"); strings.Count(list, "NVIDIA H100") != 2 || strings.Contains(list, "A100") {
		t.Errorf("nvidia-smi -L shows\n%s", list)
	}
}

func sameGPU(t *testing.T, ns string) {
	pod := runningPod(t, ns, "pair")
	gpu := func(container string) string {
		return regexp.MustCompile(`GPU-[0-9a-f-]+`).FindString(suite.Exec(t, pod, container, "nvidia-smi", "-L"))
	}
	if prefill, decode := gpu("prefill"), gpu("decode"); prefill == "" || prefill != decode {
		t.Errorf("the containers see slices of GPUs %q and %q", prefill, decode)
	}
}

func adminAccess(t *testing.T, ns string) {
	monitor := runningPod(t, ns, "monitor")
	applyFeature(t, ns, "admin-access/workload.yaml")
	workload := runningPod(t, ns, "workload")
	uuid := regexp.MustCompile(`GPU-[0-9a-f-]+`).FindString(suite.Exec(t, workload, "workload", "nvidia-smi", "-L"))
	list := suite.Exec(t, monitor, "monitor", "nvidia-smi", "-L")
	if strings.Count(list, "GPU ") != 3 || !strings.Contains(list, uuid) {
		t.Errorf("the monitor does not see all 3 GPUs, among them %s:\n%s", uuid, list)
	}
	suite.Eventually(t, "the monitor to see what the workload holds", func(context.Context) error {
		if table := suite.Exec(t, monitor, "monitor", "nvidia-smi"); !strings.Contains(table, "51200MiB /") {
			return fmt.Errorf("nvidia-smi shows\n%s", table)
		}
		return nil
	})
	if list := suite.Exec(t, workload, "workload", "nvidia-smi", "-L"); strings.Count(list, "GPU ") != 1 {
		t.Errorf("the workload sees\n%s", list)
	}
}

func deviceMetadata(t *testing.T, ns string) {
	pod := runningPod(t, ns, "reader")
	text := suite.Exec(t, pod, "reader", "cat", "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/slice/slice/gpu.nvidia.com-metadata.json")
	var metadata metadataapi.DeviceMetadata
	if err := devicemetadata.DecodeMetadataFromStream(json.NewDecoder(strings.NewReader(text)), &metadata); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	attributes := metadata.Requests[0].Devices[0].Attributes
	list := suite.Exec(t, pod, "reader", "nvidia-smi", "-L")
	if uuid := attributes["uuid"].StringValue; uuid == nil || !strings.Contains(list, *uuid) {
		t.Errorf("the file has the UUID %v, nvidia-smi -L\n%s", uuid, list)
	}
	if profile := attributes["profile"].StringValue; profile == nil || *profile != "1g.10gb" {
		t.Errorf("the file has the profile %v", profile)
	}
}

func claimParameters(t *testing.T, ns string) {
	pod := runningPod(t, ns, "reader")
	env := suite.Exec(t, pod, "reader", "env")
	for _, want := range []string{`SIMGPU_SHARING_GPU_\d=strategy=TimeSlicing,interval=Long\n`, `SIMGPU_SHARING_GPU_\d_MIG_3G40GB_9_\d=strategy=MPS,activeThreadPercentage=50,pinnedDeviceMemoryLimit=10Gi\n`} {
		if !regexp.MustCompile(want).MatchString(env) {
			t.Errorf("no %s in\n%s", want, env)
		}
	}
}

func bindingConditions(t *testing.T, ns string) {
	runningPod(t, ns, "attached")
	claim := claimNamed(t, ns, "attached")
	if result := claim.Status.Allocation.Devices.Results[0]; !slices.Equal(result.BindingConditions, []string{"simgpu.dev/attached"}) {
		t.Fatalf("the scheduler does not wait: %+v", result)
	}
	attached := meta.FindStatusCondition(claim.Status.Devices[0].Conditions, "simgpu.dev/attached")
	if attached == nil || attached.LastTransitionTime.Sub(claim.Status.Allocation.AllocationTimestamp.Time) < time.Second {
		t.Errorf("attached %+v, allocated at %s", attached, claim.Status.Allocation.AllocationTimestamp)
	}

	pods := suite.Client.CoreV1().Pods(ns)
	suite.Eventually(t, "the scheduler to give up on what cannot be attached", func(ctx context.Context) error {
		events, err := suite.Client.CoreV1().Events(ns).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=failing,reason=FailedScheduling"})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if strings.Contains(e.Message, "binding") {
				return nil
			}
		}
		return fmt.Errorf("events %+v", events.Items)
	})
	if pod, err := pods.Get(t.Context(), "failing", metav1.GetOptions{}); err != nil || pod.Spec.NodeName != "" {
		t.Fatalf("the pod is bound to %q, %v", pod.Spec.NodeName, err)
	}
	suite.Kubectl(t, "-n", ns, "annotate", "resourceclaim", "failing", "simgpu.dev/fail-attach-")
	runningPod(t, ns, "failing")
}
