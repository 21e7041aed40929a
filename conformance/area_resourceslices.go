package conformance

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	sliceDoc  = "k8s.io/api/resource/v1/types.go ResourceSliceSpec"
	poolDoc   = "k8s.io/api/resource/v1/types.go ResourcePool: consumers use the slices with the highest generation, once they are all there"
	deviceDoc = "k8s.io/api/resource/v1/types.go Device"
)

func resourceSliceChecks() []Check {
	return []Check{
		{
			Name: "resourceslices/complete-pools", Level: Must,
			Asserts: "Every pool has as many slices of its newest generation as resourceSliceCount says.",
			Source:  poolDoc,
			Fix:     "Use k8s.io/dynamic-resource-allocation/resourceslice.",
			run: func(t *T) {
				if err := complete(t.settled()); err != nil {
					t.Errorf("%v", err)
				}
			},
		},
		{
			Name: "resourceslices/no-old-generation", Level: Should,
			Asserts: "Slices of older generations are deleted.",
			Source:  poolDoc,
			Fix:     "Delete what was replaced.",
			run:     checkNoOldGeneration,
		},
		{
			Name: "resourceslices/own-node", Level: Must,
			Asserts: "Every slice is for the node that the driver runs on.",
			Source:  sliceDoc + ".NodeName; node plugins may write slices of their own node only",
			Fix:     "Set spec.nodeName to the name of the node.",
			run:     checkOwnNode,
		},
		{
			Name: "resourceslices/owner", Level: Should,
			Asserts: "The Node owns the slices, so that they go with it.",
			Source:  "k8s.io/dynamic-resource-allocation/resourceslice Owner",
			Fix:     "Set an owner reference to the Node, with its UID.",
			run:     checkOwner,
		},
		{
			Name: "resourceslices/has-devices", Level: Must,
			Asserts: "At least one device is published.",
			Source:  "without devices nothing else can be tested",
			Fix:     "Give the driver something to publish.",
			run: func(t *T) {
				if len(devicesOf(t.settled())) == 0 {
					t.Errorf("no slice has a device")
				}
			},
		},
		{
			Name: "resourceslices/unique-devices", Level: Must,
			Asserts: "A device name appears once in a pool. The API server does not see that across slices; the scheduler calls the pool invalid.",
			Source:  "k8s.io/dynamic-resource-allocation/structured: invalid resource pools",
			Fix:     "Number devices.",
			run:     checkUniqueDevices,
		},
		{
			Name: "resourceslices/counter-sets-exist", Level: Must,
			Asserts: "Every counter that a device consumes exists in a counter set of its pool. The API server does not see that.",
			Source:  "KEP-4815; k8s.io/dynamic-resource-allocation/structured: invalid resource pools",
			Fix:     "Publish the counter sets even where the device that they belong to is not.",
			run:     checkCounterSetsExist,
		},
		{
			Name: "resourceslices/consumption-fits", Level: Must,
			Asserts: "No device consumes more of a counter than there is: it could never be allocated.",
			Source:  "KEP-4815",
			Fix:     "Make counters the largest that any device needs.",
			run:     checkConsumptionFits,
		},
		{
			Name: "resourceslices/unique-counter-sets", Level: Must,
			Asserts: "A counter set appears once in a pool.",
			Source:  "KEP-4815",
			Fix:     "Publish each counter set in one slice.",
			run:     checkUniqueCounterSets,
		},
		{
			Name: "resourceslices/standard-attributes", Level: Should,
			Asserts: "Attributes in the domain resource.kubernetes.io are those that Kubernetes defines, in their form.",
			Source:  "k8s.io/dynamic-resource-allocation/deviceattribute",
			Fix:     "Get them from package deviceattribute.",
			run:     checkStandardAttributes,
		},
		{
			Name: "resourceslices/attributes-consistent", Level: Should,
			Asserts: "An attribute has the same type on all devices that have it: a CEL expression that is right for one device must not fail on another.",
			Source:  "k8s.io/dynamic-resource-allocation/cel: a failing expression aborts the scheduling of the pod",
			Fix:     "Publish each attribute with one type.",
			run:     checkAttributesConsistent,
		},
		{
			Name: "resourceslices/no-write-when-idle", Level: Must,
			Asserts: "A driver with nothing new writes nothing to the API server.",
			Source:  "every write goes to every scheduler and autoscaler that watches",
			Fix:     "Compare before writing.",
			run:     checkNoWriteWhenIdle,
		},
		{
			Name: "resourceslices/stable-over-restart", Level: Should,
			Asserts: "After a restart the driver leaves slices as they are when nothing has changed.",
			Source:  "k8s.io/dynamic-resource-allocation/resourceslice: existing slices are kept",
			Fix:     "Give devices names and an order that do not depend on the moment.",
			takes:   10 * time.Second,
			run:     checkStableOverRestart,
		},
		{
			Name: "resourceslices/recreated-when-deleted", Level: Must,
			Asserts: "A slice that somebody deletes comes back.",
			Source:  "the kubelet deletes the slices of its node when it starts (pkg/kubelet/cm/dra/plugin wipeResourceSlices)",
			Fix:     "Watch the own slices; k8s.io/dynamic-resource-allocation/resourceslice does.",
			takes:   30 * time.Second,
			run:     checkRecreated,
		},
		{
			Name: "resourceslices/restored-when-changed", Level: Should,
			Asserts: "A slice that somebody changes is put right.",
			Source:  "k8s.io/dynamic-resource-allocation/resourceslice",
			Fix:     "Watch the own slices.",
			takes:   30 * time.Second,
			run:     checkRestoredWhenChanged,
		},
		{
			Name: "resourceslices/stay-after-stop", Level: Should,
			Asserts: "Slices stay when the driver is stopped: a restart or an update is no reason to take devices away. The kubelet removes them if nobody registers for 30 seconds.",
			Source:  "k8s.io/dynamic-resource-allocation/kubeletplugin Helper.Stop; k8s.io/kubernetes pkg/kubelet/cm/dra/plugin: pendingWipes",
			Fix:     "Leave the slices to the kubelet.",
			run:     checkStayAfterStop,
		},
		{
			Name: "resourceslices/dropped-counters", Level: Should,
			Asserts: "Where the API server drops counters (no DRAPartitionableDevices), what is published does not overlap: all of it can be allocated at once then. The driver does not try again and again.",
			Source:  "k8s.io/kubernetes pkg/registry/resource/resourceslice/strategy.go dropDisabledFields; k8s.io/dynamic-resource-allocation/resourceslice DroppedFieldsError, which HandleError gets",
			Fix:     "Publish the devices that stand for themselves when HandleError is given a DroppedFieldsError.",
			takes:   20 * time.Second,
			run:     checkDroppedCounters,
		},
		{
			Name: "resourceslices/watches", Level: Should,
			Asserts: "The driver watches its own slices only, by a field selector.",
			Source:  "k8s.io/api/resource/v1 ResourceSliceSelectorNodeName, ResourceSliceSelectorDriver: all slices of a large cluster are much",
			Fix:     "List and watch with spec.nodeName and spec.driver.",
			run:     checkWatchesOwn,
		},
	}
}

