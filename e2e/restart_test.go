package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/e2e/harness"
)

// TestRestarts restarts the driver, and then the kubelet, under a pod that holds memory of its device.
func TestRestarts(t *testing.T) {
	for name, restart := range map[string]func(*testing.T){
		"driver":  suite.RestartDriver,
		"kubelet": suite.RestartKubelet,
	} {
		t.Run(name, func(t *testing.T) {
			ns := suite.Namespace(t)
			suite.CreateClaim(t, ns, harness.Claim("before", harness.Partition("slice", "3g.40gb")))
			suite.CreateClaim(t, ns, harness.Claim("after", harness.Partition("slice", "3g.40gb")))
			p := harness.Pod("before", []harness.Use{{Claim: "before"}})
			// Mounted by CDI, so not part of the image.
			p.Spec.Containers[0].Command = []string{"simgpu-run", "--memory", "1000MiB", "--", "sleep", "infinity"}
			before := suite.Running(t, suite.CreatePod(t, ns, p))
			holds := func(ctx context.Context) error {
				out, err := suite.Command(ctx, "kubectl", "-n", ns, "exec", before.Name, "--", "nvidia-smi")
				if err == nil && !strings.Contains(out, "1000MiB / 40448MiB") {
					err = fmt.Errorf("nvidia-smi shows\n%s", out)
				}
				return err
			}
			suite.Eventually(t, "the memory to be held", holds)
			files := suite.OnDisk(t)

			restart(t)

			suite.Eventually(t, "the memory to be held again", holds)
			if now := suite.OnDisk(t); fmt.Sprint(now) != fmt.Sprint(files) {
				t.Errorf("on the node there was %v and is %v", files, now)
			}
			after := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("after", []harness.Use{{Claim: "after"}})))
			current, err := suite.Client.CoreV1().Pods(ns).Get(t.Context(), before.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if s := current.Status.ContainerStatuses[0]; s.RestartCount != 0 || s.ContainerID != before.Status.ContainerStatuses[0].ContainerID {
				t.Errorf("the container was restarted: %+v", s)
			}
			suite.DeletePod(t, before)
			suite.DeletePod(t, after)
			if left := suite.OnDisk(t); len(left) > 0 {
				t.Errorf("left on the node: %v", left)
			}
		})
	}
}

// TestPodEndsWhileDriverIsAway deletes a pod while the driver is gone: it ends once the driver is back, and nothing
// of it stays on the node.
func TestPodEndsWhileDriverIsAway(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("held", harness.Partition("slice", "1g.10gb")))
	p := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("held", []harness.Use{{Claim: "held"}})))

	// No node has this label, so the DaemonSet removes its pod.
	nowhere := `{"spec": {"template": {"spec": {"nodeSelector": {"simgpu.dev/away": "true"}}}}}`
	suite.Kubectl(t, "-n", harness.DriverNamespace, "patch", "daemonset", harness.DaemonSet, "-p", nowhere)
	suite.Eventually(t, "the driver to be gone", func(ctx context.Context) error {
		pods, err := suite.Client.CoreV1().Pods(harness.DriverNamespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d pods are there", len(pods.Items))
		}
		return err
	})
	if err := suite.Client.CoreV1().Pods(ns).Delete(t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	suite.Kubectl(t, "-n", harness.DriverNamespace, "patch", "daemonset", harness.DaemonSet, "--type", "json",
		"-p", `[{"op": "remove", "path": "/spec/template/spec/nodeSelector/simgpu.dev~1away"}]`)
	suite.Kubectl(t, "-n", harness.DriverNamespace, "rollout", "status", "daemonset", harness.DaemonSet, "--timeout", harness.Patience.String())
	suite.Eventually(t, "nothing of the claim to be on the node", func(context.Context) error {
		if left := suite.OnDisk(t); len(left) > 0 {
			return fmt.Errorf("there is %v", left)
		}
		return nil
	})
}
