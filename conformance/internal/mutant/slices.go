package main

import (
	"context"
	"fmt"
	"slices"
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
				Attributes:       map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"size": {StringValue: &size}, "resource.kubernetes.io/numaNode": {IntValue: ptr.To(int64(0))}},
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
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"size": {StringValue: ptr.To("shared")}},
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
		first.Attributes["size"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(1))}
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
	_, err = resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: driverName,
		KubeClient: d.client,
		Owner:      &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID},
		Resources:  &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.node: p}},
		SyncDelay:  delay,
	})
	if err != nil {
		return err
	}
	return d.publishBeside(ctx)
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
	s.Spec.Driver, s.Spec.NodeName = driverName, &d.node
	s.Spec.Pool = resourceapi.ResourcePool{Name: pool, Generation: generation, ResourceSliceCount: count}
	return s
}

// neighbour is a node that is none of the driver's business.
func (d *driver) neighbour() string { return d.node + ".neighbour" }

// own are the slices of the driver on its node.
func (d *driver) own() metav1.ListOptions {
	return metav1.ListOptions{FieldSelector: "spec.driver=" + driverName + ",spec.nodeName=" + d.node}
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
		go d.touch(ctx)
	case "watches-all-slices":
		factory := informers.NewSharedInformerFactory(d.client, 0)
		factory.Resource().V1().ResourceSlices().Informer()
		factory.Start(ctx.Done())
	case "reads-secrets":
		_, _ = d.client.CoreV1().Secrets("").List(ctx, metav1.ListOptions{})
	case "needs-undeclared-rights":
		_, _ = d.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	case "deletes-foreign-slices":
		_ = d.client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "spec.nodeName=" + d.neighbour()})
	case "writes-config-maps":
		_, _ = d.client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: driverName}}, metav1.CreateOptions{})
	case "exits-without-api-server":
		go d.exitWithoutAPI(ctx)
	}
}

// touch writes a slice again and again.
func (d *driver) touch(ctx context.Context) {
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-time.After(500 * time.Millisecond):
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
