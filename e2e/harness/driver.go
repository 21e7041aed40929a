package harness

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// DriverPod is the one pod of the driver. It waits while there are two, as in an update, or none.
func (s *Suite) DriverPod(t *testing.T) corev1.Pod {
	t.Helper()
	var pod corev1.Pod
	s.Eventually(t, "one pod of the driver", func(ctx context.Context) error {
		pods, err := s.Client.CoreV1().Pods(DriverNamespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=kubelet-plugin"})
		if err != nil {
			return err
		}
		if len(pods.Items) != 1 {
			return fmt.Errorf("%d pods", len(pods.Items))
		}
		pod = pods.Items[0]
		return nil
	})
	return pod
}

// OnNode runs a program in the driver's pod.
func (s *Suite) OnNode(t *testing.T, program ...string) string {
	t.Helper()
	return s.Kubectl(t, append([]string{"-n", DriverNamespace, "exec", "daemonset/" + DaemonSet, "--"}, program...)...)
}

// Scrape reads a page of metrics of the driver's pod, through the API server.
func (s *Suite) Scrape(ctx context.Context, t *testing.T, port int) (string, error) {
	t.Helper()
	path := fmt.Sprintf("/api/v1/namespaces/%s/pods/%s:%d/proxy/metrics", DriverNamespace, s.DriverPod(t).Name, port)
	page, err := s.Client.CoreV1().RESTClient().Get().AbsPath(path).DoRaw(ctx)
	return string(page), err
}

// RestartDriver deletes the driver's pod and waits until the next one is ready.
func (s *Suite) RestartDriver(t *testing.T) {
	t.Helper()
	p := s.DriverPod(t)
	s.DeletePod(t, &p)
	s.DriverReady(t)
}

// DriverReady waits until the driver is ready on all nodes.
func (s *Suite) DriverReady(t *testing.T) {
	t.Helper()
	s.Kubectl(t, "-n", DriverNamespace, "rollout", "status", "daemonset", DaemonSet, "--timeout", Patience.String())
}

// RestartKubelet restarts the kubelet of node 1 and waits until the node is ready.
func (s *Suite) RestartKubelet(t *testing.T) {
	t.Helper()
	node := s.Cluster.Node(1)
	if err := node.Restart(t.Context(), "kubelet"); err != nil {
		t.Fatal(err)
	}
	s.Eventually(t, "the node to be ready", func(ctx context.Context) error {
		n, err := s.Client.CoreV1().Nodes().Get(ctx, node.Name(), metav1.GetOptions{})
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

// NodeRoot is the file system of node 1, as seen from here.
func (s *Suite) NodeRoot(t *testing.T) string {
	t.Helper()
	root, err := s.Cluster.Node(1).Root()
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// OnDisk lists what the driver has on the nodes for claims: CDI specs, checkpoints, device folders, device metadata.
func (s *Suite) OnDisk(t *testing.T) []string {
	t.Helper()
	var found []string
	for _, node := range s.Cluster.Nodes() {
		root, err := node.Root()
		if err != nil {
			t.Fatal(err)
		}
		plugin := filepath.Join(root, "var/lib/kubelet/plugins", DriverName)
		for _, pattern := range []string{
			filepath.Join(root, "run/cdi", "*"),
			filepath.Join(plugin, "checkpoint", "*"),
			filepath.Join(plugin, "dev", "*"),
			filepath.Join(plugin, "dra-device-metadata", "*", "*"),
		} {
			files, err := filepath.Glob(pattern)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range files {
				found = append(found, node.Name()+":"+strings.TrimPrefix(f, root))
			}
		}
	}
	return found
}

// Event waits for an Event of that reason about the named object whose message has all the words, and returns it.
func (s *Suite) Event(t *testing.T, namespace, reason, name string, words ...string) corev1.Event {
	t.Helper()
	var found corev1.Event
	s.Eventually(t, "an Event "+reason, func(ctx context.Context) error {
		events, err := s.Client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.name=" + name + ",reason=" + reason,
		})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if containsAll(e.Message, words) {
				found = e
				return nil
			}
		}
		return fmt.Errorf("%d such events, none with %q", len(events.Items), words)
	})
	return found
}

func containsAll(s string, words []string) bool {
	for _, w := range words {
		if !strings.Contains(s, w) {
			return false
		}
	}
	return true
}
