package driver

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	draapi "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/simgpu/simgpu/deviceapi"
)

// wholeNode is a node with everything real but the API server and the kubelet.
type wholeNode struct {
	*testNode
	t         *testing.T
	api       *fakeAPI
	inventory *configMap
	opts      Options
}

func newWholeNode(t *testing.T, objects ...runtime.Object) *wholeNode {
	t.Helper()
	return wholeNodeIn(t, memoryDir(t), objects...)
}

// memoryFolder is where files are in memory, "" where that is nowhere: many tests wait for nothing but the disk.
func memoryFolder() string {
	const memory = "/dev/shm"
	if unix.Access(memory, unix.W_OK) != nil {
		return ""
	}
	return memory
}

// wholeNodeIn is for a node whose files are in root already or will be.
func wholeNodeIn(t *testing.T, root string, objects ...runtime.Object) *wholeNode {
	t.Helper()
	n := &wholeNode{testNode: newTestNode(t), t: t, api: newFakeAPI(objects...), inventory: newConfigMap(t)}
	n.root = root
	n.inventory.write(inventoryText(gpusRule("h100-sxm5-80gb", 2)))

	toolsDir := filepath.Join(root, "image")
	registrar := filepath.Join(root, "registry")
	for _, dir := range []string{toolsDir, registrar, filepath.Join(root, "host/proc/sys/kernel/random")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for path, content := range map[string]string{
		filepath.Join(toolsDir, "nvidia-smi"):                      "#!smi",
		filepath.Join(root, "host/proc/sys/kernel/random/boot_id"): "boot-1\n",
	} {
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.opts = DefaultOptions()
	n.opts.NodeName = nodeName
	n.opts.InventoryFile = n.inventory.file()
	n.opts.KubeletPluginsDir = filepath.Join(root, "plugins")
	n.opts.KubeletRegistrarDir = registrar
	n.opts.CDIDir = filepath.Join(root, "cdi")
	n.opts.ToolsDir, n.opts.Tools = toolsDir, []string{"nvidia-smi"}
	n.opts.HTTPEndpoint = "127.0.0.1:0"
	n.opts.HostRoot = filepath.Join(root, "host")
	n.opts.KubeClient = n.api
	n.opts.Catalogue = n.catalogue
	return n
}

func (n *wholeNode) pluginDir() string { return filepath.Join(n.opts.KubeletPluginsDir, driverName) }

// runningDriver is a driver at work.
type runningDriver struct {
	*Driver
	// stop ends it and returns what Run returned.
	stop func() error
}

func (n *wholeNode) run() *runningDriver {
	n.t.Helper()
	d, err := New(n.opts)
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(n.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	r := &runningDriver{Driver: d, stop: sync.OnceValue(func() error { cancel(); return <-ended })}
	n.t.Cleanup(func() {
		if err := r.stop(); err != nil {
			n.t.Errorf("driver ended with %v", err)
		}
	})
	return r
}

// get returns the status and body of a page.
func (r *runningDriver) get(t *testing.T, path string) (int, string) {
	t.Helper()
	if r.HTTPAddr() == "" {
		return 0, "not listening"
	}
	response, err := http.Get("http://" + r.HTTPAddr() + path)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

func (r *runningDriver) expectReady(t *testing.T) {
	t.Helper()
	eventually(t, "ready", func() (bool, any) {
		status, body := r.get(t, "/readyz")
		return status == http.StatusOK, body
	})
}

// register does what the kubelet does when it finds the registration socket.
func (n *wholeNode) register() draapi.DRAPluginClient {
	n.t.Helper()
	return n.registerAt(driverName + "-reg.sock")
}

func (n *wholeNode) registerAt(name string) draapi.DRAPluginClient {
	n.t.Helper()
	socket := filepath.Join(n.opts.KubeletRegistrarDir, name)
	eventually(n.t, "registration socket", func() (bool, any) {
		_, err := os.Stat(socket)
		return err == nil, err
	})
	registration := registerapi.NewRegistrationClient(n.dial(socket))
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Minute)
	defer cancel()
	info, err := registration.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		n.t.Fatal(err)
	}
	if info.Name != driverName || info.Type != registerapi.DRAPlugin || info.SupportedVersions[0] != draapi.DRAPluginService {
		n.t.Errorf("registers as %v", info)
	}
	if _, err := registration.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		n.t.Fatal(err)
	}
	return draapi.NewDRAPluginClient(n.dial(info.Endpoint))
}

func (n *wholeNode) dial(socket string) *grpc.ClientConn {
	n.t.Helper()
	// A socket file is there a moment before anything listens on it.
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { conn.Close() })
	return conn
}

