// Package e2e holds the tests that run on a real cluster: the images and the chart as a user gets them, on the
// embedded local cluster of package cluster. `make e2e` runs them.
//
// All tests share one cluster with one node and one simulated H100, so they run one after the other, each in a
// namespace of its own that is gone, with everything it held, before the next one starts.
package e2e

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/simgpu/simgpu/e2e/cluster"
	"github.com/simgpu/simgpu/e2e/image"
	"github.com/simgpu/simgpu/e2e/internal/lock"
	"github.com/simgpu/simgpu/e2e/internal/progress"
)

const (
	driverName      = "gpu.nvidia.com"
	driverNamespace = "simgpu"
	daemonSet       = "simgpu-kubelet-plugin"

	// patience is how long something may take that takes a few seconds on an idle machine.
	patience = 2 * time.Minute
)

// suite is the cluster that all tests of this package share. TestMain makes it.
var suite *env

// env is a cluster with the chart installed.
type env struct {
	cluster *cluster.Cluster
	config  *rest.Config
	client  kubernetes.Interface
}

func TestMain(m *testing.M) {
	name := flag.String("cluster", "e2e", "name of the local cluster to start")
	retain := flag.Bool("retain", os.Getenv("RETAIN") != "", "leave the cluster up at the end")
	flag.Parse()
	os.Exit(run(m, *name, *retain))
}

func run(m *testing.M, name string, retain bool) int {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	work, err := os.Getwd()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	dirs, err := cluster.DefaultDirs(os.Getenv, work)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	// One run at a time has the cluster of that name.
	alone, err := lock.Acquire(ctx, filepath.Join(dirs.Cache, "tests-"+name+".lock"), func() {
		fmt.Fprintf(os.Stderr, "Waiting for another run of these tests on cluster %s\n", name)
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer alone.Release()

	down := func() {
		c, err := cluster.Open(dirs, name)
		if err == nil {
			err = c.Down(context.WithoutCancel(ctx))
		}
		if err != nil && !errors.Is(err, cluster.ErrNotFound) {
			fmt.Fprintln(os.Stderr, "removing the cluster:", err)
		}
	}
	if !retain {
		down() // of a run that was killed
		defer down()
	}
	if suite, err = start(ctx, dirs, name); err != nil {
		fmt.Fprintln(os.Stderr, "starting the cluster:", err)
		return 1
	}
	return m.Run()
}

// start brings up the cluster, loads the images built from this tree and installs the chart.
func start(ctx context.Context, dirs cluster.Dirs, name string) (*env, error) {
	c, err := cluster.Up(ctx, cluster.Config{Dirs: dirs, Name: name, Progress: os.Stderr})
	if err != nil {
		return nil, err
	}
	e := &env{cluster: c}
	for recipe, as := range map[string][]string{
		"simgpu":    nil,
		"vllm-sim":  {"vllm/vllm-openai:v0.19.1"}, // as in the demo's manifests
		"testimage": nil,
	} {
		if err := e.load(ctx, dirs, recipe, as); err != nil {
			return nil, err
		}
	}
	if e.config, err = c.RESTConfig(); err != nil {
		return nil, err
	}
	e.config.QPS, e.config.Burst = 100, 200
	if e.client, err = kubernetes.NewForConfig(e.config); err != nil {
		return nil, err
	}
	out, err := e.command(ctx, "helm", "upgrade", "--install", "simgpu", "../deployments/helm/simgpu",
		"--namespace", driverNamespace, "--create-namespace", "--wait", "--timeout", "3m")
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, out)
	}
	return e, nil
}

// load builds an image of this tree and puts it on every node.
func (e *env) load(ctx context.Context, dirs cluster.Dirs, name string, as []string) error {
	recipe, err := image.Find(name)
	if err != nil {
		return err
	}
	archive, err := cluster.BuildImage(ctx, dirs, progress.New(os.Stderr), recipe, as...)
	if err != nil {
		return err
	}
	_, err = e.cluster.LoadImage(ctx, archive)
	return err
}

// command runs one of the cluster's own tools (kubectl, helm) and returns what it printed.
func (e *env) command(ctx context.Context, tool string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(e.cluster.BinDir(), tool), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+e.cluster.KubeconfigPath())
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s", tool, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return out.String(), nil
}

func (e *env) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := e.command(t.Context(), "kubectl", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// exec runs a program in a container of a pod and returns what it printed.
func (e *env) exec(t *testing.T, pod *corev1.Pod, container string, program ...string) string {
	t.Helper()
	return e.kubectl(t, append([]string{"-n", pod.Namespace, "exec", pod.Name, "-c", container, "--"}, program...)...)
}

// onNode runs a program in the driver's pod.
func (e *env) onNode(t *testing.T, program ...string) string {
	t.Helper()
	return e.kubectl(t, append([]string{"-n", driverNamespace, "exec", "daemonset/" + daemonSet, "--"}, program...)...)
}

// eventually waits until check returns nil, and fails with what it last returned.
func (e *env) eventually(t *testing.T, what string, check func(context.Context) error) {
	t.Helper()
	last := errors.New("not checked yet")
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		found := check(ctx)
		if ctx.Err() == nil {
			last = found
		}
		return found == nil, nil
	})
	if err != nil {
		t.Fatalf("waited %s for %s: %v", patience, what, last)
	}
}

