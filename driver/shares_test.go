package driver

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/simgpu/simgpu/driver/inventory"
)

func sharedH100() inventory.GPUGroup {
	return inventory.GPUGroup{Model: "h100-sxm5-80gb", Count: 2, MIGMode: inventory.MIGDynamic, ConsumableShares: inventory.SharesMemory}
}

// shares makes the i-th result of a claim a share that takes so much memory.
func shares(memory ...string) option {
	return func(claim *resourceapi.ResourceClaim) {
		for i, amount := range memory {
			r := &claim.Status.Allocation.Devices.Results[i]
			r.ShareID = new(types.UID(claim.Name + "-share-" + string(rune('0'+i))))
			r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(amount), "copyEngines": {}}
		}
	}
}

func TestSharesOfOneGPU(t *testing.T) {
	node := newTestNode(t)
	p := node.start(sharedH100())
	a := claimOf("a", []string{whole0}, shares("30Gi"))
	b := claimOf("b", []string{whole0}, shares("40Gi"))
	c := claimOf("c", []string{whole0}, shares("10Gi"))
	idsA, idsB := p.mustPrepare(t, a), p.mustPrepare(t, b)
	if idsA[0] == idsB[0] {
		t.Errorf("both claims have CDI device %s", idsA[0])
	}
	if got := p.sockets.shareOf(idsA[0]); got != 30<<30 {
		t.Errorf("the container of claim a can use %d bytes", got)
	}

	check := func(p *process) {
		t.Helper()
		_, err := p.prepare(t.Context(), c)
		expectError(t, err, "share of device gpu-0 for claim team/c", "takes 10Gi", "capacity memory, which is 81152Mi", "team/a (UID uid-a) (30Gi)", "team/b (UID uid-b) (40Gi)")
		_, err = p.prepare(t.Context(), claimOf("d", []string{left0}))
		expectError(t, err, left0, "overlaps device gpu-0")
		_, err = p.prepare(t.Context(), claimOf("e", []string{whole0}))
		expectError(t, err, "gpu-0", "is prepared for claim")
	}
	check(p)
	// Another process remembers the shares.
	p = node.start(sharedH100())
	check(p)
	p.mustUnprepare(t, a)
	p.mustPrepare(t, c)
	p.mustUnprepare(t, b)
	p.mustUnprepare(t, c)
	p.mustPrepare(t, claimOf("d", []string{left0}))
	node.expectFiles("after the shares are gone", claimOf("d", []string{left0}))
}

// TestTwoSharesInOneClaim keeps shares of one device apart within a claim, too.
func TestTwoSharesInOneClaim(t *testing.T) {
	node := newTestNode(t)
	p := node.start(sharedH100())
	claim := claimOf("a", []string{whole0, whole0}, shares("10Gi", "20Gi"))
	ids := p.mustPrepare(t, claim)
	if len(ids) != 2 || ids[0] == ids[1] {
		t.Fatalf("CDI devices %v", ids)
	}
	for i, want := range []int64{10 << 30, 20 << 30} {
		if got := p.sockets.shareOf(ids[i]); got != want {
			t.Errorf("share %d can use %d bytes, want %d", i, got, want)
		}
	}
	if mounts := node.inject(ids...).mounts; len(mounts) != 3 {
		t.Errorf("a container with both shares has the mounts %v, want a tool and two sockets", mounts)
	}
	p.mustUnprepare(t, claim)
	node.expectFiles("after unprepare")
}

// TestShareWithoutTheFeature: where the API server drops what lets claims share, a device is for one claim.
func TestShareWithoutTheFeature(t *testing.T) {
	p := newTestNode(t).start(sharedH100())
	p.mustPrepare(t, claimOf("a", []string{whole0}))
	_, err := p.prepare(t.Context(), claimOf("b", []string{whole0}))
	expectError(t, err, "gpu-0", "is prepared for claim team/a")
}

// TestShareWithDamagedCheckpoint: a share of unknown size keeps the whole device from others.
func TestShareWithDamagedCheckpoint(t *testing.T) {
	node := newTestNode(t)
	p := node.start(sharedH100())
	a := claimOf("a", []string{whole0}, shares("1Gi"))
	p.mustPrepare(t, a)
	node.damage(a, strings.TrimSuffix(node.checkpointOf(a), "}}\n"))
	p = node.start(sharedH100())
	_, err := p.prepare(t.Context(), claimOf("b", []string{whole0}, shares("1Gi")))
	expectError(t, err, "gpu-0", "uid-a")
	p.mustPrepare(t, a)
	p.mustPrepare(t, claimOf("b", []string{whole0}, shares("1Gi")))
}
