package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestRestarts restarts the driver, and then the kubelet, under a pod that holds memory of its device.
func TestRestarts(t *testing.T) {
	for name, restart := range map[string]func(*testing.T){
		"driver":  restartDriver,
		"kubelet": restartKubelet,
	} {
		t.Run(name, func(t *testing.T) {
			ns := suite.namespace(t)
			suite.createClaim(t, ns, claim("before", partition("slice", "3g.40gb")))
			suite.createClaim(t, ns, claim("after", partition("slice", "3g.40gb")))
			p := pod("before", []use{{claim: "before"}})
			// Mounted by CDI, so not part of the image.
			p.Spec.Containers[0].Command = []string{"simgpu-run", "--memory", "1000MiB", "--", "sleep", "infinity"}
			before := suite.running(t, suite.createPod(t, ns, p))
			holds := func(ctx context.Context) error {
				out, err := suite.command(ctx, "kubectl", "-n", ns, "exec", before.Name, "--", "nvidia-smi")
				if err == nil && !strings.Contains(out, "1000MiB / 40448MiB") {
					err = fmt.Errorf("nvidia-smi shows\n%s", out)
				}
				return err
			}
			suite.eventually(t, "the memory to be held", holds)
			files := suite.onDisk(t)

			restart(t)

			suite.eventually(t, "the memory to be held again", holds)
			if now := suite.onDisk(t); fmt.Sprint(now) != fmt.Sprint(files) {
				t.Errorf("on the node there was %v and is %v", files, now)
			}
			after := suite.running(t, suite.createPod(t, ns, pod("after", []use{{claim: "after"}})))
			current, err := suite.client.CoreV1().Pods(ns).Get(t.Context(), before.Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if s := current.Status.ContainerStatuses[0]; s.RestartCount != 0 || s.ContainerID != before.Status.ContainerStatuses[0].ContainerID {
				t.Errorf("the container was restarted: %+v", s)
			}
			suite.deletePod(t, before)
			suite.deletePod(t, after)
			if left := suite.onDisk(t); len(left) > 0 {
				t.Errorf("left on the node: %v", left)
			}
		})
	}
}

// TestPodEndsWhileDriverIsAway deletes a pod while the driver is gone: it ends once the driver is back, and nothing
// of it stays on the node.
func TestPodEndsWhileDriverIsAway(t *testing.T) {
	ns := suite.namespace(t)
	suite.createClaim(t, ns, claim("held", partition("slice", "1g.10gb")))
	p := suite.running(t, suite.createPod(t, ns, pod("held", []use{{claim: "held"}})))

	// No node has this label, so the DaemonSet removes its pod.
	nowhere := `{"spec": {"template": {"spec": {"nodeSelector": {"simgpu.dev/away": "true"}}}}}`
	suite.kubectl(t, "-n", driverNamespace, "patch", "daemonset", daemonSet, "-p", nowhere)
	suite.eventually(t, "the driver to be gone", func(ctx context.Context) error {
		pods, err := suite.client.CoreV1().Pods(driverNamespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = fmt.Errorf("%d pods are there", len(pods.Items))
		}
		return err
	})
	if err := suite.client.CoreV1().Pods(ns).Delete(t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	suite.kubectl(t, "-n", driverNamespace, "patch", "daemonset", daemonSet, "--type", "json",
		"-p", `[{"op": "remove", "path": "/spec/template/spec/nodeSelector/simgpu.dev~1away"}]`)
	suite.kubectl(t, "-n", driverNamespace, "rollout", "status", "daemonset", daemonSet, "--timeout", patience.String())
	suite.eventually(t, "nothing of the claim to be on the node", func(context.Context) error {
		if left := suite.onDisk(t); len(left) > 0 {
			return fmt.Errorf("there is %v", left)
		}
		return nil
	})
}

func restartDriver(t *testing.T) {
	p := driverPod(t)
	suite.deletePod(t, &p)
	suite.kubectl(t, "-n", driverNamespace, "rollout", "status", "daemonset", daemonSet, "--timeout", patience.String())
}

func restartKubelet(t *testing.T) {
	node := suite.cluster.Node(1)
	if err := node.Restart(t.Context(), "kubelet"); err != nil {
		t.Fatal(err)
	}
	suite.eventually(t, "the node to be ready", func(ctx context.Context) error {
		n, err := suite.client.CoreV1().Nodes().Get(ctx, node.Name(), metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", n.Status.Conditions)
	})
}
