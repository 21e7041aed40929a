package chart

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common/util"
	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	helmutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"helm.sh/helm/v4/pkg/engine"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/dynamic-resource-allocation/cel"
	podsecurity "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

func TestDefaultsRenderEverythingOnce(t *testing.T) {
	want := []string{
		"ClusterRole/simgpu-in-use",
		"ClusterRole/simgpu-kubelet-plugin",
		"ClusterRoleBinding/simgpu-in-use",
		"ClusterRoleBinding/simgpu-kubelet-plugin",
		"ConfigMap/simgpu-inventory",
		"DaemonSet/simgpu-kubelet-plugin",
		"DeviceClass/gpu.nvidia.com",
		"DeviceClass/mig.nvidia.com",
		"Job/simgpu-in-use",
		"ResourceQuota/simgpu-critical-pods",
		"ServiceAccount/simgpu-in-use",
		"ServiceAccount/simgpu-kubelet-plugin",
		"ValidatingAdmissionPolicy/simgpu-kubelet-plugin-own-node",
		"ValidatingAdmissionPolicyBinding/simgpu-kubelet-plugin-own-node",
	}
	if got := slices.Sorted(maps.Keys(render(t, ""))); !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

func TestLintHasNothingToSay(t *testing.T) {
	for _, message := range lint.RunAll(chartDir, nil, namespace).Messages {
		if message.Severity >= support.WarningSev {
			t.Error(message)
		}
	}
}

func TestKubernetesVersions(t *testing.T) {
	constraint := loadChart(t).Metadata.KubeVersion
	for version, want := range map[string]bool{
		"v1.33.9": false, "v1.34.0": true, "v1.34.1-gke.1829001": true, "v1.35.4": true, "v1.37.2": true, "v1.38.0-alpha.1": true,
	} {
		if got := helmutil.IsCompatibleRange(constraint, version); got != want {
			t.Errorf("%s accepts %s: got %t, want %t", constraint, version, got, want)
		}
	}
}

// The driver may be no more than a reader and writer of three folders, and a reader of a fourth. Pod security's own checks say what it needs beyond
// each level: the folders, and root, who owns them.
func TestPodIsNotPrivileged(t *testing.T) {
	pod := daemonSet(t, render(t, "")).Spec.Template
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for level, want := range map[podsecurity.Level][]string{
		podsecurity.LevelBaseline:   {"hostPath volumes"},
		podsecurity.LevelRestricted: {"restricted volume types", "runAsNonRoot != true", "runAsUser=0"},
	} {
		var refused []string
		for _, result := range evaluator.EvaluatePod(podsecurity.LevelVersion{Level: level, Version: podsecurity.LatestVersion()}, &pod.ObjectMeta, &pod.Spec) {
			if !result.Allowed {
				refused = append(refused, result.ForbiddenReason)
			}
		}
		slices.Sort(refused)
		if !slices.Equal(refused, want) {
			t.Errorf("pod security refuses %q at level %s, want %q", refused, level, want)
		}
	}

	container := onlyContainer(t, pod.Spec)
	if !ptr.Deref(container.SecurityContext.ReadOnlyRootFilesystem, false) {
		t.Error("the root filesystem is writable")
	}
	if !ptr.Deref(pod.Spec.AutomountServiceAccountToken, false) {
		t.Error("the pod gets no token")
	}
	if pod.Spec.PriorityClassName != "system-node-critical" {
		t.Errorf("priority class %q", pod.Spec.PriorityClassName)
	}
}

func TestHostFolders(t *testing.T) {
	for name, test := range map[string]struct {
		values                       string
		plugin, registrar, cdi, pods string
	}{
		"default": {
			plugin:    "/var/lib/kubelet/plugins/gpu.nvidia.com",
			registrar: "/var/lib/kubelet/plugins_registry",
			cdi:       "/var/run/cdi",
			pods:      "/var/lib/kubelet/pod-resources",
		},
		"another kubelet": {
			values:    "{kubeletRoot: /var/snap/microk8s/common/var/lib/kubelet, cdiDir: /etc/cdi}",
			plugin:    "/var/snap/microk8s/common/var/lib/kubelet/plugins/gpu.nvidia.com",
			registrar: "/var/snap/microk8s/common/var/lib/kubelet/plugins_registry",
			cdi:       "/etc/cdi",
			pods:      "/var/snap/microk8s/common/var/lib/kubelet/pod-resources",
		},
		"another driver name": {
			values:    "driverName: gpu.simgpu.example",
			plugin:    "/var/lib/kubelet/plugins/gpu.simgpu.example",
			registrar: "/var/lib/kubelet/plugins_registry",
			cdi:       "/var/run/cdi",
			pods:      "/var/lib/kubelet/pod-resources",
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := daemonSet(t, render(t, test.values)).Spec.Template.Spec
			container := onlyContainer(t, pod)
			got := map[string]corev1.HostPathType{}
			for _, volume := range pod.Volumes {
				if volume.HostPath == nil {
					continue
				}
				got[volume.HostPath.Path] = *volume.HostPath.Type
				mounted := slices.ContainsFunc(container.VolumeMounts, func(mount corev1.VolumeMount) bool {
					return mount.Name == volume.Name && mount.MountPath == volume.HostPath.Path
				})
				if !mounted {
					t.Errorf("%s is not mounted at the same path inside", volume.HostPath.Path)
				}
			}
			want := map[string]corev1.HostPathType{
				test.plugin:    corev1.HostPathDirectoryOrCreate,
				test.registrar: corev1.HostPathDirectory,
				test.cdi:       corev1.HostPathDirectoryOrCreate,
				test.pods:      corev1.HostPathDirectoryOrCreate,
			}
			if !maps.Equal(got, want) {
				t.Errorf("host folders:\ngot  %v\nwant %v", got, want)
			}
			root := strings.TrimSuffix(test.registrar, "/plugins_registry")
			for _, arg := range []string{
				"--kubelet-plugins-dir=" + root + "/plugins",
				"--kubelet-registrar-dir=" + test.registrar,
				"--cdi-dir=" + test.cdi,
				"--pod-resources-socket=" + test.pods + "/kubelet.sock",
			} {
				if !slices.Contains(container.Args, arg) {
					t.Errorf("%s is missing in %v", arg, container.Args)
				}
			}
			if got := env(container, "SIMGPU_DIR").Value; got != test.plugin {
				t.Errorf("SIMGPU_DIR is %q, want %q", got, test.plugin)
			}
		})
	}
}