func requestFor(claims ...*resourceapi.ResourceClaim) []*draapi.Claim {
	var request []*draapi.Claim
	for _, claim := range claims {
		request = append(request, &draapi.Claim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)})
	}
	return request
}

func prepareOverGRPC(t *testing.T, client draapi.DRAPluginClient, claims ...*resourceapi.ResourceClaim) []string {
	t.Helper()
	response, err := client.NodePrepareResources(t.Context(), &draapi.NodePrepareResourcesRequest{Claims: requestFor(claims...)})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, claim := range claims {
		answer := response.Claims[string(claim.UID)]
		if answer == nil || answer.Error != "" {
			t.Fatalf("claim %s: %v", claim.Name, answer)
		}
		for _, d := range answer.Devices {
			ids = append(ids, d.CdiDeviceIds...)
		}
	}
	return ids
}

func unprepareOverGRPC(t *testing.T, client draapi.DRAPluginClient, claims ...*resourceapi.ResourceClaim) {
	t.Helper()
	response, err := client.NodeUnprepareResources(t.Context(), &draapi.NodeUnprepareResourcesRequest{Claims: requestFor(claims...)})
	if err != nil {
		t.Fatal(err)
	}
	for _, claim := range claims {
		if answer := response.Claims[string(claim.UID)]; answer == nil || answer.Error != "" {
			t.Errorf("claim %s: %v", claim.Name, answer)
		}
	}
}

// leftovers lists what of claims is on the node.
func (n *wholeNode) leftovers() []string {
	n.t.Helper()
	found := []string{}
	for _, pattern := range []string{"checkpoint/*", "dev/*", "dra-device-metadata/*"} {
		files, err := filepath.Glob(filepath.Join(n.pluginDir(), pattern))
		if err != nil {
			n.t.Fatal(err)
		}
		found = append(found, files...)
	}
	specs, err := filepath.Glob(filepath.Join(n.opts.CDIDir, "*"))
	if err != nil {
		n.t.Fatal(err)
	}
	return append(found, specs...)
}

