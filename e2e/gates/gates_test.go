// Package gates holds the tests in which feature gates of a running cluster go off and on.
package gates

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/simgpu/simgpu/e2e/harness"
)

// suite is a cluster with one node and two simulated H100s.
var suite *harness.Suite

func TestMain(m *testing.M) { harness.Main(m, &suite, harness.Config{Name: "gates", Values: h100s(2)}) }

// h100s are the chart's values for that many GPUs on every node.
func h100s(count int) map[string]any {
	return map[string]any{"inventory": map[string]any{"rules": []any{map[string]any{
		"name": "test",
		"gpus": []any{map[string]any{"model": "h100-sxm5-80gb", "count": count, "migMode": "dynamic"}},
	}}}}
}

// changed are the gates that setGates has set.
var changed map[string]bool

// setGates restarts the components of the control plane that ResourceSlices depend on with other gates than the
// cluster's, or with those of the cluster where there are none.
func setGates(ctx context.Context, t *testing.T, gates map[string]bool) {
	t.Helper()
	if maps.Equal(gates, changed) {
		return
	}
	changed = gates
	for _, component := range []string{"kube-apiserver", "kube-scheduler"} {
		if err := suite.Cluster.Node(1).RestartWith(ctx, component, gates); err != nil {
			t.Fatal(err)
		}
	}
}

// restoreGates has the cluster be as before at the end of the test.
func restoreGates(t *testing.T) {
	t.Helper()
	t.Cleanup(func() { setGates(context.WithoutCancel(t.Context()), t, nil) })
}