func TestArguments(t *testing.T) {
	container := onlyContainer(t, daemonSet(t, render(t, "")).Spec.Template.Spec)
	want := []string{
		"--driver-name=gpu.nvidia.com",
		"--inventory=/etc/simgpu/inventory.yaml",
		"--kubelet-plugins-dir=/var/lib/kubelet/plugins",
		"--kubelet-registrar-dir=/var/lib/kubelet/plugins_registry",
		"--cdi-dir=/var/run/cdi",
		"--http-endpoint=:8080",
		"--dcgm-endpoint=:9400",
		"--pod-resources-socket=/var/lib/kubelet/pod-resources/kubelet.sock",
		"--device-plugin-resource=nvidia.com/gpu",
		"--device-status=true",
		"--device-order=vendor",
		"--device-order-interval=1s",
		"--force-beside-real-gpu=false",
		"--logging-format=text",
		"--v=2",
	}
	if !slices.Equal(container.Args, want) {
		t.Errorf("got  %v\nwant %v", container.Args, want)
	}
	node := env(container, "NODE_NAME")
	if node.ValueFrom == nil || node.ValueFrom.FieldRef.FieldPath != "spec.nodeName" {
		t.Errorf("NODE_NAME is %v", node)
	}
}

// The driver's own parser has to know every argument that the chart can render.
func TestDriverKnowsTheArguments(t *testing.T) {
	for _, values := range []string{"", "{logFormat: json, logVerbosity: 6, deviceOrder: adaptive, deviceOrderInterval: 500ms, forceBesideRealGPU: true}"} {
		args := onlyContainer(t, daemonSet(t, render(t, values)).Spec.Template.Spec).Args
		driver := exec.CommandContext(t.Context(), "go", slices.Concat([]string{"run", "./cmd/simgpu-kubelet-plugin"}, args, []string{"--help"})...)
		driver.Dir = "../.."
		driver.Env = append(os.Environ(), "CGO_ENABLED=0") // as the images are built, so that the build is cached
		if out, err := driver.CombinedOutput(); err != nil || !strings.Contains(string(out), "Usage:") {
			t.Errorf("%v %v: %v\n%s", driver.Args, values, err, out)
		}
	}
}

func TestProbesUseTheNamedPort(t *testing.T) {
	container := onlyContainer(t, daemonSet(t, render(t, "http: {port: 9091}")).Spec.Template.Spec)
	if len(container.Ports) != 2 || container.Ports[0].Name != "http" || container.Ports[0].ContainerPort != 9091 {
		t.Fatalf("ports %v", container.Ports)
	}
	if !slices.Contains(container.Args, "--http-endpoint=:9091") {
		t.Errorf("the driver listens elsewhere: %v", container.Args)
	}
	for path, probe := range map[string]*corev1.Probe{"/healthz": container.LivenessProbe, "/readyz": container.ReadinessProbe} {
		if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Path != path || probe.HTTPGet.Port.StrVal != "http" {
			t.Errorf("probe for %s: %v", path, probe)
		}
	}
}

func TestSelectorIsStableAcrossVersions(t *testing.T) {
	set := daemonSet(t, render(t, "podLabels: {team: ml}"))
	want := map[string]string{
		"app.kubernetes.io/name":      "simgpu",
		"app.kubernetes.io/instance":  "simgpu",
		"app.kubernetes.io/component": "kubelet-plugin",
	}
	if !maps.Equal(set.Spec.Selector.MatchLabels, want) {
		t.Errorf("selector %v, want %v", set.Spec.Selector.MatchLabels, want)
	}
	for key, value := range want {
		if set.Spec.Template.Labels[key] != value {
			t.Errorf("the pods lack %s=%s", key, value)
		}
	}
}

