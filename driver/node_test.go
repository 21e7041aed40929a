package driver

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/simgpu/simgpu/cdi"
	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

const (
	nodeName   = "node-1"
	driverName = "gpu.nvidia.com"
	namespace  = "team"

	whole0 = "gpu-0"
	left0  = "gpu-0-mig-3g40gb-9-0"
	right0 = "gpu-0-mig-3g40gb-9-4"
	whole1 = "gpu-1"
	left1  = "gpu-1-mig-3g40gb-9-0"
)

// testingT is a test, or one run of a random test.
type testingT interface {
	Helper()
	Context() context.Context
	Cleanup(func())
	Error(...any)
	Errorf(string, ...any)
	Fatal(...any)
	Fatalf(string, ...any)
}

// testNode is a node that driver processes come and go on.
type testNode struct {
	t         testingT
	root      string
	catalogue *profiles.Catalogue
	bootID    string
}

// loadCatalogue reads the catalogue once for all tests: nothing changes it.
var loadCatalogue = sync.OnceValues(profiles.Load)

func newTestNode(t *testing.T) *testNode {
	t.Helper()
	return newTestNodeIn(t, t.TempDir())
}

func newTestNodeIn(t testingT, root string) *testNode {
	t.Helper()
	catalogue, err := loadCatalogue()
	if err != nil {
		t.Fatal(err)
	}
	n := &testNode{t: t, root: root, catalogue: catalogue, bootID: "boot-1"}
	if err := os.Mkdir(n.devDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *testNode) checkpointDir() string { return filepath.Join(n.root, "checkpoint") }
func (n *testNode) cdiDir() string        { return filepath.Join(n.root, "cdi") }
func (n *testNode) devDir() string        { return filepath.Join(n.root, "dev") }

// process is one run of the driver, as far as claims are concerned.
type process struct {
	*claims
	found   restored
	sockets *fakeSockets
	crash   *crashAt
}

// start runs the driver until it has read the inventory; no groups is a node with two H100.
func (n *testNode) start(groups ...inventory.GPUGroup) *process {
	n.t.Helper()
	p := n.startWithoutInventory()
	if groups == nil {
		groups = h100s(2)
	}
	p.inventory(n.t, groups...)
	return p
}

func (n *testNode) startWithoutInventory() *process {
	n.t.Helper()
	store, err := checkpoint.Open(n.checkpointDir())
	if err != nil {
		n.t.Fatal(err)
	}
	specs, err := cdi.OpenDirectory(n.cdiDir(), driverName)
	if err != nil {
		n.t.Fatal(err)
	}
	p := &process{sockets: &fakeSockets{serves: map[string]string{}}, crash: &crashAt{}}
	p.claims = newClaims(&claims{
		factory: factory{nodeName: nodeName, driverName: driverName, catalogue: n.catalogue},
		store:   store, specs: specs, sockets: p.sockets, devDir: n.devDir(),
		tools:  []cdi.Mount{{HostPath: "/tools/1/nvidia-smi", ContainerPath: "/usr/bin/nvidia-smi"}},
		bootID: n.bootID, waypoints: p.crash,
	})
	if p.found, err = p.restore(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
	return p
}

func (p *process) inventory(t testingT, groups ...inventory.GPUGroup) {
	t.Helper()
	gpus, err := p.fromInventory(groups)
	if err != nil {
		t.Fatal(err)
	}
	p.apply(gpus, nil)
}

func h100s(count int) []inventory.GPUGroup {
	return []inventory.GPUGroup{{Model: "h100-sxm5-80gb", Count: count, MIGMode: inventory.MIGDynamic}}
}

// fakeSockets keeps what is served as folders with a file in them.
type fakeSockets struct {
	mu     sync.Mutex
	fail   error
	serves map[string]string // folder name -> UUID
	shares map[string]int64  // folder name -> size of the share, 0 for all
}

// shareOf is the share that the CDI device of a part gives.
func (s *fakeSockets) shareOf(id string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, name, _ := strings.Cut(id, "=")
	uid, part, _ := strings.Cut(name, "-gpu-")
	return s.shares[socketID(types.UID(uid), "gpu-"+part)]
}

func (s *fakeSockets) Open(dir string, d deviceapi.Device) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return s.fail
	}
	s.serves[filepath.Base(dir)] = d.UUID()
	if s.shares == nil {
		s.shares = map[string]int64{}
	}
	s.shares[filepath.Base(dir)] = d.ShareBytes
	return os.MkdirAll(dir, 0o755)
}

func (s *fakeSockets) Close(dir string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.serves, filepath.Base(dir))
	return os.RemoveAll(dir)
}

func (s *fakeSockets) uuids() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Values(s.serves))
}

// crashAt ends an operation at a waypoint as a crash would: nothing after it happens.
type crashAt struct {
	at Waypoint
}

type crashed struct{ at Waypoint }

func (c *crashAt) Reached(at Waypoint, _ types.UID) {
	if c.at == at {
		panic(crashed{at})
	}
}

