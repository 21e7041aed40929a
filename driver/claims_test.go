package driver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/inventory"
)

func TestPrepareAnswersInTheOrderOfTheAllocation(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	claim := claimOf("a", []string{right0, whole1},
		firstResult(func(r *resourceapi.DeviceRequestAllocationResult) { r.Request = "gpu/small" }),
		func(claim *resourceapi.ResourceClaim) {
			results := claim.Status.Allocation.Devices.Results
			foreign := resourceapi.DeviceRequestAllocationResult{Request: "nic", Driver: "net.example.com", Pool: "x", Device: "eth0"}
			claim.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{results[0], foreign, results[1]}
		})

	devices, err := p.prepare(t.Context(), claim)
	if err != nil {
		t.Fatal(err)
	}
	type answer struct {
		requests  []string
		pool, id  string
		ids       []string
		uuid, arc string
	}
	var got []answer
	for _, d := range devices {
		got = append(got, answer{d.Requests, d.PoolName, d.DeviceName, d.CDIDeviceIDs,
			*d.Metadata.Attributes["uuid"].StringValue, *d.Metadata.Attributes["architecture"].StringValue})
	}
	want := []answer{
		{[]string{"gpu/small"}, nodeName, right0, []string{"k8s.gpu.nvidia.com/claim=uid-a-" + right0}, p.stock.device(right0).UUID, "Hopper"},
		{[]string{"r1"}, nodeName, whole1, []string{"k8s.gpu.nvidia.com/claim=uid-a-" + whole1}, p.stock.device(whole1).UUID, "Hopper"},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(answer{})); diff != "" {
		t.Error(diff)
	}

	again, err := p.prepare(t.Context(), claim)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(devices, again); diff != "" {
		t.Errorf("second answer: %s", diff)
	}
}

func TestContainerGetsTheDevicesOfItsRequest(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	claim := claimOf("a", []string{right0, whole1})
	ids := p.mustPrepare(t, claim)
	partition, gpu := p.stock.device(right0), p.stock.device(whole1)

	c := n.inject(ids[0])
	if diff := cmp.Diff([]string{"NVIDIA_VISIBLE_DEVICES=void", "SIMGPU_DEVICE_GPU_0_MIG_3G40GB_9_4=" + partition.UUID}, c.env); diff != "" {
		t.Errorf("env of the partition: %s", diff)
	}
	wantNodes := slices.Clone(partition.Files())
	slices.Sort(wantNodes)
	if diff := cmp.Diff(wantNodes, c.nodes); diff != "" {
		t.Errorf("nodes of the partition: %s", diff)
	}
	if !slices.Contains(c.nodes, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", partition.Instance.GPUInstanceMinor)) || !slices.Contains(c.nodes, "/dev/nvidiactl") {
		t.Errorf("nodes of the partition: %v", c.nodes)
	}
	socket := socketID(claim.UID, right0)
	if diff := cmp.Diff(map[string]string{
		"/usr/bin/nvidia-smi":   "/tools/1/nvidia-smi",
		"/run/simgpu/" + socket: filepath.Join(n.devDir(), socket),
	}, c.mounts); diff != "" {
		t.Errorf("mounts of the partition: %s", diff)
	}

	c = n.inject(ids[1])
	if diff := cmp.Diff([]string{"NVIDIA_VISIBLE_DEVICES=void", "SIMGPU_DEVICE_GPU_1=" + gpu.UUID}, c.env); diff != "" {
		t.Errorf("env of the GPU: %s", diff)
	}
	if slices.Contains(c.nodes, "/dev/nvidia0") || !slices.Contains(c.nodes, "/dev/nvidia1") {
		t.Errorf("nodes of the GPU: %v", c.nodes)
	}
	if diff := cmp.Diff([]string{gpu.UUID, partition.UUID}, p.sockets.uuids()); diff != "" {
		t.Errorf("served: %s", diff)
	}
}

func TestUnprepareLeavesNothingAndMayComeLate(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	a, b := claimOf("a", []string{left0, whole1}), claimOf("b", []string{right0})
	p.mustPrepare(t, a)
	p.mustPrepare(t, b)
	n.expectFiles("prepared", a, b)
	for range 2 {
		p.mustUnprepare(t, a)
	}
	n.expectFiles("one unprepared", b)
	p.mustUnprepare(t, b)
	n.expectFiles("both unprepared")
	p.mustUnprepare(t, claimOf("never seen", nil, func(c *resourceapi.ResourceClaim) { c.UID = "5e8c86e4-8e9a-4b13-90a5-3e1f4d3b8a55" }))
	if len(p.sockets.uuids()) != 0 || len(p.ledger.byGPU) != 0 || len(p.locks.locks) != 0 {
		t.Errorf("left in memory: %v, %v, %v", p.sockets.uuids(), p.ledger.byGPU, p.locks.locks)
	}
}

