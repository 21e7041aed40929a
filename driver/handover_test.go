package driver

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	draapi "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/simgpu/simgpu/deviceapi"
)

// podKubelet registers whatever appears in the registration folder and calls the newest driver that it is
// connected to, as a kubelet does.
type podKubelet struct {
	node *wholeNode

	mu      sync.Mutex
	plugins []registeredPlugin // in the order of their registration
}

type registeredPlugin struct {
	socket string
	conn   *grpc.ClientConn
}

func (n *wholeNode) kubelet() *podKubelet {
	n.t.Helper()
	k := &podKubelet{node: n}
	ctx, cancel := context.WithCancel(n.t.Context())
	var background sync.WaitGroup
	background.Go(func() {
		for pause(ctx, 5*time.Millisecond) == nil {
			k.look(ctx)
		}
	})
	n.t.Cleanup(func() {
		cancel()
		background.Wait()
		for _, p := range k.plugins {
			p.conn.Close()
		}
	})
	return k
}

func (k *podKubelet) look(ctx context.Context) {
	sockets, err := filepath.Glob(filepath.Join(k.node.opts.KubeletRegistrarDir, "*"))
	if err != nil {
		k.node.t.Error(err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.plugins = slices.DeleteFunc(k.plugins, func(p registeredPlugin) bool {
		gone := !slices.Contains(sockets, p.socket)
		if gone {
			p.conn.Close()
		}
		return gone
	})
	for _, socket := range sockets {
		if !slices.ContainsFunc(k.plugins, func(p registeredPlugin) bool { return p.socket == socket }) {
			if conn := k.register(ctx, socket); conn != nil {
				k.plugins = append(k.plugins, registeredPlugin{socket, conn})
			}
		}
	}
}

// register returns nil for a socket on which nothing listens yet.
func (k *podKubelet) register(ctx context.Context, socket string) *grpc.ClientConn {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		k.node.t.Error(err)
		return nil
	}
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return nil
	}
	service, err := grpc.NewClient("unix:"+info.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		k.node.t.Error(err)
		return nil
	}
	service.Connect()
	if _, err := client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		service.Close()
		return nil
	}
	return service
}

// known is how many drivers are registered.
func (k *podKubelet) known() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.plugins)
}

func (k *podKubelet) newest() (draapi.DRAPluginClient, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range slices.Backward(k.plugins) {
		if p.conn.GetState() == connectivity.Ready {
			return draapi.NewDRAPluginClient(p.conn), nil
		}
	}
	return nil, fmt.Errorf("driver %s is not registered", driverName)
}

// pods starts and ends pods with a claim, one after the other, until the returned function is called. That
// returns how many there were.
func (k *podKubelet) pods(claim *resourceapi.ResourceClaim) (stop func() int) {
	ctx, cancel := context.WithCancel(k.node.t.Context())
	var background sync.WaitGroup
	count := 0
	background.Go(func() {
		for ; ctx.Err() == nil; count++ {
			if err := k.pod(claim); err != nil {
				k.node.t.Errorf("pod %d with claim %s: %v", count, claim.Name, err)
				return
			}
		}
	})
	return func() int { cancel(); background.Wait(); return count }
}

func (k *podKubelet) pod(claim *resourceapi.ResourceClaim) error {
	ctx, cancel := context.WithTimeout(k.node.t.Context(), 45*time.Second)
	defer cancel()
	client, err := k.newest()
	if err != nil {
		return err
	}
	prepared, err := client.NodePrepareResources(ctx, &draapi.NodePrepareResourcesRequest{Claims: requestFor(claim)})
	if err != nil {
		return err
	}
	if answer := prepared.Claims[string(claim.UID)]; answer == nil || answer.Error != "" || len(answer.Devices) != 1 {
		return fmt.Errorf("prepare: %v", answer)
	}
	if client, err = k.newest(); err != nil {
		return err
	}
	unprepared, err := client.NodeUnprepareResources(ctx, &draapi.NodeUnprepareResourcesRequest{Claims: requestFor(claim)})
	if err != nil {
		return err
	}
	if answer := unprepared.Claims[string(claim.UID)]; answer == nil || answer.Error != "" {
		return fmt.Errorf("unprepare: %v", answer)
	}
	return nil
}

