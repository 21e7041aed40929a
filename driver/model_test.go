package driver

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/klog/v2"
	"pgregory.net/rapid"

	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/inventory"
)

// The model of a node: what a driver must have, seen from outside, without its order of things, its files
// and its counters. TestRandomLives compares the two after each step.
type model struct {
	inAPI  map[string]*resourceapi.ResourceClaim // by name
	known  map[types.UID]modelClaim
	actual map[int]modelGPU // what the node has, by index
	wanted []modelGPU       // what the inventory says
}

type modelClaim struct {
	object *resourceapi.ResourceClaim // as it was allocated when it was prepared
	half   bool                       // an undo has failed
}

// modelGPU is a model and a MIG mode.
type modelGPU string

const (
	hopper      modelGPU = "h100-sxm5-80gb dynamic"
	hopperWhole modelGPU = "h100-sxm5-80gb disabled"
	ampere      modelGPU = "a100-40gb dynamic"
)

func (g modelGPU) group() inventory.GPUGroup {
	model, mode, _ := strings.Cut(string(g), " ")
	return inventory.GPUGroup{Model: model, Count: 1, MIGMode: inventory.MIGMode(mode)}
}

// slot is the part of a GPU, in eighths of its memory, that a device takes. In this selection of devices no
// other counter runs out first.
type slot struct {
	name  string // without the GPU
	start int
	size  int
}

var slots = map[modelGPU][]slot{
	hopper: {{"", 0, 8}, {"-mig-3g40gb-9-0", 0, 4}, {"-mig-3g40gb-9-4", 4, 4}, {"-mig-1g10gb-19-0", 0, 1},
		{"-mig-1g10gb-19-5", 5, 1}, {"-mig-2g20gb-14-2", 2, 2}},
	hopperWhole: {{"", 0, 8}},
	// An A100 in MIG mode has no whole GPU.
	ampere: {{"-mig-3g20gb-9-0", 0, 4}, {"-mig-3g20gb-9-4", 4, 4}, {"-mig-1g5gb-19-2", 2, 1}},
}

// modelDevice is where a device is.
type modelDevice struct {
	gpu         int
	start, size int
	kinds       []modelGPU // that have it
}

var modelDevices = func() map[string]modelDevice {
	all := map[string]modelDevice{}
	for gpu := range 3 {
		for kind, list := range slots {
			for _, s := range list {
				name := fmt.Sprintf("gpu-%d%s", gpu, s.name)
				d := all[name]
				all[name] = modelDevice{gpu, s.start, s.size, append(d.kinds, kind)}
			}
		}
	}
	return all
}()

func (d modelDevice) overlaps(o modelDevice) bool {
	return d.gpu == o.gpu && d.start < o.start+o.size && o.start < d.start+d.size
}

// allocated are the devices of a claim, and whether it has administrative access.
func allocated(claim *resourceapi.ResourceClaim) (names []string, admin bool) {
	for _, r := range claim.Status.Allocation.Devices.Results {
		names = append(names, r.Device)
		admin = r.AdminAccess != nil && *r.AdminAccess
	}
	return names, admin
}

func overlap(a, b *resourceapi.ResourceClaim) bool {
	namesA, adminA := allocated(a)
	namesB, adminB := allocated(b)
	if adminA || adminB {
		return false
	}
	return slices.ContainsFunc(namesA, func(x string) bool {
		return slices.ContainsFunc(namesB, func(y string) bool { return modelDevices[x].overlaps(modelDevices[y]) })
	})
}

// exists says whether a claim is still in the API, as the same object.
func (m *model) exists(uid types.UID, name string) bool {
	claim := m.inAPI[name]
	return claim != nil && claim.UID == uid
}

func (m *model) inUse(gpu int) bool {
	for _, c := range m.known {
		names, _ := allocated(c.object)
		if slices.ContainsFunc(names, func(name string) bool { return modelDevices[name].gpu == gpu }) {
			return true
		}
	}
	return false
}