func TestPrepareRenewsWhatIsMissing(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	claim := claimOf("a", []string{left0})
	ids := p.mustPrepare(t, claim)
	if err := os.RemoveAll(n.cdiDir()); err != nil {
		t.Fatal(err)
	}
	if err := p.sockets.Close(filepath.Join(n.devDir(), socketID(claim.UID, left0))); err != nil {
		t.Fatal(err)
	}
	p.mustPrepare(t, claim)
	n.expectFiles("renewed", claim)
	n.inject(ids...)
}

func TestRestart(t *testing.T) {
	for name, between := range map[string]func(*testing.T, *testNode){
		"of the driver": func(*testing.T, *testNode) {},
		"of the node": func(t *testing.T, n *testNode) {
			n.bootID = "boot-2"
			if err := os.RemoveAll(n.cdiDir()); err != nil {
				t.Fatal(err)
			}
		},
		// Restarting a container that is a node empties its /run; the kernel and its boot id stay.
		"of a node in a container": func(t *testing.T, n *testNode) {
			if err := os.RemoveAll(n.cdiDir()); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			first := n.start()
			a, b := claimOf("a", []string{left0, whole1}), claimOf("b", []string{right0}, config(mps))
			ids := append(first.mustPrepare(t, a), first.mustPrepare(t, b)...)
			before := n.inject(ids...)
			served := first.sockets.uuids()
			between(t, n)

			// Neither the API nor the inventory is there yet.
			second := n.startWithoutInventory()
			if second.found.prepared != 2 || len(second.found.failed) != 0 {
				t.Errorf("restored: %+v", second.found)
			}
			n.expectFiles("restored", a, b)
			if diff := cmp.Diff(before, n.inject(ids...), cmp.AllowUnexported(container{})); diff != "" {
				t.Errorf("containers: %s", diff)
			}
			if diff := cmp.Diff(served, second.sockets.uuids()); diff != "" {
				t.Errorf("served: %s", diff)
			}
			second.mustPrepare(t, a)

			second.inventory(t, h100s(2)...)
			_, err := second.prepare(t.Context(), claimOf("c", []string{left0}))
			expectError(t, err, "team/c", "team/a")
			second.mustUnprepare(t, a)
			second.mustUnprepare(t, b)
			n.expectFiles("unprepared")
		})
	}
}

const mps = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi"}}}`

func TestCrashAtEachStep(t *testing.T) {
	claim, other := claimOf("a", []string{left0, whole1}), claimOf("b", []string{left0})

	for i, at := range PrepareWaypoints() {
		t.Run("prepare "+string(at), func(t *testing.T) {
			n := newTestNode(t)
			first := n.start()
			first.crash.at = at
			if !crashes(func() { _, _ = first.prepare(t.Context(), claim) }) {
				t.Fatal("did not come this far")
			}
			second := n.start()
			complete := i == len(PrepareWaypoints())-1
			if complete {
				// The kubelet was not told, but it will ask again or unprepare.
				n.expectFiles("after the crash", claim)
			} else {
				n.expectFiles("after the crash")
				if second.found.undone != 1 || len(second.sockets.uuids()) != 0 {
					t.Errorf("undone %d, served %v", second.found.undone, second.sockets.uuids())
				}
				// Nobody was promised the device.
				second.mustPrepare(t, other)
				second.mustUnprepare(t, other)
			}
			n.inject(second.mustPrepare(t, claim)...)
			n.expectFiles("prepared again", claim)
			second.mustUnprepare(t, claim)
			n.expectFiles("unprepared")
		})
	}

	for _, at := range UnprepareWaypoints() {
		t.Run("unprepare "+string(at), func(t *testing.T) {
			n := newTestNode(t)
			first := n.start()
			first.mustPrepare(t, claim)
			first.crash.at = at
			if !crashes(func() { _ = first.unprepare(t.Context(), claim.UID) }) {
				t.Fatal("did not come this far")
			}
			second := n.start()
			n.expectFiles("after the crash")
			second.mustUnprepare(t, claim)
			second.mustPrepare(t, other)
		})
	}
}