// published are the slices of the driver, as evidence too.
func (t *T) published() []resourceapi.ResourceSlice {
	published, err := t.slices(t.ctx)
	t.must(err)
	var lines []string
	for _, s := range published {
		lines = append(lines, fmt.Sprintf("%s pool=%s generation=%d count=%d devices=%d counterSets=%d", s.Name, s.Spec.Pool.Name, s.Spec.Pool.Generation, s.Spec.Pool.ResourceSliceCount, len(s.Spec.Devices), len(s.Spec.SharedCounters)))
	}
	t.show("ResourceSlices", "%s", strings.Join(lines, "\n"))
	return published
}

// settled is published once the driver has written no slice for a while: there may be more to come than makes it ready.
func (t *T) settled() []resourceapi.ResourceSlice {
	t.settle()
	return t.published()
}

type poolDevice struct {
	pool string
	resourceapi.Device
}

func devicesOf(published []resourceapi.ResourceSlice) []poolDevice {
	var all []poolDevice
	for _, slice := range published {
		for _, device := range slice.Spec.Devices {
			all = append(all, poolDevice{slice.Spec.Pool.Name, device})
		}
	}
	return all
}

func sameDevice(a, b poolDevice) bool {
	return a.pool == b.pool && equality.Semantic.DeepEqual(a.Device, b.Device)
}