// restock lets GPUs that are not in use become what the inventory says.
func (m *model) restock() {
	for gpu := range 3 {
		switch _, there := m.actual[gpu]; {
		case there && m.inUse(gpu):
		case gpu < len(m.wanted):
			m.actual[gpu] = m.wanted[gpu]
		default:
			delete(m.actual, gpu)
		}
	}
}

func (m *model) forget(uid types.UID) {
	delete(m.known, uid)
	m.restock()
}

// there says whether the node has all of these devices.
func (m *model) there(names []string) bool {
	return !slices.ContainsFunc(names, func(name string) bool {
		d := modelDevices[name]
		kind, there := m.actual[d.gpu]
		return !there || !slices.Contains(d.kinds, kind)
	})
}

// restarted is what a restart does: it ends all that was half undone.
func (m *model) restarted() {
	for uid, c := range m.known {
		if c.half {
			m.forget(uid)
		}
	}
}

func (m *model) reconciled() {
	for uid, c := range m.known {
		if !m.exists(uid, c.object.Name) {
			m.forget(uid)
		}
	}
}

// trouble is what is wrong with the node during an operation.
type trouble string

const (
	none          trouble = "none"
	noSockets     trouble = "sockets fail"
	diskFull      trouble = "disk full"
	noCDIFolder   trouble = "CDI folder unusable"
	crashesBefore trouble = "crash before success"
	crashesAfter  trouble = "crash after success"
)

// prepare says whether the claim is prepared, and what the claims in its way that are gone may be then.
func (m *model) prepare(claim *resourceapi.ResourceClaim, with trouble) (success bool, mayBeGone []types.UID) {
	current, isKnown := m.known[claim.UID]
	names, admin := allocated(claim)
	same := false
	if isKnown {
		before, adminBefore := allocated(current.object)
		same = slices.Equal(before, names) && adminBefore == admin
	}
	if same && !current.half {
		return with != noSockets && with != noCDIFolder, nil
	}
	if isKnown && !same {
		if with == noCDIFolder {
			m.known[claim.UID] = modelClaim{current.object, true}
			return false, nil
		}
		m.forget(claim.UID)
	}
	if !m.there(names) {
		return false, nil
	}
	var gone []types.UID
	refused := false
	for uid, c := range m.known {
		if uid == claim.UID || !overlap(c.object, claim) {
			continue
		}
		if m.exists(uid, c.object.Name) {
			refused = true
		} else {
			gone = append(gone, uid)
		}
	}
	if refused || with == noCDIFolder && len(gone) > 0 {
		return false, gone
	}
	without := model{known: maps.Clone(m.known), actual: maps.Clone(m.actual), wanted: m.wanted}
	for _, uid := range gone {
		without.forget(uid)
	}
	if !without.there(names) {
		// The GPU was there for those that are gone only.
		return false, gone
	}
	m.known, m.actual = without.known, without.actual
	switch with {
	case noSockets, diskFull, crashesBefore:
		delete(m.known, claim.UID)
		m.restock()
		return false, nil
	case noCDIFolder:
		m.known[claim.UID] = modelClaim{claim, true}
		m.restock()
		return false, nil
	}
	m.known[claim.UID] = modelClaim{claim, false}
	m.restock()
	return true, nil
}

func (m *model) unprepare(uid types.UID, with trouble) (success bool) {
	if c, ok := m.known[uid]; ok && with == noCDIFolder {
		m.known[uid] = modelClaim{c.object, true}
		return false
	}
	m.forget(uid)
	return true
}

// life is a node with its driver and the model of both.
type life struct {
	model
	*testNode
	p      *process
	plugin *plugin
	ctx    context.Context
	uids   int
	ever   []*resourceapi.ResourceClaim // all claims there ever were
	full   bool
}

// fullWhen is a disk that is full at times.
type fullWhen struct {
	claimStore
	full *bool
}

func (f fullWhen) Write(claim checkpoint.Claim) error {
	if *f.full {
		return errors.New("no space left on device")
	}
	return f.claimStore.Write(claim)
}