func TestRBACIsExact(t *testing.T) {
	rendered := render(t, "")
	want := []rbacv1.PolicyRule{
		{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims"}, Verbs: []string{"get"}},
		{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims/status"}, Verbs: []string{"patch"}},
		{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims/driver"}, Verbs: []string{"associated-node:patch"}, ResourceNames: []string{"gpu.nvidia.com"}},
		{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceslices"}, Verbs: []string{"list", "watch", "create", "update", "delete"}},
		{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch"}},
	}
	if got := get[*rbacv1.ClusterRole](t, rendered, "simgpu-kubelet-plugin").Rules; !reflect.DeepEqual(got, want) {
		t.Errorf("rules:\ngot  %v\nwant %v", got, want)
	}
	binding := get[*rbacv1.ClusterRoleBinding](t, rendered, "simgpu-kubelet-plugin")
	if want := []rbacv1.Subject{{Kind: "ServiceAccount", Name: "simgpu-kubelet-plugin", Namespace: namespace}}; !reflect.DeepEqual(binding.Subjects, want) {
		t.Errorf("subjects %v, want %v", binding.Subjects, want)
	}
	if want := (rbacv1.RoleRef{APIGroup: "rbac.authorization.k8s.io", Kind: "ClusterRole", Name: "simgpu-kubelet-plugin"}); binding.RoleRef != want {
		t.Errorf("role %v, want %v", binding.RoleRef, want)
	}
}

// The job that looks for users before an uninstallation may read claims and nothing else, and meets the strictest level of
// Pod Security, since whoever enforces that must be able to uninstall.
func TestUninstallHook(t *testing.T) {
	rendered := render(t, "")
	want := []rbacv1.PolicyRule{{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims"}, Verbs: []string{"list"}}}
	if got := get[*rbacv1.ClusterRole](t, rendered, "simgpu-in-use").Rules; !reflect.DeepEqual(got, want) {
		t.Errorf("rules:\ngot  %v\nwant %v", got, want)
	}
	job := get[*batchv1.Job](t, rendered, "simgpu-in-use")
	for name, object := range map[string]metav1.Object{
		"job":     job,
		"account": get[*corev1.ServiceAccount](t, rendered, "simgpu-in-use"),
		"role":    get[*rbacv1.ClusterRole](t, rendered, "simgpu-in-use"),
		"binding": get[*rbacv1.ClusterRoleBinding](t, rendered, "simgpu-in-use"),
	} {
		if got := object.GetAnnotations()["helm.sh/hook"]; got != "pre-delete" {
			t.Errorf("%s is a hook of %q", name, got)
		}
	}
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	level := podsecurity.LevelVersion{Level: podsecurity.LevelRestricted, Version: podsecurity.LatestVersion()}
	for _, result := range evaluator.EvaluatePod(level, &job.Spec.Template.ObjectMeta, &job.Spec.Template.Spec) {
		if !result.Allowed {
			t.Errorf("%s: %s", result.ForbiddenReason, result.ForbiddenDetail)
		}
	}
	// The DaemonSet must not take its pods for its own.
	if selector := labels.SelectorFromSet(daemonSet(t, rendered).Spec.Selector.MatchLabels); selector.Matches(labels.Set(job.Spec.Template.Labels)) {
		t.Errorf("%s selects %v", selector, job.Spec.Template.Labels)
	}
}

// A ServiceAccount of one's own has to appear everywhere that the chart's would: a policy for another account protects nothing.
func TestServiceAccountOfOnesOwn(t *testing.T) {
	rendered := render(t, "serviceAccount: {create: false, name: mine}")
	if _, made := rendered["ServiceAccount/mine"]; made {
		t.Error("the account is created although serviceAccount.create is false")
	}
	if got := daemonSet(t, rendered).Spec.Template.Spec.ServiceAccountName; got != "mine" {
		t.Errorf("the pods run as %q", got)
	}
	if got := get[*rbacv1.ClusterRoleBinding](t, rendered, "simgpu-kubelet-plugin").Subjects[0].Name; got != "mine" {
		t.Errorf("the role is bound to %q", got)
	}
	if got, want := policyOf(t, rendered).Spec.MatchConditions[0].Expression, "request.userInfo.username == 'system:serviceaccount:simgpu:mine'"; got != want {
		t.Errorf("the policy applies where %s, want %s", got, want)
	}
}

func TestDeviceClassesSelectByType(t *testing.T) {
	for name, test := range map[string]struct {
		values, driver, gpu, mig, extended string
	}{
		"default":                      {"", "gpu.nvidia.com", "gpu.nvidia.com", "mig.nvidia.com", "nvidia.com/gpu"},
		"another vendor":               {"driverName: gpu.simgpu.example", "gpu.simgpu.example", "gpu.simgpu.example", "mig.simgpu.example", "simgpu.example/gpu"},
		"a name that has no gpu in it": {"driverName: sim.example", "sim.example", "sim.example", "mig.sim.example", "sim.example/gpu"},
		"claims only":                  {"deviceClasses: {extendedResource: false}", "gpu.nvidia.com", "gpu.nvidia.com", "mig.nvidia.com", ""},
	} {
		t.Run(name, func(t *testing.T) {
			rendered := render(t, test.values)
			whole := get[*resourceapi.DeviceClass](t, rendered, test.gpu)
			partition := get[*resourceapi.DeviceClass](t, rendered, test.mig)
			if got := ptr.Deref(whole.Spec.ExtendedResourceName, ""); got != test.extended {
				t.Errorf("extended resource %q, want %q", got, test.extended)
			}
			if got := partition.Spec.ExtendedResourceName; got != nil {
				t.Errorf("partitions of any size go by one extended resource, %q", *got)
			}
			for _, device := range []struct {
				driver, kind string
				gpu, mig     bool
			}{
				{test.driver, "gpu", true, false},
				{test.driver, "mig", false, true},
				{"gpu.other.example", "gpu", false, false},
			} {
				if got := matches(t, whole, device.driver, device.kind); got != device.gpu {
					t.Errorf("%s takes a %q of %s: got %t, want %t", test.gpu, device.kind, device.driver, got, device.gpu)
				}
				if got := matches(t, partition, device.driver, device.kind); got != device.mig {
					t.Errorf("%s takes a %q of %s: got %t, want %t", test.mig, device.kind, device.driver, got, device.mig)
				}
			}
		})
	}
}

// The vendor's words are data of the catalogue; the chart has to spell them the same way.
func TestDeviceClassesAreThoseOfTheCatalogue(t *testing.T) {
	text, err := os.ReadFile("../../profiles/catalogue/nvidia/vendor.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var vendor struct {
		DriverName    string `json:"driverName"`
		DeviceClasses []struct{ Name, Selector string }
	}
	if err := yaml.Unmarshal(text, &vendor); err != nil {
		t.Fatal(err)
	}
	got, want := map[string]string{}, map[string]string{}
	for _, class := range vendor.DeviceClasses {
		want[class.Name] = strings.ReplaceAll(class.Selector, "{driver}", vendor.DriverName)
	}
	for _, object := range render(t, "") {
		if class, ok := object.(*resourceapi.DeviceClass); ok {
			got[class.Name] = class.Spec.Selectors[0].CEL.Expression
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("DeviceClasses:\ngot  %v\nwant %v", got, want)
	}
}

// matches evaluates a class as the scheduler does.
func matches(t *testing.T, class *resourceapi.DeviceClass, driver, kind string) bool {
	t.Helper()
	for _, selector := range class.Spec.Selectors {
		compiled := cel.GetCompiler(cel.Features{}).CompileCELExpression(selector.CEL.Expression, cel.Options{})
		if compiled.Error != nil {
			t.Fatalf("%s: %v", selector.CEL.Expression, compiled.Error)
		}
		match, _, err := compiled.DeviceMatches(t.Context(), cel.Device{
			Driver:     driver,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": {StringValue: &kind}},
		})
		if err != nil {
			t.Fatalf("%s: %v", selector.CEL.Expression, err)
		}
		if !match {
			return false
		}
	}
	return true
}

func TestInventoryIsPassedOnAsItIs(t *testing.T) {
	rules := `[{name: big, nodeNames: ["big-*"], nodeLabels: {pool: big}, gpus: [{model: a100-80gb, count: 8, migMode: disabled, numaNode: 1, seed: "x"}]}]`
	config := get[*corev1.ConfigMap](t, render(t, "inventory: {rules: "+rules+"}"), "simgpu-inventory")
	var got map[string]any
	if err := yaml.UnmarshalStrict([]byte(config.Data["inventory.yaml"]), &got); err != nil {
		t.Fatalf("%v\n%s", err, config.Data["inventory.yaml"])
	}
	want := parse(t, "{apiVersion: simgpu.dev/v1alpha1, kind: NodeInventory, rules: "+rules+"}")
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	// The driver reads changes by itself; a pod template that followed the ConfigMap would restart it for nothing.
	if before, after := daemonSet(t, render(t, "")), daemonSet(t, render(t, "inventory: {rules: "+rules+"}")); !reflect.DeepEqual(before, after) {
		t.Error("another inventory changes the DaemonSet")
	}
}

func TestNodesWithRealGPUsAreLeftOut(t *testing.T) {
	own := `affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
	  {matchExpressions: [{key: pool, operator: In, values: [sim]}]}, {matchExpressions: [{key: spare, operator: Exists}]}]}}}`
	notReal := corev1.NodeSelectorRequirement{Key: "nvidia.com/gpu.present", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"true"}}
	pool := corev1.NodeSelectorRequirement{Key: "pool", Operator: corev1.NodeSelectorOpIn, Values: []string{"sim"}}
	spare := corev1.NodeSelectorRequirement{Key: "spare", Operator: corev1.NodeSelectorOpExists}
	for name, test := range map[string]struct {
		values string
		want   [][]corev1.NodeSelectorRequirement // terms
	}{
		"by default":                    {"", [][]corev1.NodeSelectorRequirement{{notReal}}},
		"in every term of one's own":    {own, [][]corev1.NodeSelectorRequirement{{pool, notReal}, {spare, notReal}}},
		"beside other affinities":       {"affinity: {podAffinity: {}, nodeAffinity: {}}", [][]corev1.NodeSelectorRequirement{{notReal}}},
		"unless told otherwise":         {"forceBesideRealGPU: true", nil},
		"one's own terms alone, forced": {"forceBesideRealGPU: true\n" + own, [][]corev1.NodeSelectorRequirement{{pool}, {spare}}},
	} {
		t.Run(name, func(t *testing.T) {
			pod := daemonSet(t, render(t, test.values)).Spec.Template.Spec
			var got [][]corev1.NodeSelectorRequirement
			if pod.Affinity != nil {
				for _, term := range pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
					got = append(got, term.MatchExpressions)
				}
			}
			if !reflect.DeepEqual(got, test.want) {
				t.Errorf("node selector terms:\ngot  %v\nwant %v", got, test.want)
			}
			force := "--force-beside-real-gpu=" + map[bool]string{true: "true", false: "false"}[strings.Contains(test.values, "forceBesideRealGPU: true")]
			if args := onlyContainer(t, pod).Args; !slices.Contains(args, force) {
				t.Errorf("%s is missing in %v", force, args)
			}
		})
	}
}

func TestQuotaForCriticalPods(t *testing.T) {
	for name, test := range map[string]struct {
		namespace, values string
		class             string // "": no quota
	}{
		"in a namespace of its own": {"simgpu", "", "system-node-critical"},
		"the other critical class":  {"simgpu", "priorityClassName: system-cluster-critical", "system-cluster-critical"},
		"in kube-system":            {"kube-system", "", ""},
		"another class":             {"simgpu", "priorityClassName: mine", ""},
		"no class":                  {"simgpu", `priorityClassName: ""`, ""},
		"switched off":              {"simgpu", "resourceQuota: {create: false}", ""},
	} {
		t.Run(name, func(t *testing.T) {
			rendered := renderIn(t, test.namespace, test.values)
			if _, made := rendered["ResourceQuota/simgpu-critical-pods"]; made != (test.class != "") {
				t.Fatalf("quota rendered: %t", made)
			}
			if test.class == "" {
				return
			}
			quota := get[*corev1.ResourceQuota](t, rendered, "simgpu-critical-pods")
			if pods := quota.Spec.Hard.Pods(); pods.Value() != 10000 {
				t.Errorf("%v pods", pods)
			}
			want := []corev1.ScopedResourceSelectorRequirement{{ScopeName: corev1.ResourceQuotaScopePriorityClass, Operator: corev1.ScopeSelectorOpIn, Values: []string{test.class}}}
			if got := quota.Spec.ScopeSelector.MatchExpressions; !reflect.DeepEqual(got, want) {
				t.Errorf("scope %v, want %v", got, want)
			}
		})
	}
}

func TestOpenShift(t *testing.T) {
	rendered := render(t, "openshift: {enabled: true}")
	constraints := get[*unstructured.Unstructured](t, rendered, "simgpu-kubelet-plugin").Object
	if got, want := constraints["users"], []any{"system:serviceaccount:simgpu:simgpu-kubelet-plugin"}; !reflect.DeepEqual(got, want) {
		t.Errorf("users %v, want %v", got, want)
	}
	for _, field := range []string{"allowPrivilegedContainer", "allowPrivilegeEscalation", "allowHostNetwork", "allowHostPID", "allowHostIPC", "allowHostPorts"} {
		if constraints[field] != false {
			t.Errorf("%s is %v", field, constraints[field])
		}
	}
	if got := daemonSet(t, rendered).Spec.Template.Spec.SecurityContext.SELinuxOptions; got == nil || got.Type != "spc_t" {
		t.Errorf("SELinux options %v", got)
	}
}

// optionCases has a value other than the default for every key of values.yaml, and what is then seen in the objects.
var optionCases = map[string]struct {
	values string
	seen   func(t *testing.T, rendered objects) any
	want   any
}{
	"nameOverride": {"nameOverride: gpus", func(t *testing.T, r objects) any {
		return get[*appsv1.DaemonSet](t, r, "simgpu-gpus-kubelet-plugin").Spec.Selector.MatchLabels["app.kubernetes.io/name"]
	}, "gpus"},
	"fullnameOverride": {"fullnameOverride: fake", func(t *testing.T, r objects) any {
		return get[*appsv1.DaemonSet](t, r, "fake-kubelet-plugin").Name
	}, "fake-kubelet-plugin"},
	"image.repository": {"image: {repository: registry.example/simgpu}", func(t *testing.T, r objects) any {
		return container(t, r).Image
	}, "registry.example/simgpu:0.1.0"},
	"image.tag": {"image: {tag: next}", func(t *testing.T, r objects) any {
		return container(t, r).Image
	}, "simgpu/simgpu:next"},
	"image.pullPolicy": {"image: {pullPolicy: Never}", func(t *testing.T, r objects) any {
		return container(t, r).ImagePullPolicy
	}, corev1.PullNever},
	"imagePullSecrets": {"imagePullSecrets: [{name: s}]", func(t *testing.T, r objects) any {
		return pod(t, r).ImagePullSecrets
	}, []corev1.LocalObjectReference{{Name: "s"}}},
	"driverName": {"driverName: gpu.simgpu.example", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--driver-name=gpu.simgpu.example")
	}, true},
	"kubeletRoot": {"kubeletRoot: /k", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--kubelet-plugins-dir=/k/plugins")
	}, true},
	"cdiDir": {"cdiDir: /c", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--cdi-dir=/c")
	}, true},
	"inventory.rules": {"inventory: {rules: [{gpus: []}]}", func(t *testing.T, r objects) any {
		return get[*corev1.ConfigMap](t, r, "simgpu-inventory").Data["inventory.yaml"]
	}, "apiVersion: simgpu.dev/v1alpha1\nkind: NodeInventory\nrules:\n- gpus: []\n"},
	"deviceOrder": {"deviceOrder: packed", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--device-order=packed")
	}, true},
	"deviceOrderInterval": {"deviceOrderInterval: 1m30s", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--device-order-interval=1m30s")
	}, true},
	"forceBesideRealGPU": {"forceBesideRealGPU: true", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--force-beside-real-gpu=true")
	}, true},
	"deviceClasses.create": {"deviceClasses: {create: false}", func(t *testing.T, r objects) any {
		return r["DeviceClass/gpu.nvidia.com"] == nil && r["DeviceClass/mig.nvidia.com"] == nil
	}, true},
	"deviceClasses.extendedResource": {"deviceClasses: {extendedResource: false}", func(t *testing.T, r objects) any {
		return get[*resourceapi.DeviceClass](t, r, "gpu.nvidia.com").Spec.ExtendedResourceName
	}, (*string)(nil)},
	"admissionPolicy.create": {"admissionPolicy: {create: false}", func(t *testing.T, r objects) any {
		return r["ValidatingAdmissionPolicy/simgpu-kubelet-plugin-own-node"] == nil && r["ValidatingAdmissionPolicyBinding/simgpu-kubelet-plugin-own-node"] == nil
	}, true},
	"deviceStatus.enabled": {"deviceStatus: {enabled: false}", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--device-status=false")
	}, true},
	"alpha.partitionTypes": {"alpha: {partitionTypes: true}", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--partition-types")
	}, true},
	"alpha.skipNodeOperations": {`alpha: {skipNodeOperations: ["*"]}`, func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--skip-node-operations=*")
	}, true},
	"attachDelay": {"attachDelay: 5s", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--attach-delay=5s")
	}, true},
	"serviceAccount.create": {"serviceAccount: {create: false, name: x}", func(t *testing.T, r objects) any {
		return r["ServiceAccount/x"] == nil
	}, true},
	"serviceAccount.name": {"serviceAccount: {name: x}", func(t *testing.T, r objects) any {
		return get[*corev1.ServiceAccount](t, r, "x").Name + " " + pod(t, r).ServiceAccountName
	}, "x x"},
	"serviceAccount.annotations": {"serviceAccount: {annotations: {a: b}}", func(t *testing.T, r objects) any {
		return get[*corev1.ServiceAccount](t, r, "simgpu-kubelet-plugin").Annotations
	}, map[string]string{"a": "b"}},
	"resourceQuota.create": {"resourceQuota: {create: false}", func(t *testing.T, r objects) any {
		return r["ResourceQuota/simgpu-critical-pods"] == nil
	}, true},
	"resourceQuota.pods": {"resourceQuota: {pods: 1000000}", func(t *testing.T, r objects) any {
		return get[*corev1.ResourceQuota](t, r, "simgpu-critical-pods").Spec.Hard.Pods().Value()
	}, int64(1000000)},
	"openshift.enabled": {"openshift: {enabled: true}", func(t *testing.T, r objects) any {
		return r["SecurityContextConstraints/simgpu-kubelet-plugin"] != nil
	}, true},
	"logVerbosity": {"logVerbosity: 6", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--v=6")
	}, true},
	"logFormat": {"logFormat: json", func(t *testing.T, r objects) any {
		return slices.Contains(container(t, r).Args, "--logging-format=json")
	}, true},
	"http.port": {"http: {port: 9999}", func(t *testing.T, r objects) any {
		return container(t, r).Ports[0].ContainerPort
	}, int32(9999)},
	"dcgm.enabled": {"dcgm: {enabled: false}", func(t *testing.T, r objects) any {
		return len(container(t, r).Ports)
	}, 1},
	"dcgm.port": {"dcgm: {port: 9999}", func(t *testing.T, r objects) any {
		return container(t, r).Ports[1].ContainerPort
	}, int32(9999)},
	"devicePlugin.enabled": {"devicePlugin: {enabled: true}", func(t *testing.T, r objects) any {
		c := container(t, r)
		return slices.Contains(c.Args, "--device-plugin-dir=/var/lib/kubelet/device-plugins") &&
			slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/var/lib/kubelet/device-plugins" })
	}, true},
	"dcgm.podAttribution": {"dcgm: {podAttribution: false}", func(t *testing.T, r objects) any {
		return strings.Contains(strings.Join(container(t, r).Args, " "), "--pod-resources-socket")
	}, false},
	"serviceMonitor.enabled": {"serviceMonitor: {enabled: true}", func(t *testing.T, r objects) any {
		return r["ServiceMonitor/simgpu-kubelet-plugin"] != nil
	}, true},
	"serviceMonitor.labels": {"serviceMonitor: {enabled: true, labels: {release: prometheus}}", func(t *testing.T, r objects) any {
		return get[*unstructured.Unstructured](t, r, "simgpu-kubelet-plugin").GetLabels()["release"]
	}, "prometheus"},
	"serviceMonitor.interval": {"serviceMonitor: {enabled: true, interval: 15s}", func(t *testing.T, r objects) any {
		return endpoints(t, r)[1]["interval"]
	}, "15s"},
	"serviceMonitor.honorLabels": {"serviceMonitor: {enabled: true, honorLabels: true}", func(t *testing.T, r objects) any {
		return endpoints(t, r)[1]["honorLabels"]
	}, true},
	"grafanaDashboard.enabled": {"grafanaDashboard: {enabled: true}", func(t *testing.T, r objects) any {
		return r["ConfigMap/simgpu-dashboard"] != nil
	}, true},
	"grafanaDashboard.labels": {"grafanaDashboard: {enabled: true, labels: {team: ml}}", func(t *testing.T, r objects) any {
		return get[*corev1.ConfigMap](t, r, "simgpu-dashboard").Labels["team"]
	}, "ml"},
	"grafanaDashboard.annotations": {"grafanaDashboard: {enabled: true, annotations: {grafana_folder: GPUs}}", func(t *testing.T, r objects) any {
		return get[*corev1.ConfigMap](t, r, "simgpu-dashboard").Annotations["grafana_folder"]
	}, "GPUs"},
	"claimPolicy.enabled": {"claimPolicy: {enabled: true}", func(t *testing.T, r objects) any {
		return r["ValidatingAdmissionPolicyBinding/simgpu-claims-resourceclaims"] != nil && r["ValidatingAdmissionPolicyBinding/simgpu-claims-resourceclaimtemplates"] != nil
	}, true},
	"claimPolicy.namespaceSelector": {"claimPolicy: {enabled: true, namespaceSelector: {matchLabels: {a: b}}}", func(t *testing.T, r objects) any {
		return claimPolicy(t, r).MatchConstraints.NamespaceSelector.MatchLabels["a"]
	}, "b"},
	"claimPolicy.deviceClasses": {"claimPolicy: {enabled: true, deviceClasses: [a, b]}", func(t *testing.T, r objects) any {
		return claimPolicy(t, r).Variables[0].Expression
	}, `["a","b"]`},
	"claimPolicy.selectors": {`claimPolicy: {enabled: true, selectors: ["^a\\.b == 'c'$"]}`, func(t *testing.T, r objects) any {
		return claimPolicy(t, r).Variables[2].Expression
	}, `["^a\\.b == \u0027c\u0027$"]`},
	"managedDRA.enabled": {"managedDRA: {enabled: true}", func(t *testing.T, r objects) any {
		return managedDRA(t, r).Args
	}, []string{"--model-server-image=vllm/vllm-openai:v0.19.1", "--webhook=simgpu-managed-dra", "-v=2"}},
	"managedDRA.crds.create": {"managedDRA: {enabled: true, crds: {create: false}}", func(t *testing.T, r objects) any {
		return r["CustomResourceDefinition/llminferenceservices.serving.kserve.io"] == nil
	}, true},
	"managedDRA.replicas": {"managedDRA: {enabled: true, replicas: 3}", func(t *testing.T, r objects) any {
		return *get[*appsv1.Deployment](t, r, "simgpu-managed-dra").Spec.Replicas
	}, int32(3)},
	"managedDRA.modelServerImage": {"managedDRA: {enabled: true, modelServerImage: mine}", func(t *testing.T, r objects) any {
		return managedDRA(t, r).Args[0]
	}, "--model-server-image=mine"},
	"managedDRA.webhook.enabled": {"managedDRA: {enabled: true, webhook: {enabled: false}}", func(t *testing.T, r objects) any {
		return r["ValidatingWebhookConfiguration/simgpu-managed-dra"] == nil && r["Service/simgpu-managed-dra"] == nil && len(managedDRA(t, r).Args) == 2
	}, true},
	"managedDRA.webhook.failurePolicy": {"managedDRA: {enabled: true, webhook: {failurePolicy: Ignore}}", func(t *testing.T, r objects) any {
		return string(*get[*admissionregistrationv1.ValidatingWebhookConfiguration](t, r, "simgpu-managed-dra").Webhooks[0].FailurePolicy)
	}, "Ignore"},
	"managedDRA.resources.requests.cpu": {"managedDRA: {enabled: true, resources: {requests: {cpu: 1}}}", func(t *testing.T, r objects) any {
		return managedDRA(t, r).Resources.Requests[corev1.ResourceCPU]
	}, resource.MustParse("1")},
	"managedDRA.resources.requests.memory": {"managedDRA: {enabled: true, resources: {requests: {memory: 1Gi}}}", func(t *testing.T, r objects) any {
		return managedDRA(t, r).Resources.Requests[corev1.ResourceMemory]
	}, resource.MustParse("1Gi")},
	"managedDRA.resources.limits.memory": {"managedDRA: {enabled: true, resources: {limits: {memory: null}}}", func(t *testing.T, r objects) any {
		return len(managedDRA(t, r).Resources.Limits)
	}, 0},
	"uninstall.refuseWhileInUse": {"uninstall: {refuseWhileInUse: false}", func(t *testing.T, r objects) any {
		return r["Job/simgpu-in-use"] == nil && r["ClusterRole/simgpu-in-use"] == nil
	}, true},
	"updateStrategy.maxSurge": {"updateStrategy: {maxSurge: 10%}", func(t *testing.T, r objects) any {
		return daemonSet(t, r).Spec.UpdateStrategy.RollingUpdate.MaxSurge.String()
	}, "10%"},
	"updateStrategy.maxUnavailable": {"updateStrategy: {maxSurge: 0, maxUnavailable: 10%}", func(t *testing.T, r objects) any {
		return daemonSet(t, r).Spec.UpdateStrategy.RollingUpdate.MaxUnavailable.String()
	}, "10%"},
	"priorityClassName": {"priorityClassName: mine", func(t *testing.T, r objects) any {
		return pod(t, r).PriorityClassName
	}, "mine"},
	"resources.requests.cpu": {"resources: {requests: {cpu: 1}}", func(t *testing.T, r objects) any {
		return container(t, r).Resources.Requests[corev1.ResourceCPU]
	}, resource.MustParse("1")},
	"resources.requests.memory": {"resources: {requests: {memory: 1Gi}}", func(t *testing.T, r objects) any {
		return container(t, r).Resources.Requests[corev1.ResourceMemory]
	}, resource.MustParse("1Gi")},
	"resources.limits.memory": {"resources: {limits: {memory: null}}", func(t *testing.T, r objects) any {
		return len(container(t, r).Resources.Limits)
	}, 0},
	"nodeSelector": {"nodeSelector: {a: b}", func(t *testing.T, r objects) any {
		return pod(t, r).NodeSelector
	}, map[string]string{"a": "b"}},
	"affinity": {"affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: zone}]}}", func(t *testing.T, r objects) any {
		return pod(t, r).Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[0].TopologyKey
	}, "zone"},
	"tolerations": {"tolerations: [{operator: Exists}]", func(t *testing.T, r objects) any {
		return pod(t, r).Tolerations
	}, []corev1.Toleration{{Operator: corev1.TolerationOpExists}}},
	"podAnnotations": {"podAnnotations: {a: b}", func(t *testing.T, r objects) any {
		return daemonSet(t, r).Spec.Template.Annotations
	}, map[string]string{"a": "b"}},
	"podLabels": {"podLabels: {a: b}", func(t *testing.T, r objects) any {
		return daemonSet(t, r).Spec.Template.Labels["a"]
	}, "b"},
}