func checkNoOldGeneration(t *T) {
	t.await("slices of older generations remain", func() error {
		published, err := t.slices(t.ctx)
		if err != nil {
			return err
		}
		newest := map[string]int64{}
		for _, s := range published {
			newest[s.Spec.Pool.Name] = max(newest[s.Spec.Pool.Name], s.Spec.Pool.Generation)
		}
		for _, s := range published {
			if s.Spec.Pool.Generation < newest[s.Spec.Pool.Name] {
				return fmt.Errorf("%s is of generation %d, and the newest is %d", s.Name, s.Spec.Pool.Generation, newest[s.Spec.Pool.Name])
			}
		}
		return nil
	})
}

func checkOwnNode(t *T) {
	local := false
	for _, s := range t.settled() {
		switch {
		case s.Spec.NodeName == nil:
		case *s.Spec.NodeName != t.nodeName:
			t.Errorf("%s is for node %s; the driver runs on %s", s.Name, *s.Spec.NodeName, t.nodeName)
		default:
			local = true
		}
	}
	if !local {
		t.Skipf("the driver publishes no devices of its node alone")
	}
}

func checkOwner(t *T) {
	node, err := t.admin.CoreV1().Nodes().Get(t.ctx, t.nodeName, metav1.GetOptions{})
	t.must(err)
	for _, s := range t.settled() {
		if s.Spec.NodeName == nil {
			continue
		}
		if !slices.ContainsFunc(s.OwnerReferences, func(r metav1.OwnerReference) bool { return r.Kind == "Node" && r.UID == node.UID }) {
			t.Errorf("%s is not owned by Node %s", s.Name, t.nodeName)
		}
	}
}

func checkUniqueDevices(t *T) {
	seen := map[string]bool{}
	for _, device := range devicesOf(t.settled()) {
		if seen[key(device.pool, device.Name)] {
			t.Errorf("device %s is twice in pool %s", device.Name, device.pool)
		}
		seen[key(device.pool, device.Name)] = true
	}
}

// counterSets are the counter sets by pool and name.
func counterSets(published []resourceapi.ResourceSlice) map[string][]resourceapi.CounterSet {
	sets := map[string][]resourceapi.CounterSet{}
	for _, slice := range published {
		for _, set := range slice.Spec.SharedCounters {
			sets[key(slice.Spec.Pool.Name, set.Name)] = append(sets[key(slice.Spec.Pool.Name, set.Name)], set)
		}
	}
	return sets
}

// eachConsumption calls f for every counter that a device consumes. Available is nil where it does not exist.
func eachConsumption(published []resourceapi.ResourceSlice, f func(device poolDevice, set, counter string, consumed resourceapi.Counter, available *resourceapi.Counter)) (any bool) {
	sets := counterSets(published)
	for _, device := range devicesOf(published) {
		for _, consumption := range device.ConsumesCounters {
			for _, name := range slices.Sorted(maps.Keys(consumption.Counters)) {
				any = true
				var available *resourceapi.Counter
				for _, set := range sets[key(device.pool, consumption.CounterSet)] {
					if counter, ok := set.Counters[name]; ok {
						available = &counter
					}
				}
				f(device, consumption.CounterSet, name, consumption.Counters[name], available)
			}
		}
	}
	return any
}

func checkCounterSetsExist(t *T) {
	used := eachConsumption(t.settled(), func(device poolDevice, set, counter string, _ resourceapi.Counter, available *resourceapi.Counter) {
		if available == nil {
			t.Errorf("device %s consumes counter %s of counter set %s, which pool %s does not have", device.Name, counter, set, device.pool)
		}
	})
	if !used {
		t.Skipf("no device consumes counters")
	}
}

func checkConsumptionFits(t *T) {
	used := eachConsumption(t.settled(), func(device poolDevice, set, counter string, consumed resourceapi.Counter, available *resourceapi.Counter) {
		if available != nil && consumed.Value.Cmp(available.Value) > 0 {
			t.Errorf("device %s consumes %s of counter %s in %s, and there is %s", device.Name, consumed.Value.String(), counter, set, available.Value.String())
		}
	})
	if !used {
		t.Skipf("no device consumes counters")
	}
}

func checkUniqueCounterSets(t *T) {
	sets := counterSets(t.settled())
	if len(sets) == 0 {
		t.Skipf("no counter sets are published")
	}
	for _, name := range slices.Sorted(maps.Keys(sets)) {
		if n := len(sets[name]); n > 1 {
			t.Errorf("counter set %s is published %d times", name, n)
		}
	}
}

