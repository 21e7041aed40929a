// Package order decides in which order the devices of a node are published. That is a placement policy:
// the scheduler gives a claim the first device that fits, going through the slices of a pool by name and
// through the devices of a slice as they are listed.
//
// # Orders
//
// vendor is what the vendor's driver publishes: GPU by GPU, the whole GPU and then its partitions by
// name. So first fit puts a small partition where a large one could have been, and lets it rule out more
// than it has to.
//
// packed lists the devices of each GPU by how many others they rule out, fewest first. On an H100 that
// is the order in which NVIDIA's own driver places partitions (1g 6,4,5,0,1,2,3; 2g 4,0,2; 3g 4,0), but
// it follows from the counters of any model. It never changes.
//
// adaptive does the same with the GPUs as they are: devices in use rule out nothing more, and what is
// left is listed by how much it would rule out of what still fits. Of equal choices the one on the
// fullest GPU comes first. Devices that a claim may choose between, those of one profile, are listed as a
// row of claims would best take them, so that a scheduler that has not seen the latest order yet still
// goes by a good one. An order is kept as long as its first choices are the best there are.
//
// # Slices
//
// vendor and packed publish each GPU in slices of its own. In the split layout adaptive has the devices
// of one profile on all GPUs side by side: which slice a device is in never depends on usage, so that a
// new order changes single slices and moves no device from one to another. In the combined layout
// devices have to stay with their counters, GPU by GPU; there adaptive chooses the placement but not the
// GPU.
//
// The package knows neither claims nor the API. Whatever order it makes of whatever usage it is told,
// the devices are the same, each of them once.
package order

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/simgpu/simgpu/driver/hardware"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// Order names an order.
type Order string

const (
	// Vendor is the order of the vendor's driver.
	Vendor Order = "vendor"
	// Packed lists first what rules out fewest other devices of an empty GPU.
	Packed Order = "packed"
	// Adaptive lists first what rules out fewest of the devices that still fit.
	Adaptive Order = "adaptive"
)

// Names lists the orders, the default first.
func Names() []string { return []string{string(Vendor), string(Packed), string(Adaptive)} }

// Parse returns the order of that name.
func Parse(name string) (Order, error) {
	if !slices.Contains(Names(), name) {
		return "", fmt.Errorf("unknown device order %q; known: %s", name, strings.Join(Names(), ", "))
	}
	return Order(name), nil
}

// Publisher makes the resources of one node, one time after the other. It is not safe for concurrent
// use.
type Publisher struct {
	order  Order
	models map[*hardware.GPU]*model
	// listed are the names of the devices as they were listed last, by group.
	listed [][]string
	// next is the group that may change first.
	next          int
	changed, more bool
}

// NewPublisher returns a publisher that has published nothing yet.
func NewPublisher(o Order) *Publisher { return &Publisher{order: o} }

// DependsOnUsage is true where other usage may mean another order.
func (p *Publisher) DependsOnUsage() bool { return p.order == Adaptive }

// Resources returns the pool of the node, as package slices makes it, in the order that is best for what
// is in use: taken holds the names of the devices that claims have for themselves. As long as the devices
// stay the same, one slice at most differs from the last time. The caller may change what it gets.
func (p *Publisher) Resources(node *hardware.Node, layout deviceslices.Layout, taken map[string]bool) (resourceslice.DriverResources, error) {
	return resources(node, layout, p.Groups(node, layout, taken))
}

// Unchanged is Resources in the order of the last time.
func (p *Publisher) Unchanged(node *hardware.Node, layout deviceslices.Layout, taken map[string]bool) (resourceslice.DriverResources, error) {
	return resources(node, layout, p.groups(node, layout, taken, 0))
}

// Changed is true if the last resources are in another order than those before.
func (p *Publisher) Changed() bool { return p.changed }

// More is true if another slice is not in its best order yet.
func (p *Publisher) More() bool { return p.more }

// Groups is the order of Resources: all devices of the node, those of each group in slices of their own.
func (p *Publisher) Groups(node *hardware.Node, layout deviceslices.Layout, taken map[string]bool) [][]*hardware.Device {
	return p.groups(node, layout, taken, 1)
}

func resources(node *hardware.Node, layout deviceslices.Layout, groups [][]*hardware.Device) (resourceslice.DriverResources, error) {
	if layout == deviceslices.Split {
		return deviceslices.Grouped(node, groups)
	}
	ordered := *node
	ordered.GPUs = make([]*hardware.GPU, len(node.GPUs))
	for i, gpu := range node.GPUs {
		reordered := *gpu
		reordered.Devices = groups[i]
		ordered.GPUs[i] = &reordered
	}
	return deviceslices.Resources(&ordered, layout)
}

// groups lets that many groups of the same devices change.
func (p *Publisher) groups(node *hardware.Node, layout deviceslices.Layout, taken map[string]bool, changes int) [][]*hardware.Device {
	if p.order == Adaptive {
		p.learn(node)
		return p.adaptive(node, layout, taken, changes)
	}
	groups := make([][]*hardware.Device, len(node.GPUs))
	for i, gpu := range node.GPUs {
		groups[i] = slices.Clone(gpu.Devices)
		if p.order == Packed {
			for place, device := range newModel(figuresOf(gpu)).packed {
				groups[i][place] = gpu.Devices[device]
			}
		}
	}
	return groups
}

// learn reads the figures of the GPUs that are new, and forgets those that are gone.
func (p *Publisher) learn(node *hardware.Node) {
	models := map[*hardware.GPU]*model{}
	var distinct []*model
	for _, gpu := range node.GPUs {
		m := p.models[gpu]
		if m == nil {
			figures := figuresOf(gpu)
			if i := slices.IndexFunc(distinct, func(m *model) bool { return m.of(figures) }); i >= 0 {
				m = distinct[i]
			} else {
				m = newModel(figures)
			}
		}
		models[gpu] = m
		if !slices.Contains(distinct, m) {
			distinct = append(distinct, m)
		}
	}
	p.models = models
}

func (p *Publisher) adaptive(node *hardware.Node, layout deviceslices.Layout, taken map[string]bool, changes int) [][]*hardware.Device {
	cards := make([]card, len(node.GPUs))
	for i, gpu := range node.GPUs {
		cards[i] = newCard(gpu, p.models[gpu], i, taken)
	}
	parts := byGPU
	if layout == deviceslices.Split {
		parts = byProfile
	}
	all := parts(cards)
	if !p.same(all) {
		p.listed, p.next = make([][]string, len(all)), 0
		changes = len(all)
	}

	p.changed, p.more = false, false
	first := p.next
	groups := make([][]*hardware.Device, len(all))
	for n := range all {
		i := (first + n) % len(all)
		if best := names(all[i].best(p.listed[i])); !slices.Equal(best, p.listed[i]) {
			if changes > 0 {
				p.listed[i], p.next, p.changed = best, i+1, true
				changes--
			} else {
				p.more = true
			}
		}
		for _, c := range all[i].find(p.listed[i]) {
			groups[i] = append(groups[i], c.device())
		}
	}
	return groups
}

// same is true if the groups have the devices of the last time.
func (p *Publisher) same(groups []group) bool {
	return slices.EqualFunc(groups, p.listed, func(g group, names []string) bool { return g.find(names) != nil })
}
