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
