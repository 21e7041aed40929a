package driver

import (
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/order"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

const fourOn1 = "gpu-1-mig-4g40gb-5-0"

// ordered is what a first start publishes.
func ordered(t *testing.T, o order.Order, s *stock, taken map[string]bool) []string {
	t.Helper()
	resources, err := resourcesOf(nodeName, driverName, fleet{stock: s}, deviceslices.Split, apiLimits{}, newOrdering(o, time.Hour, func() {}).unchanged(taken))
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(namesIn(resources), func(name string) bool { return name == "#" })
}

func TestOrdersArePublished(t *testing.T) {
	t.Parallel()
	s := newTestNode(t).start().stock
	for o, first := range map[order.Order]string{order.Vendor: whole0, order.Packed: "gpu-0-mig-1g10gb-19-6", order.Adaptive: "gpu-0-mig-1g10gb-19-6"} {
		api := newFakeAPI()
		p := startPublishingIn(t, o, time.Hour, time.Hour, api, fleet{stock: s})
		p.expect(t, ordered(t, o, s, nil))
		if got := api.published(t); got[0] != first || len(got) != len(allOf(s)) {
			t.Errorf("%s: %d devices, the first is %s", o, len(got), got[0])
		}
	}
}

// An order that follows usage costs single writes: the pool is complete at all times, and nobody notices more
// than that devices are listed differently.
func TestAdaptiveOrderFollowsUsage(t *testing.T) {
	t.Parallel()
	for minor, layout := range map[string]deviceslices.Layout{"34": deviceslices.Combined, "37": deviceslices.Split} {
		t.Run("1."+minor, func(t *testing.T) {
			t.Parallel()
			s := newTestNode(t).start(h100s(4)...).stock
			api := newFakeAPI()
			api.setMinor(minor)
			p := startPublishingIn(t, order.Adaptive, time.Millisecond, time.Hour, api, fleet{stock: s})
			eventually(t, "published", func() (bool, any) { return p.ready() == nil, p.ready() })
			before, writes := api.published(t), api.count("update resourceslices")
			var unready atomic.Bool
			api.PrependReactor("update", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
				if p.ready() != nil {
					unready.Store(true)
				}
				return false, nil, nil
			})

			taken := map[string]bool{fourOn1: true, "gpu-2-mig-1g10gb-19-2": true}
			p.set(fleet{stock: s, inUse: taken, taken: taken})
			settled := func() (bool, any) {
				best := order.NewPublisher(order.Adaptive)
				best.Groups(nodeOf(s), layout, nil)
				best.Groups(nodeOf(s), layout, taken)
				for best.More() {
					best.Groups(nodeOf(s), layout, taken)
				}
				want, err := best.Unchanged(nodeOf(s), layout, taken)
				if err != nil {
					return false, err
				}
				diff := cmp.Diff(withoutMarks(namesIn(want)), api.published(t))
				return diff == "", diff
			}
			eventually(t, "the order that usage asks for", settled)
			after := api.published(t)
			if slices.Equal(before, after) {
				t.Error("the order is the same")
			}
			slices.Sort(before)
			slices.Sort(after)
			if diff := cmp.Diff(before, after); diff != "" {
				t.Errorf("other devices: %s", diff)
			}
			list, err := api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, slice := range list.Items {
				if slice.Spec.Pool.Generation != 1 {
					t.Errorf("slice %s is of generation %d: more than one was written at once", slice.Name, slice.Spec.Pool.Generation)
				}
			}
			written := api.count("update resourceslices") - writes
			if written == 0 || written > len(list.Items) || float64(written) != p.metrics.value(t, "simgpu_slice_reorders_total") {
				t.Errorf("%d writes for %d slices, the metric says %v", written, len(list.Items), p.metrics.value(t, "simgpu_slice_reorders_total"))
			}
			if unready.Load() {
				t.Error("not ready while the order changed")
			}
			if api.count("create resourceslices") > len(list.Items)+1 || api.count("delete resourceslices") > 0 {
				t.Error("slices were replaced")
			}
		})
	}
}