func TestClaimOverItsWholeLife(t *testing.T) {
	t.Parallel()
	first, second := claimOf("first", []string{left0}), claimOf("second", []string{right0})
	n := newWholeNode(t, first, second)
	d := n.run()

	eventually(t, "healthy", func() (bool, any) {
		status, body := d.get(t, "/healthz")
		return status == http.StatusOK, body
	})
	if status, body := d.get(t, "/readyz"); status != http.StatusServiceUnavailable {
		t.Errorf("ready before the kubelet knows the driver: %d %s", status, body)
	}
	kubelet := n.register()
	d.expectReady(t)
	if got := n.api.published(t); len(got) == 0 || got[0] != whole0 {
		t.Errorf("ready with %v published", got)
	}

	ids := prepareOverGRPC(t, kubelet, first, second)
	want := []string{
		"k8s.gpu.nvidia.com/claim=uid-first-" + left0, driverName + "/metadata=uid-first_r0",
		"k8s.gpu.nvidia.com/claim=uid-second-" + right0, driverName + "/metadata=uid-second_r0",
	}
	if diff := cmp.Diff(want, ids); diff != "" {
		t.Errorf("CDI ids: %s", diff)
	}

	// What a container of the first claim has.
	c := n.inject(ids[:2]...)
	for at, from := range c.mounts {
		if _, err := os.Stat(from); err != nil {
			t.Errorf("mount at %s: %v", at, err)
		}
	}
	metadata, err := os.ReadFile(c.mounts["/var/run/kubernetes.io/dra-device-attributes/resourceclaims/first/r0/"+driverName+"-metadata.json"])
	if err != nil {
		t.Errorf("device metadata: %v", err)
	}
	for _, mention := range []string{`"metadata.resource.k8s.io/v1beta1"`, left0, `"3g.40gb"`, "MIG-"} {
		if !strings.Contains(string(metadata), mention) {
			t.Errorf("metadata lacks %s: %s", mention, metadata)
		}
	}
	inside := t.TempDir()
	for at, from := range c.mounts {
		if strings.HasPrefix(at, deviceapi.DefaultDir+"/") {
			if err := os.Symlink(from, filepath.Join(inside, filepath.Base(at))); err != nil {
				t.Fatal(err)
			}
		}
	}
	expectDevices(t, inside, 1)
	expectDevices(t, n.pluginDir(), 4) // the node view: two GPUs, and the two partitions

	_, page := d.get(t, "/metrics")
	for _, series := range []string{
		"simgpu_claims_prepared 2", `simgpu_claim_operation_duration_seconds_count{operation="prepare"} 2`,
		`simgpu_claim_operation_errors_total{operation="unprepare",reason="io"} 0`, "simgpu_published_devices 52", "simgpu_published_slices 3", "process_resident_memory_bytes",
	} {
		if !strings.Contains(page, series) {
			t.Errorf("metrics lack %s", series)
		}
	}

	// The driver restarts; containers stay and find it again.
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
	if got := n.api.published(t); len(got) == 0 {
		t.Error("the slices went with the driver")
	}
	if _, err := os.Stat(filepath.Join(n.opts.KubeletRegistrarDir, driverName+"-reg.sock")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("registration socket after the stop: %v", err)
	}
	d = n.run()
	kubelet = n.register()
	d.expectReady(t)
	expectDevices(t, inside, 1)
	if diff := cmp.Diff(ids, prepareOverGRPC(t, kubelet, first, second)); diff != "" {
		t.Errorf("CDI ids after the restart: %s", diff)
	}

	// The claim may be gone from the API before the kubelet unprepares it.
	if err := n.api.ResourceV1().ResourceClaims(namespace).Delete(t.Context(), first.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	unprepareOverGRPC(t, kubelet, first, second)
	unprepareOverGRPC(t, kubelet, first)
	if left := n.leftovers(); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

func expectDevices(t *testing.T, dir string, want int) {
	t.Helper()
	eventually(t, "devices seen in "+dir, func() (bool, any) {
		client, err := deviceapi.Discover(dir, nil)
		if err != nil {
			return false, err
		}
		defer client.Close()
		snapshot, err := client.Snapshot(t.Context())
		if err != nil {
			return false, err
		}
		return len(snapshot.Devices()) == want, snapshot.Devices()
	})
}

func TestFaultyInventoryAtTheStart(t *testing.T) {
	t.Parallel()
	claim := claimOf("first", []string{left0})
	n := newWholeNode(t, claim)
	d := n.run()
	kubelet := n.register()
	d.expectReady(t)
	prepareOverGRPC(t, kubelet, claim)
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}

	n.inventory.write("kind: Nonsense")
	d = n.run()
	kubelet = n.register()
	eventually(t, "an Event on the Node", func() (bool, any) {
		list, err := n.api.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list.Items {
			if e.Reason == reasonInvalidInventory && e.InvolvedObject.Kind == "Node" && e.InvolvedObject.Name == nodeName {
				return true, nil
			}
		}
		return false, list.Items
	})
	if status, body := d.get(t, "/readyz"); status == http.StatusOK {
		t.Errorf("ready: %s", body)
	}
	if status, body := d.get(t, "/healthz"); status != http.StatusOK {
		t.Errorf("not healthy: %s", body)
	}
	unprepareOverGRPC(t, kubelet, claim)
	if left := n.leftovers(); len(left) != 0 {
		t.Errorf("left %v", left)
	}
	n.inventory.write(inventoryText(gpusRule("h100-sxm5-80gb", 1)))
	d.expectReady(t)
}

func TestStartReleasesClaimsThatAreGone(t *testing.T) {
	t.Parallel()
	claim := claimOf("first", []string{left0})
	n := newWholeNode(t, claim)
	d := n.run()
	kubelet := n.register()
	d.expectReady(t)
	prepareOverGRPC(t, kubelet, claim)
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
	if err := n.api.ResourceV1().ResourceClaims(namespace).Delete(t.Context(), claim.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	n.run()
	eventually(t, "released", func() (bool, any) {
		left := n.leftovers()
		return len(left) == 0, left
	})
}

// TestLongestNames is about files that the kubeletplugin helper names after claims.
func TestLongestNames(t *testing.T) {
	t.Parallel()
	claim := claimOf(strings.Repeat("c", 253), []string{left0}, firstResult(func(r *resourceapi.DeviceRequestAllocationResult) {
		r.Request = strings.Repeat("r", 63)
	}))
	claim.Namespace = strings.Repeat("n", 63)
	claim.UID = "8f1c7a54-6c0e-4a55-9a37-0d1d4b1f6f11"
	n := newWholeNode(t, claim)
	d := n.run()
	kubelet := n.register()
	d.expectReady(t)

	ids := prepareOverGRPC(t, kubelet, claim)
	if len(ids) != 2 {
		t.Errorf("without metadata: %v", ids)
	}
	for at, from := range n.inject(ids...).mounts {
		if _, err := os.Stat(from); err != nil {
			t.Errorf("mount at %s: %v", at, err)
		}
	}
	unprepareOverGRPC(t, kubelet, claim)
	if left := n.leftovers(); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

func TestNewToolsReachPreparedClaims(t *testing.T) {
	t.Parallel()
	claim := claimOf("first", []string{left0})
	n := newWholeNode(t, claim)
	d := n.run()
	kubelet := n.register()
	ids := prepareOverGRPC(t, kubelet, claim)
	before := n.inject(ids...).mounts["/usr/bin/nvidia-smi"]
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(n.opts.ToolsDir, "nvidia-smi"), []byte("#!new"), 0o755); err != nil {
		t.Fatal(err)
	}
	d = n.run()
	n.register()
	d.expectReady(t)
	after := n.inject(ids...).mounts["/usr/bin/nvidia-smi"]
	if data, err := os.ReadFile(after); err != nil || string(data) != "#!new" || after == before {
		t.Errorf("mounted %s: %q, %v", after, data, err)
	}
	if _, err := os.Stat(before); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("old tools: %v", err)
	}
}

func TestUnhealthyWithoutTheSocketsThatTheKubeletUses(t *testing.T) {
	t.Parallel()
	n := newWholeNode(t)
	d := n.run()
	n.register()
	d.expectReady(t)
	if err := os.Remove(filepath.Join(n.opts.KubeletRegistrarDir, driverName+"-reg.sock")); err != nil {
		t.Fatal(err)
	}
	if status, body := d.get(t, "/healthz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "reg.sock") {
		t.Errorf("%d %s", status, body)
	}
}

func TestStaleSocketsAreReplaced(t *testing.T) {
	t.Parallel()
	n := newWholeNode(t)
	if err := os.MkdirAll(n.pluginDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, stale := range []string{filepath.Join(n.opts.KubeletRegistrarDir, driverName+"-reg.sock"), filepath.Join(n.pluginDir(), "dra.sock")} {
		if err := os.WriteFile(stale, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d := n.run()
	eventually(t, "started", func() (bool, any) { return d.started.Load(), nil })
	n.register()
	d.expectReady(t)
}

func TestSecondDriverWaitsForTheFirst(t *testing.T) {
	t.Parallel()
	n := newWholeNode(t)
	first := n.run()
	n.register()
	first.expectReady(t)
	second := n.run()
	third, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, errors.New("tired of waiting"))
	defer cancel()
	d, err := New(n.opts)
	if err != nil {
		t.Fatal(err)
	}
	expectError(t, d.Run(third), "lock", "tired of waiting")
	if second.session.Load() != nil {
		t.Error("two drivers at work")
	}
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "second driver at work", func() (bool, any) { return second.session.Load() != nil, nil })
}

func TestKeepsAwayFromRealGPUs(t *testing.T) {
	t.Parallel()
	for _, trace := range realGPUTraces() {
		t.Run(filepath.Base(trace), func(t *testing.T) {
			n := newWholeNode(t)
			if err := os.MkdirAll(filepath.Join(n.opts.HostRoot, trace), 0o755); err != nil {
				t.Fatal(err)
			}
			d, err := New(n.opts)
			if err != nil {
				t.Fatal(err)
			}
			expectError(t, d.Run(t.Context()), trace)
			if _, err := os.Stat(n.pluginDir()); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("touched the node: %v", err)
			}
			n.opts.ForceBesideRealGPU = true
			forced := n.run()
			n.register()
			forced.expectReady(t)
		})
	}
}

func TestOptionsThatCannotWork(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Options)
		want   []string
	}{
		"nothing set":     {func(o *Options) { *o = Options{} }, []string{"client", "node name", "inventory", "CDI", "resync"}},
		"driver name":     {func(o *Options) { o.DriverName = "GPU/x" }, []string{`"GPU/x"`}},
		"pod UID":         {func(o *Options) { o.PodUID = "../x" }, []string{"pod's UID", "../x"}},
		"resync":          {func(o *Options) { o.Resync = 0 }, []string{"resync period must be positive"}},
		"no plugins dir":  {func(o *Options) { o.KubeletPluginsDir = "" }, []string{"plugins folder"}},
		"no registration": {func(o *Options) { o.KubeletRegistrarDir = "" }, []string{"registration folder"}},
	} {
		t.Run(name, func(t *testing.T) {
			opts := newWholeNode(t).opts
			test.change(&opts)
			_, err := New(opts)
			expectError(t, err, test.want...)
		})
	}
	d, err := New(newWholeNode(t).opts)
	if err != nil || d.opts.DriverName != driverName {
		t.Errorf("the vendor's name: %v, %v", d, err)
	}
}

func TestPermissionsUsed(t *testing.T) {
	t.Parallel()
	claim := claimOf("first", []string{left0})
	n := newWholeNode(t, claim)
	d := n.run()
	kubelet := n.register()
	d.expectReady(t)
	prepareOverGRPC(t, kubelet, claim)
	unprepareOverGRPC(t, kubelet, claim)
	n.inventory.write("kind: Nonsense")
	eventually(t, "an Event", func() (bool, any) { n := n.api.count("create events"); return n > 0, n })
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
	granted := []string{
		"get resourceclaims", "patch resourceclaims/status", "get nodes", "list nodes", "watch nodes", "create events", "patch events", "get version",
		"list resourceslices", "watch resourceslices", "create resourceslices", "update resourceslices", "delete resourceslices",
	}
	n.api.mu.Lock()
	defer n.api.mu.Unlock()
	for request := range n.api.requests {
		if !slices.Contains(granted, request) {
			t.Errorf("needs %s, which the documentation does not grant", request)
		}
	}
}