func TestEveryOptionHasAnEffect(t *testing.T) {
	if got, want := slices.Sorted(maps.Keys(optionCases)), valueKeys(t); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
		t.Errorf("options tested and options of values.yaml differ:\ngot  %v\nwant %v", got, want)
	}
	for key, test := range optionCases {
		t.Run(key, func(t *testing.T) {
			if got := test.seen(t, renderIn(t, namespace, test.values, prometheusOperator)); !reflect.DeepEqual(got, test.want) {
				t.Errorf("with %s: got %v, want %v", test.values, got, test.want)
			}
		})
	}
}

func TestBadValuesAreRefused(t *testing.T) {
	for name, test := range map[string]struct {
		values string
		want   []string // parts of the message
	}{
		"unknown key":                 {"drivername: x", []string{"additional properties 'drivername' not allowed"}},
		"unknown key below":           {"image: {registry: x}", []string{"/image", "additional properties 'registry' not allowed"}},
		"tag is a number":             {"image: {tag: 1.0}", []string{"/image/tag", "want string"}},
		"unknown pull policy":         {"image: {pullPolicy: Sometimes}", []string{"/image/pullPolicy", "'IfNotPresent'"}},
		"driver name in upper case":   {"driverName: GPU.nvidia.com", []string{"/driverName", "does not match pattern"}},
		"driver name too long":        {"driverName: " + strings.Repeat("a", 64), []string{"/driverName", "63"}},
		"relative kubelet root":       {"kubeletRoot: var/lib/kubelet", []string{"/kubeletRoot", "does not match pattern"}},
		"kubelet root ends in /":      {"kubeletRoot: /var/lib/kubelet/", []string{"/kubeletRoot", "does not match pattern"}},
		"kubelet root climbs":         {"kubeletRoot: /var/lib/../kubelet", []string{"/kubeletRoot", "does not match pattern"}},
		"no inventory":                {"inventory: {rules: null}", []string{"/inventory", "missing property 'rules'"}},
		"inventory without rules":     {"inventory: {rules: []}", []string{"/inventory/rules", "minItems"}},
		"malformed PCIe root":         {"inventory: {rules: [{gpus: [{model: h100-sxm5-80gb, pcieRoot: \"0000:40\"}]}]}", []string{"/inventory/rules/0/gpus/0/pcieRoot"}},
		"unreachable rule":            {"inventory: {rules: [{gpus: []}, {nodeNames: [a], gpus: []}]}", []string{"inventory.rules[1] is never reached: inventory.rules[0] has neither", "Put that rule last"}},
		"rules of one name":           {"inventory: {rules: [{name: a, nodeNames: [a], gpus: []}, {name: a, gpus: []}]}", []string{"inventory.rules[0] and inventory.rules[1] have the same name \"a\"", "Rename one"}},
		"rule without GPUs":           {"inventory: {rules: [{name: a}]}", []string{"/inventory/rules/0", "missing property 'gpus'"}},
		"GPUs without a model":        {"inventory: {rules: [{gpus: [{count: 1}]}]}", []string{"/inventory/rules/0/gpus/0", "missing property 'model'"}},
		"negative count":              {"inventory: {rules: [{gpus: [{model: h100-sxm5-80gb, count: -1}]}]}", []string{"/inventory/rules/0/gpus/0/count", "got -1, want 0"}},
		"partition without profile":   {"inventory: {rules: [{gpus: [{model: h100-sxm5-80gb, migMode: static, partitions: [{start: 4}]}]}]}", []string{"/inventory/rules/0/gpus/0/partitions/0", "missing property 'profile'"}},
		"unknown MIG mode":            {"inventory: {rules: [{gpus: [{model: h100-sxm5-80gb, migMode: always}]}]}", []string{"/inventory/rules/0/gpus/0/migMode", "'dynamic'"}},
		"unknown GPU field":           {"inventory: {rules: [{gpus: [{model: h100-sxm5-80gb, memory: 80}]}]}", []string{"/inventory/rules/0/gpus/0", "additional properties 'memory' not allowed"}},
		"unknown order":               {"deviceOrder: best", []string{"/deviceOrder", "'packed'"}},
		"interval without a unit":     {"deviceOrderInterval: '30'", []string{"/deviceOrderInterval", "pattern"}},
		"interval of nothing":         {"deviceOrderInterval: 0s", []string{"/deviceOrderInterval", "pattern"}},
		"privileged port":             {"http: {port: 80}", []string{"/http/port", "want 1,024"}},
		"no interval":                 {"serviceMonitor: {interval: 30}", []string{"/serviceMonitor/interval", "want string"}},
		"two endpoints on one port":   {"http: {port: 9400}", []string{"dcgm.port and http.port are both 9400", "another port"}},
		"no Prometheus Operator":      {"serviceMonitor: {enabled: true}", []string{"does not serve " + prometheusOperator, "--api-versions"}},
		"verbosity is a word":         {"logVerbosity: debug", []string{"/logVerbosity", "want integer"}},
		"unknown log format":          {"logFormat: xml", []string{"/logFormat", "'json'"}},
		"no pod may be updated":       {"updateStrategy: {maxSurge: 0}", []string{"/updateStrategy", "oneOf"}},
		"two kinds of update":         {"updateStrategy: {maxUnavailable: 1}", []string{"/updateStrategy", "oneOf"}},
		"no quantity":                 {"resources: {limits: {memory: lots}}", []string{"/resources/limits/memory"}},
		"claims of the driver itself": {"resources: {claims: []}", []string{"/resources", "additional properties 'claims' not allowed"}},
		"node label is no string":     {"nodeSelector: {gpu: true}", []string{"/nodeSelector/gpu", "want string"}},
		"unknown toleration field":    {"tolerations: [{keys: a}]", []string{"/tolerations/0", "additional properties 'keys' not allowed"}},
		"the default account": {"serviceAccount: {create: false}",
			[]string{"serviceAccount.name is empty", "Set serviceAccount.name"}},
		"sockets with too long a path": {"kubeletRoot: /var/snap/microk8s/common/var/lib/kubelet\ndriverName: gpu.a-long-name-for-a-driver.example.com",
			[]string{"kubeletRoot \"/var/snap/microk8s/common/var/lib/kubelet\"", "a path of 123 bytes", "Linux allows 107", "at least 16 bytes shorter"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := templates(t, test.values)
			if err == nil {
				t.Fatalf("%q was accepted", test.values)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the message lacks %q:\n%v", want, err)
				}
			}
		})
	}
}

