package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	draapi "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/checkpoint"
)

// machinery is all of a driver that has to do with claims, on real files and sockets, behind its real gRPC
// socket.
type machinery struct {
	*claims
	node       *wholeNode
	events     *events
	found      restored
	reconciler *reconciler
	server     *deviceapi.Server
	helper     *kubeletplugin.Helper
	client     draapi.DRAPluginClient
	// watch, if set, is called on the goroutine of a call of the kubelet before the driver does anything.
	watch func()
	stop  func()
}

// watchedFront tells when a call begins.
type watchedFront struct {
	*front
	m *machinery
}

func (p watchedFront) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	if p.m.watch != nil {
		p.m.watch()
	}
	return p.front.PrepareResourceClaims(ctx, claims)
}

func (p watchedFront) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	if p.m.watch != nil {
		p.m.watch()
	}
	return p.front.UnprepareResourceClaims(ctx, claims)
}

// quiet is the context of the test without a log: these tests make the driver complain a lot.
func (n *wholeNode) quiet() context.Context {
	return klog.NewContext(n.t.Context(), logr.Discard())
}

// open is the first half of a start: what is on disk is brought in order, as far as that is possible
// without the API.
func (n *wholeNode) open() (*machinery, error) {
	n.t.Helper()
	d, err := New(n.opts)
	if err != nil {
		return nil, err
	}
	m := &machinery{node: n, events: newEvents(), server: deviceapi.NewServer(deviceapi.ServerOptions{Grace: -1})}
	m.stop = m.server.Stop
	if m.claims, err = d.openClaims(m.server); err != nil {
		return nil, err
	}
	metadata, err := openMetadata(d.paths.metadata, d.opts.CDIDir, d.opts.DriverName, m.has)
	if err != nil {
		return nil, err
	}
	if m.found, err = m.restore(n.quiet()); err != nil {
		return nil, err
	}
	m.reconciler = &reconciler{claims: m.claims, client: n.api, reporter: m.events.reporter(), metrics: newMetrics(m.preparedCount), metadata: metadata}
	if err := m.reconciler.removeOrphans(); err != nil {
		return nil, err
	}
	gpus, err := m.fromInventory(h100s(2))
	if err != nil {
		return nil, err
	}
	m.apply(gpus, nil)
	return m, nil
}

// serve is the second half: the kubelet can call.
func (m *machinery) serve() {
	n := m.node
	n.t.Helper()
	d, err := New(n.opts)
	if err != nil {
		n.t.Fatal(err)
	}
	fatal := func(err error) {
		if !errors.Is(err, grpc.ErrServerStopped) { // stopped before it had begun
			n.t.Error(err)
		}
	}
	f := newFront(d.opts, m.reconciler.metadata, m.reconciler.metrics, fatal)
	f.open(&plugin{claims: m.claims, reconciler: m.reconciler, reporter: m.reconciler.reporter, metrics: m.reconciler.metrics})
	if m.helper, err = f.startHelper(n.quiet(), watchedFront{f, m}); err != nil {
		n.t.Fatal(err)
	}
	m.client = draapi.NewDRAPluginClient(n.dial(filepath.Join(n.pluginDir(), "dra.sock")))
	m.stop = func() { m.helper.Stop(); m.server.Stop() }
}

func (n *wholeNode) startMachinery() *machinery {
	n.t.Helper()
	m, err := n.open()
	if err != nil {
		n.t.Fatal(err)
	}
	m.serve()
	n.t.Cleanup(m.stop)
	return m
}

// prepareAll returns the answer to the kubelet: devices with their CDI ids, or an error.
func (m *machinery) prepareAll(ctx context.Context, claims ...*resourceapi.ResourceClaim) ([]string, error) {
	response, err := m.client.NodePrepareResources(ctx, &draapi.NodePrepareResourcesRequest{Claims: requestFor(claims...)})
	if err != nil {
		return nil, err
	}
	var answers []string
	var errs []error
	for _, claim := range claims {
		answer := response.Claims[string(claim.UID)]
		switch {
		case answer == nil:
			errs = append(errs, fmt.Errorf("no answer about claim %s", claim.Name))
		case answer.Error != "":
			errs = append(errs, fmt.Errorf("claim %s: %s", claim.Name, answer.Error))
		default:
			for _, d := range answer.Devices {
				answers = append(answers, fmt.Sprintf("%s %v %v", d.DeviceName, d.RequestNames, d.CdiDeviceIds))
			}
		}
	}
	return answers, errors.Join(errs...)
}

func (m *machinery) unprepareAll(ctx context.Context, claims ...*resourceapi.ResourceClaim) error {
	response, err := m.client.NodeUnprepareResources(ctx, &draapi.NodeUnprepareResourcesRequest{Claims: requestFor(claims...)})
	if err != nil {
		return err
	}
	var errs []error
	for _, claim := range claims {
		if answer := response.Claims[string(claim.UID)]; answer == nil || answer.Error != "" {
			errs = append(errs, fmt.Errorf("claim %s: %v", claim.Name, answer))
		}
	}
	return errors.Join(errs...)
}

func (m *machinery) mustPrepare(t *testing.T, claims ...*resourceapi.ResourceClaim) []string {
	t.Helper()
	answers, err := m.prepareAll(t.Context(), claims...)
	if err != nil {
		t.Fatal(err)
	}
	return answers
}

