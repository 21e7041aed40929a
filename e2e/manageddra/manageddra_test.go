// Package manageddra holds the tests of managed DRA, in a cluster with the controller, a node with two A100s that are used as
// a whole, and a node with an H100 that can be partitioned.
package manageddra

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/simgpu/simgpu/e2e/harness"
	"github.com/simgpu/simgpu/manageddra/api"
	"github.com/simgpu/simgpu/placement"
	"github.com/simgpu/simgpu/placement/shadow"
)

// suite is a cluster with two nodes, of which the first has the H100.
var suite *harness.Suite

func TestMain(m *testing.M) {
	harness.Main(m, &suite, harness.Config{Name: "manageddra", Nodes: 2, WithoutChart: true, Images: []string{"epp", "gateway"}})
}

// install the chart as the demos have it.
func install(t *testing.T) {
	t.Helper()
	suite.Kubectl(t, "label", "--overwrite", "node", suite.Cluster.Node(2).Name(), "gpu=a100")
	if err := suite.InstallChart(t.Context(), demoValues(t, "qwen-mig")); err != nil {
		t.Fatal(err)
	}
}

// demoValues are those of the chart that a demo has.
func demoValues(t *testing.T, demo string) map[string]any {
	t.Helper()
	content, err := os.ReadFile(suite.Path("demo/" + demo + "/values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.Unmarshal(content, &values); err != nil {
		t.Fatal(err)
	}
	return values
}

// namespace for services, which are gone before it is.
func namespace(t *testing.T) string {
	t.Helper()
	install(t)
	ns := suite.Namespace(t)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if t.Failed() {
			for _, args := range [][]string{{"-n", ns, "get", "llmisvc,deployments,pods", "-o", "wide"}, {"-n", ns, "describe", "llmisvc"}, {"-n", harness.DriverNamespace, "logs", "deployment/simgpu-managed-dra", "--tail", "40"}} {
				out, err := suite.Command(ctx, "kubectl", args...)
				t.Logf("kubectl %s\n%s%v", strings.Join(args, " "), out, err)
			}
		}
		if _, err := suite.Command(ctx, "kubectl", "-n", ns, "delete", "llmisvc", "--all", "--wait", "--cascade=foreground"); err != nil {
			t.Error(err)
		}
	})
	return ns
}

// service as the API server has it.
func service(ctx context.Context, ns, name string) (*api.LLMInferenceService, error) {
	out, err := suite.Command(ctx, "kubectl", "-n", ns, "get", "llmisvc", name, "-o", "json")
	if err != nil {
		return nil, err
	}
	s := &api.LLMInferenceService{}
	return s, json.Unmarshal([]byte(out), s)
}

// expect waits until a condition of a service has that status and reason, and returns its message.
func expect(t *testing.T, ns, name, condition string, status corev1.ConditionStatus, reason string) string {
	t.Helper()
	var message string
	suite.Eventually(t, fmt.Sprintf("%s of %s to be %s (%s)", condition, name, status, reason), func(ctx context.Context) error {
		s, err := service(ctx, ns, name)
		if err != nil {
			return err
		}
		for _, c := range s.Status.Conditions {
			if c.Type == condition && c.Status == status && c.Reason == reason {
				message = c.Message
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", s.Status.Conditions)
	})
	return message
}

func ready(t *testing.T, ns, name string) {
	t.Helper()
	expect(t, ns, name, api.ConditionReady, corev1.ConditionTrue, "")
}

// apply a manifest, and return what kubectl says, also where it fails.
func apply(t *testing.T, ns, manifest string) (string, error) {
	t.Helper()
	path := t.TempDir() + "/manifest.yaml"
	if err := os.WriteFile(path, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	return suite.Command(t.Context(), "kubectl", "-n", ns, "apply", "-f", path)
}

func annotate(t *testing.T, ns, name string, annotations ...string) {
	t.Helper()
	suite.Kubectl(t, append([]string{"-n", ns, "annotate", "--overwrite", "llmisvc", name}, annotations...)...)
}

func template(ctx context.Context, ns, name string) (*resourceapi.ResourceClaimTemplate, error) {
	return suite.Client.ResourceV1().ResourceClaimTemplates(ns).Get(ctx, name, metav1.GetOptions{})
}

// pods of a service that are not going away, by name.
func pods(ctx context.Context, ns, name string) ([]corev1.Pod, error) {
	list, err := suite.Client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: api.LabelName + "=" + name})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil }), nil
}