// clusterWith is a cluster as Helm's lookup sees it while it installs.
type clusterWith struct{ dynamic.Interface }

func (c clusterWith) GetClientFor(apiVersion, kind string) (dynamic.NamespaceableResourceInterface, bool, error) {
	gv, err := schema.ParseGroupVersion(apiVersion)
	return c.Resource(gv.WithResource(strings.ToLower(kind) + "es")), false, err
}

func TestDeviceClassOfAnotherOwner(t *testing.T) {
	class := func(release, namespace string) *resourceapi.DeviceClass {
		class := &resourceapi.DeviceClass{}
		class.APIVersion, class.Kind, class.Name = "resource.k8s.io/v1", "DeviceClass", "mig.nvidia.com"
		if release != "" {
			class.Annotations = map[string]string{"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": namespace}
		}
		return class
	}
	for name, test := range map[string]struct {
		found   []runtime.Object
		values  string
		refused bool
	}{
		"none":                            {nil, "", false},
		"this release's":                  {[]runtime.Object{class("simgpu", "simgpu")}, "", false},
		"the vendor's":                    {[]runtime.Object{class("nvidia-dra-driver", "nvidia")}, "", true},
		"made by hand":                    {[]runtime.Object{class("", "")}, "", true},
		"same release elsewhere":          {[]runtime.Object{class("simgpu", "other")}, "", true},
		"the vendor's, used as it is":     {[]runtime.Object{class("nvidia-dra-driver", "nvidia")}, "deviceClasses: {create: false}", false},
		"the vendor's, another name here": {[]runtime.Object{class("nvidia-dra-driver", "nvidia")}, "driverName: gpu.simgpu.example", false},
	} {
		t.Run(name, func(t *testing.T) {
			chart := loadChart(t)
			values, err := util.ToRenderValues(chart, parse(t, test.values), options(namespace), nil)
			if err != nil {
				t.Fatal(err)
			}
			_, err = engine.RenderWithClientProvider(chart, values, clusterWith{dynamicfake.NewSimpleDynamicClient(scheme.Scheme, test.found...)})
			if refused := err != nil; refused != test.refused {
				t.Fatalf("refused: %t, want %t: %v", refused, test.refused, err)
			}
			if test.refused && (!strings.Contains(err.Error(), `DeviceClass "mig.nvidia.com" exists already`) || !strings.Contains(err.Error(), "deviceClasses.create=false")) {
				t.Errorf("the message does not say what exists and what to do: %v", err)
			}
		})
	}
}

