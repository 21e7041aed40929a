package replay

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/simgpu/simgpu/driver/order"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// Timing is how long the allocator takes for a claim for the smallest partition: the median of several
// times.
type Timing struct {
	Order order.Order `json:"order"`
	GPUs  int         `json:"gpus"`
	// First is on an empty node, Last where only the last GPU has room, None where no GPU has.
	First, Last, None time.Duration
}

// Time measures the allocator on the node.
func (n *Node) Time(ctx context.Context, o order.Order, times int) (Timing, error) {
	scheduler, err := newScheduler(n)
	if err != nil {
		return Timing{}, err
	}
	timing := Timing{Order: o, GPUs: len(n.GPUs)}
	for _, c := range []struct {
		taken  int // GPUs that are not divided
		fits   bool
		result *time.Duration
	}{
		{0, true, &timing.First},
		{len(n.GPUs) - 1, true, &timing.Last},
		{len(n.GPUs), false, &timing.None},
	} {
		taken := map[string]bool{}
		for _, gpu := range n.GPUs[:c.taken] {
			taken[gpu.Devices[n.of(wholeGPU)[0]].Name] = true
		}
		// The order as if the driver did not know yet: what is measured is the walk through the devices.
		scheduler.see(order.NewPublisher(o).Groups(n.Node, deviceslices.Split, nil))
		scheduler.allocated.Clear()
		for name := range taken {
			scheduler.allocated.Insert(scheduler.id(name))
		}
		var took []time.Duration
		for range times + 1 {
			start := time.Now()
			device, err := scheduler.allocate(ctx, "1g")
			if err != nil {
				return Timing{}, err
			}
			took = append(took, time.Since(start))
			if (device != "") != c.fits {
				return Timing{}, fmt.Errorf("%d GPUs, %d of them taken: a claim got %q", len(n.GPUs), c.taken, device)
			}
			if device != "" {
				scheduler.release(device)
			}
		}
		took = took[1:] // the first one compiles expressions
		slices.Sort(took)
		*c.result = took[len(took)/2]
	}
	return timing, nil
}