func nodeOf(s *stock) *hardware.Node {
	node := &hardware.Node{Name: nodeName, DriverName: driverName}
	for _, gpu := range s.gpus {
		node.GPUs = append(node.GPUs, gpu.GPU)
	}
	return node
}

func withoutMarks(names []string) []string {
	return slices.DeleteFunc(names, func(name string) bool { return name == "#" })
}

func TestStaticOrdersIgnoreUsage(t *testing.T) {
	for _, o := range []order.Order{order.Vendor, order.Packed} {
		if newOrdering(o, time.Nanosecond, func() { t.Error("woken up") }).due(map[string]bool{fourOn1: true}) {
			t.Errorf("%s asks for another order", o)
		}
	}
}

func TestOrderChangesAtIntervals(t *testing.T) {
	s := newTestNode(t).start(h100s(4)...).stock
	const interval = 20 * time.Millisecond
	woken := make(chan time.Time, 10)
	o := newOrdering(order.Adaptive, interval, func() { woken <- time.Now() })
	defer o.stop()
	names := func(arrange arrangement) []string {
		t.Helper()
		resources, err := arrange(nodeOf(s), deviceslices.Split)
		if err != nil {
			t.Fatal(err)
		}
		return namesIn(resources)
	}
	start := names(o.unchanged(nil))
	if o.due(map[string]bool{}) {
		t.Error("another order for no usage")
	}
	// What changes nothing takes no time.
	if got := names(o.reordered(map[string]bool{whole0: true})); !slices.Equal(got, start) || !o.next.IsZero() {
		t.Fatal("the first of equal GPUs being taken changes the order")
	}
	first := map[string]bool{fourOn1: true}
	if !o.due(first) {
		t.Fatal("the first change has to wait")
	}
	looked := time.Now()
	one := names(o.reordered(first))
	if slices.Equal(start, one) {
		t.Error("the order is the same")
	}
	if !o.publisher.More() {
		t.Fatal("one slice was all there was to change: the test needs another usage")
	}
	if o.due(first) && time.Since(looked) < interval {
		t.Error("the second change does not wait")
	}
	if at := <-woken; at.Sub(looked) < interval {
		t.Errorf("woken up after %v", at.Sub(looked))
	}
	if !o.due(first) {
		t.Error("the second change waits for ever")
	}
	if got := names(o.unchanged(first)); !slices.Equal(got, one) {
		t.Error("the order changes though it was not asked for")
	}
}

func TestAdministrativeAccessDoesNotChangeTheOrder(t *testing.T) {
	p := newTestNode(t).start()
	p.mustPrepare(t, claimOf("watcher", []string{whole0}, adminAccess))
	p.mustPrepare(t, claimOf("worker", []string{left1}))
	f := p.fleet()
	if want := map[string]bool{whole0: true, left1: true}; !cmp.Equal(want, f.inUse) {
		t.Errorf("in use: %v", f.inUse)
	}
	if want := map[string]bool{left1: true}; !cmp.Equal(want, f.taken) {
		t.Errorf("taken: %v", f.taken)
	}
}

func TestOnlyReordered(t *testing.T) {
	pool := func(devices ...resourceapi.Device) resourceslice.Pool {
		return resourceslice.Pool{Slices: []resourceslice.Slice{{SharedCounters: []resourceapi.CounterSet{{Name: "set"}}}, {Devices: devices}}}
	}
	a, b := resourceapi.Device{Name: "a"}, resourceapi.Device{Name: "b"}
	tainted := resourceapi.Device{Name: "b", Taints: []resourceapi.DeviceTaint{{Key: removedTaint}}}
	for name, test := range map[string]struct {
		now  resourceslice.Pool
		want bool
	}{
		"another order":      {pool(b, a), true},
		"a taint":            {pool(a, tainted), false},
		"fewer":              {pool(a), false},
		"other devices":      {pool(a, resourceapi.Device{Name: "c"}), false},
		"a slice more":       {resourceslice.Pool{Slices: append(pool(a, b).Slices, resourceslice.Slice{})}, false},
		"other counter sets": {resourceslice.Pool{Slices: []resourceslice.Slice{{}, {Devices: []resourceapi.Device{a, b}}}}, false},
	} {
		if got := onlyReordered(pool(a, b), test.now); got != test.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}
