package driver

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/hardware"
)

// part is what a claim has of one device: all of it, or one share. It has a socket and a CDI device of its
// own.
type part struct {
	// name is that of the CDI device, and unique in the claim.
	name   string
	device string
	share  bool
	// consumed is what a share takes of the capacities of the device.
	consumed map[string]resource.Quantity
	env      map[string]string
}

// partsOf returns the parts of a claim, each once, in the order of the claim.
func partsOf(claim checkpoint.Claim) []part {
	var parts []part
	for _, d := range claim.Devices {
		name := partName(d.Device, d.ShareID)
		i := slices.IndexFunc(parts, func(p part) bool { return p.name == name })
		if i < 0 {
			i = len(parts)
			parts = append(parts, part{name: name, device: d.Device, share: d.ShareID != "", consumed: d.Consumed, env: map[string]string{}})
		}
		maps.Copy(parts[i].env, d.Env)
	}
	return parts
}

// shareMark stands between the name of a device and what tells its shares apart. No name of a device has it.
const shareMark = "-share-"

func partName(device, shareID string) string {
	if shareID == "" {
		return device
	}
	digest := sha256.Sum256([]byte(shareID))
	return device + shareMark + hex.EncodeToString(digest[:4])
}

// deviceOfPart is the device of which a part has that name.
func deviceOfPart(name string) string {
	device, _, _ := strings.Cut(name, shareMark)
	return device
}

// served is a part as the device API describes it: a share looks like a smaller device.
func (p part) served(device *hardware.Device) deviceapi.Device {
	served := servedDevice(device)
	if share := device.ShareMiB(p.consumed); p.share && share < device.MemoryMiB {
		served.ShareBytes = share * deviceapi.MiB
	}
	return served
}

// consumedBy is what an allocation result takes of the capacities of its device.
func consumedBy(r resourceapi.DeviceRequestAllocationResult) map[string]resource.Quantity {
	if r.ShareID == nil || len(r.ConsumedCapacity) == 0 {
		return nil
	}
	consumed := make(map[string]resource.Quantity, len(r.ConsumedCapacity))
	for name, amount := range r.ConsumedCapacity {
		consumed[string(name)] = amount
	}
	return consumed
}

// overcommitted finds a capacity of the device that has too little left for another share of it.
func (l *ledger) overcommitted(h holding) *conflict {
	if h.hardware == nil || h.shareID == "" {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(h.consumed)) {
		capacity, ok := h.hardware.Published.Capacity[resourceapi.QualifiedName(name)]
		if !ok {
			continue
		}
		left := capacity.Value.DeepCopy()
		left.Sub(h.consumed[name])
		var holders []holding
		for _, other := range l.byGPU[h.gpu] {
			if taken, has := other.consumed[name]; has && other.device == h.device && !other.admin && !taken.IsZero() {
				left.Sub(taken)
				holders = append(holders, other)
			}
		}
		if left.Sign() < 0 {
			return &conflict{holders: holders, capacity: name, of: capacity.Value, wanted: h.consumed[name]}
		}
	}
	return nil
}

// overcommitment says which shares leave too little for another.
func (e *conflictError) overcommitment() string {
	var others []string
	for _, h := range e.holders {
		taken := h.consumed[e.capacity]
		others = append(others, fmt.Sprintf("claim %s (%s)", h.claim, taken.String()))
	}
	if len(others) == 0 {
		others = []string{"nobody"}
	}
	return fmt.Sprintf("share of device %s for claim %s does not fit: it takes %s of the capacity %s, which is %s and in use by %s",
		e.device, e.claim, e.wanted.String(), e.capacity, e.of.String(), strings.Join(others, ", "))
}
