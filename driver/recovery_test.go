package driver

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// withAPI adds to a process what needs the API.
func (n *testNode) withAPI(p *process, api kubernetes.Interface) (*plugin, *events) {
	events := newEvents()
	m := newMetrics(p.preparedCount)
	r := &reconciler{
		claims: p.claims, client: api, reporter: events.reporter(), metrics: m, metadata: n.openMetadata(),
	}
	return &plugin{claims: p.claims, reconciler: r, reporter: events.reporter(), metrics: m}, events
}

func (n *testNode) openMetadata() *metadataFiles {
	n.t.Helper()
	m, err := openMetadata(filepath.Join(n.root, "metadata"), n.cdiDir(), driverName, func(types.UID) bool { return false })
	if err != nil {
		n.t.Fatal(err)
	}
	return m
}

// damage overwrites the checkpoint of a claim.
func (n *testNode) damage(claim *resourceapi.ResourceClaim, content string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.checkpointDir(), string(claim.UID)+".json"), []byte(content), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

func (n *testNode) checkpointOf(claim *resourceapi.ResourceClaim) string {
	n.t.Helper()
	data, err := os.ReadFile(filepath.Join(n.checkpointDir(), string(claim.UID)+".json"))
	if err != nil {
		n.t.Fatal(err)
	}
	return string(data)
}

// noteMetadata leaves the device metadata that the kubeletplugin helper leaves.
func (n *testNode) noteMetadata(claim *resourceapi.ResourceClaim) {
	n.t.Helper()
	dir := filepath.Join(n.root, "metadata", claim.Namespace+"_"+claim.Name, "r0")
	data, err := json.Marshal(metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}})
	if err == nil {
		err = errors.Join(os.MkdirAll(dir, 0o755),
			os.WriteFile(filepath.Join(dir, "metadata.json"), data, 0o600),
			os.WriteFile(filepath.Join(n.cdiDir(), driverName+"_metadata_"+string(claim.UID)+"_r0.json"),
				[]byte(`{"cdiVersion":"0.5.0","kind":"`+driverName+`/metadata","devices":[{"name":"`+string(claim.UID)+`_r0","containerEdits":{"env":["X=y"]}}]}`), 0o600))
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *testNode) metadata() []string {
	n.t.Helper()
	found := []string{}
	for _, pattern := range []string{"metadata/*", "cdi/*_metadata_*"} {
		files, err := filepath.Glob(filepath.Join(n.root, pattern))
		if err != nil {
			n.t.Fatal(err)
		}
		for _, f := range files {
			found = append(found, filepath.Base(f))
		}
	}
	return found
}

