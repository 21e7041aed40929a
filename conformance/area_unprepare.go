package conformance

import (
	"context"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

const unprepareDoc = "k8s.io/kubelet/pkg/apis/dra/v1/api.proto: NodeUnprepareResources"

func unprepareChecks() []Check {
	return []Check{
		{
			Name: "unprepare/after-prepare", Level: Must,
			Asserts: "A prepared claim can be unprepared.",
			Source:  unprepareDoc,
			Fix:     "Undo what prepare did.",
			run: func(t *T) {
				w, _ := t.prepared()
				t.unprepare(w.claim())
			},
		},
		{
			Name: "unprepare/removes-cdi-spec", Level: Must,
			Asserts: "Unprepare removes every CDI spec that prepare has written.",
			Source:  cdiSpec + ": specs of devices that nobody uses pile up and are read for every container",
			Fix:     "Remove the files of the claim.",
			run:     checkRemovesSpec,
		},
		{
			Name: "unprepare/twice", Level: Must,
			Asserts: "Unpreparing a claim again succeeds: the kubelet repeats calls whose answer it did not get.",
			Source:  unprepareDoc + ": must be idempotent",
			Fix:     "A claim that is not prepared is unprepared.",
			run: func(t *T) {
				w, _ := t.prepared()
				t.unprepare(w.claim())
				t.unprepare(w.claim())
			},
		},
		{
			Name: "unprepare/unknown-claim", Level: Must,
			Asserts: "Unpreparing a claim that was never prepared succeeds: otherwise its pod stays Terminating.",
			Source:  "k8s.io/kubernetes pkg/kubelet/cm/dra/manager.go unprepareResources",
			Fix:     "A claim that is not prepared is unprepared.",
			run:     checkUnprepareUnknown,
		},
		{
			Name: "unprepare/answers-for-the-claim", Level: Must,
			Asserts: "The response has one entry for each claim that was asked for.",
			Source:  "k8s.io/kubernetes pkg/kubelet/cm/dra/manager.go: unknown and missing entries are errors",
			Fix:     "Key the response by the UID in the request.",
			run:     checkUnprepareBatch,
		},
		{
			Name: "unprepare/frees-the-device", Level: Must,
			Asserts: "After unprepare the device can be prepared for another claim.",
			Source:  unprepareDoc,
			Fix:     "Forget the claim.",
			run:     checkFreesDevice,
		},
		{
			Name: "unprepare/then-prepare-again", Level: Must,
			Asserts: "A claim that was unprepared can be prepared again: a pod that was restarted in place uses the same claim.",
			Source:  kubeletDRA,
			Fix:     "Keep nothing of an earlier life of the claim.",
			run: func(t *T) {
				w, _ := t.prepared()
				t.unprepare(w.claim())
				t.compareDevices(w.claim(), t.prepareOne(w.claim()))
			},
		},
		{
			Name: "unprepare/concurrent-with-prepare", Level: Must,
			Asserts: "Prepare and unprepare of one claim at the same time end in a state from which both work.",
			Source:  "a call that timed out may still run when the kubelet makes the next",
			Fix:     "Serialize the operations on a claim.",
			run:     checkConcurrentUnprepare,
		},
		{
			Name: "unprepare/without-api-server", Level: Must,
			Asserts: "A claim can be unprepared while the API server is away: otherwise pods stay Terminating.",
			Source:  "k8s.io/kubernetes pkg/kubelet/cm/dra/manager.go: NodeUnprepareResources comes without the claim",
			Fix:     "Keep on the node what unprepare needs.",
			run:     checkUnprepareWithoutAPI,
		},
	}
}

func checkRemovesSpec(t *T) {
	before := t.cdiFiles()
	w, _ := t.prepared()
	t.unprepare(w.claim())
	t.nothingLeft(before)
}

func checkUnprepareUnknown(t *T) {
	claim := &drapb.Claim{Namespace: t.namespace, Name: uniqueName("unknown"), Uid: string(uuid.NewUUID())}
	response, err := t.tryUnprepare(t.plugin(), claim)
	switch {
	case err != nil:
		t.Errorf("%v", err)
	case response.GetClaims()[claim.Uid] == nil:
		t.Errorf("there is no entry for claim %s", claim.Uid)
	case response.Claims[claim.Uid].Error != "":
		t.Errorf("%s", response.Claims[claim.Uid].Error)
	}
}

func checkUnprepareBatch(t *T) {
	first, second := t.newWorkload().claim(), t.newWorkload().claim()
	t.prepare(first, second)
	response, err := t.tryUnprepare(t.plugin(), reference(first), reference(second))
	if err != nil {
		t.Fatalf("%v", err)
	}
	want := slices.Sorted(slices.Values([]string{string(first.UID), string(second.UID)}))
	if got := slices.Sorted(maps.Keys(response.GetClaims())); !slices.Equal(got, want) {
		t.Errorf("there are entries for %v; asked for were %v", got, want)
	}
}

func checkFreesDevice(t *T) {
	first := t.newWorkload().claim()
	t.prepareOne(first)
	t.unprepare(first)
	second := t.newClaim()
	second.Status.Allocation = first.Status.Allocation.DeepCopy()
	t.must(t.deleteClaim(t.ctx, first.Name))
	second = t.rewriteAllocation(second)
	t.compareDevices(second, t.prepareOne(second))
}

func checkConcurrentUnprepare(t *T) {
	claim := t.newWorkload().claim()
	plugin := t.plugin()
	for range 5 {
		ctx, cancel := context.WithTimeout(t.ctx, kubeletCallTimeout)
		var both sync.WaitGroup
		both.Go(func() {
			_, _ = plugin.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{reference(claim)}})
		})
		both.Go(func() {
			_, _ = plugin.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{reference(claim)}})
		})
		both.Wait()
		cancel()
	}
	var ids []string
	for _, device := range t.prepareOne(claim) {
		ids = append(ids, device.CdiDeviceIds...)
	}
	for _, id := range ids {
		if _, err := t.resolve(id); err != nil {
			t.Errorf("%v", err)
		}
	}
	t.unprepare(claim)
}

func checkUnprepareWithoutAPI(t *T) {
	w, _ := t.prepared()
	t.proxy.Outage()
	t.unprepare(w.claim())
}