func checkStandardAttributes(t *T) {
	const domain = "resource.kubernetes.io/"
	standard := map[resourceapi.QualifiedName]func(resourceapi.DeviceAttribute) error{
		domain + "pcieRoot": func(a resourceapi.DeviceAttribute) error { return stringLike(a, "pci", "pci0000:3a") },
		domain + "pciBusID": func(a resourceapi.DeviceAttribute) error { return stringLike(a, "", "0000:3b:00.0") },
		domain + "numaNode": func(a resourceapi.DeviceAttribute) error {
			if a.IntValue == nil || *a.IntValue < 0 {
				return errors.New("it is not a number from 0 on")
			}
			return nil
		},
	}
	found := false
	for _, device := range devicesOf(t.settled()) {
		for name, value := range device.Attributes {
			if !strings.HasPrefix(string(name), domain) {
				continue
			}
			found = true
			check, known := standard[name]
			if !known {
				t.Errorf("device %s: Kubernetes defines no attribute %s", device.Name, name)
			} else if err := check(value); err != nil {
				t.Errorf("device %s, attribute %s: %v", device.Name, name, err)
			}
		}
	}
	if !found {
		t.Skipf("no device has attributes of %s", strings.TrimSuffix(domain, "/"))
	}
}

// stringLike asks for a string with as many colons and dots as the example, and the prefix.
func stringLike(a resourceapi.DeviceAttribute, prefix, example string) error {
	values := a.StringValues
	if a.StringValue != nil {
		values = []string{*a.StringValue}
	}
	if len(values) == 0 {
		return errors.New("it is no string")
	}
	for _, value := range values {
		if !strings.HasPrefix(value, prefix) || strings.Count(value, ":") != strings.Count(example, ":") || strings.Count(value, ".") != strings.Count(example, ".") {
			return fmt.Errorf("%q is not like %s", value, example)
		}
	}
	return nil
}

func checkAttributesConsistent(t *T) {
	types := map[resourceapi.QualifiedName]string{}
	for _, device := range devicesOf(t.settled()) {
		for name, value := range device.Attributes {
			kind := attributeType(value)
			if other := types[name]; other != "" && other != kind {
				t.Errorf("attribute %s of device %s is of type %s, and of type %s elsewhere", name, device.Name, kind, other)
			}
			types[name] = kind
		}
	}
}

func attributeType(a resourceapi.DeviceAttribute) string {
	switch {
	case a.IntValue != nil, len(a.IntValues) > 0:
		return "int"
	case a.BoolValue != nil, len(a.BoolValues) > 0:
		return "bool"
	case a.VersionValue != nil, len(a.VersionValues) > 0:
		return "version"
	}
	return "string"
}

func checkNoWriteWhenIdle(t *T) {
	// What has just started may still be at it.
	t.settle()
	since := time.Now()
	t.pause(t.times.quiet)
	for _, request := range t.proxy.Requests(since) {
		if request.Writes() && request.Group == resourceapi.GroupName {
			t.Errorf("%s %s %s while nothing happened", request.Verb, request.Resource, request.Name)
		}
	}
}

// settle waits until the driver has written no slice for a while.
func (t *T) settle() {
	t.await("the driver goes on writing ResourceSlices", func() error {
		for _, request := range t.proxy.Requests(time.Now().Add(-2 * time.Second)) {
			if request.Writes() && request.Resource == "resourceslices" {
				return fmt.Errorf("%s %s", request.Verb, request.Name)
			}
		}
		return nil
	})
}

// pause lets time go by in which nothing must happen.
func (t *T) pause(d time.Duration) {
	select {
	case <-t.ctx.Done():
		t.Fatalf("%v", t.ctx.Err())
	case <-time.After(d):
	}
}

func checkStableOverRestart(t *T) {
	before := t.settled()
	t.restartDriver(false)
	after := t.settled()
	for _, old := range before {
		at := slices.IndexFunc(after, func(s resourceapi.ResourceSlice) bool { return s.UID == old.UID })
		switch {
		case at < 0:
			t.Errorf("%s was replaced", old.Name)
		case !equality.Semantic.DeepEqual(old.Spec, after[at].Spec):
			t.Errorf("%s was changed", old.Name)
		}
	}
	if len(after) > len(before) {
		t.Errorf("there were %d slices, and there are %d", len(before), len(after))
	}
}

func checkRecreated(t *T) {
	before := devicesOf(t.settled())
	t.must(t.deleteSlices(t.ctx, resourceapi.ResourceSliceSelectorDriver+"="+t.vars.DriverName))
	t.awaitDevices(before)
}

