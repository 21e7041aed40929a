package driver

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/driver/order"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// namesIn returns the devices of a pool in order, "!" after the tainted, "#" before each slice with
// counter sets.
func namesIn(resources resourceslice.DriverResources) []string {
	names := []string{}
	for _, slice := range resources.Pools[nodeName].Slices {
		if len(slice.SharedCounters) > 0 {
			names = append(names, "#")
		}
		for _, d := range slice.Devices {
			name := d.Name
			if len(d.Taints) > 0 {
				name += "!"
			}
			names = append(names, name)
		}
	}
	return names
}

func TestWhatIsPublished(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	everything := func(gpu int) []string {
		var names []string
		for _, d := range p.stock.gpu(gpu).Devices {
			names = append(names, d.Name)
		}
		return names
	}
	inUse := func(names ...string) map[string]bool {
		m := map[string]bool{}
		for _, name := range names {
			m[name] = true
		}
		return m
	}
	retiring1 := newStock([]stockGPU{*p.stock.gpu(0), {GPU: p.stock.gpu(1).GPU, retiring: true}})
	disabled, err := p.fromInventory([]inventory.GPUGroup{{Model: "h100-sxm5-80gb", Count: 2, MIGMode: inventory.MIGDisabled}})
	if err != nil {
		t.Fatal(err)
	}

	for name, test := range map[string]struct {
		fleet  fleet
		layout deviceslices.Layout
		api    apiLimits
		want   []string
	}{
		"split": {fleet{stock: p.stock}, deviceslices.Split, apiLimits{},
			slices.Concat([]string{"#"}, everything(0), everything(1))},
		"combined": {fleet{stock: p.stock}, deviceslices.Combined, apiLimits{},
			slices.Concat([]string{"#"}, everything(0), []string{"#"}, everything(1))},
		"usage is nobody's business": {fleet{stock: p.stock, inUse: inUse(left0)}, deviceslices.Combined, apiLimits{},
			slices.Concat([]string{"#"}, everything(0), []string{"#"}, everything(1))},
		"no GPUs": {fleet{stock: newStock(nil)}, deviceslices.Split, apiLimits{}, []string{}},
		"counters dropped": {fleet{stock: p.stock}, deviceslices.Split, apiLimits{noPartitions: true},
			[]string{whole0, whole1}},
		"counters dropped, combined": {fleet{stock: p.stock}, deviceslices.Combined, apiLimits{noPartitions: true},
			[]string{whole0, whole1}},
		"counters dropped, a partition in use": {fleet{stock: p.stock, inUse: inUse(right0, whole1)}, deviceslices.Split, apiLimits{noPartitions: true},
			[]string{whole1}},
		"counters dropped, partitions of all GPUs in use": {fleet{stock: p.stock, inUse: inUse(right0, left1)}, deviceslices.Split, apiLimits{noPartitions: true},
			[]string{}},
		"GPU on its way out": {fleet{stock: retiring1, inUse: inUse(left1, left0)}, deviceslices.Split, apiLimits{},
			slices.Concat([]string{"#"}, everything(0), []string{left1 + "!"})},
		"GPU on its way out, taints dropped": {fleet{stock: retiring1, inUse: inUse(left1)}, deviceslices.Split, apiLimits{noTaints: true},
			slices.Concat([]string{"#"}, everything(0))},
		"no partitions anyway": {fleet{stock: newStock(disabled)}, deviceslices.Split, apiLimits{noPartitions: true},
			[]string{whole0, whole1}},
	} {
		t.Run(name, func(t *testing.T) {
			resources, err := resourcesOf(nodeName, driverName, test.fleet, test.layout, test.api, deviceslices.Resources)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, namesIn(resources)); diff != "" {
				t.Error(diff)
			}
			if len(resources.Pools[nodeName].Slices) == 0 {
				t.Error("no slice says that the driver is there")
			}
			for _, slice := range resources.Pools[nodeName].Slices {
				for _, d := range slice.Devices {
					if test.api.noPartitions && len(d.ConsumesCounters) > 0 {
						t.Errorf("%s refers to counters that are not published", d.Name)
					}
				}
			}
		})
	}
	if d := p.stock.device(whole0).Published; len(d.ConsumesCounters) == 0 || len(d.Taints) != 0 {
		t.Error("the hardware itself was changed")
	}
}

