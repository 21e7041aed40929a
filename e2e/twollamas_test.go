package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/e2e/harness"
)

const llama = "meta-llama/Meta-Llama-3.1-8B-Instruct"

// TestTwoLlamas applies the manifests of demo/two-llamas and looks at everything that the demo shows.
func TestTwoLlamas(t *testing.T) {
	ns := suite.Namespace(t)
	suite.Kubectl(t, "-n", ns, "apply", "-f", suite.Path("demo/two-llamas/manifests"))
	suite.Kubectl(t, "-n", ns, "rollout", "status", "deployment/llama", "--timeout", harness.Patience.String())
	pods := llamas(t, ns)
	if len(pods) != 2 {
		t.Fatalf("got %d pods, want 2", len(pods))
	}

	t.Run("two claims have the two slices", func(t *testing.T) {
		claims, err := suite.Client.ResourceV1().ResourceClaims(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var devices, holders []string
		for _, c := range claims.Items {
			for _, r := range c.Status.Allocation.Devices.Results {
				devices = append(devices, r.Device)
				if r.Driver != harness.DriverName || r.Pool != suite.Cluster.Node(1).Name() || r.Request != "mig-slice" {
					t.Errorf("result %+v of claim %s: want driver %s, the node's pool, request mig-slice", r, c.Name, harness.DriverName)
				}
			}
			for _, r := range c.Status.ReservedFor {
				holders = append(holders, r.Name)
			}
		}
		slices.Sort(devices)
		slices.Sort(holders)
		if want := []string{"gpu-0-mig-3g40gb-9-0", "gpu-0-mig-3g40gb-9-4"}; !slices.Equal(devices, want) {
			t.Errorf("devices %v, want %v", devices, want)
		}
		if want := []string{pods[0].Name, pods[1].Name}; !slices.Equal(holders, want) {
			t.Errorf("claims are reserved for %v, want %v", holders, want)
		}
		for line := range strings.Lines(suite.Kubectl(t, "-n", ns, "get", "resourceclaims", "--no-headers")) {
			if !strings.Contains(line, "allocated,reserved") {
				t.Errorf("kubectl get resourceclaims: %q does not say allocated,reserved", line)
			}
		}
	})

	t.Run("each pod sees its own slice", func(t *testing.T) {
		var uuids []string
		for _, p := range pods {
			table := suite.Exec(t, &p, "modelserver", "nvidia-smi")
			if got := strings.Count(table, "15023MiB / 40448MiB"); got != 1 {
				t.Errorf("nvidia-smi of %s shows %d slices of 15023MiB / 40448MiB, want 1:\n%s", p.Name, got, table)
			}
			list := suite.Exec(t, &p, "modelserver", "nvidia-smi", "-L")
			found := regexp.MustCompile(`(?m)^  MIG 3g\.40gb     Device  0: \(UUID: (MIG-[0-9a-f-]{36})\)$`).FindAllStringSubmatch(list, -1)
			if len(found) != 1 || strings.Count(list, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-") != 1 {
				t.Fatalf("nvidia-smi -L of %s:\n%s", p.Name, list)
			}
			uuids = append(uuids, found[0][1])
		}
		if uuids[0] == uuids[1] {
			t.Errorf("both pods see %s", uuids[0])
		}
	})

	t.Run("the node sees both slices and their processes", func(t *testing.T) {
		table := suite.OnNode(t, "nvidia-smi")
		if got := strings.Count(table, "15023MiB / 40448MiB"); got != 2 {
			t.Errorf("%d slices of 15023MiB / 40448MiB, want 2:\n%s", got, table)
		}
		pids := regexp.MustCompile(`(?m)^\|\s+0\s+\d+\s+0\s+(\d+)\s+C\s+python3 `).FindAllStringSubmatch(table, -1)
		if len(pids) != 2 || pids[0][1] == pids[1][1] {
			t.Errorf("processes %v, want two different ones:\n%s", pids, table)
		}
	})

	t.Run("both answer at the same time", func(t *testing.T) {
		for _, p := range pods {
			t.Run(p.Name, func(t *testing.T) {
				t.Parallel()
				url := suite.PortForward(t, &p, "8000")
				header, content := complete(t, url)
				if content == "" {
					t.Error("the completion is empty")
				}
				if got := header.Get("x-inference-pod"); got != p.Name {
					t.Errorf("answered by %q, want %q", got, p.Name)
				}
			})
		}
	})

	t.Run("the Service answers", func(t *testing.T) {
		out := suite.Exec(t, &pods[0], "modelserver", "vllm", "chat",
			"--url", "http://llama:8000/v1", "--model-name", llama, "--quick", "What is NVIDIA MIG in one sentence?")
		if strings.TrimSpace(out) == "" {
			t.Error("the completion is empty")
		}
	})

	t.Run("the slices are free once the pods are gone", func(t *testing.T) {
		specs := func() []string {
			files, err := filepath.Glob(filepath.Join(suite.NodeRoot(t), "run/cdi/*claim_*"))
			if err != nil {
				t.Fatal(err)
			}
			return files
		}
		if got := specs(); len(got) != 2 {
			t.Errorf("CDI specs of the two claims: %v", got)
		}
		suite.Kubectl(t, "-n", ns, "delete", "-f", suite.Path("demo/two-llamas/manifests"), "--wait")
		suite.Eventually(t, "the CDI specs to be gone", func(context.Context) error {
			if left := specs(); len(left) > 0 {
				return fmt.Errorf("%v are there", left)
			}
			return nil
		})
		if table := suite.OnNode(t, "nvidia-smi"); strings.Contains(table, "40448MiB") {
			t.Errorf("the node still shows a slice:\n%s", table)
		}
	})
}

// llamas returns the running pods of the demo's Deployment, sorted by name.
func llamas(t *testing.T, namespace string) []corev1.Pod {
	t.Helper()
	list, err := suite.Client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=llama"})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return list.Items
}

// complete asks for a chat completion and returns the answer's header and text.
func complete(t *testing.T, url string) (http.Header, string) {
	t.Helper()
	body := fmt.Sprintf(`{"model": %q, "max_tokens": 20, "messages": [{"role": "user", "content": "Explain DRA in one sentence."}]}`, llama)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/chat/completions", bytes.NewBufferString(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var completion struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err := json.Unmarshal(answer, &completion); err != nil || resp.StatusCode != http.StatusOK || len(completion.Choices) != 1 {
		t.Fatalf("status %s, answer %s", resp.Status, answer)
	}
	return resp.Header, completion.Choices[0].Message.Content
}
