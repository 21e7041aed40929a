package manageddra

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/simgpu/simgpu/manageddra/api"
)

// routes makes the cluster serve the APIs that route requests, and starts the gateway.
func routes(t *testing.T) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), suite.Path("routing/apis.sh"))
	cmd.Env = append(os.Environ(), "KUBECONFIG="+suite.Cluster.KubeconfigPath(), "PATH="+suite.Cluster.BinDir()+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// ask sends a question to the gateway. The pod is the one that has answered.
func ask(ctx context.Context, path, model, question string, stream bool) (status int, pod string, body io.ReadCloser, err error) {
	client, err := rest.HTTPClientFor(suite.RESTConfig)
	if err != nil {
		return 0, "", nil, err
	}
	content := fmt.Sprintf(`{"model": %q, "stream": %t, "max_tokens": 20, "messages": [{"role": "user", "content": %q}]}`, model, stream, question)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost,
		suite.RESTConfig.Host+"/api/v1/namespaces/simgpu-gateway/services/http:gateway:80/proxy"+path, strings.NewReader(content))
	if err != nil {
		return 0, "", nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return 0, "", nil, err
	}
	return response.StatusCode, response.Header.Get("X-Inference-Pod"), response.Body, nil
}

// answeredBy has a question answered, and returns the pod that did.
func answeredBy(t *testing.T, question string) string {
	t.Helper()
	status, pod, body, err := ask(t.Context(), chat, llama, question, false)
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if content, err := io.ReadAll(body); err != nil || status != http.StatusOK || !strings.Contains(string(content), `"content":`) || pod == "" {
		t.Fatalf("status %d by pod %q: %s (%v)", status, pod, content, err)
	}
	return pod
}

// text is long enough for several blocks of a prefix cache, and has none in common with one about something else.
func text(about string) string {
	return strings.Repeat(about+" is what this sentence of a long document is about. ", 40)
}

const (
	llama = "meta-llama/Meta-Llama-3.1-8B-Instruct"
	chat  = "/v1/chat/completions"
)

