package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"
)

// wholes is how many gadgets there are. Each is offered as a whole and as two halves.
const wholes = 4

const shared = "shared"

func deviceNames() []string {
	names := []string{shared}
	for i := range wholes {
		names = append(names, fmt.Sprintf("whole-%d", i), fmt.Sprintf("half-%d-a", i), fmt.Sprintf("half-%d-b", i))
	}
	return names
}

// pool is what a driver without faults publishes.
func pool() resourceslice.Pool {
	counters := func(n int64) map[string]resourceapi.Counter {
		return map[string]resourceapi.Counter{"parts": {Value: *resource.NewQuantity(n, resource.DecimalSI)}}
	}
	var sets []resourceapi.CounterSet
	var devices []resourceapi.Device
	for i := range wholes {
		set := fmt.Sprintf("gadget-%d", i)
		sets = append(sets, resourceapi.CounterSet{Name: set, Counters: counters(2)})
		add := func(name, size string, parts int64) {
			devices = append(devices, resourceapi.Device{
				Name:             name,
				Attributes:       map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{domain + "/size": {StringValue: &size}, "resource.kubernetes.io/numaNode": {IntValue: ptr.To(int64(0))}},
				ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: counters(parts)}},
			})
		}
		add(fmt.Sprintf("half-%d-a", i), "half", 1)
		add(fmt.Sprintf("half-%d-b", i), "half", 1)
		add(fmt.Sprintf("whole-%d", i), "whole", 2)
	}
	// One that can be shared.
	devices = append(devices, resourceapi.Device{
		Name: shared, AllowMultipleAllocations: ptr.To(true),
		// Who does not ask for less gets all.
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"parts": {Value: resource.MustParse("10"), RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default: ptr.To(resource.MustParse("10")), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(resource.MustParse("1"))},
		}}},
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{domain + "/size": {StringValue: ptr.To("shared")}},
	})
	return resourceslice.Pool{Slices: []resourceslice.Slice{{SharedCounters: sets}, {Devices: devices}}}
}

func (d *driver) publish(ctx context.Context) error {
	p := pool()
	devices := p.Slices[1].Devices
	first := &devices[0]
	switch d.fault {
	case "no-devices":
		p.Slices = []resourceslice.Slice{{}}
	case "unknown-standard-attribute":
		first.Attributes["resource.kubernetes.io/colour"] = resourceapi.DeviceAttribute{StringValue: ptr.To("red")}
	case "malformed-standard-attribute":
		first.Attributes["resource.kubernetes.io/pciBusID"] = resourceapi.DeviceAttribute{StringValue: ptr.To("3b")}
	case "inconsistent-attribute":
		first.Attributes[domain+"/size"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(1))}
	case "unstable-names":
		for i := range devices {
			devices[i].Attributes["started"] = resourceapi.DeviceAttribute{StringValue: ptr.To(time.Now().Format(time.RFC3339Nano))}
		}
	case "publishes-once", "no-owner":
		return d.publishOnce(ctx, p)
	}
	node, err := d.client.CoreV1().Nodes().Get(ctx, d.node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	// What kubeletplugin does, but quick to put right what others have changed. A driver with a fault takes its time, and
	// so leaves it alone.
	var delay *time.Duration
	if d.fault == "" {
		delay = ptr.To(time.Second)
	}
	d.published, err = resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: d.name,
		KubeClient: d.client,
		Owner:      &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID},
		Resources:  d.resources(p),
		SyncDelay:  delay,
		ErrorHandler: func(_ context.Context, err error, _ string) {
			var dropped *resourceslice.DroppedFieldsError
			if errors.As(err, &dropped) {
				d.fieldsDropped(dropped)
			}
		},
	})
	if err != nil {
		return err
	}
	go d.follow(ctx, p)
	return d.publishBeside(ctx)
}

func (d *driver) resources(p resourceslice.Pool) *resourceslice.DriverResources {
	return &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.node: p}}
}

