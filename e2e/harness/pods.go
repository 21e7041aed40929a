package harness

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// CreateClaim makes the claim in the namespace.
func (s *Suite) CreateClaim(t *testing.T, namespace string, c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	t.Helper()
	c, err := s.Client.ResourceV1().ResourceClaims(namespace).Create(t.Context(), c, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// CreatePod makes the pod in the namespace.
func (s *Suite) CreatePod(t *testing.T, namespace string, p *corev1.Pod) *corev1.Pod {
	t.Helper()
	p, err := s.Client.CoreV1().Pods(namespace).Create(t.Context(), p, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Running waits until all containers of the pod are ready.
func (s *Suite) Running(t *testing.T, p *corev1.Pod) *corev1.Pod {
	t.Helper()
	var current *corev1.Pod
	s.Eventually(t, "pod "+p.Name+" to run", func(ctx context.Context) (err error) {
		if current, err = s.Client.CoreV1().Pods(p.Namespace).Get(ctx, p.Name, metav1.GetOptions{}); err != nil {
			return err
		}
		for _, c := range current.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("phase %s, conditions %+v", current.Status.Phase, current.Status.Conditions)
	})
	return current
}

// Waiting waits until the scheduler has said that the pod does not fit, and returns its message.
func (s *Suite) Waiting(t *testing.T, p *corev1.Pod) string {
	t.Helper()
	var message string
	s.Eventually(t, "pod "+p.Name+" to be refused by the scheduler", func(ctx context.Context) error {
		current, err := s.Client.CoreV1().Pods(p.Namespace).Get(ctx, p.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if current.Spec.NodeName != "" {
			t.Fatalf("pod %s was scheduled", p.Name)
		}
		for _, c := range current.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
				message = c.Message
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", current.Status.Conditions)
	})
	return message
}

// DeletePod deletes a pod and waits until it is gone.
func (s *Suite) DeletePod(t *testing.T, p *corev1.Pod) {
	t.Helper()
	if err := s.Client.CoreV1().Pods(p.Namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Eventually(t, "pod "+p.Name+" to be gone", func(ctx context.Context) error {
		_, err := s.Client.CoreV1().Pods(p.Namespace).Get(ctx, p.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is still there (%w)", err)
	})
}

// Devices returns the devices that a claim has, by request.
func (s *Suite) Devices(t *testing.T, c *resourceapi.ResourceClaim) map[string]string {
	t.Helper()
	c, err := s.Client.ResourceV1().ResourceClaims(c.Namespace).Get(t.Context(), c.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	devices := map[string]string{}
	if c.Status.Allocation != nil {
		for _, r := range c.Status.Allocation.Devices.Results {
			devices[r.Request] = r.Device
		}
	}
	return devices
}

// PortForward forwards a free local port to the pod for the time of the test, and returns the base URL.
func (s *Suite) PortForward(t *testing.T, p *corev1.Pod, port string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(s.Cluster.BinDir(), "kubectl"),
		"-n", p.Namespace, "port-forward", "--address", "127.0.0.1", "pod/"+p.Name, ":"+port)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+s.Cluster.KubeconfigPath())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("kubectl port-forward: %v", err)
	}
	found := regexp.MustCompile(`127\.0\.0\.1:(\d+)`).FindStringSubmatch(line)
	if found == nil {
		t.Fatalf("kubectl port-forward printed %q", line)
	}
	return "http://127.0.0.1:" + found[1]
}