func (l *life) start(t *rapid.T) {
	l.p = l.startWithoutInventory()
	if len(l.p.found.failed) > 0 {
		t.Fatalf("restored: %v", l.p.found.failed)
	}
	l.p.store = fullWhen{l.p.store, &l.full}
	l.stock(t)
	l.plugin, _ = l.withAPI(l.p, modelClient{model: &l.model})
	l.plugin.reconciler.metadata.prepared = l.p.has
	l.restarted()
	l.restock()
}

func (l *life) stock(t *rapid.T) {
	groups := []inventory.GPUGroup{}
	for _, gpu := range l.wanted {
		groups = append(groups, gpu.group())
	}
	gpus, err := l.p.fromInventory(groups)
	if err != nil {
		t.Fatal(err)
	}
	l.p.apply(gpus, nil)
}

func (l *life) newUID() types.UID {
	l.uids++
	return types.UID(fmt.Sprintf("%08d-6c0e-4a55-9a37-0d1d4b1f6f11", l.uids))
}

// allocate draws devices for a claim. The API may be wrong about them: they may overlap those of other
// claims, and the node may not have them any more.
func (l *life) allocate(t *rapid.T, name string, uid types.UID) *resourceapi.ResourceClaim {
	var there []string
	for name, d := range modelDevices {
		if slices.Contains(d.kinds, l.actual[d.gpu]) {
			there = append(there, name)
		}
	}
	choose := slices.Sorted(maps.Keys(modelDevices))
	if len(there) > 0 && rapid.IntRange(0, 9).Draw(t, "where it is") > 0 {
		slices.Sort(there)
		choose = there
	}
	var devices []string
	for range rapid.IntRange(1, 2).Draw(t, "devices") {
		device := rapid.SampledFrom(choose).Draw(t, "device")
		if !slices.ContainsFunc(devices, func(other string) bool { return modelDevices[other].overlaps(modelDevices[device]) }) {
			devices = append(devices, device)
		}
	}
	claim := claimOf(name, devices)
	claim.UID = uid
	if rapid.IntRange(0, 9).Draw(t, "admin") == 0 {
		adminAccess(claim)
	}
	return claim
}

// modelClient is an API server that knows the claims of a model, and nothing else.
type (
	modelClient struct {
		kubernetes.Interface
		model *model
	}
	modelAPIGroup struct {
		resourceclient.ResourceV1Interface
		model *model
	}
	modelClaims struct {
		resourceclient.ResourceClaimInterface
		model *model
	}
)

func (c modelClient) ResourceV1() resourceclient.ResourceV1Interface {
	return modelAPIGroup{model: c.model}
}

func (g modelAPIGroup) ResourceClaims(string) resourceclient.ResourceClaimInterface {
	return modelClaims{model: g.model}
}

func (c modelClaims) Get(_ context.Context, name string, _ metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	if claim := c.model.inAPI[name]; claim != nil {
		return claim, nil
	}
	return nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), name)
}

func (l *life) put(claim *resourceapi.ResourceClaim) {
	l.inAPI[claim.Name] = claim
	l.ever = append(l.ever, claim)
}

// inAPIAtAll draws a claim of the API.
func (l *life) inAPIAtAll(t *rapid.T) *resourceapi.ResourceClaim {
	if len(l.inAPI) == 0 {
		t.Skip("no claims")
	}
	return l.inAPI[rapid.SampledFrom(slices.Sorted(maps.Keys(l.inAPI))).Draw(t, "claim")]
}

// within lets something be wrong while it calls the driver.
func (l *life) within(with trouble, call func() error) (err error, crashed bool) {
	switch with {
	case noSockets:
		l.p.sockets.fail = errors.New("no sockets")
		defer func() { l.p.sockets.fail = nil }()
	case diskFull:
		l.full = true
		defer func() { l.full = false }()
	case noCDIFolder:
		away := l.cdiDir() + ".away"
		if err := errors.Join(os.Rename(l.cdiDir(), away), os.WriteFile(l.cdiDir(), nil, 0o600)); err != nil {
			l.t.Fatal(err)
		}
		defer func() {
			if err := errors.Join(os.Remove(l.cdiDir()), os.Rename(away, l.cdiDir())); err != nil {
				l.t.Fatal(err)
			}
		}()
	}
	crashed = crashes(func() { err = call() })
	return err, crashed
}