// fieldsDropped notes what the API server does not have.
func (d *driver) fieldsDropped(dropped *resourceslice.DroppedFieldsError) {
	for _, gate := range dropped.DisabledFeatures() {
		switch {
		case gate == "DRAPartitionableDevices" && d.fault != "overlaps-without-counters":
			d.noCounters.Store(true)
		case gate == "DRADeviceTaints" && d.fault != "offers-broken-devices":
			d.noTaints.Store(true)
		}
	}
}

// follow publishes anew when devices break, and when it turns out what the API server drops.
func (d *driver) follow(ctx context.Context, p resourceslice.Pool) {
	last := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(200 * time.Millisecond):
		}
		broken := d.broken()
		if now := fmt.Sprint(broken, d.noCounters.Load(), d.noTaints.Load()); now != last {
			if last != "" || now != fmt.Sprint([]string(nil), false, false) {
				d.published.Update(d.resources(d.shaped(p, broken)))
			}
			last = now
		}
	}
}

// broken are the devices that somebody has broken.
func (d *driver) broken() []string {
	files, _ := filepath.Glob(filepath.Join(d.dir, "broken-*"))
	var names []string
	for _, file := range files {
		names = append(names, strings.TrimPrefix(filepath.Base(file), "broken-"))
	}
	return names
}

// shaped is the pool with taints on what is broken, and with what can be published where the API server drops fields.
func (d *driver) shaped(p resourceslice.Pool, broken []string) resourceslice.Pool {
	var shaped resourceslice.Pool
	for _, s := range p.Slices {
		if d.noCounters.Load() {
			s.SharedCounters = nil
		}
		var devices []resourceapi.Device
		for _, device := range s.Devices {
			bad := slices.Contains(broken, device.Name)
			if d.noCounters.Load() {
				if strings.HasPrefix(device.Name, "half-") {
					continue
				}
				device.ConsumesCounters = nil
			}
			if bad && d.noTaints.Load() {
				continue
			}
			if bad {
				device.Taints = []resourceapi.DeviceTaint{{Key: domain + "/broken", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
			}
			devices = append(devices, device)
		}
		s.Devices = devices
		if len(s.Devices)+len(s.SharedCounters) > 0 {
			shaped.Slices = append(shaped.Slices, s)
		}
	}
	return shaped
}

// publishOnce writes slices and never looks at them again.
func (d *driver) publishOnce(ctx context.Context, p resourceslice.Pool) error {
	existing, err := d.client.ResourceV1().ResourceSlices().List(ctx, d.own())
	if err != nil || len(existing.Items) > 0 {
		return err
	}
	for i, s := range p.Slices {
		slice := d.slice(fmt.Sprintf("once-%d-", i), d.node, 1, int64(len(p.Slices)))
		slice.Spec.Devices, slice.Spec.SharedCounters = s.Devices, s.SharedCounters
		if d.fault == "no-owner" {
			slice.OwnerReferences = nil
		}
		if err := d.create(ctx, slice); err != nil {
			return err
		}
	}
	return nil
}

func (d *driver) slice(name, pool string, generation, count int64) *resourceapi.ResourceSlice {
	s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: name}}
	s.Spec.Driver, s.Spec.NodeName = d.name, &d.node
	s.Spec.Pool = resourceapi.ResourcePool{Name: pool, Generation: generation, ResourceSliceCount: count}
	return s
}

// neighbour is a node that is none of the driver's business.
func (d *driver) neighbour() string { return d.node + ".neighbour" }

// own are the slices of the driver on its node.
func (d *driver) own() metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: "spec.driver=" + d.name + ",spec.nodeName=" + d.node}
}

func (d *driver) deleteSlices(ctx context.Context, which metav1.ListOptions) {
	list, err := d.client.ResourceV1().ResourceSlices().List(ctx, which)
	if err != nil {
		return
	}
	for _, s := range list.Items {
		_ = d.client.ResourceV1().ResourceSlices().Delete(ctx, s.Name, metav1.DeleteOptions{})
	}
}

