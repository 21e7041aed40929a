package driver

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/simgpu/simgpu/driver/hardware"
)

// unknownGPU is the index of a device of which only the name is known.
const unknownGPU = -1

// claimRef names a claim in messages.
type claimRef struct {
	types.NamespacedName
	UID types.UID
}

func (c claimRef) String() string {
	if c.Name == "" {
		return fmt.Sprintf("of UID %s", c.UID)
	}
	return fmt.Sprintf("%s (UID %s)", c.NamespacedName, c.UID)
}

// holding is one device that a claim has.
type holding struct {
	claim  claimRef
	device string
	gpu    int // index, or unknownGPU
	// hardware is nil while it is not known what the device is.
	hardware *hardware.Device
	// admin access takes the device from nobody.
	admin   bool
	shareID string
	// consumed is what a share takes of the capacities of the device.
	consumed map[string]resource.Quantity
}

// ledger knows which claim has which device. Its cost does not depend on the number of claims, only on
// how many devices of one GPU are in use. It is not safe for concurrent use.
type ledger struct {
	byGPU map[int][]holding
}

// conflict is what stands against giving out a device.
type conflict struct {
	// holders have what the device would take.
	holders []holding
	// counter is what they and the device together take too much of; "" where one of them alone is in
	// the way.
	counter string
	// capacity is that of which shares of the device take too much; "" for other conflicts.
	capacity   string
	of, wanted resource.Quantity
}

// conflict returns nil for a device that can be given out.
func (l *ledger) conflict(h holding) *conflict {
	if h.admin {
		return nil
	}
	for _, gpu := range []int{h.gpu, unknownGPU} {
		for _, other := range l.byGPU[gpu] {
			if h.excludes(other) {
				return &conflict{holders: []holding{other}}
			}
		}
	}
	if found := l.overcommitted(h); found != nil {
		return found
	}
	return l.exhausted(h)
}

// exhausted finds a counter of the GPU that has enough for any two devices in use but not for all.
func (l *ledger) exhausted(h holding) *conflict {
	if h.hardware == nil || h.hardware.GPU.CounterSet == nil {
		return nil
	}
	counters := h.hardware.GPU.CounterSet.Counters
	for _, name := range slices.Sorted(maps.Keys(counters)) {
		left := counters[name].Value.DeepCopy()
		left.Sub(consumption(h.hardware, name))
		var holders []holding
		for _, other := range l.byGPU[h.gpu] {
			// A share of a device counts once, with the first holder of the device.
			again := slices.ContainsFunc(holders, func(o holding) bool { return o.device == other.device })
			if other.admin || other.hardware == nil || again || other.device == h.device {
				continue
			}
			left.Sub(consumption(other.hardware, name))
			holders = append(holders, other)
		}
		if left.Sign() < 0 {
			return &conflict{holders: holders, counter: name}
		}
	}
	return nil
}

func consumption(device *hardware.Device, counter string) resource.Quantity {
	var total resource.Quantity
	for _, consumption := range device.Published.ConsumesCounters {
		total.Add(consumption.Counters[counter].Value)
	}
	return total
}

func (h holding) excludes(other holding) bool {
	switch {
	case h.admin || other.admin:
		return false
	case h.device == other.device:
		shares := h.shareID != "" && other.shareID != "" && h.shareID != other.shareID && (h.hardware == nil || h.hardware.Shared())
		return !shares
	case h.hardware != nil && other.hardware != nil:
		return h.hardware.Overlaps(other.hardware)
	}
	// What an unknown device of the same GPU takes from it is unknown, too.
	return h.gpu == other.gpu && h.gpu != unknownGPU
}

func (l *ledger) add(h holding) {
	if l.byGPU == nil {
		l.byGPU = map[int][]holding{}
	}
	l.byGPU[h.gpu] = append(l.byGPU[h.gpu], h)
}

func (l *ledger) remove(uid types.UID) {
	for gpu, holdings := range l.byGPU {
		holdings = slices.DeleteFunc(holdings, func(h holding) bool { return h.claim.UID == uid })
		if len(holdings) == 0 {
			delete(l.byGPU, gpu)
		} else {
			l.byGPU[gpu] = holdings
		}
	}
}

// rebind looks all devices up again after the hardware of the node has changed.
func (l *ledger) rebind(s *stock) {
	old := l.byGPU
	l.byGPU = nil
	for gpu, holdings := range old {
		for _, h := range holdings {
			h.hardware = s.device(h.device)
			if h.hardware != nil && gpu == unknownGPU {
				h.gpu = h.hardware.GPU.Index
			}
			l.add(h)
		}
	}
}

// inUse returns the devices of a GPU that claims have, including administrative access.
func (l *ledger) inUse(gpu int) []holding { return l.byGPU[gpu] }

// usage returns the names of the devices that claims have, and of those that claims have for themselves: not
// by administrative access.
func (l *ledger) usage() (inUse, taken map[string]bool) {
	inUse, taken = map[string]bool{}, map[string]bool{}
	for _, holdings := range l.byGPU {
		for _, h := range holdings {
			inUse[h.device] = true
			if !h.admin {
				taken[h.device] = true
			}
		}
	}
	return inUse, taken
}
