package replay

import (
	"slices"

	"github.com/simgpu/simgpu/driver/order"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// Same is true if two policies that never change their order list the devices of each kind that mixes
// ask for in the same order: no claim can tell them apart.
func (n *Node) Same(a, b Policy) bool {
	if a.Order == order.Adaptive || b.Order == order.Adaptive {
		return a == b
	}
	kinds := []string{wholeGPU}
	for kind := range n.profiles {
		kinds = append(kinds, kind)
	}
	list := func(p Policy, kind string) []string {
		groups := order.NewPublisher(p.Order).Groups(n.Node, deviceslices.Split, nil)
		if p.Order == nvidia {
			groups = nvidiaGroups(n.Node)
		}
		var names []string
		for _, device := range slices.Concat(groups...) {
			if n.is(device, kind) {
				names = append(names, device.Name)
			}
		}
		return names
	}
	return !slices.ContainsFunc(kinds, func(kind string) bool { return !slices.Equal(list(a, kind), list(b, kind)) })
}
