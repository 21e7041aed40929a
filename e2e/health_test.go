package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/e2e/harness"
)

// simgpuctlPath is the program, built from this tree.
var simgpuctlPath = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "simgpuctl")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "simgpuctl")
	build := exec.Command("go", "build", "-o", path, "./cmd/simgpuctl")
	build.Dir = ".."
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

// fault runs "simgpuctl fault" and returns what it printed.
func fault(t *testing.T, args ...string) string {
	t.Helper()
	path, err := simgpuctlPath()
	if err != nil {
		t.Fatal(err)
	}
	args = append([]string{"fault", "--kubeconfig", suite.Cluster.KubeconfigPath()}, args...)
	out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("simgpuctl %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// addFault puts faults on the node until the end of the test.
func addFault(t *testing.T, args ...string) {
	t.Helper()
	node := suite.Cluster.Node(1).Name()
	t.Cleanup(func() {
		path, err := simgpuctlPath()
		if err != nil {
			t.Error(err)
			return
		}
		out, err := exec.Command(path, "fault", "clear", node, "--kubeconfig", suite.Cluster.KubeconfigPath()).CombinedOutput()
		if err != nil {
			t.Errorf("clear faults: %v: %s", err, out)
		}
	})
	t.Log(fault(t, append([]string{"add", node}, args...)...))
}

func clearFaults(t *testing.T) {
	t.Helper()
	t.Log(fault(t, "clear", suite.Cluster.Node(1).Name()))
}

// taintsOf returns the taints of each device of the node, "<key>=<value>:<effect> since <time>".
func taintsOf(ctx context.Context) (map[string][]string, error) {
	list, err := suite.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	taints := map[string][]string{}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			taints[d.Name] = []string{}
			for _, taint := range d.Taints {
				taints[d.Name] = append(taints[d.Name], fmt.Sprintf("%s=%s:%s since %s", taint.Key, taint.Value, taint.Effect, taint.TimeAdded))
			}
		}
	}
	return taints, nil
}

// untainted waits until no device has a taint.
func untainted(t *testing.T) {
	t.Helper()
	suite.Eventually(t, "the taints to be gone", func(ctx context.Context) error {
		taints, err := taintsOf(ctx)
		for device, found := range taints {
			if len(found) > 0 {
				return fmt.Errorf("%s has %v", device, found)
			}
		}
		return err
	})
}

// healthOf is the health of the first device of the pod's first container, "<health>: <message>".
func healthOf(ctx context.Context, p *corev1.Pod) (string, error) {
	current, err := suite.Client.CoreV1().Pods(p.Namespace).Get(ctx, p.Name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	for _, c := range current.Status.ContainerStatuses {
		for _, r := range c.AllocatedResourcesStatus {
			if len(r.Resources) > 0 {
				device := r.Resources[0]
				return fmt.Sprintf("%s: %s", device.Health, ptr.Deref(device.Message, "")), nil
			}
		}
	}
	return "", fmt.Errorf("no health in %+v", current.Status.ContainerStatuses)
}

func expectHealth(t *testing.T, p *corev1.Pod, want string) {
	t.Helper()
	suite.Eventually(t, "the pod's status to say "+want, func(ctx context.Context) error {
		got, err := healthOf(ctx, p)
		if err == nil && got != want {
			err = fmt.Errorf("it says %s", got)
		}
		return err
	})
}

// nodeEvents are the reasons of Events on the node, with their messages.
func nodeEvents(ctx context.Context) ([]string, error) {
	list, err := suite.Client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var events []string
	for _, e := range list.Items {
		events = append(events, e.Reason+": "+e.Message)
	}
	return events, nil
}

func expectNodeEvent(t *testing.T, want string) {
	t.Helper()
	suite.Eventually(t, "an Event "+want, func(ctx context.Context) error {
		events, err := nodeEvents(ctx)
		if err == nil && !slices.ContainsFunc(events, func(e string) bool { return strings.Contains(e, want) }) {
			err = fmt.Errorf("there are %q", events)
		}
		return err
	})
}

// TestBrokenGPU follows an XID from the device taint and the pod's status to recovery.
func TestBrokenGPU(t *testing.T) {
	ns := suite.Namespace(t)
	for _, claim := range []string{"held", "wanted"} {
		suite.CreateClaim(t, ns, harness.Claim(claim, harness.Partition("slice", "3g.40gb")))
	}
	held := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("held", []harness.Use{{Claim: "held"}})))
	expectHealth(t, held, "Healthy: ")
	before, err := suite.Client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}

	addFault(t, "--device", "gpu-0", "--xid", "79")
	expectHealth(t, held, "Unhealthy: XID 79: GPU has fallen off the bus (restart the node)")
	var tainted map[string][]string
	suite.Eventually(t, "all devices of the GPU to be tainted", func(ctx context.Context) (err error) {
		tainted, err = taintsOf(ctx)
		for device, taints := range tainted {
			if len(taints) != 1 || !strings.HasPrefix(taints[0], "gpu.nvidia.com/xid=79:NoSchedule since 2") {
				return fmt.Errorf("%s has %v", device, taints)
			}
		}
		return err
	})
	after, err := suite.Client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var written int64
	for _, slice := range after.Items {
		i := slices.IndexFunc(before.Items, func(s resourceapi.ResourceSlice) bool { return s.UID == slice.UID })
		if i < 0 || before.Items[i].Spec.Pool != slice.Spec.Pool {
			t.Fatalf("slice %s of pool %+v is new", slice.Name, slice.Spec.Pool)
		}
		written += slice.Generation - before.Items[i].Generation
	}
	if written != 1 {
		t.Errorf("one fault was written in %d changes of slices", written)
	}
	expectNodeEvent(t, "XID 79 on gpu-0")

	wanted := suite.CreatePod(t, ns, harness.Pod("wanted", []harness.Use{{Claim: "wanted"}}))
	suite.Waiting(t, wanted)
	suite.RestartDriver(t)
	expectHealth(t, held, "Unhealthy: XID 79: GPU has fallen off the bus (restart the node)")
	if taints, err := taintsOf(t.Context()); err != nil || fmt.Sprint(taints) != fmt.Sprint(tainted) {
		t.Errorf("the taints were %v and after a restart of the driver are %v, %v", tainted, taints, err)
	}

	clearFaults(t)
	untainted(t)
	expectHealth(t, held, "Healthy: ")
	suite.Running(t, wanted)
	expectNodeEvent(t, "FaultCleared: Fault cleared")
	if p, err := suite.Client.CoreV1().Pods(ns).Get(t.Context(), held.Name, metav1.GetOptions{}); err != nil || p.UID != held.UID || p.DeletionTimestamp != nil {
		t.Errorf("the pod that had the GPU is not the same any more: %v", err)
	}
}