// runPod starts the driver in a pod of that UID.
func (n *wholeNode) runPod(uid string) *runningDriver {
	n.t.Helper()
	pod := *n
	pod.opts.PodUID = uid
	return pod.run()
}

func (r *runningDriver) works() bool { return r.session.Load() != nil }

func TestUpdateLosesNoCall(t *testing.T) {
	t.Parallel()
	streams := []*resourceapi.ResourceClaim{claimOf("one", []string{left0}), claimOf("two", []string{whole1})}
	held := claimOf("held", []string{right0})
	n := newWholeNode(t, streams[0], streams[1], held)
	kubelet := n.kubelet()
	old := n.runPod("uid-old")
	old.expectReady(t)
	client, err := kubelet.newest()
	if err != nil {
		t.Fatal(err)
	}
	ids := prepareOverGRPC(t, client, held)
	lease := n.hold(ids)
	written := n.api.count("create resourceslices") + n.api.count("update resourceslices") + n.api.count("delete resourceslices")
	var stops []func() int
	for _, claim := range streams {
		stops = append(stops, kubelet.pods(claim))
	}

	current := old
	for i := range 3 {
		next := n.runPod(fmt.Sprintf("uid-%d", i))
		next.expectReady(t)
		if current.works() || !next.works() {
			t.Errorf("round %d: old works: %v, new works: %v", i, current.works(), next.works())
		}
		// Ready, since it would take over again: a DaemonSet ends a pod at once that is not.
		current.expectReady(t)
		if err := current.stop(); err != nil {
			t.Fatal(err)
		}
		current = next
	}
	for i, stop := range stops {
		if count := stop(); count < 3 {
			t.Errorf("stream %d: %d pods only", i, count)
		}
	}
	eventually(t, "the memory to be held", func() (bool, any) { return lease(), nil })
	// Each new driver asks once, in a dry run, what the API server keeps.
	now := n.api.count("create resourceslices") + n.api.count("update resourceslices") + n.api.count("delete resourceslices")
	n.api.mu.Lock()
	dryRuns := n.api.dryRuns
	n.api.mu.Unlock()
	if stored := now - dryRuns; stored > written {
		t.Errorf("%d writes of slices before the updates, %d after them", written, stored)
	}
	client, err = kubelet.newest()
	if err != nil {
		t.Fatal(err)
	}
	unprepareOverGRPC(t, client, held)
	if left := n.leftovers(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// hold keeps some memory of a device, as a container does. What it returns tells whether the node sees it.
func (n *wholeNode) hold(ids []string) func() bool {
	n.t.Helper()
	inside, err := os.MkdirTemp("", "simgpu")
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { os.RemoveAll(inside) })
	for at, from := range n.inject(ids...).mounts {
		if strings.HasPrefix(at, deviceapi.DefaultDir+"/") {
			if err := os.Symlink(from, filepath.Join(inside, filepath.Base(at))); err != nil {
				n.t.Fatal(err)
			}
		}
	}
	client, err := deviceapi.Discover(inside, nil)
	if err != nil {
		n.t.Fatal(err)
	}
	lease, err := client.Hold(n.t.Context(), deviceapi.HoldOptions{MemoryBytes: 1 << 30})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { lease.Close(); client.Close() })
	return func() bool {
		snapshot, err := client.Snapshot(n.t.Context())
		if err != nil {
			return false
		}
		var used int64
		for _, gpu := range snapshot.GPUs {
			for _, p := range gpu.Partitions {
				used += p.MemoryUsed
			}
		}
		return used == 1<<30
	}
}