// publishing is a publisher with the real ResourceSlice controller behind it.
type publishing struct {
	*publisher
	api    *fakeAPI
	events *events
	stop   func()

	mu    sync.Mutex
	fleet fleet
}

func (p *publishing) set(f fleet) {
	p.mu.Lock()
	p.fleet = f
	p.mu.Unlock()
	p.changed()
}

func startPublishing(t *testing.T, api *fakeAPI, f fleet) *publishing {
	t.Helper()
	return startPublishingEvery(t, time.Hour, api, f)
}

func startPublishingEvery(t *testing.T, resync time.Duration, api *fakeAPI, f fleet) *publishing {
	t.Helper()
	return startPublishingIn(t, "", 0, resync, api, f)
}

func startPublishingIn(t *testing.T, o order.Order, interval, resync time.Duration, api *fakeAPI, f fleet) *publishing {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	p := &publishing{api: api, events: newEvents(), fleet: f}
	p.publisher = newPublisher(&publisher{
		nodeName: nodeName, driverName: driverName, client: api, resync: resync, order: o, orderInterval: interval,
		reporter: p.events.reporter(), metrics: newMetrics(func() (int, int) { return 0, 0 }),
		fleet: func() fleet {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.fleet
		},
	})
	writer := &sliceWriter{client: api, driverName: driverName, nodeName: nodeName, failed: p.writeFailed}
	p.publish = writer.write
	var background sync.WaitGroup
	background.Go(func() { p.run(ctx) })
	p.stop = sync.OnceFunc(func() {
		cancel()
		background.Wait()
		writer.stop()
	})
	t.Cleanup(p.stop)
	return p
}

func (p *publishing) expect(t *testing.T, want []string) {
	t.Helper()
	eventually(t, "published and ready", func() (bool, any) {
		got := p.api.published(t)
		return p.ready() == nil && cmp.Equal(want, got), cmp.Diff(want, got)
	})
}

func allOf(s *stock) []string {
	var names []string
	for _, gpu := range s.gpus {
		for _, d := range gpu.Devices {
			names = append(names, d.Name)
		}
	}
	return names
}

func TestReadyWhenTheSlicesAreInTheAPI(t *testing.T) {
	t.Parallel()
	for minor, counterSlices := range map[string]int{"34": 2, "35": 1, "37": 1} {
		t.Run("1."+minor, func(t *testing.T) {
			s := newTestNode(t).start().stock
			api := newFakeAPI()
			api.setMinor(minor)
			p := startPublishing(t, api, fleet{stock: s})
			p.expect(t, allOf(s))
			list, err := api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			found := 0
			for _, slice := range list.Items {
				if len(slice.Spec.SharedCounters) > 0 {
					found++
				}
			}
			if found != counterSlices {
				t.Errorf("%d slices with counters, want %d", found, counterSlices)
			}
			if got := p.metrics.value(t, "simgpu_published_devices"); int(got) != len(allOf(s)) {
				t.Errorf("metric says %v devices", got)
			}
			if api.dryRuns != 1 || len(p.events.all()) != 0 {
				t.Errorf("%d dry runs, events %q", api.dryRuns, p.events.all())
			}
		})
	}
}

func TestNotReadyWhileSlicesAreRefused(t *testing.T) {
	t.Parallel()
	s := newTestNode(t).start().stock
	api := newFakeAPI()
	var mu sync.Mutex
	refuse := true
	api.PrependReactor("create", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		if !refuse {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(resourceapi.Resource("resourceslices"), "", errors.New("policy"))
	})
	p := startPublishing(t, api, fleet{stock: s})
	eventually(t, "the refusal is told", func() (bool, any) {
		err := p.ready()
		return err != nil && strings.Contains(err.Error(), "policy"), err
	})
	p.events.expect(t, reasonPublishFailed, "policy")
	mu.Lock()
	refuse = false
	mu.Unlock()
	p.expect(t, allOf(s))
}

