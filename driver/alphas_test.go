package driver

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestAlphasArePublished(t *testing.T) {
	t.Parallel()
	n := newWholeNode(t)
	n.opts.PartitionTypes = true
	n.opts.SkipNodeOperations = []string{"*"}
	d := n.run()
	n.register()
	d.expectReady(t)
	list, err := n.api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, slice := range list.Items {
		if len(slice.Spec.Devices) == 0 {
			if slice.Spec.PartitionTypeAttribute != nil || slice.Spec.SkipNodeOperations != nil {
				t.Errorf("slice %s has no devices: %+v", slice.Name, slice.Spec)
			}
			continue
		}
		if slice.Spec.PartitionTypeAttribute == nil || *slice.Spec.PartitionTypeAttribute != partitionTypeAttribute {
			t.Errorf("slice %s: partition type attribute %v", slice.Name, slice.Spec.PartitionTypeAttribute)
		}
		if got := slice.Spec.SkipNodeOperations; len(got) != 1 || got[0] != resourceapi.SkipNodeOperationAll {
			t.Errorf("slice %s: skips %v", slice.Name, got)
		}
		for _, device := range slice.Spec.Devices {
			if value := device.Attributes[partitionTypeAttribute].StringValue; value == nil || *value != device.Name {
				t.Errorf("device %s: %v", device.Name, value)
			}
		}
	}
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
}

// TestDroppedAlphasAreNoFault: an API server with default gates drops them, and that is all.
func TestDroppedAlphasAreNoFault(t *testing.T) {
	t.Parallel()
	n := newWholeNode(t)
	n.api.setDrops(func(slice *resourceapi.ResourceSlice) {
		slice.Spec.PartitionTypeAttribute, slice.Spec.SkipNodeOperations = nil, nil
	})
	n.opts.PartitionTypes = true
	n.opts.SkipNodeOperations = []string{"*"}
	d := n.run()
	n.register()
	d.expectReady(t)
	if got := len(n.api.published(t)); got != 52 {
		t.Errorf("%d devices are published, want 52", got)
	}
	if v := d.metrics.value(t, "simgpu_publish_errors_total"); v != 0 {
		t.Errorf("%v publish errors", v)
	}
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
}

func TestOperationsToSkip(t *testing.T) {
	for name, test := range map[string]struct {
		names []string
		want  []string
	}{
		"unknown":              {[]string{"Nothing"}, []string{`"Nothing" is unknown`}},
		"prepare alone":        {[]string{"NodePrepareResources"}, []string{"NodePrepareResources cannot be skipped without NodeUnprepareResources"}},
		"twice":                {[]string{"*", "*"}, []string{"named twice"}},
		"both":                 {[]string{"NodePrepareResources", "NodeUnprepareResources"}, nil},
		"unprepare alone, all": {[]string{"NodeUnprepareResources", "*"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			opts := newWholeNode(t).opts
			opts.SkipNodeOperations = test.names
			_, err := New(opts)
			if test.want != nil {
				expectError(t, err, test.want...)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

// skipping has devices of a claim say which calls the kubelet leaves out.
func skipping(operations ...resourceapi.SkipNodeOperation) option {
	return firstResult(func(r *resourceapi.DeviceRequestAllocationResult) { r.SkipNodeOperations = operations })
}

// TestAbandonedClaims has a claim lose its device while the kubelet does not unprepare it: another one can have the device
// if, and only if, the kubelet is not going to.
func TestAbandonedClaims(t *testing.T) {
	for name, test := range map[string]struct {
		skip     []resourceapi.SkipNodeOperation
		kept     bool
		released bool
	}{
		"nothing skipped":        {nil, false, false},
		"unprepare skipped":      {[]resourceapi.SkipNodeOperation{resourceapi.SkipNodeOperationNodeUnprepareResources}, false, true},
		"all skipped":            {[]resourceapi.SkipNodeOperation{resourceapi.SkipNodeOperationAll}, false, true},
		"skipped, but allocated": {[]resourceapi.SkipNodeOperation{resourceapi.SkipNodeOperationNodeUnprepareResources}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			holder, next := claimOf("holder", []string{left0}, skipping(test.skip...)), claimOf("next", []string{left0})
			n.start().mustPrepare(t, holder)
			p := n.start() // which has to remember
			inAPI := holder.DeepCopy()
			if !test.kept {
				inAPI.Status.Allocation = nil
			}
			api := newFakeAPI(inAPI, next)
			plugin, events := n.withAPI(p, api)
			results, err := plugin.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{next})
			if err != nil {
				t.Fatal(err)
			}
			if err := results[next.UID].Err; (err == nil) != test.released {
				t.Errorf("prepared with the error %v", err)
			}
			if !test.released {
				n.expectFiles("the holder keeps its device", holder)
				return
			}
			n.expectFiles("the device has changed hands", next)
			events.expect(t, reasonClaimReleased, "team/holder", "not allocated any more")

			// The first one gets it back, and is not abandoned any more.
			p.mustUnprepare(t, next)
			p.mustPrepare(t, holder)
			if err := api.Tracker().Update(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), holder, namespace); err != nil {
				t.Fatal(err)
			}
			if !plugin.reconciler.run(t.Context()) {
				t.Error("a round of the reconciler failed")
			}
			n.expectFiles("the device is back", holder)
		})
	}
}