func TestFailedStepIsUndone(t *testing.T) {
	full := errors.New("no space left")
	for name, break_ := range map[string]func(*testing.T, *testNode, *process) (mend func()){
		"checkpoint": func(t *testing.T, n *testNode, p *process) func() {
			return replaceByFile(t, n.checkpointDir())
		},
		"sockets": func(_ *testing.T, _ *testNode, p *process) func() {
			p.sockets.fail = full
			return func() { p.sockets.fail = nil }
		},
		"CDI folder": func(t *testing.T, n *testNode, _ *process) func() {
			return replaceByFile(t, n.cdiDir())
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			p := n.start()
			claim := claimOf("a", []string{left0})
			mend := break_(t, n, p)
			if _, err := p.prepare(t.Context(), claim); err == nil {
				t.Error("prepared")
			}
			mend()
			// However far the undoing came: the claim itself can be prepared, and after that undone.
			p.mustPrepare(t, claim)
			p.mustUnprepare(t, claim)
			n.expectFiles("unprepared")
			p.mustPrepare(t, claimOf("b", []string{left0}))
		})
	}
}

func TestFailedUnprepareKeepsTheDevices(t *testing.T) {
	for name, dir := range map[string]func(*testNode) string{
		"checkpoint": (*testNode).checkpointDir,
		"CDI folder": (*testNode).cdiDir,
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			p := n.start()
			claim, other := claimOf("a", []string{left0}), claimOf("b", []string{left0})
			p.mustPrepare(t, claim)
			mend := replaceByFile(t, dir(n))
			if err := p.unprepare(t.Context(), claim.UID); err == nil {
				t.Error("unprepared")
			}
			_, err := p.prepare(t.Context(), other)
			expectError(t, err, "team/a")
			mend()
			// Also after a restart in between.
			p = n.start()
			p.mustUnprepare(t, claim)
			n.expectFiles("unprepared")
			p.mustPrepare(t, other)
		})
	}
}

// fullDisk lets files be removed but not written.
type fullDisk struct{ claimStore }

func (fullDisk) Write(checkpoint.Claim) error { return unix.ENOSPC }

func TestFullDiskKeepsNobodyFromUnpreparing(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	claim, other := claimOf("a", []string{left0}), claimOf("b", []string{right0})
	p.mustPrepare(t, claim)
	p.store = fullDisk{p.store}
	_, err := p.prepare(t.Context(), other)
	expectError(t, err, "no space left")
	n.expectFiles("full", claim)
	p.mustUnprepare(t, claim)
	n.expectFiles("unprepared")
	if len(p.ledger.byGPU) != 0 {
		t.Errorf("still given out: %v", p.ledger.byGPU)
	}
}

func TestCrashInUnprepareOnAFullDiskIsPutRight(t *testing.T) {
	for _, at := range UnprepareWaypoints() {
		t.Run(string(at), func(t *testing.T) {
			n := newTestNode(t)
			first := n.start()
			claim := claimOf("a", []string{left0})
			first.mustPrepare(t, claim)
			first.store = fullDisk{first.store}
			first.crash.at = at
			if !crashes(func() { _ = first.unprepare(t.Context(), claim.UID) }) {
				t.Fatal("did not come this far")
			}
			second := n.start()
			if at != ClaimRemoved {
				n.expectFiles("after the crash", claim)
			}
			second.mustUnprepare(t, claim)
			n.expectFiles("unprepared")
		})
	}
}