func TestOldDriverTakesOverAgain(t *testing.T) {
	t.Parallel()
	claim := claimOf("one", []string{left0})
	n := newWholeNode(t, claim)
	kubelet := n.kubelet()
	old := n.runPod("uid-old")
	old.expectReady(t)
	for range 2 {
		broken := n.runPod("uid-broken")
		eventually(t, "the new driver to work", func() (bool, any) { return broken.works() && !old.works(), nil })
		if err := broken.stop(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the old driver to work", func() (bool, any) { return old.works(), nil })
		eventually(t, "the kubelet to know no other", func() (bool, any) { n := kubelet.known(); return n == 1, n })
		if err := kubelet.pod(claim); err != nil {
			t.Error(err)
		}
		old.expectReady(t)
	}
}

func TestThreeDrivers(t *testing.T) {
	t.Parallel()
	claim := claimOf("one", []string{left0})
	n := newWholeNode(t, claim)
	kubelet := n.kubelet()
	var drivers []*runningDriver
	first := n.runPod("uid-0")
	first.expectReady(t)
	stop := kubelet.pods(claim)
	for i := range 3 {
		drivers = append(drivers, n.runPod(fmt.Sprintf("uid-%d", i+1)))
	}
	// All asked, one after the other; none asks twice.
	for i, d := range drivers {
		eventually(t, fmt.Sprintf("driver %d to have worked", i), func() (bool, any) {
			return d.works() || d.wasReady.Load() != nil, nil
		})
	}
	working := func() (n int) {
		for _, d := range append(drivers, first) {
			if d.works() {
				n++
			}
		}
		return n
	}
	eventually(t, "one driver to work", func() (bool, any) { n := working(); return n == 1, n })
	stop()
	for _, d := range append(drivers[1:], first) {
		if err := d.stop(); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "the last driver to work", func() (bool, any) { return drivers[0].works(), nil })
	eventually(t, "the kubelet to know no other", func() (bool, any) { n := kubelet.known(); return n == 1, n })
	if err := kubelet.pod(claim); err != nil {
		t.Error(err)
	}
}

func TestWaitingDriverSaysForWhom(t *testing.T) {
	t.Parallel()
	n := newWholeNode(t)
	old := n.runPod("uid-old") // nobody registers it: the new one must not be asked for anything
	eventually(t, "the old driver to work", func() (bool, any) { return old.works(), nil })
	next := n.runPod("uid-new")
	eventually(t, "the new driver to wait", func() (bool, any) { return next.started.Load(), nil })
	if status, body := next.get(t, "/healthz"); status != http.StatusOK {
		t.Errorf("a waiting driver is not healthy: %s", body)
	}
	n.registerAt(filepath.Base(next.opts.registrationSocket()))
	eventually(t, "the old driver to hand over", func() (bool, any) {
		status, body := next.get(t, "/readyz")
		// What it says until then.
		if status != http.StatusOK && !strings.Contains(body, "uid-old") && !strings.Contains(body, "publish") && !strings.Contains(body, "uid-new") && !strings.Contains(body, "not registered") {
			t.Errorf("not ready: %s", body)
		}
		return next.works(), body
	})
}

// TestHandoverWaitsForWhatRuns holds a prepare up in the middle.
func TestHandoverWaitsForWhatRuns(t *testing.T) {
	t.Parallel()
	slow, quick := claimOf("slow", []string{left0}), claimOf("quick", []string{right0})
	n := newWholeNode(t, slow, quick)
	gate := &gateAt{at: SocketsOpened, uid: slow.UID, reached: make(chan struct{}), open: make(chan struct{})}
	n.opts.Waypoints = gate
	kubelet := n.kubelet()
	old := n.runPod("uid-old")
	old.expectReady(t)
	n.opts.Waypoints = nil
	var pods sync.WaitGroup
	pods.Go(func() {
		if err := kubelet.pod(slow); err != nil {
			t.Errorf("the call that ran: %v", err)
		}
	})
	<-gate.reached
	next := n.runPod("uid-new")
	eventually(t, "the old driver to want to hand over", func() (bool, any) { return old.wasReady.Load() != nil, nil })
	pods.Go(func() {
		if err := kubelet.pod(quick); err != nil {
			t.Errorf("the call that came meanwhile: %v", err)
		}
	})
	if next.works() {
		t.Error("two drivers work")
	}
	close(gate.open)
	pods.Wait()
	next.expectReady(t)
}

func TestCallToADriverThatHasHandedOver(t *testing.T) {
	t.Parallel()
	claim := claimOf("one", []string{left0})
	n := newWholeNode(t, claim)
	old := n.runPod("uid-old")
	kubelet := n.registerAt(filepath.Base(old.opts.registrationSocket()))
	old.expectReady(t)
	next := n.runPod("uid-new")
	n.registerAt(filepath.Base(next.opts.registrationSocket()))
	next.expectReady(t)
	prepareOverGRPC(t, kubelet, claim)
	if claims, _ := next.preparedCount(); claims != 1 {
		t.Errorf("%d claims prepared by the new driver", claims)
	}
	unprepareOverGRPC(t, kubelet, claim)
}

// lockState takes the node's state as a driver that hands over only by ending: it signs no lock.
func (n *wholeNode) lockState() *os.File {
	n.t.Helper()
	if err := os.MkdirAll(n.pluginDir(), 0o755); err != nil {
		n.t.Fatal(err)
	}
	lock, err := openLock(filepath.Join(n.pluginDir(), "lock"))
	if err != nil {
		n.t.Fatal(err)
	}
	if got, err := tryLock(lock, unix.LOCK_EX); !got || err != nil {
		n.t.Fatal(err)
	}
	return lock
}

// TestUpdateOfADriverThatCannotHandOver has an owner that knows nothing of this: it serves at dra.sock and
// signs no lock.
func TestUpdateOfADriverThatCannotHandOver(t *testing.T) {
	t.Parallel()
	claim := claimOf("one", []string{left0})
	n := newWholeNode(t, claim)
	lock := n.lockState()
	defer lock.Close()
	listener, err := net.Listen("unix", filepath.Join(n.pluginDir(), soleSocket))
	if err != nil {
		t.Fatal(err)
	}
	earlier := &earlierDriver{}
	server := grpc.NewServer()
	draapi.RegisterDRAPluginServer(server, earlier)
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()

	kubelet := n.kubelet()
	next := n.runPod("uid-new")
	next.expectReady(t)
	if next.works() {
		t.Fatal("two drivers work")
	}
	stop := kubelet.pods(claim)
	eventually(t, "calls to reach the earlier driver", func() (bool, any) { n := earlier.calls.Load(); return n > 2, n })
	// The DaemonSet ends it.
	server.GracefulStop()
	lock.Close()
	eventually(t, "the new driver to work", func() (bool, any) { return next.works(), nil })
	if stop() < 2 {
		t.Error("no pods")
	}
	next.expectReady(t)
}

type earlierDriver struct {
	draapi.UnimplementedDRAPluginServer
	calls atomic.Int64
}

func (e *earlierDriver) NodePrepareResources(_ context.Context, r *draapi.NodePrepareResourcesRequest) (*draapi.NodePrepareResourcesResponse, error) {
	e.calls.Add(1)
	answer := &draapi.NodePrepareResourcesResponse{Claims: map[string]*draapi.NodePrepareResourceResponse{}}
	for _, c := range r.Claims {
		answer.Claims[c.Uid] = &draapi.NodePrepareResourceResponse{Devices: []*draapi.Device{{DeviceName: left0}}}
	}
	return answer, nil
}

func (e *earlierDriver) NodeUnprepareResources(_ context.Context, r *draapi.NodeUnprepareResourcesRequest) (*draapi.NodeUnprepareResourcesResponse, error) {
	answer := &draapi.NodeUnprepareResourcesResponse{Claims: map[string]*draapi.NodeUnprepareResourceResponse{}}
	for _, c := range r.Claims {
		answer.Claims[c.Uid] = &draapi.NodeUnprepareResourceResponse{}
	}
	return answer, nil
}

func TestCallThatNobodyTakesEndsWithAReason(t *testing.T) {
	t.Parallel()
	claim := claimOf("one", []string{left0})
	n := newWholeNode(t, claim)
	lock := n.lockState()
	defer lock.Close()
	n.kubelet()
	next := n.runPod("uid-new")
	eventually(t, "the new driver to serve", func() (bool, any) { return next.started.Load(), nil })
	client := draapi.NewDRAPluginClient(n.dial(filepath.Join(n.pluginDir(), next.opts.serviceSocket())))
	ended := make(chan error, 1)
	go func() {
		_, err := client.NodePrepareResources(t.Context(), &draapi.NodePrepareResourcesRequest{Claims: requestFor(claim)})
		ended <- err
	}()
	// It waits, and does not outlive the driver.
	select {
	case err := <-ended:
		t.Fatalf("ended with %v", err)
	case <-time.After(3 * passAgain):
	}
	if err := next.stop(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil {
		t.Error("no error")
	}
}

func TestSocketsOfDriversThatAreGone(t *testing.T) {
	t.Parallel()
	n := newWholeNode(t)
	if err := os.MkdirAll(n.pluginDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	minute := time.Now().Add(-2 * staleAfter)
	leave := func(path string, at time.Time) string {
		t.Helper()
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(false)
		if err := listener.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
		return path
	}
	gone := []string{
		leave(filepath.Join(n.opts.KubeletRegistrarDir, driverName+"-reg.sock"), minute),
		leave(filepath.Join(n.opts.KubeletRegistrarDir, driverName+"-uid-dead-reg.sock"), minute),
		leave(filepath.Join(n.pluginDir(), soleSocket), minute),
		leave(filepath.Join(n.pluginDir(), "dra-uid-dead.sock"), minute),
	}
	kept := []string{
		leave(filepath.Join(n.opts.KubeletRegistrarDir, driverName+"-uid-starts-reg.sock"), time.Now()),
		leave(filepath.Join(n.opts.KubeletRegistrarDir, "other.example.com-reg.sock"), minute),
	}
	live, err := net.Listen("unix", filepath.Join(n.pluginDir(), "dra-uid-live.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	if err := os.Chtimes(live.Addr().String(), minute, minute); err != nil {
		t.Fatal(err)
	}
	kept = append(kept, live.Addr().String())

	d := n.runPod("uid-new")
	eventually(t, "the driver to work", func() (bool, any) { return d.works(), nil })
	for _, path := range gone {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	for _, path := range kept {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
}

func TestSocketNamesFit(t *testing.T) {
	uid := "01234567-89ab-cdef-0123-456789abcdef"
	for _, dir := range []string{"/var/lib/kubelet", "/var/snap/microk8s/common/var/lib/kubelet"} {
		o := Options{DriverName: driverName, PodUID: uid, KubeletPluginsDir: filepath.Join(dir, "plugins"), KubeletRegistrarDir: filepath.Join(dir, "plugins_registry")}
		name := o.serviceSocket()
		if named := strings.Contains(name, uid); named != (dir == "/var/lib/kubelet") {
			t.Errorf("%s: %s", dir, name)
		}
		for _, path := range []string{filepath.Join(o.paths().plugin, name), o.registrationSocket()} {
			if len(path) > longestSocketPath {
				t.Errorf("%s has %d characters", path, len(path))
			}
		}
	}
}

// gateAt stops the first operation of a claim at a waypoint until it is opened.
type gateAt struct {
	at            Waypoint
	uid           types.UID
	once          sync.Once
	reached, open chan struct{}
}

func (g *gateAt) Reached(at Waypoint, uid types.UID) {
	if at == g.at && uid == g.uid {
		g.once.Do(func() {
			close(g.reached)
			<-g.open
		})
	}
}
