package controller

import (
	"errors"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/simgpu/simgpu/manageddra/annotations"
	"github.com/simgpu/simgpu/manageddra/api"
)

func podOf(containers ...string) *corev1.PodSpec {
	pod := &corev1.PodSpec{}
	for _, name := range containers {
		pod.Containers = append(pod.Containers, corev1.Container{Name: name, Image: "image"})
	}
	return pod
}

func TestInject(t *testing.T) {
	for name, tc := range map[string]struct {
		pod       *corev1.PodSpec
		container string
		want      string // the container that gets the claim, "" for none
	}{
		"the only one":          {podOf("main"), "", "main"},
		"the first by default":  {podOf("sidecar", "main"), "", "sidecar"},
		"the one that is named": {podOf("sidecar", "main"), "main", "main"},
		"none of that name":     {podOf("sidecar", "main"), "ghost", ""},
		"no containers":         {podOf(), "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 { // the second time changes nothing
				if got := inject(tc.pod, "template", tc.container); got != (tc.want != "") {
					t.Errorf("inject returned %v", got)
				}
			}
			if tc.want == "" {
				if len(tc.pod.ResourceClaims) > 0 {
					t.Errorf("a device that no container sees: %+v", tc.pod.ResourceClaims)
				}
				return
			}
			if len(tc.pod.ResourceClaims) != 1 || tc.pod.ResourceClaims[0].Name != "managed-device" || *tc.pod.ResourceClaims[0].ResourceClaimTemplateName != "template" {
				t.Errorf("claims of the pod: %+v", tc.pod.ResourceClaims)
			}
			for _, c := range tc.pod.Containers {
				if has := len(c.Resources.Claims) == 1 && c.Resources.Claims[0].Name == "managed-device"; has != (c.Name == tc.want) {
					t.Errorf("claims of %s: %+v", c.Name, c.Resources.Claims)
				}
			}
		})
	}
}

func TestInjectLeavesOtherClaimsAlone(t *testing.T) {
	pod := podOf("main")
	pod.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic", ResourceClaimName: new("mine")}, {Name: "managed-device", ResourceClaimName: new("elsewhere")}}
	pod.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "nic"}}
	inject(pod, "template", "")
	if len(pod.ResourceClaims) != 2 || *pod.ResourceClaims[1].ResourceClaimName != "elsewhere" || len(pod.Containers[0].Resources.Claims) != 2 {
		t.Errorf("got %+v, %+v", pod.ResourceClaims, pod.Containers[0].Resources.Claims)
	}
}

func newService(change func(*api.LLMInferenceService)) *api.LLMInferenceService {
	s := &api.LLMInferenceService{ObjectMeta: metav1.ObjectMeta{Name: "qwen", Namespace: "ns"}}
	s.Spec.Model.URI = "hf://Qwen/Qwen2.5-7B-Instruct"
	change(s)
	return s
}

func deploymentOf(t *testing.T, s *api.LLMInferenceService, prefill bool, request *annotations.Request) *appsv1.Deployment {
	t.Helper()
	r := &reconciler{options: Options{Image: "default"}}
	for _, role := range roles(s.Name, &s.Spec) {
		if role.prefill == prefill {
			d, err := r.deployment(s, &s.Spec, role, request)
			if err != nil {
				t.Fatal(err)
			}
			return d
		}
	}
	t.Fatal("no such role")
	return nil
}