// replaceByFile makes a folder unusable; permissions do not stop root.
func replaceByFile(t *testing.T, dir string) (mend func()) {
	t.Helper()
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := errors.Join(os.Remove(dir), os.Rename(dir+".away", dir)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDevicesAreGivenToOneClaim(t *testing.T) {
	const (
		one0  = "gpu-0-mig-1g10gb-19-0"
		one6  = "gpu-0-mig-1g10gb-19-6"
		four0 = "gpu-0-mig-4g40gb-5-0"
		me0   = "gpu-0-mig-1g10gb-me-20-0"
		me4   = "gpu-0-mig-1g10gb-me-20-4"
	)
	for name, test := range map[string]struct {
		first, second []string
		options       []option
		conflict      bool
	}{
		"same partition":             {[]string{left0}, []string{left0}, nil, true},
		"both halves":                {[]string{left0}, []string{right0}, nil, false},
		"4g beside 3g":               {[]string{four0}, []string{right0}, nil, false},
		"partition in another":       {[]string{left0}, []string{one0}, nil, true},
		"partition beside another":   {[]string{left0}, []string{one6}, nil, false},
		"GPU over its partition":     {[]string{one6}, []string{whole0}, nil, true},
		"partition of a GPU in use":  {[]string{whole0}, []string{one6}, nil, true},
		"other GPU":                  {[]string{whole0}, []string{left1}, nil, false},
		"second media extension":     {[]string{me0}, []string{me4}, nil, true},
		"one of several":             {[]string{left0}, []string{right0, one0}, nil, true},
		"admin access to one in use": {[]string{left0}, []string{left0, whole0}, []option{adminAccess}, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			p := n.start()
			first, second := claimOf("a", test.first), claimOf("b", test.second, test.options...)
			p.mustPrepare(t, first)
			_, err := p.prepare(t.Context(), second)
			if !test.conflict {
				if err != nil {
					t.Error(err)
				}
				n.expectFiles("both", first, second)
				return
			}
			expectError(t, err, "team/a (UID uid-a)", "team/b (UID uid-b)", test.first[0])
			n.expectFiles("after the conflict", first)
			p.mustUnprepare(t, first)
			p.mustPrepare(t, second)
		})
	}
}

func TestAdminAccessTakesNothing(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	p.mustPrepare(t, claimOf("monitor", []string{whole0}, adminAccess))
	p.mustPrepare(t, claimOf("a", []string{left0}))
	p.mustPrepare(t, claimOf("monitor2", []string{whole0}, adminAccess))
}

func TestConcurrentPreparesOfOverlappingDevices(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	devices := []string{whole0, left0, "gpu-0-mig-4g40gb-5-0", "gpu-0-mig-7g80gb-0-0"}
	const each = 4
	var wg sync.WaitGroup
	prepared := make(chan types.UID, len(devices)*each)
	for i := range len(devices) * each {
		claim := claimOf(fmt.Sprint("c", i), []string{devices[i%len(devices)]})
		wg.Go(func() {
			_, err := p.prepare(t.Context(), claim)
			if err == nil {
				prepared <- claim.UID
				return
			}
			var conflict *conflictError
			if !errors.As(err, &conflict) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	close(prepared)
	var winners []types.UID
	for uid := range prepared {
		winners = append(winners, uid)
	}
	if len(winners) != 1 {
		t.Errorf("prepared %v, want exactly one", winners)
	}
}

func TestConcurrentLivesOfClaims(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	plugin, _ := n.withAPI(p, newFakeAPI())
	var wg, sweeper sync.WaitGroup
	ended := make(chan struct{})
	sweeper.Go(func() {
		for {
			select {
			case <-ended:
				return
			default:
				if err := plugin.reconciler.removeOrphans(); err != nil {
					t.Error(err)
				}
			}
		}
	})
	for i := range 7 {
		claim := claimOf(fmt.Sprint("c", i), []string{fmt.Sprintf("gpu-0-mig-1g10gb-19-%d", i)})
		wg.Go(func() {
			for range 5 {
				var calls sync.WaitGroup
				for range 2 { // the kubelet after a restart
					calls.Go(func() {
						if _, err := p.prepare(t.Context(), claim); err != nil {
							t.Error(err)
						}
					})
				}
				calls.Wait()
				if devices, err := p.specs.Devices(string(claim.UID)); err != nil || len(devices) != 1 {
					t.Errorf("CDI spec: %v, %v", devices, err)
				}
				if err := p.unprepare(t.Context(), claim.UID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	close(ended)
	sweeper.Wait()
	n.expectFiles("in the end")
}

func TestUnusableAllocationsSayWhy(t *testing.T) {
	for name, test := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  []string
	}{
		"unknown device": {claimOf("a", []string{"gpu-9"}), []string{"team/a", "request r0", "gpu-9", "inventory"}},
		"other pool": {claimOf("a", []string{left0}, firstResult(func(r *resourceapi.DeviceRequestAllocationResult) { r.Pool = "node-2" })),
			[]string{"team/a", `"node-2"`, `"node-1"`}},
		"UID that leaves the folder": {claimOf("a", []string{left0}, func(c *resourceapi.ResourceClaim) { c.UID = "../../x" }),
			[]string{"../../x"}},
		"unknown configuration": {claimOf("a", []string{left0}, config(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfg"}`, "r0")),
			[]string{"team/a", "GpuConfg", "request r0", "GpuConfig and MigDeviceConfig"}},
		"configuration of the other type": {claimOf("a", []string{whole0}, config(mps, "r0")),
			[]string{"team/a", "MigDeviceConfig", "GpuConfig"}},
		"limit for no device": {claimOf("a", []string{left0}, config(strings.Replace(mps, `"defaultActive`, `"defaultPerDevicePinnedMemoryLimit":{"7":"1Gi"},"defaultActive`, 1))),
			[]string{"team/a", `"7"`}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			p := n.start()
			_, err := p.prepare(t.Context(), test.claim)
			expectError(t, err, test.want...)
			n.expectFiles("after the error")
			p.mustPrepare(t, claimOf("b", []string{whole0}))
		})
	}
}

func TestConfigurationShowsInTheContainer(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	claim := claimOf("a", []string{left0, whole1}, config(mps),
		config(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`, "r1"))
	ids := p.mustPrepare(t, claim)
	for i, want := range []string{
		"SIMGPU_SHARING_GPU_0_MIG_3G40GB_9_0=strategy=MPS,activeThreadPercentage=50,pinnedDeviceMemoryLimit=10Gi",
		"SIMGPU_SHARING_GPU_1=strategy=TimeSlicing,interval=Long",
	} {
		if c := n.inject(ids[i]); !slices.Contains(c.env, want) {
			t.Errorf("env %v lacks %s", c.env, want)
		}
	}
}

func TestClaimWithoutDevicesOfTheDriverIsNotKept(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	claim := claimOf("a", []string{"eth0"}, firstResult(func(r *resourceapi.DeviceRequestAllocationResult) { r.Driver = "net.example.com" }))
	if ids := p.mustPrepare(t, claim); len(ids) != 0 {
		t.Errorf("answered %v", ids)
	}
	n.expectFiles("after")
}

func TestClaimThatWasAllocatedAnew(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	p.mustPrepare(t, claimOf("a", []string{left0}))
	// Deallocated, and allocated again elsewhere, without an unprepare that anybody saw.
	moved := claimOf("a", []string{whole1})
	n.inject(p.mustPrepare(t, moved)...)
	n.expectFiles("moved", moved)
	p.mustPrepare(t, claimOf("b", []string{left0}))
}

func TestSharesOfADeviceArePassedOn(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	share := types.UID("5e8c86e4-8e9a-4b13-90a5-3e1f4d3b8a55")
	claim := claimOf("a", []string{whole0}, firstResult(func(r *resourceapi.DeviceRequestAllocationResult) { r.ShareID = ptr.To(share) }))
	devices, err := p.prepare(t.Context(), claim)
	if err != nil {
		t.Fatal(err)
	}
	if devices[0].ShareID == nil || *devices[0].ShareID != share {
		t.Errorf("share %v", devices[0].ShareID)
	}
}

func TestWithoutInventoryOnlyPreparedClaimsAreServed(t *testing.T) {
	n := newTestNode(t)
	claim := claimOf("a", []string{left0})
	n.start().mustPrepare(t, claim)

	p := n.startWithoutInventory()
	p.apply(nil, errors.New("rules[0].gpus[0].count: must be positive"))
	_, err := p.prepare(t.Context(), claimOf("b", []string{whole1}))
	expectError(t, err, "team/b", "no valid inventory", "must be positive")
	n.inject(p.mustPrepare(t, claim)...)
	p.mustUnprepare(t, claim)
	n.expectFiles("unprepared")
	if f := p.fleet(); f.stock != nil {
		t.Errorf("would publish %v", f.stock.gpus)
	}
}

func TestInventoryChangesAroundGPUsInUse(t *testing.T) {
	a100 := inventory.GPUGroup{Model: "a100-40gb", Count: 1, MIGMode: inventory.MIGDynamic}
	n := newTestNode(t)
	p := n.start(h100s(3)...)
	claim := claimOf("a", []string{left1})
	ids := p.mustPrepare(t, claim)
	before := n.inject(ids...)

	// GPU 0 changes its model, GPU 1 and 2 vanish; 1 is in use.
	p.inventory(t, a100)
	models := func() []string {
		var all []string
		for _, gpu := range p.currentStock().gpus {
			all = append(all, fmt.Sprintf("%d %s retiring=%v", gpu.Index, gpu.Model.ID, gpu.retiring))
		}
		return all
	}
	if diff := cmp.Diff([]string{"0 a100-40gb retiring=false", "1 h100-sxm5-80gb retiring=true"}, models()); diff != "" {
		t.Error(diff)
	}
	// It survives a restart, although no inventory knows it.
	p = n.start(a100)
	if diff := cmp.Diff([]string{"0 a100-40gb retiring=false", "1 h100-sxm5-80gb retiring=true"}, models()); diff != "" {
		t.Errorf("after a restart: %s", diff)
	}
	p.mustPrepare(t, claim)
	if diff := cmp.Diff(before, n.inject(ids...), cmp.AllowUnexported(container{})); diff != "" {
		t.Errorf("container: %s", diff)
	}
	p.mustUnprepare(t, claim)
	if diff := cmp.Diff([]string{"0 a100-40gb retiring=false"}, models()); diff != "" {
		t.Errorf("after the release: %s", diff)
	}
	// And back: nothing was lost by it.
	p.inventory(t, h100s(3)...)
	p.mustPrepare(t, claim)
}