// namespace makes a namespace. At the end of the test its pods and claims are gone, and with them everything they had on
// the node.
func (e *env) namespace(t *testing.T) string {
	t.Helper()
	ns, err := e.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		if t.Failed() {
			e.explain(ctx, t, ns.Name)
		}
		// The namespace controller takes its time; what the next test must not meet is gone at once this way.
		_, err := e.command(ctx, "kubectl", "-n", ns.Name, "delete", "deployments,pods,resourceclaims", "--all", "--wait")
		if err != nil {
			t.Error(err)
		}
		if err := e.client.CoreV1().Namespaces().Delete(ctx, ns.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
		if left := e.onDisk(t); len(left) > 0 {
			t.Errorf("left on the node after all pods are gone: %s", strings.Join(left, ", "))
		}
	})
	return ns.Name
}

// explain prints what a person would look at first.
func (e *env) explain(ctx context.Context, t *testing.T, namespace string) {
	for _, args := range [][]string{
		{"-n", namespace, "get", "pods,resourceclaims", "-o", "wide"},
		{"-n", namespace, "get", "events", "--sort-by", ".lastTimestamp"},
		{"-n", driverNamespace, "logs", "daemonset/" + daemonSet, "--tail", "60"},
	} {
		out, err := e.command(ctx, "kubectl", args...)
		t.Logf("kubectl %s\n%s%v", strings.Join(args, " "), out, err)
	}
}

// nodeRoot is the node's file system, as seen from here.
func nodeRoot(t *testing.T) string {
	t.Helper()
	root, err := suite.cluster.Node(1).Root()
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// onDisk lists what the driver has on the node for claims: CDI specs, checkpoints, device folders.
func (e *env) onDisk(t *testing.T) []string {
	t.Helper()
	root := nodeRoot(t)
	plugin := filepath.Join(root, "var/lib/kubelet/plugins", driverName)
	var found []string
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
			found = append(found, strings.TrimPrefix(f, root))
		}
	}
	return found
}

// claim is a ResourceClaim with these requests.
func claim(name string, requests ...resourceapi.DeviceRequest) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: requests}},
	}
}

// partition requests one partition of that profile.
func partition(name, profile string) resourceapi.DeviceRequest {
	r := gpu(name)
	r.Exactly.DeviceClassName = "mig.nvidia.com"
	r.Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.attributes['%s'].profile == '%s'", driverName, profile),
	}}}
	return r
}

// gpu requests a whole GPU.
func gpu(name string) resourceapi.DeviceRequest {
	return resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}}
}

func (e *env) createClaim(t *testing.T, namespace string, c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	t.Helper()
	c, err := e.client.ResourceV1().ResourceClaims(namespace).Create(t.Context(), c, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (e *env) createPod(t *testing.T, namespace string, p *corev1.Pod) *corev1.Pod {
	t.Helper()
	p, err := e.client.CoreV1().Pods(namespace).Create(t.Context(), p, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// use is what a container takes of a pod's claim.
type use struct{ claim, request string }

// pod sleeps in one container per element of containers, each with the claims it names. The pod's claims are existing
// ResourceClaims of the same name.
func pod(name string, containers ...[]use) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{TerminationGracePeriodSeconds: new(int64(5))},
	}
	seen := map[string]bool{}
	for i, uses := range containers {
		c := corev1.Container{
			Name:            fmt.Sprintf("c%d", i),
			Image:           image.Test.Reference,
			ImagePullPolicy: corev1.PullNever,
			Command:         []string{"sleep", "infinity"},
			Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1m")},
			},
		}
		for _, u := range uses {
			c.Resources.Claims = append(c.Resources.Claims, corev1.ResourceClaim{Name: u.claim, Request: u.request})
			if !seen[u.claim] {
				seen[u.claim] = true
				p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: u.claim, ResourceClaimName: &u.claim})
			}
		}
		p.Spec.Containers = append(p.Spec.Containers, c)
	}
	return p
}

// running waits until all containers of the pod are ready.
func (e *env) running(t *testing.T, p *corev1.Pod) *corev1.Pod {
	t.Helper()
	var current *corev1.Pod
	e.eventually(t, "pod "+p.Name+" to run", func(ctx context.Context) (err error) {
		if current, err = e.client.CoreV1().Pods(p.Namespace).Get(ctx, p.Name, metav1.GetOptions{}); err != nil {
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

// waiting waits until the scheduler has said that the pod does not fit, and returns its message.
func (e *env) waiting(t *testing.T, p *corev1.Pod) string {
	t.Helper()
	var message string
	e.eventually(t, "pod "+p.Name+" to be refused by the scheduler", func(ctx context.Context) error {
		current, err := e.client.CoreV1().Pods(p.Namespace).Get(ctx, p.Name, metav1.GetOptions{})
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

// deletePod deletes a pod and waits until it is gone.
func (e *env) deletePod(t *testing.T, p *corev1.Pod) {
	t.Helper()
	if err := e.client.CoreV1().Pods(p.Namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	e.eventually(t, "pod "+p.Name+" to be gone", func(ctx context.Context) error {
		_, err := e.client.CoreV1().Pods(p.Namespace).Get(ctx, p.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is still there (%w)", err)
	})
}

// devices returns the devices that a claim has, by request.
func (e *env) devices(t *testing.T, c *resourceapi.ResourceClaim) map[string]string {
	t.Helper()
	c, err := e.client.ResourceV1().ResourceClaims(c.Namespace).Get(t.Context(), c.Name, metav1.GetOptions{})
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
