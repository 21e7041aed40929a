package replay

import (
	"context"
	"fmt"
	"slices"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/order"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// Policy is an order and how the scheduler gets to see it.
type Policy struct {
	Name string
	// Order is "" for NVIDIA's own.
	Order order.Order
	// Lag is how long it takes from an allocation until the driver knows of it, and Interval how long at
	// least from one change of the order to the next; both in units of the mean stay of a claim.
	Lag, Interval float64
}

// Policies are those that the benchmark compares, the vendor's first.
func Policies() []Policy {
	return []Policy{
		{Name: "vendor", Order: order.Vendor},
		{Name: "NVIDIA", Order: nvidia},
		{Name: "packed", Order: order.Packed},
		// Claims that stay for ten minutes, two seconds from allocation to prepare, a change a second.
		{Name: "adaptive", Order: order.Adaptive, Lag: 2. / 600, Interval: 1. / 600},
		// Claims that stay for twenty seconds.
		{Name: "adaptive, 20 s", Order: order.Adaptive, Lag: 2. / 20, Interval: 1. / 20},
	}
}

// nvidia is the order in which NVIDIA's own driver places partitions.
const nvidia order.Order = "nvidia"

// nvidiaStarts is the order in which NVIDIA's driver is known to place 1g on GPUs with eight memory slices
// (examples of the MIG user guide for A100; instance ids seen on an H100). The orders known of larger
// partitions, 4,0,2 for 2g and 4,0 for 3g, are what is left of it where they can start.
var nvidiaStarts = []int{6, 4, 5, 0, 1, 2, 3}

// nvidiaGroups is that order, GPU by GPU.
func nvidiaGroups(node *hardware.Node) [][]*hardware.Device {
	place := func(d *hardware.Device) int {
		if d.Partition == nil {
			return len(nvidiaStarts)
		}
		return slices.Index(nvidiaStarts, d.Partition.Start)
	}
	var groups [][]*hardware.Device
	for _, gpu := range node.GPUs {
		groups = append(groups, slices.SortedStableFunc(slices.Values(gpu.Devices), func(a, b *hardware.Device) int { return place(a) - place(b) }))
	}
	return groups
}

// Result is what became of a stream.
type Result struct {
	Claims, Accepted         int
	Compute, AcceptedCompute int
	Writes                   int // of slices, to change the order
}

// Acceptance is the share of the claims that got a device, in percent.
func (r Result) Acceptance() float64 { return 100 * float64(r.Accepted) / float64(r.Claims) }

// ComputeAcceptance is the share of the compute slices asked for that claims got, in percent.
func (r Result) ComputeAcceptance() float64 {
	return 100 * float64(r.AcceptedCompute) / float64(r.Compute)
}

// Replay lets a stream of claims come and go. It fails if the allocator gives out what overlaps.
func (n *Node) Replay(ctx context.Context, policy Policy, stream []Claim) (Result, error) {
	scheduler, err := newScheduler(n)
	if err != nil {
		return Result{}, err
	}
	r := &run{node: n, policy: policy, scheduler: scheduler, used: make([]uint64, len(n.GPUs)), known: map[string]bool{}, due: never}
	r.publisher = order.NewPublisher(policy.Order)
	r.publish()
	var result Result
	for _, claim := range stream {
		r.until(claim.Arrival)
		result.Claims++
		result.Compute += claim.Compute
		device, err := scheduler.allocate(ctx, claim.Kind)
		if err != nil {
			return Result{}, err
		}
		if device == "" {
			continue
		}
		if err := r.take(claim, device); err != nil {
			return Result{}, fmt.Errorf("order %s: %w", policy.Name, err)
		}
		result.Accepted++
		result.AcceptedCompute += claim.Compute
	}
	result.Writes = r.writes
	return result, nil
}

// never is later than anything happens.
const never = 1e300

// event is something that happens to a claim.
type event struct {
	at     float64
	device string
	ends   bool // else the driver hears of it
}

// run is a replay under way.
type run struct {
	node      *Node
	policy    Policy
	scheduler *scheduler
	publisher *order.Publisher

	used   []uint64        // by GPU, the devices in use
	known  map[string]bool // the devices that the driver knows to be in use
	events []event         // by time
	groups [][]*hardware.Device
	due    float64 // when the order may change next, if it is to
	last   float64 // when it changed last
	writes int
}

// take gives a device to a claim.
func (r *run) take(claim Claim, device string) error {
	gpu, index := r.find(device)
	if gpu < 0 || !r.node.is(r.node.GPUs[gpu].Devices[index], claim.Kind) {
		return fmt.Errorf("a claim for %s got %s", claim.Kind, device)
	}
	if set := r.used[gpu] | 1<<index; r.used[gpu]&(1<<index) != 0 || !r.node.board.possible(set) {
		return fmt.Errorf("%s overlaps with what is in use of its GPU", device)
	}
	r.used[gpu] |= 1 << index
	r.add(event{at: claim.Arrival + r.policy.Lag, device: device})
	r.add(event{at: claim.Arrival + claim.Stay, device: device, ends: true})
	return nil
}

func (r *run) find(device string) (gpu, index int) {
	for i, g := range r.node.GPUs {
		for k, d := range g.Devices {
			if d.Name == device {
				return i, k
			}
		}
	}
	return -1, -1
}

func (r *run) add(e event) {
	i, _ := slices.BinarySearchFunc(r.events, e, func(a, b event) int {
		if a.at <= b.at {
			return -1
		}
		return 1
	})
	r.events = slices.Insert(r.events, i, e)
}

// until lets everything happen that happens before a time.
func (r *run) until(now float64) {
	for {
		next := never
		if len(r.events) > 0 {
			next = r.events[0].at
		}
		if min(next, r.due) > now {
			return
		}
		if r.due <= next {
			r.last, r.due = r.due, never
			r.publish()
			continue
		}
		e := r.events[0]
		r.events = r.events[1:]
		if e.ends {
			gpu, index := r.find(e.device)
			r.used[gpu] &^= 1 << index
			r.scheduler.release(e.device)
			delete(r.known, e.device)
			r.events = slices.DeleteFunc(r.events, func(o event) bool { return o.device == e.device })
		} else {
			r.known[e.device] = true
		}
		r.changed(e.at)
	}
}

// changed has the order looked at as soon as it may change.
func (r *run) changed(now float64) {
	if r.publisher.DependsOnUsage() && r.due == never {
		r.due = max(now, r.last+r.policy.Interval)
	}
}

// publish has the scheduler see the order that what is in use asks for, as far as the driver knows of it.
func (r *run) publish() {
	groups := r.publisher.Groups(r.node.Node, deviceslices.Split, r.known)
	if r.policy.Order == nvidia {
		groups = nvidiaGroups(r.node.Node)
	}
	changed := r.groups == nil
	for i := range r.groups {
		if !slices.Equal(r.groups[i], groups[i]) {
			r.writes++
			changed = true
		}
	}
	if changed {
		r.scheduler.see(groups)
	}
	r.groups = groups
	if r.publisher.More() {
		r.changed(r.last)
	}
}