func (m *machinery) mustUnprepare(t *testing.T, claims ...*resourceapi.ResourceClaim) {
	t.Helper()
	if err := m.unprepareAll(t.Context(), claims...); err != nil {
		t.Fatal(err)
	}
}

// contents lists what of claims is on the node, as "<what> <claim UID or folder>".
func (n *wholeNode) contents() []string {
	n.t.Helper()
	found := []string{}
	for _, place := range []struct{ what, dir string }{
		{"checkpoint", filepath.Join(n.pluginDir(), "checkpoint")},
		{"cdi", n.opts.CDIDir},
		{"dev", filepath.Join(n.pluginDir(), "dev")},
		{"metadata", filepath.Join(n.pluginDir(), "dra-device-metadata")},
	} {
		entries, err := os.ReadDir(place.dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			n.t.Fatal(err)
		}
		for _, e := range entries {
			found = append(found, place.what+" "+e.Name())
		}
	}
	slices.Sort(found)
	return found
}

// contentsOf is what prepared claims have on the node, apart from what of the metadata may not have been
// written when the driver was killed.
func contentsOf(claims ...checkpoint.Claim) (required, allowed []string) {
	for _, claim := range claims {
		uid := string(claim.UID)
		required = append(required, "checkpoint "+uid+".json", "cdi k8s."+driverName+"-claim_"+uid+".yaml")
		allowed = append(allowed, "metadata "+shortName(claim.Namespace+"_"+claim.Name))
		for _, d := range claim.Devices {
			required = append(required, "dev "+socketID(claim.UID, d.Device))
			request, _, _ := strings.Cut(d.Request, "/")
			allowed = append(allowed, "cdi "+driverName+"_metadata_"+uid+"_"+request+".json")
		}
	}
	return required, allowed
}

// expectConsistent checks what must be true of a node between operations.
func (m *machinery) expectConsistent(t *testing.T, when string) {
	t.Helper()
	m.mu.Lock()
	var known []checkpoint.Claim
	for _, claim := range m.known {
		if claim.State != checkpoint.Prepared {
			t.Errorf("%s: claim %s is %s", when, claim.Name, claim.State)
		}
		known = append(known, claim)
	}
	// No device is given twice, and none is held by a claim that is not there.
	held, again := map[types.UID]int{}, &ledger{}
	for _, holdings := range m.ledger.byGPU {
		for _, h := range holdings {
			held[h.claim.UID]++
			if c := again.conflict(h); c != nil {
				t.Errorf("%s: given twice: %+v", when, c)
			}
			again.add(h)
			if _, ok := m.known[h.claim.UID]; !ok {
				t.Errorf("%s: device %s is held by claim %s, which is not prepared", when, h.device, h.claim)
			}
		}
	}
	for _, claim := range known {
		if held[claim.UID] != len(claim.Devices) {
			t.Errorf("%s: claim %s holds %d devices of %d", when, claim.Name, held[claim.UID], len(claim.Devices))
		}
	}
	m.mu.Unlock()

	stored, unreadable, err := m.store.Load()
	if err != nil || len(unreadable) > 0 {
		t.Errorf("%s: checkpoints: %v, %v", when, unreadable, err)
	}
	slices.SortFunc(known, func(a, b checkpoint.Claim) int { return compareUID(a.UID, b.UID) })
	if diff := cmp.Diff(known, stored); diff != "" {
		t.Errorf("%s: claims in memory and on disk differ: %s", when, diff)
	}
	required, allowed := contentsOf(known...)
	contents := m.node.contents()
	for _, file := range required {
		if !slices.Contains(contents, file) {
			t.Errorf("%s: lacks %s", when, file)
		}
	}
	for _, file := range contents {
		if !slices.Contains(required, file) && !slices.Contains(allowed, file) {
			t.Errorf("%s: %s belongs to no claim", when, file)
		}
	}
	for _, claim := range known {
		for _, d := range claim.Devices {
			dir := m.socketDir(claim.UID, d.Device)
			if info, err := os.Stat(filepath.Join(dir, deviceapi.SocketName)); err != nil || info.Mode().Type() != os.ModeSocket {
				t.Errorf("%s: socket of device %s: %v", when, d.Device, err)
			}
		}
	}
}

// expectAnswers checks that the kubelet is answered as ever, and that the runtime can use the answer.
func (m *machinery) expectAnswers(t *testing.T, want []string, claims ...*resourceapi.ResourceClaim) {
	t.Helper()
	answers, err := m.prepareAll(t.Context(), claims...)
	if err != nil {
		t.Errorf("prepare again: %v", err)
		return
	}
	if diff := cmp.Diff(want, answers); diff != "" {
		t.Errorf("prepared again: answer (-want +got): %s", diff)
	}
	for _, answer := range answers {
		_, ids, _ := strings.Cut(answer, "] [")
		for _, id := range strings.Fields(strings.Trim(ids, "[]")) {
			m.node.inject(id)
		}
	}
}

// lockedWatch makes the next call of the kubelet wait for decide at each of its file system calls. The
// result says afterwards whether that has worked.
func (m *machinery) lockedWatch(decide func(fileSyscall) unix.Errno) (failed func() error) {
	result := func() error { return errors.New("the call has not come") }
	m.watch = func() {
		m.watch = nil
		runtime.LockOSThread() // for good: the goroutine of a call ends with it
		done, err := watchFileSyscalls(decide)
		if err != nil {
			done = func() error { return err }
		}
		result = done
	}
	return func() error { return result() }
}