// devices that the claims of a namespace have, NODE/DEVICE, sorted.
func devices(ctx context.Context, ns string) ([]string, error) {
	claims, err := suite.Client.ResourceV1().ResourceClaims(ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, claim := range claims.Items {
		if claim.Status.Allocation != nil {
			for _, result := range claim.Status.Allocation.Devices.Results {
				names = append(names, result.Pool+"/"+result.Device)
			}
		}
	}
	slices.Sort(names)
	return names, nil
}

func expectDevices(t *testing.T, ns string, want ...string) {
	t.Helper()
	suite.Eventually(t, fmt.Sprintf("the devices %v to be allocated", want), func(ctx context.Context) error {
		got, err := devices(ctx, ns)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("allocated are %v", got)
		}
		return err
	})
}

// qwen is a service with these annotations, whose values may have several lines.
func qwen(name string, replicas int, annotations map[string]string) string {
	var lines strings.Builder
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		fmt.Fprintf(&lines, "    serving.kserve.io/%s: %q\n", key, annotations[key])
	}
	return fmt.Sprintf(`
apiVersion: serving.kserve.io/v1alpha2
kind: LLMInferenceService
metadata:
  name: %s
  annotations:
%sspec:
  model: {uri: hf://Qwen/Qwen2.5-7B-Instruct, name: Qwen/Qwen2.5-7B-Instruct}
  replicas: %d
  template:
    terminationGracePeriodSeconds: 1
`, name, lines.String(), replicas)
}

const (
	class     = "exp-dra-device-class"
	count     = "exp-dra-device-count"
	selector  = "exp-dra-cel-selector"
	container = "exp-dra-container-name"
)

func profile(name string) string {
	return fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", name)
}

// TestDemos applies the manifests of the demos and looks at what their README files say.
func TestDemos(t *testing.T) {
	h100, a100 := suite.Cluster.Node(1).Name(), suite.Cluster.Node(2).Name()
	for demo, tc := range map[string]struct {
		service string
		devices [][]string // any of these
		sees    string     // nvidia-smi -L in main
		times   int
	}{
		"qwen-minimal":      {"qwen2-7b-instruct-dra-minimal", [][]string{{h100 + "/gpu-0"}, {a100 + "/gpu-0"}}, "GPU ", 1},
		"qwen-multi-device": {"qwen2-7b-instruct-dra-multi-device", [][]string{{a100 + "/gpu-0", a100 + "/gpu-1"}}, "NVIDIA A100-SXM4-40GB", 2},
		"qwen-mig":          {"qwen", [][]string{{h100 + "/gpu-0-mig-3g40gb-9-0", h100 + "/gpu-0-mig-3g40gb-9-4"}}, "MIG 3g.40gb", 1},
	} {
		t.Run(demo, func(t *testing.T) {
			ns := namespace(t)
			suite.Kubectl(t, "-n", ns, "apply", "-f", suite.Path("demo/"+demo+"/manifests"))
			ready(t, ns, tc.service)
			expect(t, ns, tc.service, api.ConditionDevicesAllocated, corev1.ConditionTrue, "Allocated")
			got, err := devices(t.Context(), ns)
			if err != nil || !slices.ContainsFunc(tc.devices, func(want []string) bool { return slices.Equal(got, want) }) {
				t.Errorf("allocated are %v, want one of %v (%v)", got, tc.devices, err)
			}
			list, err := pods(t.Context(), ns, tc.service)
			if err != nil {
				t.Fatal(err)
			}
			for _, pod := range list {
				if smi := suite.Exec(t, &pod, "main", "nvidia-smi", "-L"); strings.Count(smi, tc.sees) != tc.times {
					t.Errorf("nvidia-smi -L shows %q not %d times:\n%s", tc.sees, tc.times, smi)
				}
				for _, c := range pod.Spec.Containers {
					if has := len(c.Resources.Claims) > 0; has != (c.Name == "main") {
						t.Errorf("container %s has the claims %v", c.Name, c.Resources.Claims)
					}
				}
			}
			suite.Exec(t, &list[0], "main", "vllm", "chat", "--url", fmt.Sprintf("http://%s:8000/v1", api.WorkloadServiceName(tc.service)),
				"--model-name", "Qwen/Qwen2.5-7B-Instruct", "--quick", "What is DRA?")
		})
	}
}