func TestServerThatDropsCountersNeverGetsPartitions(t *testing.T) {
	t.Parallel()
	s := newTestNode(t).start().stock
	api := newFakeAPI()
	api.setDrops(dropCounters)
	everPublished := watchPublished(api)
	p := startPublishing(t, api, fleet{stock: s})
	p.expect(t, []string{whole0, whole1})
	p.events.expect(t, reasonPartitionsWithdrawn, "DRAPartitionableDevices")
	if missing := p.metrics.series(t, "simgpu_api_feature_missing"); missing[featurePartitions] != 1 || missing[featureTaints] != 0 {
		t.Errorf("metric is %v", missing)
	}
	// While a partition is in use its GPU is not offered as a whole.
	p.set(fleet{stock: s, inUse: map[string]bool{left0: true}})
	p.expect(t, []string{whole1})
	if names := everPublished(); slices.ContainsFunc(names, func(name string) bool { return strings.Contains(name, "mig") }) {
		t.Errorf("published at some time: %v", names)
	}

	// The gate is enabled, and the driver looks again.
	api.setDrops(func(*resourceapi.ResourceSlice) {})
	p.lookAgain()
	p.expect(t, allOf(s))
	p.events.expect(t, reasonPartitionsPublished)
	if missing := p.metrics.series(t, "simgpu_api_feature_missing"); missing[featurePartitions] != 0 {
		t.Errorf("metric is %v", missing)
	}
}

// watchPublished remembers the names of all devices that were ever written.
func watchPublished(api *fakeAPI) func() []string {
	var mu sync.Mutex
	var names []string
	remember := func(action clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		var object runtime.Object
		switch action := action.(type) {
		case clienttesting.CreateActionImpl:
			if len(action.CreateOptions.DryRun) > 0 {
				return false, nil, nil
			}
			object = action.Object
		case clienttesting.UpdateActionImpl:
			object = action.Object
		}
		for _, d := range object.(*resourceapi.ResourceSlice).Spec.Devices {
			names = append(names, d.Name)
		}
		return false, nil, nil
	}
	api.PrependReactor("create", "resourceslices", remember)
	api.PrependReactor("update", "resourceslices", remember)
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(names)
	}
}

func TestServerThatDropsCountersOnlyWhenStoring(t *testing.T) {
	t.Parallel()
	s := newTestNode(t).start().stock
	start := func(t *testing.T) *publishing {
		t.Helper()
		t.Parallel()
		api := newFakeAPI()
		api.honest = false
		api.setDrops(dropCounters)
		p := startPublishing(t, api, fleet{stock: s})
		p.expect(t, []string{whole0, whole1})
		p.events.expect(t, reasonPartitionsWithdrawn)
		// Its answers to dry runs are not believed.
		asked := api.asked()
		p.lookAgain()
		eventually(t, "another dry run", func() (bool, any) { return api.asked() > asked, api.asked() })
		p.expect(t, []string{whole0, whole1})
		return p
	}
	t.Run("until it admits it", func(t *testing.T) {
		p := start(t)
		p.api.setHonest()
		asked := p.api.asked()
		p.lookAgain()
		eventually(t, "another dry run", func() (bool, any) { return p.api.asked() > asked, p.api.asked() })
		p.expect(t, []string{whole0, whole1})
		p.api.setDrops(func(*resourceapi.ResourceSlice) {})
		p.lookAgain()
		p.expect(t, allOf(s))
	})
	t.Run("until a while has passed", func(t *testing.T) {
		p := start(t)
		p.api.setDrops(func(*resourceapi.ResourceSlice) {})
		p.publisher.mu.Lock()
		p.dropped[featurePartitions] = time.Now().Add(-2 * distrustFor)
		p.publisher.mu.Unlock()
		p.lookAgain()
		p.expect(t, allOf(s))
	})
}

