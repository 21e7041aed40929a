package driver

import (
	"maps"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/order"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// ordering lists the devices of the node in the order that is asked for. Where that depends on what is in
// use, it looks again when that has changed. One slice is rewritten at a time, and the next one not before
// its interval is over: so the generation of the pool stays, and no reader meets an incomplete pool. An
// order is a preference, and whatever a scheduler still goes by is the same devices.
type ordering struct {
	publisher *order.Publisher
	interval  time.Duration
	wake      func()

	taken map[string]bool // when it last looked
	next  time.Time       // when the order may change again
	timer *time.Timer
}

func newOrdering(o order.Order, interval time.Duration, wake func()) *ordering {
	return &ordering{publisher: order.NewPublisher(o), interval: interval, wake: wake}
}

// due is true if another order may be better by now. If it is too early for another one, the publisher is
// woken up when it is not.
func (o *ordering) due(taken map[string]bool) bool {
	if !o.publisher.DependsOnUsage() || !o.publisher.More() && maps.Equal(o.taken, taken) {
		return false
	}
	if wait := time.Until(o.next); wait > 0 {
		o.wakeIn(wait)
		return false
	}
	return true
}

func (o *ordering) wakeIn(wait time.Duration) {
	o.stop()
	o.timer = time.AfterFunc(wait, o.wake)
}

func (o *ordering) stop() {
	if o.timer != nil {
		o.timer.Stop()
	}
}

// reordered looks at what is in use.
func (o *ordering) reordered(taken map[string]bool) arrangement {
	return func(node *hardware.Node, layout deviceslices.Layout) (resourceslice.DriverResources, error) {
		resources, err := o.publisher.Resources(node, layout, taken)
		if err != nil {
			return resources, err
		}
		o.taken = taken
		if o.publisher.Changed() {
			o.next = time.Now().Add(o.interval)
		}
		if o.publisher.More() {
			o.wakeIn(o.interval)
		}
		return resources, nil
	}
}

// unchanged keeps the order that there is, if there is one.
func (o *ordering) unchanged(taken map[string]bool) arrangement {
	return func(node *hardware.Node, layout deviceslices.Layout) (resourceslice.DriverResources, error) {
		return o.publisher.Unchanged(node, layout, taken)
	}
}

// onlyReordered is true if the slices have the same devices, but not all of them in the same order.
func onlyReordered(a, b resourceslice.Pool) bool {
	byName := func(devices []resourceapi.Device) []resourceapi.Device {
		devices = slices.Clone(devices)
		slices.SortFunc(devices, func(a, b resourceapi.Device) int { return strings.Compare(a.Name, b.Name) })
		return devices
	}
	return slices.EqualFunc(a.Slices, b.Slices, func(a, b resourceslice.Slice) bool {
		a.Devices, b.Devices = byName(a.Devices), byName(b.Devices)
		return equality.Semantic.DeepEqual(a, b)
	})
}