// TestLlamaTwoSlices applies the manifests of demo/llama-two-slices and looks at what its README says.
func TestLlamaTwoSlices(t *testing.T) {
	ns := namespace(t)
	routes(t)
	const servers, picker = "deployment/optimized-baseline-nvidia-gpu-vllm-decode", "deployment/optimized-baseline-epp"
	suite.Kubectl(t, "-n", ns, "apply", "-f", suite.Path("demo/llama-two-slices/manifests"))
	for _, deployment := range []string{servers, picker} {
		suite.Kubectl(t, "-n", ns, "rollout", "status", deployment, "--timeout", "3m")
	}
	h100 := suite.Cluster.Node(1).Name()
	expectDevices(t, ns, h100+"/gpu-0-mig-3g40gb-9-0", h100+"/gpu-0-mig-3g40gb-9-4")
	accepted(t, ns, "httproute/optimized-baseline", "{.status.parents[0].conditions}", "True")
	accepted(t, ns, "inferencepool/optimized-baseline", "{.status.parents[0].conditions}", "True")
	suite.Kubectl(t, "-n", ns, "wait", "--for=condition=Programmed", "gateway/inference-gateway", "--timeout", "1m")
	reached := func(ctx context.Context) error {
		status, _, body, err := ask(ctx, chat, llama, "Are you there?", false)
		if err == nil {
			body.Close()
			if status != http.StatusOK {
				err = fmt.Errorf("status %d", status)
			}
		}
		return err
	}
	suite.Eventually(t, "an answer through the gateway", reached)

	t.Run("different prompts reach both replicas", func(t *testing.T) {
		counts := map[string]int{}
		for i := 0; len(counts) < 2; i++ {
			if i == 50 {
				t.Fatalf("all of %d questions went to one replica: %v", i, counts)
			}
			counts[answeredBy(t, text(fmt.Sprint(i)))]++
		}
	})
	t.Run("a common prefix stays where it is cached", func(t *testing.T) {
		common := text("The same subject")
		first := answeredBy(t, common+"What is it about?")
		for i := range 10 {
			if pod := answeredBy(t, common+fmt.Sprintf("Question %d: what else does it say?", i)); pod != first {
				t.Errorf("question %d went to %s, and the prefix is cached by %s", i, pod, first)
			}
		}
	})
	t.Run("tokens are streamed", func(t *testing.T) {
		_, _, body, err := ask(t.Context(), chat, llama, "Tell me a story.", true)
		if err != nil {
			t.Fatal(err)
		}
		defer body.Close()
		var events []string
		for lines := bufio.NewScanner(body); lines.Scan(); {
			if event, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				events = append(events, event)
			}
		}
		if len(events) < 3 || events[len(events)-1] != "[DONE]" {
			t.Errorf("events %q", events)
		}
	})
	t.Run("what the model server refuses is refused", func(t *testing.T) {
		status, _, body, err := ask(t.Context(), chat, "another-model", "Are you there?", false)
		if err != nil || status != http.StatusNotFound {
			t.Errorf("status %d (%v), want 404", status, err)
		}
		body.Close()
	})
	t.Run("without the picker any replica will do, or none", func(t *testing.T) {
		suite.Kubectl(t, "-n", ns, "scale", picker, "--replicas", "0")
		suite.Kubectl(t, "-n", ns, "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=optimized-baseline-epp", "--timeout", "1m")
		answeredBy(t, "Are you still there?")
		suite.Kubectl(t, "-n", ns, "patch", "inferencepool", "optimized-baseline", "--type", "merge", "-p", `{"spec":{"endpointPickerRef":{"failureMode":"FailClose"}}}`)
		suite.Eventually(t, "requests to be refused", func(ctx context.Context) error {
			status, _, body, err := ask(ctx, chat, llama, "Are you still there?", false)
			if err == nil {
				body.Close()
				if status != http.StatusServiceUnavailable {
					err = fmt.Errorf("status %d", status)
				}
			}
			return err
		})
		suite.Kubectl(t, "-n", ns, "scale", picker, "--replicas", "1")
		suite.Eventually(t, "the picker to be back", reached)
	})
}

// accepted waits until all conditions at that path of an object have that status.
func accepted(t *testing.T, ns, object, path, status string) {
	t.Helper()
	suite.Eventually(t, object+" to be accepted", func(ctx context.Context) error {
		out, err := suite.Command(ctx, "kubectl", "-n", ns, "get", object, "-o", "jsonpath="+path)
		if err == nil && (out == "" || strings.Count(out, `"status":"`) != strings.Count(out, `"status":"`+status+`"`)) {
			err = fmt.Errorf("conditions %s", out)
		}
		return err
	})
}

// TestRouter: a service that asks for a scheduler and a route gets a pool and a route, and is reached through the gateway.
func TestRouter(t *testing.T) {
	ns := namespace(t)
	routes(t)
	manifest := qwen("qwen", 1, map[string]string{class: "mig.nvidia.com", selector: profile("3g.40gb")}) + `  router:
    scheduler: {}
    route: {}
    gateway:
      refs: [{name: inference-gateway}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: inference-gateway}
spec:
  gatewayClassName: simgpu
  listeners: [{name: http, port: 80, protocol: HTTP}]
`
	if out, err := apply(t, ns, manifest); err != nil {
		t.Fatal(out, err)
	}
	ready(t, ns, "qwen")
	for _, condition := range []string{api.ConditionRouterReady, api.ConditionInferencePoolReady, api.ConditionHTTPRoutesReady} {
		expect(t, ns, "qwen", condition, corev1.ConditionTrue, "")
	}
	accepted(t, ns, "httproute/"+api.HTTPRouteName("qwen"), "{.status.parents[0].conditions}", "True")
	// There is no picker, and the pool fails open.
	var pod string
	suite.Eventually(t, "an answer through the gateway", func(ctx context.Context) error {
		status, by, body, err := ask(ctx, "/"+ns+"/qwen/v1/chat/completions", "Qwen/Qwen2.5-7B-Instruct", "Are you there?", false)
		if err == nil {
			body.Close()
			if pod = by; status != http.StatusOK {
				err = fmt.Errorf("status %d", status)
			}
		}
		return err
	})
	if list, err := pods(t.Context(), ns, "qwen"); err != nil || !slices.ContainsFunc(list, func(p corev1.Pod) bool { return p.Name == pod }) {
		t.Errorf("answered by %q, pods %v (%v)", pod, list, err)
	}
	// Without a router both are removed.
	suite.Kubectl(t, "-n", ns, "patch", "llmisvc", "qwen", "--type=json", `-p=[{"op":"remove","path":"/spec/router"}]`)
	suite.Eventually(t, "pool and route to be gone", func(ctx context.Context) error {
		out, err := suite.Command(ctx, "kubectl", "-n", ns, "get", "httproutes,inferencepools", "-o", "name")
		if err == nil && strings.TrimSpace(out) != "" {
			err = fmt.Errorf("there are %s", out)
		}
		return err
	})
}