func TestServerThatDropsTaints(t *testing.T) {
	t.Parallel()
	n := newTestNode(t)
	s := n.start().stock
	api := newFakeAPI()
	api.setDrops(func(slice *resourceapi.ResourceSlice) {
		for i := range slice.Spec.Devices {
			slice.Spec.Devices[i].Taints = nil
		}
	})
	p := startPublishing(t, api, fleet{stock: s})
	p.expect(t, allOf(s))
	if events := p.events.all(); len(events) != 0 {
		t.Errorf("told %q although no taint is needed", events)
	}
	leaving := fleet{stock: newStock([]stockGPU{*s.gpu(0), {GPU: s.gpu(1).GPU, retiring: true}}), inUse: map[string]bool{left1: true}}
	first := fleet{stock: newStock([]stockGPU{*s.gpu(0)})}
	p.set(leaving)
	p.expect(t, allOf(first.stock))
	p.events.expect(t, reasonTaintsDropped, featureTaints)

	api.setDrops(func(*resourceapi.ResourceSlice) {})
	p.lookAgain()
	p.expect(t, append(allOf(first.stock), left1+"!"))
	p.events.expect(t, reasonTaintsKept)
}

func TestServerThatDropsShares(t *testing.T) {
	t.Parallel()
	shared, err := newTestNode(t).start().fromInventory([]inventory.GPUGroup{{
		Model: "h100-sxm5-80gb", Count: 2, MIGMode: inventory.MIGDisabled, ConsumableShares: inventory.SharesMemory,
	}})
	if err != nil {
		t.Fatal(err)
	}
	api := newFakeAPI()
	api.setDrops(func(slice *resourceapi.ResourceSlice) {
		unshared(resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{"": {Slices: []resourceslice.Slice{{Devices: slice.Spec.Devices}}}}})
	})
	p := startPublishing(t, api, fleet{stock: newStock(shared)})
	p.expect(t, []string{whole0, whole1})
	p.events.expect(t, reasonSharesDropped, featureShares)
	if n := p.metrics.series(t, "simgpu_dropped_fields_total")[featureShares]; n != 0 {
		t.Errorf("%v slices lost fields that were known to be dropped", n)
	}

	api.setDrops(func(*resourceapi.ResourceSlice) {})
	p.lookAgain()
	eventually(t, "shared devices", func() (bool, any) {
		list, err := api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		devices := 0
		for _, slice := range list.Items {
			for _, d := range slice.Spec.Devices {
				if d.AllowMultipleAllocations != nil {
					devices++
				}
			}
		}
		return devices == 2 && p.ready() == nil, list.Items
	})
	p.events.expect(t, reasonSharesKept)
}

func TestMissingPartitionsThatNobodyWants(t *testing.T) {
	t.Parallel()
	whole, err := newTestNode(t).start().fromInventory([]inventory.GPUGroup{{Model: "h100-sxm5-80gb", Count: 2, MIGMode: inventory.MIGDisabled}})
	if err != nil {
		t.Fatal(err)
	}
	api := newFakeAPI()
	api.setDrops(dropCounters)
	p := startPublishing(t, api, fleet{stock: newStock(whole)})
	p.expect(t, []string{whole0, whole1})
	if events := p.events.all(); len(events) != 0 {
		t.Errorf("told %q", events)
	}
	s := newTestNode(t).start().stock
	p.set(fleet{stock: s})
	eventually(t, "an event", func() (bool, any) { return len(p.events.all()) > 0, p.events.all() })
	p.events.expect(t, reasonPartitionsWithdrawn, featurePartitions)
	p.expect(t, []string{whole0, whole1})
}

func TestServerIsAskedAgainHoweverManyClaimsCome(t *testing.T) {
	t.Parallel()
	s := newTestNode(t).start().stock
	api := newFakeAPI()
	p := startPublishingEvery(t, 20*time.Millisecond, api, fleet{stock: s})
	eventually(t, "third dry run", func() (bool, any) {
		p.changed()
		api.mu.Lock()
		defer api.mu.Unlock()
		return api.dryRuns >= 3, api.dryRuns
	})
}

func TestDryRunsThatAreNotAllowed(t *testing.T) {
	t.Parallel()
	s := newTestNode(t).start().stock
	api := newFakeAPI()
	api.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if len(action.(clienttesting.CreateActionImpl).CreateOptions.DryRun) > 0 {
			return true, nil, apierrors.NewBadRequest("admission webhook does not support dry run")
		}
		return false, nil, nil
	})
	startPublishing(t, api, fleet{stock: s}).expect(t, allOf(s))
}