// TestTemplate follows a claim template through everything that can happen to it.
func TestTemplate(t *testing.T) {
	ns := namespace(t)
	const name = "qwen"
	rct := api.ClaimTemplateName(name)
	expectTemplate := func(what string, check func(*resourceapi.ResourceClaimTemplate) error) (uid types.UID) {
		t.Helper()
		suite.Eventually(t, what, func(ctx context.Context) error {
			found, err := template(ctx, ns, rct)
			if err != nil {
				return err
			}
			uid = found.UID
			return check(found)
		})
		return uid
	}
	hasProfile := func(want string) func(*resourceapi.ResourceClaimTemplate) error {
		return func(found *resourceapi.ResourceClaimTemplate) error {
			if len(found.OwnerReferences) != 1 || found.OwnerReferences[0].Name != name || !*found.OwnerReferences[0].Controller {
				return fmt.Errorf("owners %+v", found.OwnerReferences)
			}
			if got := found.Spec.Spec.Devices.Requests[0].Exactly.Selectors[0].CEL.Expression; got != profile(want) {
				return fmt.Errorf("selector %s", got)
			}
			return nil
		}
	}
	node := suite.Cluster.Node(1).Name() + "/"
	if out, err := apply(t, ns, qwen(name, 2, map[string]string{class: "mig.nvidia.com", selector: profile("3g.40gb")})); err != nil {
		t.Fatal(out, err)
	}
	ready(t, ns, name)
	expectTemplate("the template", hasProfile("3g.40gb"))
	before, err := pods(t.Context(), ns, name)
	if err != nil {
		t.Fatal(err)
	}

	// Another selector: another template of the same name, new pods, other devices, and none of the old claims is left.
	annotate(t, ns, name, "serving.kserve.io/"+selector+"="+profile("2g.20gb"))
	expectTemplate("the template to be replaced", hasProfile("2g.20gb"))
	suite.Eventually(t, "two devices of the other kind", func(ctx context.Context) error { // which of them depends on whose place is free first
		got, err := devices(ctx, ns)
		if err == nil && (len(got) != 2 || !strings.HasPrefix(got[0], node+"gpu-0-mig-2g20gb-") || !strings.HasPrefix(got[1], node+"gpu-0-mig-2g20gb-")) {
			err = fmt.Errorf("allocated are %v", got)
		}
		return err
	})
	ready(t, ns, name)
	after, err := pods(t.Context(), ns, name)
	if err != nil || len(after) != 2 || slices.ContainsFunc(after, func(p corev1.Pod) bool { return p.Name == before[0].Name || p.Name == before[1].Name }) {
		t.Errorf("pods %v, %v; before there were %s and %s", after, err, before[0].Name, before[1].Name)
	}

	// Deleted or disowned by hand: repaired, and the pods stay.
	uid := expectTemplate("the template", hasProfile("2g.20gb"))
	suite.Kubectl(t, "-n", ns, "delete", "resourceclaimtemplate", rct)
	expectTemplate("the deleted template to be back", hasProfile("2g.20gb"))
	suite.Kubectl(t, "-n", ns, "patch", "resourceclaimtemplate", rct, "--type=json", `-p=[{"op":"remove","path":"/metadata/ownerReferences"}]`)
	if expectTemplate("the template to have its owner back", hasProfile("2g.20gb")) == uid {
		t.Error("it is the first one")
	}
	still, err := pods(t.Context(), ns, name)
	if err != nil || len(still) != 2 || still[0].UID != after[0].UID && still[0].UID != after[1].UID {
		t.Errorf("repairing the template has cost pods: %v, %v", still, err)
	}

	// Stopped, and started again.
	gone := func(what string) {
		t.Helper()
		suite.Eventually(t, what, func(ctx context.Context) error {
			list, err := pods(ctx, ns, name)
			if err == nil && len(list) > 0 {
				err = fmt.Errorf("there are %d pods", len(list))
			}
			if _, missing := template(ctx, ns, rct); err == nil && !apierrors.IsNotFound(missing) {
				err = fmt.Errorf("the template is there: %w", missing)
			}
			return err
		})
	}
	annotate(t, ns, name, api.AnnotationStop+"=true")
	gone("the stopped service to be gone")
	expect(t, ns, name, api.ConditionReady, corev1.ConditionFalse, "Stopped")
	annotate(t, ns, name, api.AnnotationStop+"-")
	ready(t, ns, name)

	// Without the annotation, pods without devices. A model server does not come up without: those before stay, with theirs.
	annotate(t, ns, name, "serving.kserve.io/"+class+"-", "serving.kserve.io/"+selector+"-")
	suite.Eventually(t, "a pod without claims, and no template", func(ctx context.Context) error {
		list, err := pods(ctx, ns, name)
		if err == nil && !slices.ContainsFunc(list, func(p corev1.Pod) bool { return len(p.Spec.ResourceClaims) == 0 }) {
			err = fmt.Errorf("%d pods, all with claims", len(list))
		}
		if _, missing := template(ctx, ns, rct); err == nil && !apierrors.IsNotFound(missing) {
			err = fmt.Errorf("the template is there: %w", missing)
		}
		return err
	})

	suite.Kubectl(t, "-n", ns, "delete", "llmisvc", name)
	gone("what belongs to the deleted service to be gone")
}