func TestDeployment(t *testing.T) {
	request := &annotations.Request{DeviceClass: "gpu", Count: 1}
	t.Run("nothing said", func(t *testing.T) {
		d := deploymentOf(t, newService(func(*api.LLMInferenceService) {}), false, request)
		main := d.Spec.Template.Spec.Containers[0]
		if d.Name != "qwen-kserve" || main.Name != "main" || main.Image != "default" ||
			!slices.Equal(main.Args, []string{"Qwen/Qwen2.5-7B-Instruct", "--served-model-name", "qwen", "--port", "8000"}) {
			t.Errorf("%s: %+v", d.Name, main)
		}
		if d.Spec.Replicas != nil {
			t.Errorf("%d replicas, which is for an autoscaler to say", *d.Spec.Replicas)
		}
		if labels := d.Spec.Template.Labels; labels[api.LabelRole] != "both" || labels[api.LabelWorkload] != "workload" || labels[api.LabelName] != "qwen" {
			t.Errorf("labels %v", labels)
		}
		if update := d.Spec.Strategy.RollingUpdate; update == nil || update.MaxSurge.IntValue() != 0 || update.MaxUnavailable.IntValue() != 1 {
			t.Errorf("a pod more than there are devices for: %+v", update)
		}
	})
	t.Run("parallelism, name and strategy", func(t *testing.T) {
		d := deploymentOf(t, newService(func(s *api.LLMInferenceService) {
			s.Spec.Model.Name = new("Qwen/Qwen2.5")
			s.Spec.Parallelism = &api.Parallelism{Tensor: new(int32(2)), Expert: true}
			s.Spec.RolloutStrategy = &api.RolloutStrategy{MaxSurge: new(intstr.FromString("50%"))}
		}), false, request)
		args := strings.Join(d.Spec.Template.Spec.Containers[0].Args, " ")
		if !strings.Contains(args, "--served-model-name Qwen/Qwen2.5 ") || !strings.HasSuffix(args, "--tensor-parallel-size 2 --enable-expert-parallel") {
			t.Error(args)
		}
		if got := d.Spec.Strategy.RollingUpdate.MaxSurge.String(); got != "50%" {
			t.Errorf("maxSurge %s", got)
		}
	})
	t.Run("additional arguments", func(t *testing.T) {
		d := deploymentOf(t, newService(func(s *api.LLMInferenceService) {
			s.Spec.Template = &corev1.PodSpec{Containers: []corev1.Container{{
				Name: "main", Env: []corev1.EnvVar{{Name: "VLLM_ADDITIONAL_ARGS", Value: `--max-model-len=4096 --kv-transfer-config '{"kv_role": "kv_both"}'`}},
			}}}
		}), false, request)
		args := d.Spec.Template.Spec.Containers[0].Args
		if want := []string{"--max-model-len=4096", "--kv-transfer-config", `{"kv_role": "kv_both"}`}; len(args) != 8 || !slices.Equal(args[5:], want) {
			t.Errorf("%q, want %q at the end", args, want)
		}
	})
	t.Run("a container that says it all", func(t *testing.T) {
		d := deploymentOf(t, newService(func(s *api.LLMInferenceService) { s.Spec.Template = podOf("server") }), false, request)
		if c := d.Spec.Template.Spec.Containers; len(c) != 1 || len(c[0].Args) > 0 || c[0].Image != "image" {
			t.Errorf("%+v", c)
		}
	})
	t.Run("prefill", func(t *testing.T) {
		s := newService(func(s *api.LLMInferenceService) { s.Spec.Prefill = &api.WorkloadSpec{Replicas: new(int32(2))} })
		prefill, decode := deploymentOf(t, s, true, request), deploymentOf(t, s, false, request)
		if prefill.Name != "qwen-kserve-prefill" || prefill.Labels[api.LabelRole] != "prefill" || decode.Labels[api.LabelRole] != "decode" || *prefill.Spec.Replicas != 2 {
			t.Errorf("%s %v, %v", prefill.Name, prefill.Labels, decode.Labels)
		}
		if len(prefill.Spec.Template.Spec.ResourceClaims) != 1 {
			t.Error("prefill has no devices")
		}
	})
	t.Run("probes that speak TLS", func(t *testing.T) {
		d := deploymentOf(t, newService(func(s *api.LLMInferenceService) {
			s.Spec.Template = podOf("main")
			s.Spec.Template.Containers[0].LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/health", Port: intstr.FromInt32(8000), Scheme: "HTTPS"}}}
		}), false, request)
		if got := d.Spec.Template.Spec.Containers[0].LivenessProbe.HTTPGet.Scheme; got != "HTTP" {
			t.Error(got)
		}
	})
	t.Run("another request rolls the pods", func(t *testing.T) {
		s := newService(func(*api.LLMInferenceService) {})
		one, two := deploymentOf(t, s, false, request), deploymentOf(t, s, false, &annotations.Request{DeviceClass: "gpu", Count: 2})
		if one.Spec.Template.Annotations[requestAnnotation] == two.Spec.Template.Annotations[requestAnnotation] {
			t.Error("the pods are the same")
		}
	})
}