// TestPrefillDecode applies the manifests of demo/prefill-decode and looks at what its README says.
func TestPrefillDecode(t *testing.T) {
	ns := namespace(t)
	suite.Kubectl(t, "-n", ns, "apply", "-f", suite.Path("demo/prefill-decode/manifests"))
	ready(t, ns, "llama")
	ready(t, ns, "qwen")
	for deployment, tc := range map[string]struct{ role, claim, sees string }{
		"llama-kserve-prefill": {"prefill", "gpu", "MIG 3g.40gb"},
		"llama-kserve":         {"decode", "gpu", "MIG 2g.20gb"},
		"qwen-kserve":          {"both", api.ClaimName, "NVIDIA A100-SXM4-40GB"},
	} {
		list, err := pods(t.Context(), ns, strings.SplitN(deployment, "-", 2)[0])
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(list, func(p corev1.Pod) bool { return p.Labels[api.LabelRole] == tc.role })
		if at < 0 {
			t.Errorf("no pod has the role %s: %v", tc.role, list)
			continue
		}
		pod := &list[at]
		if claims := pod.Spec.ResourceClaims; !strings.HasPrefix(pod.Name, deployment+"-") || len(claims) != 1 || claims[0].Name != tc.claim {
			t.Errorf("pod %s has the claims %v, want one %s of %s", pod.Name, claims, tc.claim, deployment)
		}
		if smi := suite.Exec(t, pod, "main", "nvidia-smi", "-L"); strings.Count(smi, tc.sees) != 1 {
			t.Errorf("pod %s sees, and should see one %s:\n%s", pod.Name, tc.sees, smi)
		}
		model := map[bool]string{true: llama, false: "Qwen/Qwen2.5-7B-Instruct"}[pod.Labels[api.LabelName] == "llama"]
		suite.Exec(t, pod, "main", "vllm", "chat", "--url", "http://localhost:8000/v1", "--model-name", model, "--quick", "What is DRA?")
	}
	// Stopping the one does nothing to the other.
	before, err := pods(t.Context(), ns, "llama")
	if err != nil {
		t.Fatal(err)
	}
	annotate(t, ns, "qwen", api.AnnotationStop+"=true")
	expect(t, ns, "qwen", api.ConditionReady, corev1.ConditionFalse, "Stopped")
	h100 := suite.Cluster.Node(1).Name()
	suite.Eventually(t, "the claim of qwen to be gone", func(ctx context.Context) error {
		left, err := devices(ctx, ns)
		if err == nil && (len(left) != 2 || !strings.HasPrefix(left[0], h100+"/gpu-0-mig-2g20gb-") || !strings.HasPrefix(left[1], h100+"/gpu-0-mig-3g40gb-")) {
			err = fmt.Errorf("allocated are %v", left)
		}
		return err
	})
	after, err := pods(t.Context(), ns, "llama")
	if err != nil || len(after) != 2 || !slices.ContainsFunc(before, func(p corev1.Pod) bool { return p.UID == after[0].UID }) {
		t.Errorf("pods of llama were %v and are %v (%v)", before, after, err)
	}
}