// TestEviction has the fault of a GPU end the pods that use it.
func TestEviction(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("held", harness.Partition("slice", "1g.10gb")))
	held := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("held", []harness.Use{{Claim: "held"}})))
	addFault(t, "--device", "gpu-0", "--lost", "--effect", "NoExecute")
	suite.Eventually(t, "the pod to be evicted", func(ctx context.Context) error {
		_, err := suite.Client.CoreV1().Pods(ns).Get(ctx, held.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is still there (%w)", err)
	})
	clearFaults(t)
	untainted(t)
	suite.CreateClaim(t, ns, harness.Claim("again", harness.GPU("gpu")))
	suite.Running(t, suite.CreatePod(t, ns, harness.Pod("again", []harness.Use{{Claim: "again"}})))
}

// TestLostGPU looks at a lost GPU from inside the container, where a program holds its memory.
func TestLostGPU(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("gpu", harness.GPU("gpu")))
	p := harness.Pod("gpu", []harness.Use{{Claim: "gpu"}}, []harness.Use{{Claim: "gpu"}})
	p.Spec.Containers[1].Command = []string{"simgpu-run", "--memory", "1000MiB", "--", "sleep", "infinity"}
	p = suite.Running(t, suite.CreatePod(t, ns, p))
	node := suite.Cluster.Node(1).Name()

	addFault(t, "--device", "gpu-0", "--ecc-correctable", "3", "--ecc-uncorrectable", "2")
	eccErrors := []string{"nvidia-smi", "--query-gpu=ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"}
	for view, look := range map[string]func() string{
		"container": func() string { return suite.Exec(t, p, "c0", eccErrors...) },
		"node":      func() string { return suite.OnNode(t, eccErrors...) },
	} {
		suite.Eventually(t, "ECC errors in the view of the "+view, func(context.Context) error {
			if got := look(); got != "3, 2\n" {
				return fmt.Errorf("it shows %q", got)
			}
			return nil
		})
	}

	fault(t, "add", node, "--device", "gpu-0", "--lost")
	suite.Eventually(t, "the holder of memory to end", func(ctx context.Context) error {
		current, err := suite.Client.CoreV1().Pods(ns).Get(ctx, p.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, state := range []corev1.ContainerState{current.Status.ContainerStatuses[1].State, current.Status.ContainerStatuses[1].LastTerminationState} {
			// 120: lost while it was held. The restarted container may have failed since with 122: no such device.
			if state.Terminated != nil && (state.Terminated.ExitCode == 120 || state.Terminated.ExitCode == 122) {
				return nil
			}
		}
		return fmt.Errorf("its status is %+v", current.Status.ContainerStatuses[1])
	})
	out, err := suite.Command(t.Context(), "kubectl", "-n", ns, "exec", p.Name, "-c", "c0", "--", "nvidia-smi")
	if err == nil || !strings.Contains(err.Error(), "exit code 15") || !strings.Contains(out, "GPU is lost") {
		t.Errorf("nvidia-smi ends with %v and prints\n%s", err, out)
	}
	if list := fault(t, "list"); !strings.Contains(list, "GPULost") || !strings.Contains(list, "ECC 3 correctable, 2 uncorrectable") {
		t.Errorf("faults listed:\n%s", list)
	}

	clearFaults(t)
	suite.Eventually(t, "the memory to be held again", func(ctx context.Context) error {
		out, err := suite.Command(ctx, "kubectl", "-n", ns, "exec", p.Name, "-c", "c0", "--", "nvidia-smi")
		if err == nil && !strings.Contains(out, "1000MiB /  81559MiB") {
			err = fmt.Errorf("nvidia-smi prints\n%s", out)
		}
		return err
	})
}

