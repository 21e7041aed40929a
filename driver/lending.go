package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/deviceplugin"
	"github.com/simgpu/simgpu/driver/hardware"
)

// A GPU that the kubelet gives out as an extended resource, through the device plugin API, is lent: the driver keeps it like the
// device of a claim, so that it is prepared, restored and in nobody else's way like one, under a UID that no claim has.
const (
	lentPrefix    = "lent-"
	lentNamespace = "device-plugin" // for messages
	lentRequest   = "gpu"
)

const (
	// lookAtPods is how often the driver asks the kubelet which lent GPUs are in use: it tells nobody when a container ends.
	lookAtPods = 5 * time.Second
	// unusedFor is how long the kubelet has to say that a lent GPU is in no container's hands, since one that is starting knows
	// less than it will.
	unusedFor = 30 * time.Second
)

func isLent(uid types.UID) bool { return strings.HasPrefix(string(uid), lentPrefix) }

// lentTaint is on devices that claims still have while their GPU is to be lent.
const lentTaint = "simgpu.dev/device-plugin"

// lent returns the GPUs that are lent, by index.
func (l *ledger) lent() map[int]bool {
	var lent map[int]bool
	for gpu, holdings := range l.byGPU {
		if slices.ContainsFunc(holdings, func(h holding) bool { return isLent(h.claim.UID) }) {
			if lent == nil {
				lent = map[int]bool{}
			}
			lent[gpu] = true
		}
	}
	return lent
}

// wholeOf is the device that is all of a GPU, nil for one that is divided for good.
func wholeOf(gpu *hardware.GPU) *hardware.Device {
	i := slices.IndexFunc(gpu.Devices, func(d *hardware.Device) bool { return d.Partition == nil })
	if i < 0 {
		return nil
	}
	return gpu.Devices[i]
}

// lend makes a GPU usable by a container, and returns its CDI names.
func (c *claims) lend(ctx context.Context, device string) ([]string, error) {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: lentNamespace, Name: device, UID: types.UID(lentPrefix + device)}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Request: lentRequest, Driver: c.driverName, Pool: c.nodeName, Device: device}},
	}}
	prepared, err := c.prepare(ctx, claim)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, p := range prepared {
		names = append(names, p.CDIDeviceIDs...)
	}
	return names, nil
}

// lentDevices are the devices that are lent, by their UID in the checkpoint.
func (c *claims) lentDevices() map[types.UID]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	devices := map[types.UID]string{}
	for uid, claim := range c.known {
		if isLent(uid) && claim.State == checkpoint.Prepared {
			devices[uid] = claim.Devices[0].Device
		}
	}
	return devices
}

// lending gives out GPUs through the device plugin API, and takes back those that no container has any more.
type lending struct {
	claims     *claims
	conditions func(*stock) *conditions
	// used tells which devices of the resource containers have, by their ID; nil where nobody can say.
	used func(ctx context.Context) (map[string]bool, error)
	now  func() time.Time

	mu     sync.Mutex
	unused map[types.UID]time.Time // since when the kubelet says so
}

// extended are the devices of claims that the scheduler made for an extended resource.
func (c *claims) extended() map[string]bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	devices := map[string]bool{}
	for _, claim := range c.known {
		if claim.ExtendedResource {
			for _, device := range claim.Devices {
				devices[device.Device] = true
			}
		}
	}
	return devices
}

// devices for the kubelet: those of GPUs that claims have parts of are not healthy, so that the kubelet gives them to nobody.
// Where the scheduler has made the claim for an extended resource it goes on to count what the pod asks for against what the
// node offers. Such a GPU would count twice if it were not offered: it is healthy, and the kubelet is told to take another.
func (l *lending) devices() []deviceplugin.Device {
	f := l.claims.fleet()
	if f.stock == nil {
		return nil
	}
	broken := l.conditions(f.stock)
	extended := l.claims.extended()
	var list []deviceplugin.Device
	for _, gpu := range f.stock.gpus {
		if whole := wholeOf(gpu.GPU); whole != nil {
			claimed := !f.lent[gpu.Index] && slices.ContainsFunc(gpu.Devices, func(d *hardware.Device) bool { return f.taken[d.Name] })
			taken := claimed && extended[whole.Name]
			healthy := (!claimed || taken) && !gpu.retiring && (broken == nil || !broken.devices[whole.Name].keepsAway())
			list = append(list, deviceplugin.Device{ID: whole.UUID, Healthy: healthy, Taken: taken})
		}
	}
	return list
}

// allocate lends the GPUs of these IDs. Where one cannot be had, none of those that were free before are kept.
func (l *lending) allocate(ctx context.Context, ids []string) ([]string, error) {
	l.mu.Lock() // what is given out again must not be taken back meanwhile
	defer l.mu.Unlock()
	stock := l.claims.currentStock()
	before := l.claims.lentDevices()
	var names []string
	var added []types.UID
	for _, id := range ids {
		device, err := deviceOfID(stock, id)
		var more []string
		if err == nil {
			more, err = l.claims.lend(ctx, device)
		}
		if err != nil {
			for _, uid := range added {
				err = errors.Join(err, l.claims.unprepare(ctx, uid))
			}
			return nil, err
		}
		uid := types.UID(lentPrefix + device)
		if _, was := before[uid]; !was {
			added = append(added, uid)
		}
		delete(l.unused, uid)
		names = append(names, more...)
	}
	return names, nil
}

func deviceOfID(s *stock, id string) (string, error) {
	for _, gpu := range s.gpus {
		if whole := wholeOf(gpu.GPU); whole != nil && whole.UUID == id {
			return whole.Name, nil
		}
	}
	return "", fmt.Errorf("the node has no GPU %s", id)
}

// run takes back what is not used any more, until the context ends.
func (l *lending) run(ctx context.Context) {
	ticker := time.NewTicker(lookAtPods)
	defer ticker.Stop()
	told := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		err := l.takeBack(ctx)
		if err != nil && err.Error() != told {
			klog.FromContext(ctx).Error(err, "Lent GPUs stay lent")
		}
		if told = ""; err != nil {
			told = err.Error()
		}
	}
}

// takeBack releases the GPUs that no container has had for a while, by what the kubelet says.
func (l *lending) takeBack(ctx context.Context) error {
	lent := l.claims.lentDevices()
	if len(lent) == 0 {
		return nil
	}
	if l.used == nil {
		return fmt.Errorf("%d GPUs are lent, and without the kubelet's pod resources nobody can tell which are still in use: set --pod-resources-socket", len(lent))
	}
	used, err := l.used(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.unused = nil // silence counts for nothing
		return err
	}
	stock := l.claims.currentStock()
	since := map[types.UID]time.Time{}
	for uid, name := range lent {
		device := stock.device(name)
		if device != nil && used[device.UUID] {
			continue
		}
		first, before := l.unused[uid]
		if !before {
			first = l.now()
		}
		if l.now().Sub(first) < unusedFor {
			since[uid] = first
			continue
		}
		if err := l.claims.unprepare(ctx, uid); err != nil {
			return err
		}
		klog.FromContext(ctx).Info("A lent GPU is back", "device", name)
	}
	l.unused = since
	return nil
}