func TestFleetChangesArePublished(t *testing.T) {
	t.Parallel()
	n := newTestNode(t)
	two, three := n.start().stock, n.start(h100s(3)...).stock
	api := newFakeAPI()
	p := startPublishing(t, api, fleet{stock: two})
	p.expect(t, allOf(two))
	p.set(fleet{stock: three})
	p.expect(t, allOf(three))

	// Preparing a claim changes the usage and costs the API nothing.
	before := api.count("list resourceslices") + api.count("create resourceslices") + api.count("update resourceslices")
	p.set(fleet{stock: three, inUse: map[string]bool{left0: true}})
	retiring := newStock([]stockGPU{*three.gpu(0), *three.gpu(1), {GPU: three.gpu(2).GPU, retiring: true}})
	if after := api.count("list resourceslices") + api.count("create resourceslices") + api.count("update resourceslices"); after != before {
		t.Errorf("%d requests", after-before)
	}
	p.set(fleet{stock: retiring, inUse: map[string]bool{"gpu-2": true}})
	p.expect(t, append(allOf(two), "gpu-2!"))
	p.set(fleet{stock: newStock(nil)})
	p.expect(t, []string{})
}

func TestSlicesThatSomebodyDeletedComeBackAtOnce(t *testing.T) {
	t.Parallel()
	s := newTestNode(t).start().stock
	api := newFakeAPI()
	p := startPublishing(t, api, fleet{stock: s})
	p.expect(t, allOf(s))
	list, err := api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, slice := range list.Items {
		if err := api.ResourceV1().ResourceSlices().Delete(t.Context(), slice.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	p.recheck()
	if p.ready() == nil {
		t.Error("ready without slices")
	}
	p.expect(t, allOf(s))
	if events := p.events.all(); len(events) != 0 {
		t.Errorf("told %q", events)
	}
}

func TestWithoutInventoryNothingIsPublished(t *testing.T) {
	t.Parallel()
	api := newFakeAPI()
	p := startPublishing(t, api, fleet{fault: errors.New("rules is required")})
	eventually(t, "the API was asked for slices to remove", func() (bool, any) {
		n := api.count("list resourceslices")
		return n > 0, n
	})
	expectError(t, p.ready(), "rules is required")
	s := newTestNode(t).start().stock
	p.set(fleet{stock: s})
	p.expect(t, allOf(s))
}

func TestStored(t *testing.T) {
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{
		{SharedCounters: []resourceapi.CounterSet{{Name: "set"}}},
		{Devices: []resourceapi.Device{{Name: "a"}, {Name: "b"}}},
	}}
	inAPI := func() []resourceapi.ResourceSlice {
		spec := func(s resourceapi.ResourceSliceSpec) resourceapi.ResourceSliceSpec {
			s.Pool = resourceapi.ResourcePool{Name: nodeName, Generation: 3, ResourceSliceCount: 2}
			s.NodeName = ptr.To(nodeName)
			return s
		}
		return []resourceapi.ResourceSlice{
			{ObjectMeta: metav1.ObjectMeta{Name: "00001-x"}, Spec: spec(resourceapi.ResourceSliceSpec{Devices: pool.Slices[1].Devices})},
			{ObjectMeta: metav1.ObjectMeta{Name: "00000-x"}, Spec: spec(resourceapi.ResourceSliceSpec{SharedCounters: pool.Slices[0].SharedCounters})},
		}
	}
	for name, test := range map[string]struct {
		change func([]resourceapi.ResourceSlice) []resourceapi.ResourceSlice
		want   bool
	}{
		"as it should be": {func(s []resourceapi.ResourceSlice) []resourceapi.ResourceSlice { return s }, true},
		"one missing":     {func(s []resourceapi.ResourceSlice) []resourceapi.ResourceSlice { return s[:1] }, false},
		"one too many":    {func(s []resourceapi.ResourceSlice) []resourceapi.ResourceSlice { return append(s, s[0]) }, false},
		"mixed generations": {func(s []resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
			s[0].Spec.Pool.Generation++
			return s
		}, false},
		"other devices": {func(s []resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
			s[0].Spec.Devices = s[0].Spec.Devices[1:]
			return s
		}, false},
		"counters dropped": {func(s []resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
			s[1].Spec.SharedCounters = nil
			return s
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := stored(pool, test.change(inAPI())); got != test.want {
				t.Errorf("got %v", got)
			}
		})
	}
}