// TestPrepareThatFailsRecovers lets two prepares on the node fail.
func TestPrepareThatFailsRecovers(t *testing.T) {
	ns := suite.Namespace(t)
	addFault(t, "--fail-prepare", "--times", "2")
	suite.CreateClaim(t, ns, harness.Claim("c", harness.Partition("slice", "1g.10gb")))
	p := suite.CreatePod(t, ns, harness.Pod("p", []harness.Use{{Claim: "c"}}))
	suite.Running(t, p)
	expectPrepareFailures(t, p, 2)
}

// brokenDevices is demo/features/health.
func brokenDevices(t *testing.T, ns string) {
	pod := func(name string) *corev1.Pod {
		return suite.Running(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}})
	}
	worker := pod("worker")
	pod("late")
	expectHealth(t, worker, "Healthy: ")
	addFault(t, "--lost")
	expectHealth(t, worker, "Unhealthy: GPU is lost")
	out, err := suite.Command(t.Context(), "kubectl", "-n", ns, "exec", "worker", "-c", "shell", "--", "nvidia-smi")
	if err == nil || !strings.Contains(err.Error(), "exit code 15") || !strings.Contains(out, "GPU is lost") {
		t.Errorf("nvidia-smi ends with %v and prints\n%s", err, out)
	}
	clearFaults(t)
	expectHealth(t, worker, "Healthy: ")

	applyFeature(t, ns, "health/failing-claim.yaml")
	expectPrepareFailures(t, pod("unlucky"), 2)
}

// expectPrepareFailures counts the kubelet's Events on failed prepares of a pod.
func expectPrepareFailures(t *testing.T, p *corev1.Pod, want int32) {
	t.Helper()
	suite.Eventually(t, "the kubelet's Events on failed prepares", func(ctx context.Context) error {
		list, err := suite.Client.CoreV1().Events(p.Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var failures int32
		for _, e := range list.Items {
			if e.InvolvedObject.Name == p.Name && e.Reason == "FailedPrepareDynamicResources" && strings.Contains(e.Message, "because of fault") {
				failures += max(e.Count, 1)
			}
		}
		if failures != want {
			return fmt.Errorf("%d, want %d", failures, want)
		}
		return nil
	})
}

// TestPrepareThatHangsHoldsUpNobodyElse has one partition hang while another is given out.
func TestPrepareThatHangsHoldsUpNobodyElse(t *testing.T) {
	ns := suite.Namespace(t)
	addFault(t, "--device", "gpu-0-mig-3g40gb-9-0", "--hang-prepare")
	var pods []*corev1.Pod
	for _, name := range []string{"hangs", "runs"} {
		claim := suite.CreateClaim(t, ns, harness.Claim(name, harness.Partition("slice", "3g.40gb")))
		pods = append(pods, suite.CreatePod(t, ns, harness.Pod(name, []harness.Use{{Claim: name}})))
		suite.Eventually(t, "claim "+name+" to be allocated", func(context.Context) error {
			if len(suite.Devices(t, claim)) == 0 {
				return fmt.Errorf("it is not")
			}
			return nil
		})
	}
	suite.Running(t, pods[1])
	hanging, err := suite.Client.CoreV1().Pods(ns).Get(t.Context(), pods[0].Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if hanging.Status.Phase != corev1.PodPending || hanging.Spec.NodeName == "" {
		t.Errorf("the pod whose prepare hangs is %s on node %q", hanging.Status.Phase, hanging.Spec.NodeName)
	}
	clearFaults(t)
	suite.Running(t, pods[0])
}

// TestCrashInPrepare ends the driver in the middle of a prepare. The pod runs in the end, and the driver has
// crashed once.
func TestCrashInPrepare(t *testing.T) {
	ns := suite.Namespace(t)
	restarts := func() int32 { return suite.DriverPod(t).Status.ContainerStatuses[0].RestartCount }
	before := restarts()
	addFault(t, "--crash-at", "SpecWritten")
	suite.CreateClaim(t, ns, harness.Claim("c", harness.Partition("slice", "2g.20gb")))
	p := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("p", []harness.Use{{Claim: "c"}})))
	if n := restarts() - before; n != 1 {
		t.Errorf("the driver has restarted %d times", n)
	}
	suite.DriverReady(t)
	suite.DeletePod(t, p)
	if left := suite.OnDisk(t); len(left) > 0 {
		t.Errorf("left on the node: %v", left)
	}
	if n := restarts() - before; n != 1 {
		t.Errorf("the driver has restarted %d times in the end", n)
	}
}