func TestWorksAsADependency(t *testing.T) {
	parent := &helmchart.Chart{Metadata: &helmchart.Metadata{APIVersion: "v2", Name: "platform", Version: "1.0.0"}}
	parent.AddDependency(loadChart(t))
	values, err := util.ToRenderValues(parent, parse(t, "{global: {site: a}, simgpu: {logVerbosity: 4}}"), options(namespace), nil)
	if err != nil {
		t.Fatal(err)
	}
	files, err := engine.Render(parent, values)
	if err != nil {
		t.Fatal(err)
	}
	if text := files["platform/charts/simgpu/templates/daemonset.yaml"]; !strings.Contains(text, "--v=4") {
		t.Errorf("the value of the parent chart is not used:\n%s", text)
	}
}

func TestNotesSayWhatToDoNext(t *testing.T) {
	for name, test := range map[string]struct {
		values      string
		want, avoid []string
	}{
		"default": {"", []string{
			"kubectl -n simgpu rollout status daemonset/simgpu-kubelet-plugin",
			"kubectl get resourceslices --field-selector spec.driver=gpu.nvidia.com",
			"kubectl -n simgpu exec daemonset/simgpu-kubelet-plugin -- nvidia-smi",
			"demo/two-llamas",
		}, []string{"deviceClasses.create=false", "forceBesideRealGPU"}},
		"another driver name": {"driverName: gpu.simgpu.example", []string{
			"spec.driver=gpu.simgpu.example", "deviceClassName gpu.simgpu.example", "mig.simgpu.example",
		}, []string{"demo/two-llamas", "nvidia.com"}},
		"classes of one's own": {"deviceClasses: {create: false}", []string{
			"kubectl get deviceclasses gpu.nvidia.com mig.nvidia.com",
		}, nil},
		"beside real GPUs": {"forceBesideRealGPU: true", []string{"nodes with real GPUs"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			files, err := templates(t, test.values)
			if err != nil {
				t.Fatal(err)
			}
			notes := files["NOTES.txt"]
			for _, want := range test.want {
				if !strings.Contains(notes, want) {
					t.Errorf("the notes lack %q:\n%s", want, notes)
				}
			}
			for _, avoid := range test.avoid {
				if strings.Contains(notes, avoid) {
					t.Errorf("the notes should not speak of %q:\n%s", avoid, notes)
				}
			}
			if long := regexp.MustCompile(`(?m)^.{121,}$`).FindString(notes); long != "" {
				t.Errorf("too long a line for a terminal: %s", long)
			}
		})
	}
}