func TestModelOf(t *testing.T) {
	pod, main := &corev1.PodSpec{}, &corev1.Container{}
	if model, err := modelOf(pod, main, "pvc://models/qwen/7b"); err != nil || model != "/mnt/models" || pod.Volumes[0].PersistentVolumeClaim.ClaimName != "models" || main.VolumeMounts[0].SubPath != "qwen/7b" {
		t.Errorf("%s, %v, %+v, %+v", model, err, pod, main)
	}
	for _, uri := range []string{"", "s3://bucket/x", "hf://", "Qwen"} {
		if _, err := modelOf(pod, main, uri); err == nil {
			t.Errorf("%q was accepted", uri)
		}
	}
}

func TestMergeSpecs(t *testing.T) {
	base := api.ServiceSpec{WorkloadSpec: api.WorkloadSpec{Replicas: new(int32(1)), Template: podOf("main", "logger")}}
	own := api.ServiceSpec{Model: api.Model{URI: "hf://a/b"}, WorkloadSpec: api.WorkloadSpec{Replicas: new(int32(3)), Template: &corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Args: []string{"x"}}}}}}
	merged, err := mergeSpecs(base, own)
	if err != nil {
		t.Fatal(err)
	}
	containers := merged.Template.Containers
	if *merged.Replicas != 3 || merged.Model.URI != "hf://a/b" || len(containers) != 2 || containers[0].Name != "main" || containers[0].Image != "image" || containers[0].Args[0] != "x" {
		t.Errorf("%+v, containers %+v", merged, containers)
	}
}

func TestContains(t *testing.T) {
	live := map[string]any{"a": int64(1), "b": map[string]any{"c": "x", "default": true}, "l": []any{map[string]any{"n": 1.0, "more": 2}}}
	for name, tc := range map[string]struct {
		want     map[string]any
		contains bool
	}{
		"a part":            {map[string]any{"b": map[string]any{"c": "x"}}, true},
		"defaults in lists": {map[string]any{"l": []any{map[string]any{"n": int64(1)}}}, true},
		"another value":     {map[string]any{"a": int64(2)}, false},
		"a field more":      {map[string]any{"z": "y"}, false},
		"a shorter list":    {map[string]any{"l": []any{}}, false},
	} {
		if got := contains(live, tc.want); got != tc.contains {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestTransient(t *testing.T) {
	again := errors.New("again")
	if err := transient(errors.Join(&problem{"Reason", "message"}, errors.Join(again, &problem{"Reason", "message"}))); !errors.Is(err, again) || strings.Contains(err.Error(), "message") {
		t.Error(err)
	}
	if err := transient(errors.Join(&problem{"Reason", "message"})); err != nil {
		t.Error(err)
	}
}

func TestReadyIsTheFirstThatIsNot(t *testing.T) {
	c := &conditions{}
	c.ok(api.ConditionPresetsCombined)
	c.ok(api.ConditionMainWorkloadReady)
	c.fail(api.ConditionPrefillWorkloadReady, "Other", &problem{"Reason", "message"})
	c.complete()
	if ready := c.find(api.ConditionReady); ready.Status != corev1.ConditionFalse || ready.Reason != "Reason" || ready.Message != "message" {
		t.Errorf("%+v", ready)
	}
	if router := c.find(api.ConditionRouterReady); router.Status != corev1.ConditionTrue {
		t.Errorf("no router was asked for: %+v", router)
	}
}

func TestGroupSize(t *testing.T) {
	for want, p := range map[int64]*api.Parallelism{
		1: nil,
		2: {Pipeline: new(int32(2))},
		4: {Data: new(int32(8)), DataLocal: new(int32(2))},
		8: {Data: new(int32(8))},
	} {
		if got := groupSize(p); got != want {
			t.Errorf("%+v: %d, want %d", p, got, want)
		}
	}
}