func (d *driver) create(ctx context.Context, s *resourceapi.ResourceSlice) error {
	node, err := d.client.CoreV1().Nodes().Get(ctx, d.node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if d.fault != "no-owner" {
		s.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}
	}
	_, err = d.client.ResourceV1().ResourceSlices().Create(ctx, s, metav1.CreateOptions{})
	return err
}

// publishBeside writes slices with a fault into a pool beside that of the node, where the library does not see them.
func (d *driver) publishBeside(ctx context.Context) error {
	beside := d.node + "-beside" // pools have names of their own in the cluster
	plain := []resourceapi.Device{{Name: "extra"}}
	set := resourceapi.CounterSet{Name: "extra", Counters: map[string]resourceapi.Counter{"parts": {Value: resource.MustParse("1")}}}
	consuming := func(set string, parts string) []resourceapi.Device {
		return []resourceapi.Device{{Name: "extra", ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
			CounterSet: set, Counters: map[string]resourceapi.Counter{"parts": {Value: resource.MustParse(parts)}},
		}}}}
	}
	write := func(generation, count int64, change func(*resourceapi.ResourceSlice)) error {
		s := d.slice("beside-", beside, generation, count)
		change(s)
		return d.create(ctx, s)
	}
	devices := func(list []resourceapi.Device) func(*resourceapi.ResourceSlice) {
		return func(s *resourceapi.ResourceSlice) { s.Spec.Devices = list }
	}
	counters := func(s *resourceapi.ResourceSlice) { s.Spec.SharedCounters = []resourceapi.CounterSet{set} }
	var err1, err2 error
	switch d.fault {
	case "incomplete-pool":
		err1 = write(1, 2, devices(plain))
	case "old-generation":
		err1, err2 = write(1, 1, devices(plain)), write(2, 1, devices(plain))
	case "other-node":
		err1 = write(1, 1, func(s *resourceapi.ResourceSlice) { s.Spec.NodeName, s.Spec.Devices = ptr.To(d.neighbour()), plain })
	case "device-in-two-slices":
		err1, err2 = write(1, 2, devices(plain)), write(1, 2, devices(plain))
	case "counter-set-missing":
		err1 = write(1, 1, devices(consuming("missing", "1")))
	case "consumes-too-much":
		err1, err2 = write(1, 2, counters), write(1, 2, devices(consuming("extra", "2")))
	case "counter-set-twice":
		err1, err2 = write(1, 2, counters), write(1, 2, counters)
	}
	if err1 != nil {
		return err1
	}
	return err2
}

// afterStart does in the background what a driver should not.
func (d *driver) afterStart(ctx context.Context) {
	switch d.fault {
	case "writes-when-idle":
		go d.touch(ctx, func() bool { return true })
	case "writes-dropped-counters-again":
		go d.touch(ctx, d.noCounters.Load)
	case "watches-all-slices":
		factory := informers.NewSharedInformerFactory(d.client, 0)
		factory.Resource().V1().ResourceSlices().Informer()
		factory.Start(ctx.Done())
	case "reads-secrets":
		_, _ = d.client.CoreV1().Secrets("").List(ctx, metav1.ListOptions{})
	case "needs-undeclared-rights":
		_, _ = d.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	case "deletes-foreign-slices":
		d.deleteSlices(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + d.neighbour()})
	case "writes-config-maps":
		_, _ = d.client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: d.name}}, metav1.CreateOptions{})
	case "exits-without-api-server":
		go d.exitWithoutAPI(ctx)
	}
}

// touch writes a slice again and again.
func (d *driver) touch(ctx context.Context, when func() bool) {
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-time.After(500 * time.Millisecond):
		}
		if !when() {
			continue
		}
		list, err := d.client.ResourceV1().ResourceSlices().List(ctx, d.own())
		if err != nil || len(list.Items) == 0 {
			continue
		}
		slices.SortFunc(list.Items, func(a, b resourceapi.ResourceSlice) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"touched":"%d"}}}`, i)
		_, _ = d.client.ResourceV1().ResourceSlices().Patch(ctx, list.Items[0].Name, types.MergePatchType, patch, metav1.PatchOptions{})
	}
}
