package kubelet

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

const driverName = "gadget.example.com"

// gadgets is a driver that counts.
type gadgets struct {
	mu                   sync.Mutex
	prepared, unprepared int
}

func (g *gadgets) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		g.prepared++
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: []kubeletplugin.Device{{
			Requests: []string{"device"}, PoolName: "node", DeviceName: "one", CDIDeviceIDs: []string{"example.com/gadget=one"},
		}}}
	}
	return results, nil
}

func (g *gadgets) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	results := map[types.UID]error{}
	for _, claim := range claims {
		g.unprepared++
		results[claim.UID] = nil
	}
	return results, nil
}

func (g *gadgets) counts() (prepared, unprepared int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.prepared, g.unprepared
}

func (g *gadgets) HandleError(context.Context, error, string) {}

func (g *gadgets) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	for range 600 {
		if done() {
			return
		}
		select {
		case <-t.Context().Done():
			t.Fatal(t.Context().Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
	t.Fatalf("%s: not so after 30 seconds", what)
}

func TestDriverAndPodOutliveTheKubelet(t *testing.T) {
	dir, err := os.MkdirTemp("", "dra") //nolint:usetesting // t.TempDir is too long for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "pod", UID: "pod"},
		Spec: corev1.PodSpec{
			NodeName:       "node",
			Containers:     []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "claim"}}}}},
			ResourceClaims: []corev1.PodResourceClaim{{Name: "claim", ResourceClaimName: new("claim")}},
		},
	}
	client := fake.NewClientset(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}},
		&resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "claim", UID: "claim"},
			Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "device"}}}},
			Status: resourceapi.ResourceClaimStatus{
				Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
					Request: "device", Driver: driverName, Pool: "node", Device: "one",
				}}}},
				ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "pod"}},
			},
		},
	)
	config := Config{NodeName: "node", Client: client, RegistryDir: filepath.Join(dir, "registry"), StateDir: filepath.Join(dir, "state")}
	k, err := Start(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	if err := k.Prepare(t.Context(), pod); err == nil {
		t.Error("prepared without a driver")
	}
	if err := k.Reach(t.Context(), driverName); err == nil {
		t.Error("reached a driver that does not run")
	}

	driver := &gadgets{}
	plugins := filepath.Join(dir, "plugin")
	if err := os.Mkdir(plugins, 0o755); err != nil {
		t.Fatal(err)
	}
	helper, err := kubeletplugin.Start(t.Context(), driver, kubeletplugin.DriverName(driverName), kubeletplugin.NodeName("node"),
		kubeletplugin.KubeClient(client), kubeletplugin.RegistrarDirectoryPath(config.RegistryDir), kubeletplugin.PluginDataDirectoryPath(plugins))
	if err != nil {
		t.Fatal(err)
	}
	defer helper.Stop()
	until(t, "the driver is registered", func() bool { return k.Reach(t.Context(), driverName) == nil })
	if err := k.Prepare(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	ids, err := k.CDIDevices(pod, &pod.Spec.Containers[0])
	if err != nil || len(ids) != 1 || ids[0] != "example.com/gadget=one" {
		t.Errorf("CDI devices %v, error %v", ids, err)
	}
	if _, err := os.Stat(k.Checkpoint()); err != nil {
		t.Error(err)
	}

	k.Stop()
	if k, err = Start(t.Context(), config, pod); err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	until(t, "the driver is registered again", func() bool { return k.Reach(t.Context(), driverName) == nil })
	if err := k.Prepare(t.Context(), pod); err != nil {
		t.Fatalf("after a restart: %v", err)
	}
	if err := k.Unprepare(t.Context(), pod); err != nil {
		t.Fatalf("after a restart: %v", err)
	}
	if prepared, unprepared := driver.counts(); prepared != 2 || unprepared != 1 {
		t.Errorf("%d times prepared and %d times unprepared", prepared, unprepared)
	}
	if _, err := k.CDIDevices(pod, &pod.Spec.Containers[0]); err == nil {
		t.Error("the kubelet still has the devices of an unprepared pod")
	}
	helper.Stop()
	until(t, "the driver is not registered", func() bool { return !k.Registered(driverName) })
	if err := k.Unprepare(t.Context(), pod); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("unprepared again: %v", err)
	}
}