// awaitDevices waits until the devices are published as they were.
func (t *T) awaitDevices(want []poolDevice) {
	err := eventually(t.ctx, t.times.late, func() error {
		published, err := t.slices(t.ctx)
		if err != nil {
			return err
		}
		if err := complete(published); err != nil {
			return err
		}
		if got := devicesOf(published); !slices.EqualFunc(got, want, sameDevice) {
			return fmt.Errorf("the %d devices that are published are not the %d from before", len(got), len(want))
		}
		return nil
	})
	if err != nil {
		t.Errorf("the slices do not come back: %v", err)
	}
}

func checkRestoredWhenChanged(t *T) {
	published := t.settled()
	want := devicesOf(published)
	at := slices.IndexFunc(published, func(s resourceapi.ResourceSlice) bool { return len(s.Spec.Devices) > 1 })
	if at < 0 {
		t.Skipf("no slice has two devices")
	}
	changed := published[at].DeepCopy()
	changed.Spec.Devices = changed.Spec.Devices[1:]
	_, err := t.admin.ResourceV1().ResourceSlices().Update(t.ctx, changed, metav1.UpdateOptions{})
	t.must(err)
	t.awaitDevices(want)
}

func checkStayAfterStop(t *T) {
	before := t.settled()
	t.stopDriver(false)
	if after := t.published(); len(after) < len(before) {
		t.Errorf("of %d slices %d are left after the driver was stopped", len(before), len(after))
	}
}

// withoutCounters does what an API server without DRAPartitionableDevices does.
func withoutCounters(slice *resourceapi.ResourceSlice) {
	slice.Spec.SharedCounters = nil
	for i := range slice.Spec.Devices {
		slice.Spec.Devices[i].ConsumesCounters = nil
	}
}

// startDropping has the driver begin anew on an API server that drops fields.
func (t *T) startDropping(drop func(*resourceapi.ResourceSlice)) {
	t.stopDriver(false)
	t.must(t.deleteSlices(t.ctx, resourceapi.ResourceSliceSelectorDriver+"="+t.vars.DriverName))
	t.proxy.Drop(drop)
	t.fresh = true
	t.deferred(func() { t.proxy.Drop(nil) })
	since := time.Now()
	t.must(t.startDriver())
	t.await("the driver writes no ResourceSlice", func() error {
		for _, request := range t.proxy.Requests(since) {
			if request.Writes() && request.Resource == "resourceslices" {
				return nil
			}
		}
		return errors.New("no write yet")
	})
	t.settle()
}

func checkDroppedCounters(t *T) {
	before := t.settled()
	if !eachConsumption(before, func(poolDevice, string, string, resourceapi.Counter, *resourceapi.Counter) {}) {
		t.Skipf("no device consumes counters")
	}
	t.startDropping(withoutCounters)
	t.await("devices that overlap are published without the counters that keep them apart", func() error {
		now := map[string]bool{}
		for _, device := range devicesOf(t.published()) {
			now[key(device.pool, device.Name)] = true
		}
		left := map[string]resource.Quantity{}
		var overlaps error
		eachConsumption(before, func(device poolDevice, set, counter string, consumed resourceapi.Counter, available *resourceapi.Counter) {
			if !now[key(device.pool, device.Name)] || available == nil {
				return
			}
			name := key(key(device.pool, set), counter)
			if _, begun := left[name]; !begun {
				left[name] = available.Value.DeepCopy()
			}
			rest := left[name]
			rest.Sub(consumed.Value)
			left[name] = rest
			if rest.Sign() < 0 && overlaps == nil {
				overlaps = fmt.Errorf("with device %s more of counter %s in %s is published than there is", device.Name, counter, set)
			}
		})
		return overlaps
	})
}

func checkWatchesOwn(t *T) {
	t.stopDriver(false)
	since := time.Now()
	t.must(t.startDriver())
	t.awaitReady()
	watched := false
	for _, request := range t.proxy.Requests(since) {
		if request.Resource != "resourceslices" || request.Verb != "list" && request.Verb != "watch" {
			continue
		}
		watched = true
		if !strings.Contains(request.Query, "fieldSelector=") {
			t.Errorf("%s of all ResourceSlices in the cluster: %s?%s", request.Verb, request.Path, request.Query)
		}
	}
	if !watched {
		t.Errorf("the driver does not watch its ResourceSlices")
	}
}