func TestUnreadableCheckpointIsRebuiltFromTheAPI(t *testing.T) {
	for name, damage := range map[string]func(*testNode, *resourceapi.ResourceClaim){
		"name readable in it": func(n *testNode, claim *resourceapi.ResourceClaim) {
			n.damage(claim, strings.Replace(n.checkpointOf(claim), `"request":"r0"`, `"request":"r1"`, 1))
		},
		"written by a later version": func(n *testNode, claim *resourceapi.ResourceClaim) {
			n.damage(claim, strings.Replace(n.checkpointOf(claim), `"version":1`, `"version":2`, 1))
		},
		"empty": func(n *testNode, claim *resourceapi.ResourceClaim) {
			n.damage(claim, "")
		},
		"empty, and the CDI spec is gone, too": func(n *testNode, claim *resourceapi.ResourceClaim) {
			n.damage(claim, "")
			if err := os.RemoveAll(n.cdiDir()); err != nil {
				n.t.Fatal(err)
			}
		},
		"name damaged in it": func(n *testNode, claim *resourceapi.ResourceClaim) {
			n.damage(claim, strings.Replace(n.checkpointOf(claim), `"name":"a"`, `"name":"x"`, 1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			first := n.start()
			a, b, c := uuidClaim("a", left0), uuidClaim("b", right0), uuidClaim("c", left0)
			ids := first.mustPrepare(t, a)
			first.mustPrepare(t, b)
			n.noteMetadata(a)
			damage(n, a)

			p := n.start()
			if len(p.found.unreadable) != 1 || p.found.prepared != 1 {
				t.Errorf("found %+v", p.found)
			}
			plugin, events := n.withAPI(p, newFakeAPI(a, b, c))
			// Before it is settled nobody else gets its device, and other claims are unharmed.
			_, err := p.prepare(t.Context(), c)
			expectError(t, err, string(a.UID))
			p.mustPrepare(t, b)

			plugin.reconciler.run(t.Context())
			events.expect(t, reasonCheckpointRebuilt, "team/a", string(a.UID))
			n.inject(ids...)
			_, err = p.prepare(t.Context(), c)
			expectError(t, err, "team/a")
			p.mustUnprepare(t, a)
			p.mustPrepare(t, c)
			if left, _ := filepath.Glob(filepath.Join(n.checkpointDir(), "*.unreadable")); len(left) != 0 {
				t.Errorf("left %v", left)
			}
		})
	}
}

func TestUnreadableCheckpointsDoNotBlockEachOther(t *testing.T) {
	n := newTestNode(t)
	first := n.start()
	a, b, c := uuidClaim("a", left0), uuidClaim("b", right0), uuidClaim("c", whole1)
	for _, claim := range []*resourceapi.ResourceClaim{a, b} {
		first.mustPrepare(t, claim)
		n.noteMetadata(claim)
		n.damage(claim, "")
	}
	hopeless := uuidClaim("hopeless")
	n.damage(hopeless, "")
	if err := os.RemoveAll(n.cdiDir()); err != nil {
		t.Fatal(err)
	}

	p := n.start()
	plugin, _ := n.withAPI(p, newFakeAPI(a, b, c))
	plugin.reconciler.run(t.Context())
	if served := p.sockets.uuids(); len(served) != 2 {
		t.Errorf("served %v", served)
	}
	_, err := p.prepare(t.Context(), c)
	expectError(t, err, "team/c", string(hopeless.UID))
	p.mustUnprepare(t, hopeless)
	p.mustPrepare(t, c)
	for _, claim := range []*resourceapi.ResourceClaim{a, b, c} {
		p.mustUnprepare(t, claim)
	}
	n.expectFiles("in the end")
}

func TestUnreadableCheckpointIsSettledByTheKubelet(t *testing.T) {
	for name, settle := range map[string]func(*testing.T, *process, *resourceapi.ResourceClaim){
		"by preparing": func(t *testing.T, p *process, a *resourceapi.ResourceClaim) {
			p.mustPrepare(t, a)
			p.mustUnprepare(t, a)
		},
		"by unpreparing": func(t *testing.T, p *process, a *resourceapi.ResourceClaim) { p.mustUnprepare(t, a) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			a, c := uuidClaim("a", left0), uuidClaim("c", whole1)
			n.start().mustPrepare(t, a)
			n.damage(a, "")
			if err := os.RemoveAll(n.cdiDir()); err != nil {
				t.Fatal(err)
			}

			// Nothing tells what it has: it may have any device.
			p := n.start()
			_, err := p.prepare(t.Context(), c)
			expectError(t, err, "team/c", string(a.UID), string(a.UID)+".unreadable")
			settle(t, p, a)
			p.mustPrepare(t, c)
			if left, _ := filepath.Glob(filepath.Join(n.checkpointDir(), "*.unreadable")); len(left) != 0 {
				t.Errorf("left %v", left)
			}
			plugin, _ := n.withAPI(p, newFakeAPI())
			if err := plugin.reconciler.removeOrphans(); err != nil {
				t.Fatal(err)
			}
			n.expectFiles("in the end", c)
		})
	}
}

func TestUnreadableCheckpointOfAClaimThatIsGone(t *testing.T) {
	n := newTestNode(t)
	a := uuidClaim("a", left0)
	n.start().mustPrepare(t, a)
	n.damage(a, n.checkpointOf(a)+"x")
	p := n.start()
	plugin, _ := n.withAPI(p, newFakeAPI())
	plugin.reconciler.run(t.Context())
	n.expectFiles("settled")
	p.mustPrepare(t, uuidClaim("b", left0))
}

