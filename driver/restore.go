package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/driver/checkpoint"
)

// restored is what a start found.
type restored struct {
	// prepared claims have their sockets and CDI specs again, except for those in failed.
	prepared int
	// earlierBoot of them were prepared before the node's last boot.
	earlierBoot int
	// undone were in the middle of a prepare or unprepare.
	undone int
	// unreadable checkpoints are to be settled, unless they are strays.
	unreadable []checkpoint.Unreadable
	// lost checkpoints are to be settled, too: of these claims there is a CDI spec.
	lost []types.UID
	// failed is what could not be put right. The claims in question keep their devices.
	failed []error
}

// restore brings the claims of an earlier process back: undoes what was half-way, and renews sockets
// and CDI specs of the rest. It needs neither the API nor the inventory. It comes before everything
// else.
func (c *claims) restore(ctx context.Context) (restored, error) {
	var found restored
	records, unreadable, err := c.store.Load()
	if err != nil {
		return found, err
	}
	found.unreadable = unreadable
	lost, err := c.findLost(records, unreadable)
	if err != nil {
		return found, err
	}
	for _, u := range lost {
		found.lost = append(found.lost, u.UID)
	}
	unsettled := slices.DeleteFunc(slices.Clone(unreadable), func(u checkpoint.Unreadable) bool { return u.Stray })
	c.hold(ctx, records, append(unsettled, lost...))

	for _, claim := range records {
		if claim.State == checkpoint.Preparing {
			found.undone++
			if err := c.undo(claim); err != nil {
				found.failed = append(found.failed, fmt.Errorf("undo an unfinished operation: %w", err))
			}
			continue
		}
		found.prepared++
		if claim.BootID != c.bootID {
			found.earlierBoot++
		}
		if _, err := c.renew(claim); err != nil {
			found.failed = append(found.failed, err)
		}
	}
	return found, nil
}

// errLost is a claim with a CDI spec, but without a checkpoint. No crash leaves that, since the checkpoint is
// written first and removed last, so somebody has removed it. Containers may be using the spec.
var errLost = errors.New("there is no checkpoint, only a CDI spec")

func (c *claims) findLost(records []checkpoint.Claim, unreadable []checkpoint.Unreadable) ([]checkpoint.Unreadable, error) {
	uids, err := c.specs.List()
	if err != nil {
		return nil, err
	}
	has := map[string]bool{}
	for _, claim := range records {
		has[string(claim.UID)] = true
	}
	for _, u := range unreadable {
		has[string(u.UID)] = true
	}
	var lost []checkpoint.Unreadable
	for _, uid := range uids {
		// A spec that nothing can be made out of is of no use to any container.
		if devices, err := c.specs.Devices(uid); !has[uid] && err == nil && len(devices) > 0 {
			lost = append(lost, checkpoint.Unreadable{UID: types.UID(uid), Err: errLost})
		}
	}
	return lost, nil
}

// hold enters who has what, as far as is known.
func (c *claims) hold(ctx context.Context, records []checkpoint.Claim, unreadable []checkpoint.Unreadable) {
	c.mu.Lock()
	defer c.mu.Unlock()

	var gpus []stockGPU
	for _, claim := range records {
		for _, d := range claim.Devices {
			if slices.ContainsFunc(gpus, func(g stockGPU) bool { return g.Index == d.GPU.Index }) {
				continue
			}
			gpu, err := c.fromSource(d.GPU)
			if err != nil {
				klog.FromContext(ctx).Error(err, "The GPU of a prepared claim cannot be described any more; it stays reserved", "claim", claim.Key(), "device", d.Device)
				continue
			}
			gpu.retiring = true // until an inventory says otherwise
			gpus = append(gpus, gpu)
		}
	}
	c.stock = newStock(gpus)
	for _, claim := range records {
		c.known[claim.UID] = claim
		for i, d := range claim.Devices {
			c.ledger.add(holdingOf(claim, i, c.stock.device(d.Device)))
		}
	}
	for _, u := range unreadable {
		devices, err := c.specs.Devices(string(u.UID))
		if err != nil {
			devices = nil
		}
		for i := range devices {
			devices[i] = deviceOfPart(devices[i])
		}
		for _, name := range u.Devices {
			if !slices.Contains(devices, name) {
				devices = append(devices, name)
			}
		}
		c.unsettled[u.UID] = unsettledClaim{Unreadable: u, devices: devices}
		c.holdUnsettled(u.UID)
	}
}

// preparedKeys are the claims that are prepared or being prepared, by UID.
func (c *claims) preparedKeys() map[types.UID]types.NamespacedName {
	c.mu.Lock()
	defer c.mu.Unlock()
	keys := make(map[types.UID]types.NamespacedName, len(c.known))
	for uid, claim := range c.known {
		keys[uid] = claim.Key()
	}
	return keys
}

// unsettledClaims are the claims whose checkpoint could not be read.
func (c *claims) unsettledClaims() []checkpoint.Unreadable {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []checkpoint.Unreadable
	for _, u := range c.unsettled {
		all = append(all, u.Unreadable)
	}
	slices.SortFunc(all, func(a, b checkpoint.Unreadable) int { return compareUID(a.UID, b.UID) })
	return all
}

func compareUID(a, b types.UID) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}
