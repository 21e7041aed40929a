package manageddra

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/manageddra/api"
	"github.com/simgpu/simgpu/placement/canary"
)

// server is the pod of demo/fallback, once there is one that is ready and gets its GPU in that way.
func server(t *testing.T, ns string, path canary.Path) *corev1.Pod {
	t.Helper()
	var found *corev1.Pod
	suite.Eventually(t, fmt.Sprintf("a pod that has its GPU by %s", path), func(ctx context.Context) error {
		list, err := suite.Client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=server"})
		if err != nil {
			return err
		}
		for i := range list.Items {
			pod := &list.Items[i]
			ready := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue })
			if pod.DeletionTimestamp == nil && ready && (pod.Status.ExtendedResourceClaimStatus != nil) == (path == canary.DRA) {
				found = pod
				return nil
			}
		}
		return fmt.Errorf("there are %d pods", len(list.Items))
	})
	return found
}

// TestFallback does what demo/fallback does, on the node with two GPUs: a Deployment that asks for nvidia.com/gpu is served by DRA,
// by the device plugin and by DRA again.
func TestFallback(t *testing.T) {
	ns := namespace(t)
	a100s := suite.Cluster.Node(2).Name()
	t.Cleanup(func() {
		if err := suite.InstallChart(context.WithoutCancel(t.Context()), demoValues(t, "qwen-mig")); err != nil {
			t.Error(err)
		}
	})
	plugin := func(enabled bool) {
		t.Helper()
		values := demoValues(t, "qwen-mig")
		values["devicePlugin"] = map[string]any{"enabled": enabled}
		if err := suite.InstallChart(t.Context(), values); err != nil {
			t.Fatal(err)
		}
	}
	offered := func(want string) {
		t.Helper()
		suite.Eventually(t, "the node to offer "+want+" GPUs", func(ctx context.Context) error {
			node, err := suite.Client.CoreV1().Nodes().Get(ctx, a100s, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if got := node.Status.Allocatable["nvidia.com/gpu"]; got.String() != want {
				err = fmt.Errorf("it offers %s", got.String())
			}
			return err
		})
	}
	inSlices := func(want ...string) {
		t.Helper()
		suite.Eventually(t, fmt.Sprintf("the devices %v in slices", want), func(ctx context.Context) error {
			list, err := suite.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + a100s})
			if err != nil {
				return err
			}
			var names []string
			for _, slice := range list.Items {
				for _, device := range slice.Spec.Devices {
					names = append(names, device.Name)
				}
			}
			if slices.Sort(names); !slices.Equal(names, want) {
				err = fmt.Errorf("there are %v", names)
			}
			return err
		})
	}
	// gpu that the pod sees, by the name that the node publishes it under.
	var names map[string]string
	gpu := func(pod *corev1.Pod) string {
		t.Helper()
		smi := suite.Exec(t, pod, pod.Spec.Containers[0].Name, "nvidia-smi", "-L")
		for uuid, name := range names {
			if strings.Count(smi, "GPU ") == 1 && strings.Contains(smi, uuid) {
				return name
			}
		}
		t.Fatalf("the pod does not see one GPU of %v:\n%s", names, smi)
		return ""
	}
	other := map[string]string{"gpu-0": "gpu-1", "gpu-1": "gpu-0"}
	restart := func() {
		t.Helper()
		suite.Kubectl(t, "-n", ns, "rollout", "restart", "deployment/server")
	}

	inSlices("gpu-0", "gpu-1")
	names = map[string]string{attribute(t, a100s, "gpu-0", "uuid"): "gpu-0", attribute(t, a100s, "gpu-1", "uuid"): "gpu-1"}
	suite.Kubectl(t, "-n", ns, "apply", "-f", suite.Path("demo/fallback/manifests"))
	suite.Kubectl(t, "-n", ns, "patch", "deployment", "server", "-p", `{"spec":{"template":{"spec":{"nodeSelector":{"gpu":"a100"}}}}}`)
	suite.Kubectl(t, "-n", ns, "rollout", "status", "deployment/server", "--timeout", "3m")
	byDRA := server(t, ns, canary.DRA)
	first := gpu(byDRA)

	// The pod keeps its GPU, and the next one gets the other from the kubelet.
	plugin(true)
	offered("2")
	inSlices(first)
	if again := gpu(byDRA); again != first {
		t.Errorf("the pod saw %s and sees %s", first, again)
	}
	restart()
	byPlugin := server(t, ns, canary.DevicePlugin)
	second := gpu(byPlugin)
	if second == first {
		t.Errorf("two pods have had %s at the same time", first)
	}
	suite.Kubectl(t, "-n", ns, "rollout", "status", "deployment/server")
	offered("2")
	inSlices()
	out, err := exec.CommandContext(t.Context(), "go", "-C", suite.Path("."), "run", "./cmd/simgpuctl", "canary", "-n", ns, "-o", "json",
		"--kubeconfig", suite.Cluster.KubeconfigPath()).Output()
	if err != nil {
		t.Fatal(err)
	}
	var report canary.Report
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(report.Nodes, func(n canary.Node) bool { return n.Name == a100s })
	if len(report.Paths) != 1 || report.Paths[0].Path != canary.DevicePlugin || report.Paths[0].Ready != 1 || report.Nodes[at].Plugin != 2 || report.Nodes[at].PluginFree != 1 {
		t.Errorf("the comparison is %s", out)
	}

	// A restarted kubelet knows the plugin again, and the pod its GPU.
	if err := suite.Cluster.Node(2).Restart(t.Context(), "kubelet"); err != nil {
		t.Fatal(err)
	}
	offered("2")
	suite.Eventually(t, "the kubelet to know its pods", func(ctx context.Context) error {
		_, err := suite.Command(ctx, "kubectl", "-n", ns, "exec", byPlugin.Name, "--", "nvidia-smi", "-L")
		return err
	})
	if again := gpu(byPlugin); again != second {
		t.Errorf("the pod saw %s and sees %s", second, again)
	}

	// Back to DRA: what the kubelet has given out is in no slice until it is free.
	plugin(false)
	offered("0")
	inSlices(other[second])
	restart()
	if third := gpu(server(t, ns, canary.DRA)); third == second {
		t.Errorf("two pods have had %s at the same time", second)
	}
	inSlices("gpu-0", "gpu-1")
}