func TestReconcileReleasesWhatIsGone(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	there, gone, replaced := claimOf("there", []string{left0}), claimOf("gone", []string{right0}), claimOf("replaced", []string{whole1})
	for _, claim := range []*resourceapi.ResourceClaim{there, gone, replaced} {
		p.mustPrepare(t, claim)
		n.noteMetadata(claim)
	}
	successor := replaced.DeepCopy()
	successor.UID = "uid-successor"
	api := newFakeAPI(there, successor)
	plugin, _ := n.withAPI(p, api)
	orphan := claimOf("orphan", []string{left0})
	if err := errors.Join(
		os.WriteFile(filepath.Join(n.cdiDir(), "k8s.gpu.nvidia.com-claim_"+string(orphan.UID)+".yaml"), nil, 0o600),
		os.MkdirAll(filepath.Join(n.devDir(), socketID(orphan.UID, left0)), 0o755),
		os.MkdirAll(filepath.Join(n.root, "metadata", "team_orphan", "r0"), 0o755),
	); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(n.cdiDir(), "vendor.yaml")
	if err := os.WriteFile(foreign, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	plugin.reconciler.run(t.Context())
	if err := os.Remove(foreign); err != nil {
		t.Errorf("foreign file: %v", err)
	}
	if diff := cmp.Diff([]string{"team_there", driverName + "_metadata_uid-there_r0.json"}, n.metadata()); diff != "" {
		t.Errorf("metadata: %s", diff)
	}
	if err := os.Remove(filepath.Join(n.cdiDir(), driverName+"_metadata_uid-there_r0.json")); err != nil {
		t.Fatal(err)
	}
	n.expectFiles("reconciled", there)
}

// watchedSockets says when a socket is closed.
type watchedSockets struct {
	socketServer
	closing func()
}

func (s watchedSockets) Close(dir string) error {
	s.closing()
	return s.socketServer.Close(dir)
}

// TestNoClaimComesWhileOrphansAreRemoved is about a claim that is unprepared and prepared again, as when a
// new pod takes it over, while its files are about to be removed as orphans.
func TestNoClaimComesWhileOrphansAreRemoved(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	plugin, _ := n.withAPI(p, newFakeAPI())
	if err := os.Mkdir(filepath.Join(n.devDir(), socketID("uid-a", left0)), 0o755); err != nil {
		t.Fatal(err)
	}
	removed := 0
	p.claims.sockets = watchedSockets{p.sockets, func() {
		removed++
		if p.mu.TryLock() {
			p.mu.Unlock()
			t.Error("claims can come and go")
		}
	}}
	if err := plugin.reconciler.removeOrphans(); err != nil || removed != 1 {
		t.Errorf("removed %d: %v", removed, err)
	}
	n.expectFiles("after")
}

func TestReconcileWithoutAPIChangesNothing(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	claim := claimOf("a", []string{left0})
	p.mustPrepare(t, claim)
	api := newFakeAPI()
	api.PrependReactor("get", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewServiceUnavailable("down")
	})
	plugin, _ := n.withAPI(p, api)
	plugin.reconciler.run(t.Context())
	n.expectFiles("reconciled", claim)
}

func TestReconcileDoesNotWaitARoundForTheAPI(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	gone, hopeless := claimOf("gone", []string{left0}), uuidClaim("hopeless")
	p.mustPrepare(t, gone)
	n.damage(hopeless, "")
	p = n.start()
	api := newFakeAPI()
	calls := 0
	api.PrependReactor("get", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		calls++
		return calls < 4, nil, apierrors.NewServiceUnavailable("starting")
	})
	plugin, _ := n.withAPI(p, api)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	p.changed = cancel // called when the claim is released
	go func() {
		defer close(ended)
		plugin.reconciler.loop(ctx, time.Hour, time.Millisecond)
	}()
	<-ended
	if left := p.preparedKeys(); len(left) != 0 {
		t.Errorf("still prepared: %v", left)
	}
	// What trying again does not help with waits for the next round.
	if !plugin.reconciler.run(t.Context()) {
		t.Error("a claim that nobody knows is tried again and again")
	}
}

func TestConflictWithAClaimThatIsGone(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	forced, late := claimOf("forced", []string{left0}), claimOf("late", []string{left0})
	p.mustPrepare(t, forced)
	plugin, _ := n.withAPI(p, newFakeAPI(late))
	results, err := plugin.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{late})
	if err != nil || results[late.UID].Err != nil {
		t.Fatalf("%v, %v", err, results[late.UID].Err)
	}
	n.expectFiles("prepared", late)
}

func TestBatchesSucceedAndFailClaimByClaim(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	good, bad, overlapping := claimOf("good", []string{left0}), claimOf("bad", []string{"gpu-9"}), claimOf("overlapping", []string{whole0})
	plugin, events := n.withAPI(p, newFakeAPI(good, bad, overlapping))

	results, err := plugin.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{bad, good, overlapping})
	if err != nil {
		t.Fatal(err)
	}
	if len(results) != 3 || results[good.UID].Err != nil || len(results[good.UID].Devices) != 1 {
		t.Errorf("results %+v", results)
	}
	expectError(t, results[bad.UID].Err, "gpu-9")
	expectError(t, results[overlapping.UID].Err, "team/overlapping", "team/good")
	n.expectFiles("prepared", good)
	events.expect(t, reasonPrepareFailed, "team/bad")
	events.expect(t, reasonDeviceConflict, "team/overlapping", "team/good")

	var objects []kubeletplugin.NamespacedObject
	for _, claim := range []*resourceapi.ResourceClaim{good, bad} {
		objects = append(objects, kubeletplugin.NamespacedObject{NamespacedName: types.NamespacedName{Namespace: namespace, Name: claim.Name}, UID: claim.UID})
	}
	undone, err := plugin.UnprepareResourceClaims(t.Context(), objects)
	if err != nil || len(undone) != 2 || undone[good.UID] != nil || undone[bad.UID] != nil {
		t.Errorf("unprepare: %v, %v", err, undone)
	}
	n.expectFiles("unprepared")
}
