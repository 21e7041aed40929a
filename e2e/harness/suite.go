package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/simgpu/simgpu/e2e/cluster"
	"github.com/simgpu/simgpu/e2e/image"
	"github.com/simgpu/simgpu/e2e/internal/progress"
)

// Names that the chart gives.
const (
	DriverName      = "gpu.nvidia.com"
	DriverNamespace = "simgpu"
	DaemonSet       = "simgpu-kubelet-plugin"
)

// Patience is how long something may take that takes a few seconds on an idle machine.
const Patience = 2 * time.Minute

// Suite is a cluster for tests.
type Suite struct {
	Cluster *cluster.Cluster
	// RESTConfig is that of an administrator.
	RESTConfig *rest.Config
	Client     kubernetes.Interface

	repository string
}

// start brings up the cluster, loads the images built from this tree and installs the chart.
func start(ctx context.Context, dirs cluster.Dirs, config Config) (*Suite, error) {
	c, err := cluster.Up(ctx, cluster.Config{
		Dirs:          dirs,
		Name:          config.Name,
		Nodes:         config.Nodes,
		FeatureGates:  config.FeatureGates,
		RuntimeConfig: config.RuntimeConfig,
		Progress:      os.Stderr,
	})
	if err != nil {
		return nil, err
	}
	s := &Suite{Cluster: c, repository: filepath.Dir(dirs.Source)}
	if err := s.load(ctx, dirs, "vllm-sim", "vllm/vllm-openai:v0.19.1"); err != nil { // as in the demos' manifests
		return nil, err
	}
	for _, name := range append([]string{"simgpu", image.Test.Name}, config.Images...) {
		if err := s.load(ctx, dirs, name); err != nil {
			return nil, err
		}
	}
	if s.RESTConfig, err = c.RESTConfig(); err != nil {
		return nil, err
	}
	s.RESTConfig.QPS, s.RESTConfig.Burst = 100, 200
	if s.Client, err = kubernetes.NewForConfig(s.RESTConfig); err != nil {
		return nil, err
	}
	if config.WithoutChart {
		return s, nil
	}
	return s, s.InstallChart(ctx, config.Values)
}

// load builds an image of this tree and puts it on every node, under other names where some are given.
func (s *Suite) load(ctx context.Context, dirs cluster.Dirs, name string, references ...string) error {
	recipe, err := image.Find(name)
	if err != nil {
		return err
	}
	archive, err := cluster.BuildImage(ctx, dirs, progress.New(os.Stderr), recipe, references...)
	if err != nil {
		return err
	}
	_, err = s.Cluster.LoadImage(ctx, archive)
	return err
}

// InstallChart installs or upgrades the chart of this tree with those values over its defaults, whatever tests have written
// into its objects, and waits until the driver is ready.
func (s *Suite) InstallChart(ctx context.Context, values map[string]any) error {
	content, err := json.Marshal(values)
	if err != nil {
		return err
	}
	_, err = s.run(ctx, bytes.NewReader(content), "helm", "upgrade", "--install", "simgpu", s.Path("deployments/helm/simgpu"),
		"--namespace", DriverNamespace, "--create-namespace", "--values", "-", "--reset-values", "--force-conflicts", "--wait", "--timeout", "3m")
	return err
}

// Path is that of a file or folder of this repository, given relative to its top.
func (s *Suite) Path(path string) string { return filepath.Join(s.repository, path) }

// Command runs one of the cluster's own tools (kubectl, helm) and returns what it printed.
func (s *Suite) Command(ctx context.Context, tool string, args ...string) (string, error) {
	return s.run(ctx, nil, tool, args...)
}

func (s *Suite) run(ctx context.Context, stdin io.Reader, tool string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(s.Cluster.BinDir(), tool), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+s.Cluster.KubeconfigPath())
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &stderr
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s", tool, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return out.String(), nil
}

// Kubectl runs kubectl, which has to succeed, and returns what it printed.
func (s *Suite) Kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := s.Command(t.Context(), "kubectl", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Exec runs a program in a container of a pod and returns what it printed.
func (s *Suite) Exec(t *testing.T, pod *corev1.Pod, container string, program ...string) string {
	t.Helper()
	return s.Kubectl(t, append([]string{"-n", pod.Namespace, "exec", pod.Name, "-c", container, "--"}, program...)...)
}

// Eventually waits until check returns nil, and fails with what it last returned.
func (s *Suite) Eventually(t *testing.T, what string, check func(context.Context) error) {
	t.Helper()
	last := errors.New("not checked yet")
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, Patience, true, func(ctx context.Context) (bool, error) {
		found := check(ctx)
		if ctx.Err() == nil {
			last = found
		}
		return found == nil, nil
	})
	if err != nil {
		t.Fatalf("waited %s for %s: %v", Patience, what, last)
	}
}

// Namespace makes a namespace. At the end of the test its pods and claims are gone, and with them everything they had on
// the nodes.
func (s *Suite) Namespace(t *testing.T) string {
	t.Helper()
	ns, err := s.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), Patience)
		defer cancel()
		if t.Failed() {
			s.explain(ctx, t, ns.Name)
		}
		// The namespace controller takes its time; what the next test must not meet is gone at once this way.
		_, err := s.Command(ctx, "kubectl", "-n", ns.Name, "delete", "deployments,pods,resourceclaims", "--all", "--wait")
		if err != nil {
			t.Error(err)
		}
		if err := s.Client.CoreV1().Namespaces().Delete(ctx, ns.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
		if left := s.OnDisk(t); len(left) > 0 {
			t.Errorf("left on the node after all pods are gone: %s", strings.Join(left, ", "))
		}
	})
	return ns.Name
}

// explain prints what a person would look at first.
func (s *Suite) explain(ctx context.Context, t *testing.T, namespace string) {
	for _, args := range [][]string{
		{"-n", namespace, "get", "pods,resourceclaims", "-o", "wide"},
		{"-n", namespace, "get", "events", "--sort-by", ".lastTimestamp"},
		{"-n", DriverNamespace, "logs", "daemonset/" + DaemonSet, "--tail", "60"},
	} {
		out, err := s.Command(ctx, "kubectl", args...)
		t.Logf("kubectl %s\n%s%v", strings.Join(args, " "), out, err)
	}
}