// A key that the schema does not know cannot be set, and one that only the schema knows does nothing.
func TestSchemaAndValuesHaveTheSameKeys(t *testing.T) {
	var schema struct{ property }
	if err := json.Unmarshal(loadChart(t).Schema, &schema); err != nil {
		t.Fatal(err)
	}
	var got []string
	schema.leaves("", &got)
	// Helm sets it for charts that are a dependency; resources may name any resource.
	got = slices.DeleteFunc(got, func(key string) bool { return key == "global" || strings.Contains(key, "resources.") })
	want := slices.DeleteFunc(valueKeys(t), func(key string) bool { return strings.Contains(key, "resources.") })
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("keys of the schema and of values.yaml:\ngot  %v\nwant %v", got, want)
	}
}

type property struct {
	Properties map[string]property `json:"properties"`
	Additional *json.RawMessage    `json:"additionalProperties"`
}

// leaves appends the keys below p. An object that is passed on to Kubernetes as it is (affinity) is a leaf.
func (p property) leaves(prefix string, keys *[]string) {
	if len(p.Properties) == 0 || prefix == "affinity." {
		*keys = append(*keys, strings.TrimSuffix(prefix, "."))
		return
	}
	for name, below := range p.Properties {
		below.leaves(prefix+name+".", keys)
	}
}

