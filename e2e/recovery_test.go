package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/e2e/harness"
)

// TestReboot reboots the node under a pod: /run is emptied, and the containers of the pod start again with their device.
func TestReboot(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("held", harness.Partition("slice", "3g.40gb")))
	before := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("held", []harness.Use{{Claim: "held"}})))
	files := suite.OnDisk(t)

	if err := suite.Cluster.Node(1).Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	suite.Eventually(t, "the container to run again with its device", func(ctx context.Context) error {
		p, err := suite.Client.CoreV1().Pods(ns).Get(ctx, before.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if s := p.Status.ContainerStatuses; p.Status.Phase != corev1.PodRunning || len(s) != 1 || s[0].ContainerID == before.Status.ContainerStatuses[0].ContainerID {
			return fmt.Errorf("phase %s, containers %+v", p.Status.Phase, s)
		}
		out, err := suite.Command(ctx, "kubectl", "-n", ns, "exec", before.Name, "--", "nvidia-smi", "-L")
		if err == nil && !strings.Contains(out, "MIG 3g.40gb") {
			err = fmt.Errorf("nvidia-smi shows %s", out)
		}
		return err
	})
	suite.DriverReady(t)
	if now := suite.OnDisk(t); fmt.Sprint(now) != fmt.Sprint(files) {
		t.Errorf("on the node there was %v and is %v", files, now)
	}
	suite.DeletePod(t, before)
	if left := suite.OnDisk(t); len(left) > 0 {
		t.Errorf("left on the node: %v", left)
	}
}

// TestForcedDeletion deletes a pod and its claim by force while the kubelet is away, so that nobody unprepares the
// claim. The next claim gets the device nevertheless.
func TestForcedDeletion(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("forced", harness.GPU("gpu")))
	suite.Running(t, suite.CreatePod(t, ns, harness.Pod("forced", []harness.Use{{Claim: "forced"}})))

	node := suite.Cluster.Node(1)
	if err := node.Stop(t.Context(), "kubelet"); err != nil {
		t.Fatal(err)
	}
	suite.Kubectl(t, "-n", ns, "delete", "pod", "forced", "--force", "--grace-period=0")
	suite.Kubectl(t, "-n", ns, "delete", "resourceclaim", "forced")
	suite.CreateClaim(t, ns, harness.Claim("next", harness.GPU("gpu")))
	next := suite.CreatePod(t, ns, harness.Pod("next", []harness.Use{{Claim: "next"}}))
	suite.RestartKubelet(t)
	suite.DeletePod(t, suite.Running(t, next))
	suite.Eventually(t, "nothing of the claims to be on the node", func(context.Context) error {
		if left := suite.OnDisk(t); len(left) > 0 {
			return fmt.Errorf("there is %v", left)
		}
		return nil
	})
}