// TestForeignTemplate: somebody else's object of that name is left alone, and said to be in the way.
func TestForeignTemplate(t *testing.T) {
	ns := namespace(t)
	foreign := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: "qwen-managed-dra"},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: harness.Claim("", harness.GPU("mine")).Spec},
	}
	made, err := suite.Client.ResourceV1().ResourceClaimTemplates(ns).Create(t.Context(), foreign, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if out, err := apply(t, ns, qwen("qwen", 1, map[string]string{class: "gpu.nvidia.com"})); err != nil {
		t.Fatal(out, err)
	}
	expect(t, ns, "qwen", api.ConditionClaimTemplateReady, corev1.ConditionFalse, "NameTaken")
	if now, err := template(t.Context(), ns, made.Name); err != nil || now.ResourceVersion != made.ResourceVersion {
		t.Errorf("the template was touched: %+v, %v", now, err)
	}
	if list, err := pods(t.Context(), ns, "qwen"); err != nil || len(list) > 0 {
		t.Errorf("there are pods that would get what somebody else's template says: %v, %v", list, err)
	}
	suite.Kubectl(t, "-n", ns, "delete", "resourceclaimtemplate", made.Name)
	ready(t, ns, "qwen")
}

// TestNothingToDoWritesNothing has the controller look at a service again, and at all of them after a restart.
func TestNothingToDoWritesNothing(t *testing.T) {
	ns := namespace(t)
	if out, err := apply(t, ns, qwen("qwen", 1, map[string]string{class: "gpu.nvidia.com"})); err != nil {
		t.Fatal(out, err)
	}
	ready(t, ns, "qwen")
	expect(t, ns, "qwen", api.ConditionDevicesAllocated, corev1.ConditionTrue, "Allocated")
	versions := func() string {
		return suite.Kubectl(t, "-n", ns, "get", "llmisvc,resourceclaimtemplates,deployments,services", "-o", "jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.resourceVersion}{\"\\n\"}{end}")
	}
	before := versions()
	suite.Kubectl(t, "-n", harness.DriverNamespace, "rollout", "restart", "deployment/simgpu-managed-dra")
	suite.Kubectl(t, "-n", harness.DriverNamespace, "rollout", "status", "deployment/simgpu-managed-dra")
	// That it has come by is to be seen at a service that is new.
	if out, err := apply(t, ns, qwen("witness", 1, map[string]string{class: "gpu.nvidia.com"})); err != nil {
		t.Fatal(out, err)
	}
	ready(t, ns, "witness")
	for line := range strings.Lines(before) {
		if !strings.Contains(versions(), line) {
			t.Errorf("was written: %s, now\n%s", line, versions())
		}
	}
}