// claimPolicy is that for claims.
func claimPolicy(t *testing.T, rendered objects) admissionregistrationv1.ValidatingAdmissionPolicySpec {
	t.Helper()
	return get[*admissionregistrationv1.ValidatingAdmissionPolicy](t, rendered, "simgpu-claims-resourceclaims").Spec
}

// managedDRA is the controller's container.
func managedDRA(t *testing.T, rendered objects) corev1.Container {
	t.Helper()
	return get[*appsv1.Deployment](t, rendered, "simgpu-managed-dra").Spec.Template.Spec.Containers[0]
}

func daemonSet(t *testing.T, rendered objects) *appsv1.DaemonSet {
	t.Helper()
	return get[*appsv1.DaemonSet](t, rendered, "simgpu-kubelet-plugin")
}

func pod(t *testing.T, rendered objects) corev1.PodSpec {
	t.Helper()
	return daemonSet(t, rendered).Spec.Template.Spec
}

func container(t *testing.T, rendered objects) corev1.Container {
	t.Helper()
	return onlyContainer(t, pod(t, rendered))
}

func onlyContainer(t *testing.T, pod corev1.PodSpec) corev1.Container {
	t.Helper()
	if len(pod.Containers) != 1 || len(pod.InitContainers) != 0 {
		t.Fatalf("%d containers and %d init containers", len(pod.Containers), len(pod.InitContainers))
	}
	return pod.Containers[0]
}

func env(container corev1.Container, name string) corev1.EnvVar {
	for _, variable := range container.Env {
		if variable.Name == name {
			return variable
		}
	}
	return corev1.EnvVar{}
}
