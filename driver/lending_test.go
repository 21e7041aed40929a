package driver

import (
	"context"
	"errors"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	draapi "k8s.io/kubelet/pkg/apis/dra/v1"
)

// pluginKubelet is what a kubelet does with device plugins.
type pluginKubelet struct {
	deviceplugin.UnimplementedRegistrationServer
	dir        string
	registered chan *deviceplugin.RegisterRequest
}

// start serves kubelet.sock, after everything else in the folder was removed, as a kubelet does.
func (k *pluginKubelet) start(t *testing.T) (stop func()) {
	t.Helper()
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if err := os.Remove(filepath.Join(k.dir, entry.Name())); err != nil {
			t.Fatal(err)
		}
	}
	listener, err := net.Listen("unix", filepath.Join(k.dir, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	deviceplugin.RegisterRegistrationServer(server, k)
	go func() { _ = server.Serve(listener) }()
	return server.Stop
}

func (k *pluginKubelet) Register(_ context.Context, request *deviceplugin.RegisterRequest) (*deviceplugin.Empty, error) {
	k.registered <- request
	return &deviceplugin.Empty{}, nil
}

// plugin waits for the registration of a plugin and connects to it.
func (k *pluginKubelet) plugin(t *testing.T) (deviceplugin.DevicePluginClient, grpc.ServerStreamingClient[deviceplugin.ListAndWatchResponse]) {
	t.Helper()
	request := <-k.registered
	if request.ResourceName != "nvidia.com/gpu" || request.Version != deviceplugin.Version {
		t.Errorf("registered %v", request)
	}
	conn, err := grpc.NewClient("unix://"+filepath.Join(k.dir, request.Endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	client := deviceplugin.NewDevicePluginClient(conn)
	stream, err := client.ListAndWatch(t.Context(), &deviceplugin.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	return client, stream
}

// healths waits until the plugin has told of so many devices with these healths, and returns their IDs.
func healths(t *testing.T, stream grpc.ServerStreamingClient[deviceplugin.ListAndWatchResponse], want ...string) []string {
	t.Helper()
	for {
		answer, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		var ids, got []string
		for _, device := range answer.Devices {
			ids, got = append(ids, device.ID), append(got, device.Health)
		}
		if slices.Equal(got, want) {
			return ids
		}
	}
}

func allocate(t *testing.T, client deviceplugin.DevicePluginClient, ids ...string) ([]string, error) {
	t.Helper()
	answer, err := client.Allocate(t.Context(), &deviceplugin.AllocateRequest{ContainerRequests: []*deviceplugin.ContainerAllocateRequest{{DevicesIds: ids}}})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, device := range answer.ContainerResponses[0].CdiDevices {
		names = append(names, device.Name)
	}
	return names, nil
}

// published are the devices in the API, with the keys of their taints.
func published(t *testing.T, n *wholeNode) map[string]string {
	t.Helper()
	list, err := n.api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	devices := map[string]string{}
	for _, slice := range list.Items {
		for _, device := range slice.Spec.Devices {
			var taints []string
			for _, taint := range device.Taints {
				taints = append(taints, taint.Key)
			}
			devices[device.Name] = strings.Join(taints, ",")
		}
	}
	return devices
}

func TestDevicePlugin(t *testing.T) {
	claim := claimOf("claim", []string{"gpu-0-mig-1g10gb-19-0"})
	n := newWholeNode(t, claim)
	kubelet := &pluginKubelet{dir: filepath.Join(n.root, "device-plugins"), registered: make(chan *deviceplugin.RegisterRequest, 10)}
	if err := os.MkdirAll(kubelet.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	stop := kubelet.start(t)
	n.opts.DevicePluginDir, n.opts.DevicePluginResource = kubelet.dir, "nvidia.com/gpu"

	// A claim has a part of the first GPU, and keeps it.
	d := n.run()
	dra := n.register()
	d.expectReady(t)
	prepareOverGRPC(t, dra, claim)
	client, stream := kubelet.plugin(t)
	ids := healths(t, stream, deviceplugin.Unhealthy, deviceplugin.Healthy)
	eventually(t, "nothing to be published but what the claim has", func() (bool, any) {
		now := published(t, n)
		return maps.Equal(now, map[string]string{"gpu-0-mig-1g10gb-19-0": lentTaint}), now
	})
	if _, err := allocate(t, client, ids[0]); err == nil || !strings.Contains(err.Error(), "overlaps") {
		t.Errorf("a GPU of which a claim has a part: %v", err)
	}
	names, err := allocate(t, client, ids[1])
	if err != nil {
		t.Fatal(err)
	}
	if again, err := allocate(t, client, ids[1]); err != nil || !slices.Equal(again, names) {
		t.Errorf("once more: %v, %v; at first %v", again, err, names)
	}
	if c := n.inject(names...); !slices.Contains(c.env, "SIMGPU_DEVICE_GPU_1="+ids[1]) {
		t.Errorf("the container has %v", c.env)
	}
	if _, err := allocate(t, client, "GPU-none"); err == nil || !strings.Contains(err.Error(), "GPU-none") {
		t.Errorf("a GPU that does not exist: %v", err)
	}
	other := claimOf("other", []string{"gpu-1"})
	if err := n.api.Tracker().Add(other); err != nil {
		t.Fatal(err)
	}
	response, err := dra.NodePrepareResources(t.Context(), &draapi.NodePrepareResourcesRequest{Claims: requestFor(other)})
	if err != nil || !strings.Contains(response.Claims[string(other.UID)].GetError(), "is prepared for claim device-plugin/gpu-1") {
		t.Errorf("a claim for a lent GPU: %v, %v", response, err)
	}

	// The claim goes, and its GPU can be had. Both or neither.
	unprepareOverGRPC(t, dra, claim)
	healths(t, stream, deviceplugin.Healthy, deviceplugin.Healthy)

	// Another kubelet: the plugin registers again.
	stop()
	stop = kubelet.start(t)
	_, stream = kubelet.plugin(t)
	healths(t, stream, deviceplugin.Healthy, deviceplugin.Healthy)
	stop()

	// Another driver, for claims alone: what is lent stays lent, and the rest is published.
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
	n.opts.DevicePluginDir = ""
	d = n.run()
	n.register()
	d.expectReady(t)
	eventually(t, "the first GPU to be published", func() (bool, any) {
		now := published(t, n)
		_, whole := now["gpu-0"]
		return whole && !slices.ContainsFunc(slices.Collect(maps.Keys(now)), func(name string) bool { return strings.HasPrefix(name, "gpu-1") }), now
	})
	if c := n.inject(names...); !slices.Contains(c.env, "SIMGPU_DEVICE_GPU_1="+ids[1]) {
		t.Errorf("after the restart the container has %v", c.env)
	}
}

// TestLentGPUsComeBack: after the kubelet has said for long enough that nobody has them.
func TestLentGPUsComeBack(t *testing.T) {
	n := newTestNode(t)
	p := n.start(h100s(2)...)
	now := time.Unix(1000, 0)
	used, failure := map[string]bool{}, error(nil)
	l := &lending{claims: p.claims, conditions: func(*stock) *conditions { return nil }, now: func() time.Time { return now },
		used: func(context.Context) (map[string]bool, error) { return used, failure }}
	id := l.devices()[0].ID
	used[id] = true
	if _, err := l.allocate(t.Context(), []string{id}); err != nil {
		t.Fatal(err)
	}
	look := func(after time.Duration, wantLent bool) {
		t.Helper()
		now = now.Add(after)
		if err := l.takeBack(t.Context()); !errors.Is(err, failure) {
			t.Errorf("error %v", err)
		}
		if lent := len(p.lentDevices()) > 0; lent != wantLent {
			t.Errorf("lent is %v, want %v", lent, wantLent)
		}
	}
	look(time.Hour, true)
	delete(used, id)
	look(0, true)
	look(unusedFor-time.Second, true)
	failure = errors.New("no kubelet") // what was before that does not count
	look(time.Hour, true)
	failure = nil
	look(0, true)
	used[id] = true // another container
	look(unusedFor, true)
	delete(used, id)
	look(0, true)
	if _, err := l.allocate(t.Context(), []string{id}); err != nil { // the next container, of which the kubelet does not tell yet
		t.Fatal(err)
	}
	look(unusedFor, true)
	look(unusedFor, false)
	if files := n.files(); len(files) > 0 {
		t.Errorf("left are %v", files)
	}

	// Without pod resources nobody can tell.
	l.used = nil
	if _, err := l.allocate(t.Context(), []string{id}); err != nil {
		t.Fatal(err)
	}
	if err := l.takeBack(t.Context()); err == nil || len(p.lentDevices()) != 1 {
		t.Errorf("error %v, lent %v", err, p.lentDevices())
	}
}

// TestGPUsThatCountTwice: the scheduler counts a pod with a claim for its extended resource against what the device plugin
// offers, so the GPU is offered, and the kubelet told to take another.
func TestGPUsThatCountTwice(t *testing.T) {
	n := newTestNode(t)
	p := n.start(h100s(3)...)
	l := &lending{claims: p.claims, conditions: func(*stock) *conditions { return nil }, now: time.Now}
	extended := claimOf("extended", []string{"gpu-0"})
	extended.Annotations = map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
	p.mustPrepare(t, extended)
	p.mustPrepare(t, claimOf("claim", []string{"gpu-1"}))
	for restarted := range 2 {
		devices := l.devices()
		var got [][2]bool
		for _, device := range devices {
			got = append(got, [2]bool{device.Healthy, device.Taken})
		}
		if want := [][2]bool{{true, true}, {false, false}, {true, false}}; !slices.Equal(got, want) {
			t.Errorf("restarted %d times: healthy and taken are %v, want %v", restarted, got, want)
		}
		if _, err := l.allocate(t.Context(), []string{devices[0].ID}); err == nil {
			t.Error("the GPU of a claim is given out")
		}
		p = n.start(h100s(3)...)
		l.claims = p.claims
	}
}

// TestLendingIsAllOrNothing: of several GPUs none stays lent where one cannot be had.
func TestLendingIsAllOrNothing(t *testing.T) {
	n := newTestNode(t)
	p := n.start(h100s(3)...)
	l := &lending{claims: p.claims, conditions: func(*stock) *conditions { return nil }, now: time.Now}
	devices := l.devices()
	if _, err := l.allocate(t.Context(), []string{devices[0].ID}); err != nil {
		t.Fatal(err)
	}
	p.mustPrepare(t, claimOf("claim", []string{"gpu-2"}))
	if _, err := l.allocate(t.Context(), []string{devices[0].ID, devices[1].ID, devices[2].ID}); err == nil {
		t.Error("no error")
	}
	if lent := p.lentDevices(); len(lent) != 1 || lent[lentPrefix+"gpu-0"] != "gpu-0" {
		t.Errorf("lent are %v", lent)
	}
}

// TestSlicesOfAReplacedNode: a Node that is deleted and made anew under its name is another owner.
func TestSlicesOfAReplacedNode(t *testing.T) {
	n := newWholeNode(t)
	d := n.run()
	n.register()
	d.expectReady(t)
	nodes := n.api.CoreV1().Nodes()
	if err := nodes.Delete(t.Context(), nodeName, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "another-uid", Labels: map[string]string{"pool": "h100"}}}
	if _, err := nodes.Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	list := func() []resourceapi.ResourceSlice {
		list, err := n.api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return list.Items
	}
	eventually(t, "slices that belong to the new Node", func() (bool, any) {
		// What the garbage collector does with those of the old one.
		for _, slice := range list() {
			if slice.OwnerReferences[0].UID != "another-uid" {
				_ = n.api.ResourceV1().ResourceSlices().Delete(t.Context(), slice.Name, metav1.DeleteOptions{})
			}
		}
		now := list()
		return len(now) > 0 && !slices.ContainsFunc(now, func(s resourceapi.ResourceSlice) bool { return s.OwnerReferences[0].UID != "another-uid" }), len(now)
	})
}