// published lists the devices in the slices of the node, "!" after the tainted.
func published(ctx context.Context) ([]string, error) {
	list, err := suite.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + harness.DriverName})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, slice := range list.Items {
		for _, device := range slice.Spec.Devices {
			name := device.Name
			if len(device.Taints) > 0 {
				name += "!"
			}
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// expectPublished waits until the node publishes exactly these devices.
func expectPublished(t *testing.T, want ...string) {
	t.Helper()
	suite.Eventually(t, fmt.Sprintf("the devices %v", want), func(ctx context.Context) error {
		got, err := published(ctx)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("published are %v", got)
		}
		return err
	})
}

// expectEverything waits until the node publishes all devices of two H100s.
func expectEverything(t *testing.T) {
	t.Helper()
	suite.Eventually(t, "all devices", func(ctx context.Context) error {
		got, err := published(ctx)
		if err == nil && len(got) != 2*26 {
			err = fmt.Errorf("published are %v", got)
		}
		return err
	})
}

// expectMetric waits until the driver's metrics say whether the feature is missing.
func expectMetric(t *testing.T, gate string, missing int) {
	t.Helper()
	series := fmt.Sprintf("simgpu_api_feature_missing{feature=%q} %d\n", gate, missing)
	suite.Eventually(t, series, func(ctx context.Context) error {
		page, err := suite.Scrape(ctx, t, 8080)
		if err == nil && !strings.Contains(page, series) {
			err = fmt.Errorf("it is not among the metrics:\n%s", page)
		}
		return err
	})
}

// watchForOverlaps looks at every state of every slice from now to the end of the test: a partition without counters
// could be allocated beside one that overlaps with it.
func watchForOverlaps(t *testing.T) {
	t.Helper()
	var mu sync.Mutex
	wrong := map[string]bool{}
	look := func(object any) {
		slice, ok := object.(*resourceapi.ResourceSlice)
		if !ok {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		for _, device := range slice.Spec.Devices {
			if kind := device.Attributes["type"].StringValue; kind != nil && *kind == "mig" && len(device.ConsumesCounters) == 0 {
				wrong[fmt.Sprintf("%s in %s at version %s", device.Name, slice.Name, slice.ResourceVersion)] = true
			}
		}
	}
	factory := informers.NewSharedInformerFactory(suite.Client, 0)
	informer := factory.Resource().V1().ResourceSlices().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    look,
		UpdateFunc: func(_, object any) { look(object) },
	}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	factory.StartWithContext(ctx)
	factory.WaitForCacheSyncWithContext(ctx)
	t.Cleanup(func() {
		cancel()
		factory.Shutdown()
		mu.Lock()
		defer mu.Unlock()
		for what := range wrong {
			t.Errorf("a partition was published without counters: %s", what)
		}
	})
}

// sameContainer checks that the pod runs as it did.
func sameContainer(t *testing.T, before *corev1.Pod) {
	t.Helper()
	after := suite.Running(t, before)
	if was, is := before.Status.ContainerStatuses[0].ContainerID, after.Status.ContainerStatuses[0].ContainerID; was != is {
		t.Errorf("the container of pod %s was %s and is %s", before.Name, was, is)
	}
}

// TestPartitionsGate takes the counters away from a running cluster, with a partition in use, and gives them back.
func TestPartitionsGate(t *testing.T) {
	const gate = "DRAPartitionableDevices"
	node := suite.Cluster.Node(1).Name()
	expectEverything(t)
	ns := suite.Namespace(t)
	restoreGates(t)
	watchForOverlaps(t)
	for _, name := range []string{"held", "later"} {
		suite.CreateClaim(t, ns, harness.Claim(name, harness.Partition("slice", "3g.40gb")))
	}
	for _, name := range []string{"whole", "other"} {
		suite.CreateClaim(t, ns, harness.Claim(name, harness.GPU("gpu")))
	}
	start := func(name string) *corev1.Pod {
		return suite.CreatePod(t, ns, harness.Pod(name, []harness.Use{{Claim: name}}))
	}
	held := suite.Running(t, start("held"))

	// The API server keeps the counters of the slices that it has, so it is only by asking that the driver learns of it.
	setGates(t.Context(), t, map[string]bool{gate: false})
	expectPublished(t, "gpu-1")
	suite.Event(t, metav1.NamespaceDefault, "PartitionsWithdrawn", node, gate)
	expectMetric(t, gate, 1)
	if log := suite.Kubectl(t, "-n", harness.DriverNamespace, "logs", "daemonset/"+harness.DaemonSet); !strings.Contains(log, gate) {
		t.Errorf("the driver's log does not name %s", gate)
	}
	sameContainer(t, held)
	whole := suite.Running(t, start("whole"))
	other, later := start("other"), start("later")
	suite.Waiting(t, other)
	suite.Waiting(t, later)

	// So does one that starts like this.
	suite.RestartDriver(t)
	expectPublished(t, "gpu-1")
	sameContainer(t, held)
	if list := suite.Exec(t, held, "c0", "nvidia-smi", "-L"); !strings.Contains(list, "MIG 3g.40gb") {
		t.Errorf("the pod with the partition sees\n%s", list)
	}

	// The partition's GPU is a whole one once the partition is free.
	suite.DeletePod(t, held)
	expectPublished(t, "gpu-0", "gpu-1")
	suite.Running(t, other)
	suite.Waiting(t, later)

	setGates(t.Context(), t, nil)
	expectEverything(t)
	suite.Event(t, metav1.NamespaceDefault, "PartitionsPublished", node)
	expectMetric(t, gate, 0)
	suite.Waiting(t, later) // both GPUs are in use
	suite.DeletePod(t, whole)
	suite.Running(t, later)
	if list := suite.Exec(t, other, "c0", "nvidia-smi", "-L"); strings.Contains(list, "MIG") {
		t.Errorf("the pod with the whole GPU sees\n%s", list)
	}
}

// TestTaintsGate has a device that is in use vanish from the inventory: it is published with a taint, and not at all
// while the API server drops taints.
func TestTaintsGate(t *testing.T) {
	const gate = "DRADeviceTaints"
	node := suite.Cluster.Node(1).Name()
	expectEverything(t)
	ns := suite.Namespace(t)
	restoreGates(t)
	suite.CreateClaim(t, ns, harness.Claim("first", harness.GPU("gpu")))
	second := suite.CreateClaim(t, ns, harness.Claim("second", harness.Partition("slice", "3g.40gb")))
	suite.Running(t, suite.CreatePod(t, ns, harness.Pod("first", []harness.Use{{Claim: "first"}})))
	holder := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("second", []harness.Use{{Claim: "second"}})))
	inUse := suite.Devices(t, second)["slice"]
	if !strings.HasPrefix(inUse, "gpu-1-") {
		t.Fatalf("the second claim has %s, want a partition of gpu-1", inUse)
	}
	t.Cleanup(func() {
		if err := suite.InstallChart(context.WithoutCancel(t.Context()), h100s(2)); err != nil {
			t.Error(err)
		}
	})
	if err := suite.InstallChart(t.Context(), h100s(1)); err != nil {
		t.Fatal(err)
	}
	expectTainted := func(want ...string) {
		t.Helper()
		suite.Eventually(t, fmt.Sprintf("the devices of gpu-1 to be %v", want), func(ctx context.Context) error {
			got, err := published(ctx)
			got = slices.DeleteFunc(got, func(name string) bool { return !strings.HasPrefix(name, "gpu-1") })
			if err == nil && !slices.Equal(got, want) {
				err = fmt.Errorf("published are %v", got)
			}
			return err
		})
	}
	expectTainted(inUse + "!")

	// The API server would keep the taint that the stored slice has: the driver withdraws the device.
	setGates(t.Context(), t, map[string]bool{gate: false, "DRADeviceTaintRules": false}) // one needs the other
	expectTainted()
	suite.Event(t, metav1.NamespaceDefault, "TaintsDropped", node, gate)
	expectMetric(t, gate, 1)
	sameContainer(t, holder)

	setGates(t.Context(), t, nil)
	expectTainted(inUse + "!")
	suite.Event(t, metav1.NamespaceDefault, "TaintsKept", node)
	expectMetric(t, gate, 0)
	sameContainer(t, holder)
}
