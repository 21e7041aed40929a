package lifecycle

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/simgpu/simgpu/e2e/harness"
)

// TestUpdate updates the driver and rolls back while pods come and go: none of them notices.
func TestUpdate(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("held", harness.Partition("slice", "3g.40gb")))
	p := harness.Pod("held", []harness.Use{{Claim: "held"}})
	p.Spec.Containers[0].Command = []string{"simgpu-run", "--memory", "1000MiB", "--", "sleep", "infinity"}
	held := suite.Running(t, suite.CreatePod(t, ns, p))
	holds := func(ctx context.Context) error {
		out, err := suite.Command(ctx, "kubectl", "-n", ns, "exec", held.Name, "--", "nvidia-smi")
		if err == nil && !strings.Contains(out, "1000MiB / 40448MiB") {
			err = fmt.Errorf("nvidia-smi shows\n%s", out)
		}
		return err
	}
	suite.Eventually(t, "the memory to be held", holds)
	slices := suite.Kubectl(t, "get", "resourceslices", "-o", "name")
	before := driverPod(t)

	stop := comeAndGo(t, ns)
	if err := suite.InstallChart(t.Context(), map[string]any{"podAnnotations": map[string]any{"example.com/round": ns}}); err != nil {
		t.Error(err)
	}
	updated := driverPod(t)
	if _, err := suite.Command(t.Context(), "helm", "rollback", "simgpu", "--namespace", harness.DriverNamespace, "--wait", "--timeout", "3m"); err != nil {
		t.Error(err)
	}
	rolledBack := driverPod(t)
	count := stop()

	if before.UID == updated.UID || updated.UID == rolledBack.UID {
		t.Fatal("the driver was not replaced")
	}
	if count < 4 {
		t.Errorf("%d pods only came and went", count)
	}
	suite.Eventually(t, "the memory to be held", holds)
	if now := suite.Kubectl(t, "get", "resourceslices", "-o", "name"); now != slices {
		t.Errorf("there were slices\n%sand are\n%s", slices, now)
	}
	events, err := suite.Client.CoreV1().Events(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events.Items {
		if e.Type == corev1.EventTypeWarning && e.Reason != "FailedScheduling" {
			t.Errorf("%s of %s: %s", e.Reason, e.InvolvedObject.Name, e.Message)
		}
	}
	current, err := suite.Client.CoreV1().Pods(ns).Get(t.Context(), held.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if s := current.Status.ContainerStatuses[0]; s.RestartCount != 0 {
		t.Errorf("the container was restarted: %+v", s)
	}
}

// driverPod is the pod of the driver that is left when an update is over.
func driverPod(t *testing.T) corev1.Pod {
	t.Helper()
	suite.Eventually(t, "one driver", func(ctx context.Context) error {
		pods, err := suite.Client.CoreV1().Pods(harness.DriverNamespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) != 1 {
			err = fmt.Errorf("%d pods", len(pods.Items))
		}
		return err
	})
	return suite.DriverPod(t)
}

// comeAndGo starts pods with a claim of their own and deletes them, two at a time, until the returned function is called.
// That returns how many have run.
func comeAndGo(t *testing.T, ns string) (stop func() int) {
	ctx, cancel := context.WithCancel(t.Context())
	var streams sync.WaitGroup
	var mu sync.Mutex
	ran := 0
	for stream := range 2 {
		streams.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				name := fmt.Sprintf("pod-%d-%d", stream, i)
				if err := onePod(t.Context(), ns, name); err != nil {
					t.Errorf("pod %s: %v", name, err)
					return
				}
				mu.Lock()
				ran++
				mu.Unlock()
			}
		})
	}
	return func() int { cancel(); streams.Wait(); return ran }
}

func onePod(ctx context.Context, ns, name string) error {
	claims, pods := suite.Client.ResourceV1().ResourceClaims(ns), suite.Client.CoreV1().Pods(ns)
	if _, err := claims.Create(ctx, harness.Claim(name, harness.Partition("slice", "1g.10gb")), metav1.CreateOptions{}); err != nil {
		return err
	}
	pod := harness.Pod(name, []harness.Use{{Claim: name}})
	pod.Spec.TerminationGracePeriodSeconds = new(int64(1))
	if _, err := pods.Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return err
	}
	var last corev1.PodStatus
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, harness.Patience, true, func(ctx context.Context) (bool, error) {
		p, err := pods.Get(ctx, name, metav1.GetOptions{})
		if err == nil {
			last = p.Status
		}
		return err == nil && p.Status.Phase == corev1.PodRunning, err
	})
	if err != nil {
		return fmt.Errorf("%w: %+v", err, last)
	}
	if err := pods.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return err
	}
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, harness.Patience, true, func(ctx context.Context) (bool, error) {
		list, err := pods.List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
		return err == nil && len(list.Items) == 0, err
	})
	if err != nil {
		return fmt.Errorf("does not end: %w", err)
	}
	return claims.Delete(ctx, name, metav1.DeleteOptions{})
}