// crashes runs an operation and says whether it ended in the crash.
func crashes(operation func()) (ended bool) {
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(crashed); !ok {
				panic(r)
			}
			ended = true
		}
	}()
	operation()
	return false
}

type option func(*resourceapi.ResourceClaim)

// claimOf returns a claim that was allocated devices of the node, one request "r<i>" each.
func claimOf(name string, devices []string, options ...option) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for i, device := range devices {
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: fmt.Sprintf("r%d", i), Driver: driverName, Pool: nodeName, Device: device,
		})
	}
	for _, o := range options {
		o(claim)
	}
	return claim
}

func adminAccess(claim *resourceapi.ResourceClaim) {
	for i := range claim.Status.Allocation.Devices.Results {
		claim.Status.Allocation.Devices.Results[i].AdminAccess = ptr.To(true)
	}
}

func firstResult(change func(*resourceapi.DeviceRequestAllocationResult)) option {
	return func(claim *resourceapi.ResourceClaim) { change(&claim.Status.Allocation.Devices.Results[0]) }
}

func config(raw string, requests ...string) option {
	return func(claim *resourceapi.ResourceClaim) {
		entry := resourceapi.DeviceAllocationConfiguration{Source: resourceapi.AllocationConfigSourceClaim, Requests: requests}
		entry.Opaque = &resourceapi.OpaqueDeviceConfiguration{Driver: driverName}
		entry.Opaque.Parameters.Raw = []byte(raw)
		claim.Status.Allocation.Devices.Config = append(claim.Status.Allocation.Devices.Config, entry)
	}
}

func (p *process) mustPrepare(t *testing.T, claim *resourceapi.ResourceClaim) []string {
	t.Helper()
	devices, err := p.prepare(t.Context(), claim)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, d := range devices {
		ids = append(ids, d.CDIDeviceIDs...)
	}
	return ids
}

func (p *process) mustUnprepare(t *testing.T, claim *resourceapi.ResourceClaim) {
	t.Helper()
	if err := p.unprepare(t.Context(), claim.UID); err != nil {
		t.Fatal(err)
	}
}

// files lists what exists of claims on the node, relative to its root.
func (n *testNode) files() []string {
	n.t.Helper()
	files := []string{}
	for _, dir := range []string{"checkpoint", "cdi", "dev"} {
		entries, err := os.ReadDir(filepath.Join(n.root, dir))
		if err != nil {
			n.t.Fatal(err)
		}
		for _, e := range entries {
			files = append(files, filepath.Join(dir, e.Name()))
		}
	}
	return files
}

// filesOf are the files that prepared claims have.
func filesOf(claims ...*resourceapi.ResourceClaim) []string {
	files := []string{}
	for _, claim := range claims {
		files = append(files, "checkpoint/"+string(claim.UID)+".json", "cdi/k8s.gpu.nvidia.com-claim_"+string(claim.UID)+".yaml")
		for _, r := range claim.Status.Allocation.Devices.Results {
			files = append(files, "dev/"+socketID(claim.UID, r.Device))
		}
	}
	slices.Sort(files)
	return slices.Compact(files)
}

func (n *testNode) expectFiles(when string, claims ...*resourceapi.ResourceClaim) {
	n.t.Helper()
	got := n.files()
	slices.Sort(got)
	if diff := cmp.Diff(filesOf(claims...), got); diff != "" {
		n.t.Errorf("%s: files (-want +got): %s", when, diff)
	}
}

// container is what a container gets that references CDI devices.
type container struct {
	env    []string
	nodes  []string
	mounts map[string]string // in the container -> on the host
}

func (n *testNode) inject(ids ...string) container {
	n.t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(n.cdiDir()), cdilib.WithAutoRefresh(false))
	if err != nil {
		n.t.Fatal(err)
	}
	if errs := cache.GetErrors(); len(errs) > 0 {
		n.t.Fatalf("the runtime rejects a spec: %v", errs)
	}
	c := container{mounts: map[string]string{}}
	common := map[string]bool{}
	for _, id := range ids {
		device := cache.GetDevice(id)
		if device == nil {
			n.t.Fatalf("unresolvable CDI device %s", id)
		}
		edits := []*cdilib.ContainerEdits{{ContainerEdits: &device.ContainerEdits}}
		if spec := device.GetSpec(); !common[spec.GetPath()] {
			common[spec.GetPath()] = true
			edits = append(edits, &cdilib.ContainerEdits{ContainerEdits: &spec.ContainerEdits})
		}
		for _, e := range edits {
			c.env = append(c.env, e.Env...)
			for _, m := range e.Mounts {
				if m.HostPath == "/dev/null" {
					c.nodes = append(c.nodes, m.ContainerPath)
					continue
				}
				c.mounts[m.ContainerPath] = m.HostPath
			}
		}
	}
	slices.Sort(c.env)
	slices.Sort(c.nodes)
	c.nodes = slices.Compact(c.nodes)
	return c
}

func expectError(t *testing.T, err error, mentions ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, want one that mentions %q", mentions)
		return
	}
	for _, m := range mentions {
		if !strings.Contains(err.Error(), m) {
			t.Errorf("%q does not mention %q", err, m)
		}
	}
}