// attribute of a device, as a node publishes it; "" where it publishes no such device.
func attribute(t *testing.T, node, device string, name resourceapi.QualifiedName) string {
	t.Helper()
	list, err := suite.Client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		t.Fatal(err)
	}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			if d.Name == device {
				return *d.Attributes[name].StringValue
			}
		}
	}
	return ""
}

// TestDrain does what demo/drain does: a node is drained and replaced, and both services answer all the time.
func TestDrain(t *testing.T) {
	ns := namespace(t)
	stays, goes := suite.Cluster.Node(1).Name(), suite.Cluster.Node(2).Name()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_, err1 := suite.Command(ctx, "kubectl", "label", "--overwrite", "node", goes, "gpu=a100")
		_, err2 := suite.Command(ctx, "kubectl", "uncordon", goes)
		if err1 != nil || err2 != nil {
			t.Error(err1, err2)
		}
	})
	if err := suite.InstallChart(t.Context(), demoValues(t, "drain")); err != nil {
		t.Fatal(err)
	}
	suite.Eventually(t, "both nodes to have an H100", func(context.Context) error {
		for _, node := range []string{stays, goes} {
			if model := attribute(t, node, "gpu-0", "productName"); !strings.Contains(model, "H100") {
				return fmt.Errorf("%s has %q", node, model)
			}
		}
		return nil
	})
	suite.Kubectl(t, "-n", ns, "apply", "-f", suite.Path("demo/drain/manifests"), "-f", suite.Path("demo/drain/asker.yaml"))
	suite.Kubectl(t, "-n", ns, "patch", "deployment", "asker", "-p", fmt.Sprintf(`{"spec":{"template":{"spec":{"nodeName":%q}}}}`, stays))
	models := map[string]string{"qwen": "Qwen/Qwen2.5-7B-Instruct", "qwen-small": "Qwen/Qwen2.5-0.5B-Instruct"}
	settled := func() {
		t.Helper()
		for name := range models {
			suite.Kubectl(t, "-n", ns, "rollout", "status", "deployment/"+api.DeploymentName(name), "--timeout", "3m")
		}
	}
	suite.Eventually(t, "the Deployments", func(ctx context.Context) error {
		_, err := suite.Command(ctx, "kubectl", "-n", ns, "get", "deployments", "qwen-kserve", "qwen-small-kserve")
		return err
	})
	settled()
	suite.Kubectl(t, "-n", ns, "rollout", "status", "deployment/asker", "--timeout", "3m")
	onNode := func(node string) (number int) {
		got, err := devices(t.Context(), ns)
		if err != nil {
			t.Fatal(err)
		}
		for _, device := range got {
			if strings.HasPrefix(device, node+"/") {
				number++
			}
		}
		return number
	}
	if onNode(goes) == 0 {
		t.Fatalf("no service has a device of %s, which is to be drained", goes)
	}

	// Each service is asked without a pause until the node has been replaced.
	asking, stop := context.WithCancel(t.Context())
	defer stop()
	var group sync.WaitGroup
	for name, model := range models {
		group.Go(func() {
			answered := 0
			for asking.Err() == nil {
				_, err := suite.Command(t.Context(), "kubectl", "-n", ns, "exec", "deployment/asker", "--", "vllm", "chat", "--url",
					"http://"+api.WorkloadServiceName(name)+":8000/v1", "--model-name", model, "--quick", "Are you there?")
				if err != nil {
					t.Errorf("%s did not answer after %d answers: %v", name, answered, err)
				}
				answered++
			}
			t.Logf("%s has answered %d times", name, answered)
		})
	}
	suite.Kubectl(t, "drain", goes, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout", "3m")
	settled()
	suite.Eventually(t, "no claim to have a device of the drained node", func(context.Context) error {
		if number := onNode(goes); number > 0 {
			return fmt.Errorf("there are %d", number)
		}
		return nil
	})
	if number := onNode(stays); number != 4 {
		t.Errorf("the node that stays has %d devices of claims, want 4", number)
	}
	suite.Kubectl(t, "delete", "node", goes)
	if err := suite.Cluster.Node(2).Restart(t.Context(), "kubelet"); err != nil {
		t.Fatal(err)
	}
	suite.Eventually(t, "slices of the new Node", func(ctx context.Context) error {
		node, err := suite.Client.CoreV1().Nodes().Get(ctx, goes, metav1.GetOptions{})
		if err != nil {
			return err
		}
		list, err := suite.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + goes})
		if err != nil {
			return err
		}
		for _, slice := range list.Items {
			if owner := slice.OwnerReferences[0].UID; owner != node.UID {
				return fmt.Errorf("slice %s belongs to Node %s, and it is %s now", slice.Name, owner, node.UID)
			}
		}
		if len(list.Items) == 0 {
			return fmt.Errorf("there are none")
		}
		return nil
	})
	stop()
	group.Wait()
}