// TestAdmission: what is wrong is said at once, for both versions.
func TestAdmission(t *testing.T) {
	ns := namespace(t)
	for name, tc := range map[string]struct {
		annotations map[string]string
		says        []string
	}{
		"count without a class": {map[string]string{count: "2"}, []string{"metadata.annotations[serving.kserve.io/exp-dra-device-class]: Required value"}},
		"several": {
			map[string]string{class: "GPU", count: "0", selector: " ", container: "a_b"},
			[]string{"device class must be a DNS subdomain", "must be >= 1", "at least one non-empty CEL expression", "container name must be a DNS label"},
		},
		"more than a claim can have": {map[string]string{class: "gpu.nvidia.com", count: "33"}, []string{"at most 32 devices"}},
		"no such container":          {map[string]string{class: "gpu.nvidia.com", container: "ghost"}, []string{`Invalid value: "ghost": no pod of the service has a container of this name: there are main`}},
		"CEL that does not compile":  {map[string]string{class: "gpu.nvidia.com", selector: "true\ndevice.atributes"}, []string{`expression 2, "device.atributes": compilation failed`, "undefined field"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, version := range []string{"v1alpha2", "v1alpha1"} {
				out, err := apply(t, ns, strings.ReplaceAll(qwen("refused", 1, tc.annotations), "v1alpha2", version))
				for _, want := range tc.says {
					if err == nil || !strings.Contains(err.Error(), want) {
						t.Errorf("%s: kubectl apply: %s, %v; want %q", version, out, err, want)
					}
				}
			}
		})
	}
	t.Run("a class that is not there yet", func(t *testing.T) {
		path := t.TempDir() + "/manifest.yaml"
		if err := os.WriteFile(path, []byte(qwen("warned", 0, map[string]string{class: "nic.example.com"})), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := suite.Command(t.Context(), "kubectl", "-n", ns, "apply", "--warnings-as-errors", "-f", path); err == nil || !strings.Contains(err.Error(), `there is no DeviceClass "nic.example.com"`) {
			t.Errorf("no warning: %v", err)
		}
	})
}

// TestVersions: an object written in one version is the same in the other, with what nobody here knows.
func TestVersions(t *testing.T) {
	ns := namespace(t)
	manifest := strings.Replace(qwen("old", 0, nil), "  replicas:", "  kvCacheOffloading: {tier: [1, {deep: true}]}\n  replicas:", 1)
	manifest = strings.Replace(strings.Replace(manifest, "v1alpha2", "v1alpha1", 1), "name: Qwen/Qwen2.5-7B-Instruct}", "name: Qwen/Qwen2.5-7B-Instruct, criticality: Critical}", 1)
	manifest = strings.Replace(manifest, "  annotations:\n", "", 1)
	if out, err := apply(t, ns, manifest); err != nil {
		t.Fatal(out, err)
	}
	expect(t, ns, "old", api.ConditionPresetsCombined, corev1.ConditionTrue, "")
	specs := map[string]string{}
	for _, version := range []string{"v1alpha1", "v1alpha2"} {
		specs[version] = suite.Kubectl(t, "-n", ns, "get", "llminferenceservices."+version+".serving.kserve.io", "old", "-o", "jsonpath={.apiVersion} {.spec}")
		if want := "serving.kserve.io/" + version + " "; !strings.HasPrefix(specs[version], want) {
			t.Fatalf("%s, want %s", specs[version], want)
		}
		for _, want := range []string{`"criticality":"Critical"`, `"tier":[1,{"deep":true}]`} {
			if !strings.Contains(specs[version], want) {
				t.Errorf("%s has lost %s", specs[version], want)
			}
		}
	}
}

// TestReasons: a pod that waits says why, everywhere where one looks, and the reason goes when the devices come.
func TestReasons(t *testing.T) {
	ns := namespace(t)
	if out, err := apply(t, ns, qwen("first", 2, map[string]string{class: "mig.nvidia.com", selector: profile("3g.40gb")})); err != nil {
		t.Fatal(out, err)
	}
	ready(t, ns, "first")
	if out, err := apply(t, ns, qwen("second", 1, map[string]string{class: "mig.nvidia.com", selector: profile("2g.20gb")})); err != nil {
		t.Fatal(out, err)
	}
	message := expect(t, ns, "second", api.ConditionDevicesAllocated, corev1.ConditionFalse, "DevicesNotAvailable")
	for _, want := range []string{"memory-slice-0 of gpu-0-counter-set: 1 needed, 0 free", "claim " + ns + "/first-kserve-"} {
		if !strings.Contains(message, want) {
			t.Errorf("the condition does not say %q: %s", want, message)
		}
	}
	list, err := pods(t.Context(), ns, "second")
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	claim := *list[0].Status.ResourceClaimStatuses[0].ResourceClaimName
	for _, object := range []string{list[0].Name, claim, "second"} {
		suite.Event(t, ns, "DevicesNotAvailable", object, "memory-slice-0 of gpu-0-counter-set")
	}
	// A cordon changes the reason, and nothing of devices changes with it.
	nodes := []string{suite.Cluster.Node(1).Name(), suite.Cluster.Node(2).Name()}
	uncordon := append([]string{"uncordon"}, nodes...)
	t.Cleanup(func() { _, _ = suite.Command(context.WithoutCancel(t.Context()), "kubectl", uncordon...) })
	for _, tc := range []struct {
		args []string
		want string
	}{{append([]string{"cordon"}, nodes...), "is cordoned"}, {uncordon, "memory-slice-0 of gpu-0-counter-set"}} {
		suite.Kubectl(t, tc.args...)
		suite.Eventually(t, fmt.Sprintf("the condition to say %q", tc.want), func(ctx context.Context) error {
			s, err := service(ctx, ns, "second")
			if err == nil && !slices.ContainsFunc(s.Status.Conditions, func(c api.Condition) bool {
				return c.Type == api.ConditionDevicesAllocated && strings.Contains(c.Message, tc.want)
			}) {
				err = fmt.Errorf("conditions %+v", s.Status.Conditions)
			}
			return err
		})
	}
	suite.Kubectl(t, "-n", ns, "delete", "llmisvc", "first")
	ready(t, ns, "second")
	expect(t, ns, "second", api.ConditionDevicesAllocated, corev1.ConditionTrue, "Allocated")

	annotate(t, ns, "second", "serving.kserve.io/"+selector+"=device.attributes['gpu.nvidia.com'].colour == 'blue'")
	message = expect(t, ns, "second", api.ConditionDevicesAllocated, corev1.ConditionFalse, "ClaimCannotBeMet")
	for _, want := range []string{"selector 1 fails on device", "no such key: colour"} {
		if !strings.Contains(message, want) {
			t.Errorf("the condition does not say %q: %s", want, message)
		}
	}
}

// TestStandsAside where KServe's own controller is installed.
func TestStandsAside(t *testing.T) {
	ns := namespace(t)
	suite.Kubectl(t, "-n", ns, "create", "deployment", "llmisvc-controller-manager", "--image=none", "--replicas=0")
	t.Cleanup(func() {
		_, _ = suite.Command(context.WithoutCancel(t.Context()), "kubectl", "-n", ns, "delete", "deployment", "llmisvc-controller-manager")
	})
	if out, err := apply(t, ns, qwen("qwen", 1, map[string]string{class: "gpu.nvidia.com"})); err != nil {
		t.Fatal(out, err)
	}
	suite.Event(t, ns, "StandingAside", "qwen", "llmisvc-controller-manager")
	if _, err := template(t.Context(), ns, "qwen-managed-dra"); !apierrors.IsNotFound(err) {
		t.Errorf("there is a template: %v", err)
	}
	suite.Kubectl(t, "-n", ns, "delete", "deployment", "llmisvc-controller-manager")
	ready(t, ns, "qwen")
}

// TestPlaceForetells: what shadow resolution says before is what the scheduler does then.
func TestPlaceForetells(t *testing.T) {
	ns := namespace(t)
	snapshot, err := placement.ReadCluster(t.Context(), suite.Client)
	if err != nil {
		t.Fatal(err)
	}
	manifest := qwen("foretold", 3, map[string]string{class: "mig.nvidia.com", selector: profile("2g.20gb")})
	path := t.TempDir() + "/manifest.yaml"
	if err := os.WriteFile(path, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	units, _, err := shadow.ReadUnits(snapshot, ns, path)
	if err != nil {
		t.Fatal(err)
	}
	report, err := shadow.Resolve(t.Context(), snapshot, units, shadow.AsListed)
	if err != nil {
		t.Fatal(err)
	}
	var foretold []string
	for _, result := range report.Results {
		for _, device := range result.Devices {
			_, name, _ := strings.Cut(device, "=")
			foretold = append(foretold, result.Node+"/"+name)
		}
	}
	if len(foretold) != 3 {
		t.Fatalf("%+v", report.Results)
	}
	slices.Sort(foretold)
	if out, err := apply(t, ns, manifest); err != nil {
		t.Fatal(out, err)
	}
	expectDevices(t, ns, foretold...)
}

// TestPolicy applies the manifests of demo/policy: what is not approved is refused, with what is.
func TestPolicy(t *testing.T) {
	if err := suite.InstallChart(t.Context(), demoValues(t, "policy")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := suite.Command(context.WithoutCancel(t.Context()), "kubectl", "delete", "--wait", "-f", suite.Path("demo/policy/manifests")); err != nil {
			t.Error(err)
		}
	})
	suite.Kubectl(t, "apply", "-f", suite.Path("demo/policy/manifests"))
	for file, want := range map[string]string{
		"class.yaml":     "claims in namespace tenant-a may ask for devices of these classes: mig.nvidia.com",
		"attribute.yaml": "has to match one of these regular expressions: ^device",
		"quota.yaml":     "exceeded quota: devices",
	} {
		// The quota counts once its controller has seen the namespace; a policy applies a moment after it is made.
		suite.Eventually(t, file+" to be refused", func(ctx context.Context) error {
			out, err := suite.Command(ctx, "kubectl", "apply", "--dry-run=server", "-f", suite.Path("demo/policy/denied/"+file))
			if err == nil || !strings.Contains(err.Error(), want) {
				return fmt.Errorf("%s%w", out, err)
			}
			return nil
		})
	}
}