func (l *life) prepare(t *rapid.T, claim *resourceapi.ResourceClaim, with trouble, at Waypoint) {
	l.p.crash.at = at
	err, crashed := l.within(with, func() error {
		_, err := l.plugin.prepare(l.ctx, claim)
		return err
	})
	l.p.crash.at = ""
	success, mayBeGone := l.model.prepare(claim, with)
	for _, uid := range mayBeGone {
		known, ok := l.p.lookup(uid)
		if !ok {
			l.forget(uid)
		} else {
			l.known[uid] = modelClaim{l.known[uid].object, known.State == checkpoint.Preparing}
		}
	}
	if crashed {
		l.start(t)
		return
	}
	if success != (err == nil) && with != crashesBefore {
		t.Fatalf("prepare claim %s: %v, want success: %v", claim.UID, err, success)
	}
	if err == nil {
		l.noteMetadata(claim)
	}
}

func (l *life) unprepare(t *rapid.T, claim *resourceapi.ResourceClaim, with trouble, at Waypoint) {
	_, isKnown := l.known[claim.UID]
	l.p.crash.at = at
	err, crashed := l.within(with, func() error { return l.p.unprepare(l.ctx, claim.UID) })
	l.p.crash.at = ""
	success := l.model.unprepare(claim.UID, with)
	if crashed {
		l.start(t)
		return
	}
	if success != (err == nil) && (isKnown || with == none) {
		t.Fatalf("unprepare claim %s: %v, want success: %v", claim.UID, err, success)
	}
	if err != nil {
		return
	}
	// As the helper does.
	ops := l.plugin.reconciler.metadata.operations()
	specs, err := ops.Glob(filepath.Join(l.cdiDir(), driverName+"_metadata_"+string(claim.UID)+"_*.json"))
	err = errors.Join(err, ops.RemoveAll(filepath.Join(l.root, "metadata", namespace+"_"+claim.Name)))
	for _, spec := range specs {
		err = errors.Join(err, ops.Remove(spec))
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (l *life) reconcile(t *rapid.T) {
	if !l.plugin.reconciler.run(l.ctx) {
		t.Fatal("a round of comparing with the API is incomplete")
	}
	l.reconciled()
}

// spoil takes a checkpoint of a prepared claim away from a driver that is not running, which then starts.
func (l *life) spoil(t *rapid.T, how func(file string) error) {
	var candidates []types.UID
	for uid, c := range l.known {
		names, _ := allocated(c.object)
		retiring := slices.ContainsFunc(names, func(name string) bool {
			gpu := modelDevices[name].gpu
			return gpu >= len(l.wanted) || l.wanted[gpu] != l.actual[gpu]
		})
		// What became of a claim or a GPU that has changed, only the file tells.
		changed := l.exists(uid, c.object.Name) && l.inAPI[c.object.Name] != c.object
		// Nor is there a name where the driver crashed before the kubelet could be told of the claim.
		noted, err := l.plugin.reconciler.metadata.names(uid)
		if err != nil {
			t.Fatal(err)
		}
		if !c.half && !retiring && !changed && len(noted) > 0 {
			candidates = append(candidates, uid)
		}
	}
	if len(candidates) == 0 {
		t.Skip("no claim to spoil")
	}
	slices.Sort(candidates)
	uid := rapid.SampledFrom(candidates).Draw(t, "claim")
	if err := how(filepath.Join(l.checkpointDir(), string(uid)+".json")); err != nil {
		t.Fatal(err)
	}
	l.start(t)
	l.reconcile(t)
}

func (l *life) check(t *rapid.T) {
	// The claims.
	want, got := map[string]string{}, map[string]string{}
	var prepared []*resourceapi.ResourceClaim
	allowed := []string{}
	for uid, c := range l.known {
		names, _ := allocated(c.object)
		want[string(uid)] = fmt.Sprint(names, c.half)
		if c.half {
			allowed = append(allowed, filesOf(c.object)...)
		} else {
			prepared = append(prepared, c.object)
		}
	}
	for uid, c := range l.p.known {
		var names []string
		for _, d := range c.Devices {
			names = append(names, d.Device)
		}
		got[string(uid)] = fmt.Sprint(names, c.State == checkpoint.Preparing)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("claims (-want +got): %s", diff)
	}
	if len(l.p.unsettled) > 0 {
		t.Fatalf("unsettled: %v", l.p.unsettled)
	}
	// No device is given twice, and the driver's books agree.
	for uidA, a := range l.known {
		for uidB, b := range l.known {
			if uidA < uidB && overlap(a.object, b.object) {
				t.Fatalf("claims %s and %s overlap", uidA, uidB)
			}
		}
	}
	held := map[string]int{}
	for _, holdings := range l.p.ledger.byGPU {
		for _, h := range holdings {
			held[string(h.claim.UID)]++
		}
	}
	for uid, c := range l.known {
		names, _ := allocated(c.object)
		if held[string(uid)] != len(names) {
			t.Fatalf("claim %s holds %d devices of %d", uid, held[string(uid)], len(names))
		}
		delete(held, string(uid))
	}
	if len(held) > 0 {
		t.Fatalf("devices are held by nobody: %v", held)
	}
	// The hardware.
	gpus := map[int]modelGPU{}
	for _, gpu := range l.p.currentStock().gpus {
		gpus[gpu.Index] = modelGPU(gpu.source.Model + " " + gpu.source.MIGMode)
	}
	if diff := cmp.Diff(l.actual, gpus); diff != "" {
		t.Fatalf("GPUs (-want +got): %s", diff)
	}
	// The files.
	required := filesOf(prepared...)
	files := slices.DeleteFunc(l.files(), func(name string) bool {
		return strings.Contains(name, "_metadata_") || strings.Contains(name, "stray")
	})
	for _, name := range required {
		if !slices.Contains(files, name) {
			t.Fatalf("lacks %s of %v", name, files)
		}
	}
	for _, name := range files {
		if !slices.Contains(required, name) && !slices.Contains(allowed, name) {
			t.Fatalf("%s belongs to no claim", name)
		}
	}
}

// lives runs one sequence of random steps.
func lives(t *rapid.T) {
	l := &life{
		model: model{
			inAPI:  map[string]*resourceapi.ResourceClaim{},
			known:  map[types.UID]modelClaim{},
			actual: map[int]modelGPU{},
			wanted: []modelGPU{hopper, hopper},
		},
		testNode: newTestNodeIn(t, memoryDir(t)),
		ctx:      klog.NewContext(t.Context(), logr.Discard()),
	}
	l.start(t)

	gpuKinds := []modelGPU{hopper, hopper, hopperWhole, ampere}
	troubles := []trouble{none, none, none, noSockets, diskFull, noCDIFolder}
	steps := map[string]func(*rapid.T){
		"": l.check,
		"create a claim": func(t *rapid.T) {
			name := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f"}).Draw(t, "name")
			// One that is there is replaced.
			l.put(l.allocate(t, name, l.newUID()))
		},
		"allocate a claim anew": func(t *rapid.T) {
			claim := l.inAPIAtAll(t)
			l.put(l.allocate(t, claim.Name, claim.UID))
		},
		"delete a claim from the API": func(t *rapid.T) {
			delete(l.inAPI, l.inAPIAtAll(t).Name)
		},
		"prepare": func(t *rapid.T) {
			l.prepare(t, l.inAPIAtAll(t), rapid.SampledFrom(troubles).Draw(t, "trouble"), "")
		},
		"unprepare": func(t *rapid.T) {
			if len(l.ever) == 0 {
				t.Skip("no claims")
			}
			l.unprepare(t, rapid.SampledFrom(l.ever).Draw(t, "claim"), rapid.SampledFrom(troubles).Draw(t, "trouble"), "")
		},
		"crash in prepare": func(t *rapid.T) {
			at := rapid.SampledFrom(PrepareWaypoints()).Draw(t, "waypoint")
			with := crashesBefore
			if at == ClaimPrepared {
				with = crashesAfter
			}
			l.prepare(t, l.inAPIAtAll(t), with, at)
		},
		"crash in unprepare": func(t *rapid.T) {
			if len(l.ever) == 0 {
				t.Skip("no claims")
			}
			l.unprepare(t, rapid.SampledFrom(l.ever).Draw(t, "claim"), none, rapid.SampledFrom(UnprepareWaypoints()).Draw(t, "waypoint"))
		},
		"restart": l.start,
		"reboot": func(t *rapid.T) {
			if rapid.Bool().Draw(t, "of a machine, not of a container") {
				l.bootID += "+"
			}
			if err := os.RemoveAll(l.cdiDir()); err != nil {
				t.Fatal(err)
			}
			l.start(t)
		},
		"change the inventory": func(t *rapid.T) {
			l.wanted = rapid.SliceOfN(rapid.SampledFrom(gpuKinds), 0, 3).Draw(t, "GPUs")
			l.stock(t)
			l.restock()
		},
		"change the inventory while the driver is away": func(t *rapid.T) {
			l.wanted = rapid.SliceOfN(rapid.SampledFrom(gpuKinds), 0, 3).Draw(t, "GPUs")
			l.start(t)
		},
		"compare with the API": l.reconcile,
		"lose a checkpoint":    func(t *rapid.T) { l.spoil(t, os.Remove) },
		"damage a checkpoint": func(t *rapid.T) {
			l.spoil(t, func(file string) error {
				data, err := os.ReadFile(file)
				if err != nil {
					return err
				}
				switch rapid.IntRange(0, 2).Draw(t, "damage") {
				case 0:
					data = data[:rapid.IntRange(0, len(data)-2).Draw(t, "length")]
				case 1:
					data[rapid.IntRange(0, len(data)-2).Draw(t, "byte")] ^= 1
				default:
					data = []byte(strings.Replace(string(data), `"version":1`, `"version":9`, 1))
				}
				return os.WriteFile(file, data, 0o600)
			})
		},
		"leave a stray file": func(t *rapid.T) {
			name := rapid.SampledFrom([]string{"stray.json", "stray.unreadable", "stray"}).Draw(t, "name")
			if err := os.WriteFile(filepath.Join(l.checkpointDir(), name), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"remove files by hand": func(t *rapid.T) {
			var mine []string
			for uid, c := range l.known {
				if !c.half && l.exists(uid, c.object.Name) {
					mine = append(mine, filesOf(c.object)...)
				}
			}
			if len(mine) == 0 {
				t.Skip("no files")
			}
			slices.Sort(mine)
			if err := os.RemoveAll(filepath.Join(l.root, rapid.SampledFrom(mine).Draw(t, "file"))); err != nil {
				t.Fatal(err)
			}
			l.reconcile(t)
		},
	}
	t.Repeat(steps)

	// In the end no device is lost, and nothing is left.
	for _, claim := range l.ever {
		l.unprepare(t, claim, none, "")
	}
	l.reconcile(t)
	l.check(t)
	for gpu, kind := range l.actual {
		claim := claimOf("last", []string{fmt.Sprintf("gpu-%d%s", gpu, slots[kind][0].name)})
		claim.UID = l.newUID()
		l.put(claim)
		l.prepare(t, claim, none, "")
		l.unprepare(t, claim, none, "")
	}
}

// memoryDir is a folder in memory, where there is one, that is gone after the test.
func memoryDir(t testingT) string {
	t.Helper()
	dir, err := os.MkdirTemp(memoryFolder(), "simgpu")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// TestRandomLives lets the driver and a simple model of it live through the same random events, and compares
// them after each. Some runs are the same every time; one is new each time, and prints its seed if it fails.
func TestRandomLives(t *testing.T) {
	if seed := flag.Lookup("rapid.seed").Value.String(); seed != "0" {
		rapid.Check(t, lives)
		return
	}
	seeds := []string{"1", "2", "0"}
	if stride > 1 {
		seeds = seeds[1:]
	}
	for _, seed := range seeds {
		t.Run("seed "+seed, func(t *testing.T) {
			if err := flag.Set("rapid.seed", seed); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = flag.Set("rapid.seed", "0") }()
			rapid.Check(t, lives)
		})
	}
}
