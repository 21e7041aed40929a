package driver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/cdi"
	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/claimconfig"
	"github.com/simgpu/simgpu/driver/hardware"
)

// socketServer serves prepared devices; package deviceapi has the real one.
type socketServer interface {
	Open(dir string, device deviceapi.Device) error
	Close(dir string) error
}

// claimStore remembers claims; package checkpoint has the real one.
type claimStore interface {
	Load() ([]checkpoint.Claim, []checkpoint.Unreadable, error)
	Write(checkpoint.Claim) error
	Has(types.UID) bool
	Remove(types.UID) error
}

// claims prepares and unprepares, and knows what is prepared. Operations on different claims run in
// parallel; the mutex is held across a system call only to remove what belongs to nobody.
type claims struct {
	factory
	store     claimStore
	specs     *cdi.Directory
	sockets   socketServer
	devDir    string      // folder of the device folders
	tools     []cdi.Mount // programs that every container gets
	bootID    string
	waypoints Waypoints
	lending   bool // whole GPUs are given out by the device plugin
	// changed is called, without the mutex, after which devices are in use has changed.
	changed func()

	locks     claimLocks
	evaluated chan struct{} // closed once it is known what the inventory says

	mu        sync.Mutex
	known     map[types.UID]checkpoint.Claim
	unsettled map[types.UID]unsettledClaim
	ledger    ledger
	stock     *stock
	wanted    []stockGPU // the good inventory, nil while there is none
	noStock   error      // why there is none
}

// newClaims completes claims whose dependencies are set.
func newClaims(c *claims) *claims {
	c.changed = func() {}
	c.evaluated = make(chan struct{})
	c.known = map[types.UID]checkpoint.Claim{}
	c.unsettled = map[types.UID]unsettledClaim{}
	c.stock = newStock(nil)
	return c
}

// unsettledClaim is a claim whose checkpoint cannot be read or is lost.
type unsettledClaim struct {
	checkpoint.Unreadable
	devices []string // names it seems to have; none: it may have any
}

// conflictError is claims that want what only one can have.
type conflictError struct {
	claim  claimRef
	device string
	conflict
}

func (e *conflictError) Error() string {
	const until = "it can be given out once that claim has been unprepared"
	if e.capacity != "" {
		return e.overcommitment()
	}
	if e.counter != "" {
		var others []string
		for _, h := range e.holders {
			others = append(others, fmt.Sprintf("device %s of claim %s", h.device, h.claim))
		}
		return fmt.Sprintf("device %s of claim %s does not fit: too little of counter %s is left by %s",
			e.device, e.claim, e.counter, strings.Join(others, ", "))
	}
	holder := e.holders[0]
	if holder.device == e.device {
		return fmt.Sprintf("device %s of claim %s is prepared for claim %s: %s", e.device, e.claim, holder.claim, until)
	}
	return fmt.Sprintf("device %s of claim %s overlaps device %s, which is prepared for claim %s: %s", e.device, e.claim, holder.device, holder.claim, until)
}

// prepare makes the devices of an allocated claim usable by containers and returns them in the order
// of the allocation. For a claim that is prepared it renews whatever is missing.
func (c *claims) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	if err := checkpoint.CheckUID(claim.UID); err != nil {
		return nil, err
	}
	unlock, err := c.locks.lock(ctx, claim.UID)
	if err != nil {
		return nil, because(failedTimeout, fmt.Errorf("claim %s: wait for another operation on it: %w", klog.KObj(claim), err))
	}
	defer unlock()

	results := c.results(claim)
	for _, r := range results {
		if err := checkRequestName(r); err != nil {
			return nil, because(failedConfig, fmt.Errorf("claim %s: %w", klog.KObj(claim), err))
		}
	}
	if current, ok := c.lookup(claim.UID); ok {
		same := sameAllocation(current, results)
		if same && current.State == checkpoint.Prepared {
			return c.renew(current)
		}
		if !same {
			// Of an earlier allocation of this claim.
			if err := c.undo(current); err != nil {
				return nil, err
			}
		}
	}
	if len(results) == 0 {
		return nil, nil
	}

	select {
	case <-c.evaluated:
	case <-ctx.Done():
		return nil, because(failedTimeout, fmt.Errorf("claim %s: wait for the node's inventory: %w", klog.KObj(claim), context.Cause(ctx)))
	}
	record, err := c.reserve(claim, results)
	if err != nil {
		return nil, err
	}
	if err := c.complete(record); err != nil {
		if c.isUnsettled(claim.UID) {
			// Containers may be using it: the next attempt goes on from here.
			return nil, err
		}
		return nil, errors.Join(err, c.undo(record))
	}
	c.changed()
	return c.answer(record), nil
}

// unprepare undoes a prepare. A claim that is not prepared is no error.
func (c *claims) unprepare(ctx context.Context, uid types.UID) error {
	if checkpoint.CheckUID(uid) != nil {
		return nil // prepare refuses such a claim
	}
	unlock, err := c.locks.lock(ctx, uid)
	if err != nil {
		return because(failedTimeout, fmt.Errorf("claim of UID %s: wait for another operation on it: %w", uid, err))
	}
	defer unlock()

	if current, ok := c.lookup(uid); ok {
		return c.undo(current)
	}
	return c.forget(uid)
}

// results are the devices of the claim that are the driver's, in the order of the allocation.
func (c *claims) results(claim *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	if claim.Status.Allocation == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(claim.Status.Allocation.Devices.Results), func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver != c.driverName
	})
}

func sameAllocation(claim checkpoint.Claim, results []resourceapi.DeviceRequestAllocationResult) bool {
	return slices.EqualFunc(claim.Devices, results, func(d checkpoint.Device, r resourceapi.DeviceRequestAllocationResult) bool {
		return d.Request == r.Request && d.Pool == r.Pool && d.Device == r.Device &&
			d.AdminAccess == ptr.Deref(r.AdminAccess, false) && d.ShareID == string(ptr.Deref(r.ShareID, ""))
	})
}

func (c *claims) lookup(uid types.UID) (checkpoint.Claim, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	claim, ok := c.known[uid]
	return claim, ok
}

// reserve decides what the claim gets and takes it from all others, in memory only.
func (c *claims) reserve(claim *resourceapi.ResourceClaim, results []resourceapi.DeviceRequestAllocationResult) (checkpoint.Claim, error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	ref := claimRef{types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}, claim.UID}
	record := checkpoint.Claim{
		Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
		State: checkpoint.Preparing, BootID: c.bootID, NotUnprepared: unprepareSkipped(results),
		ExtendedResource: claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] == "true",
	}
	devices := make([]*hardware.Device, len(results))
	for i, r := range results {
		device, err := c.find(r)
		if err != nil {
			return checkpoint.Claim{}, because(failedNotFound, fmt.Errorf("claim %s, request %s: %w", ref, r.Request, err))
		}
		devices[i] = device
		record.Devices = append(record.Devices, checkpoint.Device{
			Request: r.Request, Pool: r.Pool, Device: r.Device,
			AdminAccess: ptr.Deref(r.AdminAccess, false), ShareID: string(ptr.Deref(r.ShareID, "")),
			Consumed: consumedBy(r), GPU: c.stock.gpu(device.GPU.Index).source,
		})
	}
	if err := c.configure(claim, &record, devices); err != nil {
		return checkpoint.Claim{}, because(failedConfig, err)
	}

	if err := c.blocked(claim.UID); err != nil {
		return checkpoint.Claim{}, because(failedUnsettled, fmt.Errorf("claim %s: %w", ref, err))
	}
	// What an unreadable checkpoint seemed to hold for this claim is replaced by what the claim says.
	c.ledger.remove(claim.UID)
	for i := range record.Devices {
		h := holdingOf(record, i, devices[i])
		if found := c.ledger.conflict(h); found != nil {
			c.ledger.remove(claim.UID)
			c.holdUnsettled(claim.UID)
			return checkpoint.Claim{}, &conflictError{claim: ref, device: h.device, conflict: *found}
		}
		c.ledger.add(h)
	}
	c.known[claim.UID] = record
	return record, nil
}

// find returns the device of an allocation result. The caller holds the mutex.
func (c *claims) find(r resourceapi.DeviceRequestAllocationResult) (*hardware.Device, error) {
	if r.Pool != c.nodeName {
		return nil, fmt.Errorf("device %s is in pool %q, and this node publishes pool %q only", r.Device, r.Pool, c.nodeName)
	}
	if device := c.stock.device(r.Device); device != nil {
		return device, nil
	}
	if c.noStock != nil {
		return nil, fmt.Errorf("device %s: the node has no valid inventory: %w", r.Device, c.noStock)
	}
	return nil, fmt.Errorf("pool %q has no device %s: the node's inventory may have changed since the allocation", r.Pool, r.Device)
}

// blocked is an error while a claim of which not even the devices are known may have any device. It
// does not stop a claim whose own checkpoint cannot be read: that was given its devices when it was
// known who had which.
func (c *claims) blocked(claim types.UID) error {
	if _, rebuilt := c.unsettled[claim]; rebuilt {
		return nil
	}
	for _, uid := range slices.Sorted(maps.Keys(c.unsettled)) {
		if u := c.unsettled[uid]; len(u.devices) == 0 {
			return fmt.Errorf("nothing is given out while it is unknown which devices the claim of UID %s has: its checkpoint %s cannot be read (%w). "+
				"This is settled when the kubelet prepares or unprepares that claim, or, if nothing on the node uses it, by removing the file and restarting the driver",
				uid, u.Path, u.Err)
		}
	}
	return nil
}

// configure applies the configuration in the claim to its devices.
func (c *claims) configure(claim *resourceapi.ResourceClaim, record *checkpoint.Claim, devices []*hardware.Device) error {
	set, err := claimconfig.Parse(claim, c.driverName, devices[0].GPU.Model.Vendor.ClaimConfig)
	if err != nil {
		return err
	}
	users := map[*claimconfig.Config][]int{}
	var order []*claimconfig.Config
	for i, device := range devices {
		config, err := set.For(record.Devices[i].Request, device.Partition != nil)
		if err != nil {
			return fmt.Errorf("configuration of claim %s: %w", klog.KObj(claim), err)
		}
		if config == nil || config.Sharing == nil {
			continue
		}
		if users[config] == nil {
			order = append(order, config)
		}
		users[config] = append(users[config], i)
	}
	for _, config := range order {
		uuids := make([]string, len(users[config]))
		for n, i := range users[config] {
			uuids[n] = devices[i].UUID
		}
		limits, err := config.Sharing.PinnedMemory(uuids)
		if err != nil {
			return fmt.Errorf("configuration of claim %s: %w", klog.KObj(claim), err)
		}
		for n, i := range users[config] {
			sharing := config.Sharing.String()
			if limits[n] != nil {
				sharing += ",pinnedDeviceMemoryLimit=" + limits[n].String()
			}
			record.Devices[i].Env = map[string]string{"SIMGPU_SHARING_" + envSuffix(record.Devices[i].Device): sharing}
		}
	}
	return nil
}

func holdingOf(claim checkpoint.Claim, i int, device *hardware.Device) holding {
	d := claim.Devices[i]
	return holding{
		claim:    claimRef{claim.Key(), claim.UID},
		device:   d.Device,
		gpu:      d.GPU.Index,
		hardware: device,
		admin:    d.AdminAccess,
		shareID:  d.ShareID,
		consumed: d.Consumed,
	}
}

// complete takes a reserved claim to the end, step by step.
func (c *claims) complete(claim checkpoint.Claim) error {
	// Of a claim of unknown content, which containers may be using, a crash must leave just that.
	if !c.isUnsettled(claim.UID) {
		if err := c.store.Write(claim); err != nil {
			return err
		}
	}
	c.waypoints.Reached(IntentWritten, claim.UID)
	if err := c.openSockets(claim); err != nil {
		return err
	}
	c.waypoints.Reached(SocketsOpened, claim.UID)
	if err := c.putSpec(claim); err != nil {
		return err
	}
	c.waypoints.Reached(SpecWritten, claim.UID)
	claim.State = checkpoint.Prepared
	if err := c.store.Write(claim); err != nil {
		return err
	}
	c.remember(claim)
	c.settled(claim.UID)
	c.waypoints.Reached(ClaimPrepared, claim.UID)
	return nil
}

// undo takes a claim back to nothing, whatever step it had reached. As long as it fails, the claim
// keeps its devices, and the next prepare or unprepare of the claim tries again.
func (c *claims) undo(claim checkpoint.Claim) error {
	var intentErr error
	if claim.State != checkpoint.Preparing {
		claim.State = checkpoint.Preparing
		// A full disk must not keep people from freeing it. Without the intent a crash before the end leads to
		// a prepared claim, which whoever wants it undone asks for again.
		intentErr = c.store.Write(claim)
		c.remember(claim)
	}
	c.waypoints.Reached(UndoIntentWritten, claim.UID)
	if err := c.specs.Remove(string(claim.UID)); err != nil {
		return errors.Join(intentErr, err)
	}
	c.waypoints.Reached(SpecRemoved, claim.UID)
	for _, p := range partsOf(claim) {
		if err := c.sockets.Close(c.socketDir(claim.UID, p.name)); err != nil {
			return errors.Join(intentErr, fmt.Errorf("claim %s: %w", claim.Key(), err))
		}
	}
	c.waypoints.Reached(SocketsClosed, claim.UID)
	if err := c.store.Remove(claim.UID); err != nil {
		return errors.Join(intentErr, err)
	}
	c.release(claim.UID)
	c.waypoints.Reached(ClaimRemoved, claim.UID)
	return nil
}

// forget removes whatever exists of a claim that has no readable checkpoint.
func (c *claims) forget(uid types.UID) error {
	devices, err := c.specs.Devices(string(uid))
	if err != nil {
		// A spec that cannot be read names no devices; it is removed all the same.
		devices = nil
	}
	c.mu.Lock()
	u, unsettled := c.unsettled[uid]
	c.mu.Unlock()
	if unsettled {
		devices = append(devices, u.devices...)
	}
	if err := c.specs.Remove(string(uid)); err != nil {
		return err
	}
	for _, device := range devices {
		if err := c.sockets.Close(c.socketDir(uid, device)); err != nil {
			return fmt.Errorf("claim of UID %s: %w", uid, err)
		}
	}
	if err := c.store.Remove(uid); err != nil {
		return err
	}
	if unsettled {
		c.release(uid)
	}
	return nil
}

// renew makes sure that everything of a prepared claim is in place.
func (c *claims) renew(claim checkpoint.Claim) ([]kubeletplugin.Device, error) {
	if err := c.openSockets(claim); err != nil {
		return nil, err
	}
	if err := c.putSpec(claim); err != nil {
		return nil, err
	}
	if claim.BootID != c.bootID || !c.store.Has(claim.UID) {
		claim.BootID = c.bootID
		if err := c.store.Write(claim); err != nil {
			return nil, err
		}
		c.remember(claim)
	}
	return c.answer(claim), nil
}

// refresh renews a prepared claim that nothing else works on.
func (c *claims) refresh(uid types.UID) error {
	unlock, ok := c.locks.tryLock(uid)
	if !ok {
		return nil
	}
	defer unlock()
	current, ok := c.lookup(uid)
	if !ok || current.State != checkpoint.Prepared {
		return nil
	}
	_, err := c.renew(current)
	return err
}

func (c *claims) socketDir(claim types.UID, part string) string {
	return filepath.Join(c.devDir, socketID(claim, part))
}

// hardwareOf returns what a prepared claim's device is.
func (c *claims) hardwareOf(claim checkpoint.Claim, name string) (*hardware.Device, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if device := c.stock.device(name); device != nil {
		return device, nil
	}
	return nil, because(failedNotFound, fmt.Errorf("claim %s: device %s cannot be described any more: this release of the driver does not know it", claim.Key(), name))
}

func (c *claims) openSockets(claim checkpoint.Claim) error {
	for _, p := range partsOf(claim) {
		device, err := c.hardwareOf(claim, p.device)
		if err != nil {
			return err
		}
		if err := c.sockets.Open(c.socketDir(claim.UID, p.name), p.served(device)); err != nil {
			return fmt.Errorf("claim %s: %w", claim.Key(), err)
		}
	}
	return nil
}

func (c *claims) putSpec(claim checkpoint.Claim) error {
	spec := cdi.Claim{UID: string(claim.UID), Common: cdi.Edits{Env: map[string]string{}, Mounts: c.tools}}
	for _, p := range partsOf(claim) {
		device, err := c.hardwareOf(claim, p.device)
		if err != nil {
			return err
		}
		for _, env := range device.GPU.Model.Vendor.Env {
			spec.Common.Env[env.Name] = env.Value
		}
		edits := cdi.Edits{
			Env:   map[string]string{"SIMGPU_DEVICE_" + envSuffix(p.device): device.UUID},
			Nodes: device.Files(),
			Mounts: []cdi.Mount{{
				HostPath:      c.socketDir(claim.UID, p.name),
				ContainerPath: filepath.Join(deviceapi.DefaultDir, socketID(claim.UID, p.name)),
				NoExec:        true,
			}},
		}
		maps.Copy(edits.Env, p.env)
		spec.Devices = append(spec.Devices, cdi.Device{Name: p.name, Edits: edits})
	}
	_, err := c.specs.Put(spec)
	return err
}

// answer is what the kubelet is told about a prepared claim.
func (c *claims) answer(claim checkpoint.Claim) []kubeletplugin.Device {
	c.mu.Lock()
	defer c.mu.Unlock()
	devices := make([]kubeletplugin.Device, len(claim.Devices))
	for i, d := range claim.Devices {
		devices[i] = kubeletplugin.Device{
			Requests:     []string{d.Request},
			PoolName:     d.Pool,
			DeviceName:   d.Device,
			CDIDeviceIDs: []string{c.specs.DeviceID(string(claim.UID), partName(d.Device, d.ShareID))},
		}
		if d.ShareID != "" {
			devices[i].ShareID = ptr.To(types.UID(d.ShareID))
		}
		if device := c.stock.device(d.Device); device != nil {
			devices[i].Metadata = metadataOf(device)
		}
	}
	return devices
}

func (c *claims) remember(claim checkpoint.Claim) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known[claim.UID] = claim
}

// release gives the devices of a claim back.
func (c *claims) release(uid types.UID) {
	c.mu.Lock()
	delete(c.known, uid)
	delete(c.unsettled, uid)
	c.ledger.remove(uid)
	if slices.ContainsFunc(c.stock.gpus, func(g stockGPU) bool { return g.retiring }) {
		c.restock()
	}
	c.mu.Unlock()
	c.changed()
}

// fleet is what the node has to publish.
func (c *claims) fleet() fleet {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.wanted == nil {
		return fleet{fault: c.noStock}
	}
	inUse, taken := c.ledger.usage()
	return fleet{stock: c.stock, inUse: inUse, taken: taken, lending: c.lending, lent: c.ledger.lent()}
}

func (c *claims) currentStock() *stock {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stock
}

// preparedCount returns how many claims are prepared and how many devices they have, each counted once.
func (c *claims) preparedCount() (claims, devices int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := map[string]bool{}
	for _, claim := range c.known {
		if claim.State != checkpoint.Prepared {
			continue
		}
		claims++
		for _, device := range claim.Devices {
			names[device.Device] = true
		}
	}
	return claims, len(names)
}

// has tells whether the node has a claim, or may have it.
func (c *claims) has(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, known := c.known[uid]
	_, unsettled := c.unsettled[uid]
	return known || unsettled
}

func (c *claims) isUnsettled(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.unsettled[uid]
	return ok
}

// settled notes that it is known again what a claim has.
func (c *claims) settled(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.unsettled, uid)
}

// restock works out what the node has. The caller holds the mutex.
func (c *claims) restock() {
	c.stock = c.stock.merge(c.wanted, func(gpu int) bool { return len(c.ledger.inUse(gpu)) > 0 })
	c.ledger.rebind(c.stock)
}

// apply makes the GPUs of an inventory the node's, at once where they are not in use. An error instead
// of GPUs says that there is no good inventory and changes nothing if there was one.
func (c *claims) apply(gpus []stockGPU, err error) {
	c.mu.Lock()
	switch {
	case err == nil:
		// Not nil for a node that is to have no GPUs.
		c.wanted, c.noStock = append([]stockGPU{}, gpus...), nil
		c.restock()
	case c.wanted == nil:
		c.noStock = err
	}
	select {
	case <-c.evaluated:
	default:
		close(c.evaluated)
	}
	c.mu.Unlock()
	c.changed()
}

// holdUnsettled enters what a claim with an unreadable checkpoint seems to have. The caller holds the
// mutex.
func (c *claims) holdUnsettled(uid types.UID) {
	u, ok := c.unsettled[uid]
	if !ok {
		return
	}
	for _, name := range u.devices {
		h := holding{claim: claimRef{u.Claim, uid}, device: name, gpu: unknownGPU}
		if device := c.stock.device(name); device != nil {
			h.gpu, h.hardware = device.GPU.Index, device
		}
		c.ledger.add(h)
	}
}

// socketFolders lists the device folders.
func (c *claims) socketFolders() ([]string, error) {
	entries, err := os.ReadDir(c.devDir)
	if err != nil {
		return nil, fmt.Errorf("device folders: %w", err)
	}
	var names []string
	for _, e := range entries {
		if len(e.Name()) == socketIDLength {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// present is the claims that the node has at one moment.
type present struct {
	known         map[types.UID]types.NamespacedName
	socketFolders map[string]bool
	unsettled     map[types.UID]bool // of unknown content
}

func (p present) has(uid types.UID) bool {
	_, known := p.known[uid]
	return known || p.unsettled[uid]
}

// holdStill calls do while no claim comes or goes. That is for what is rare and quick.
func (c *claims) holdStill(do func(present)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := present{known: map[types.UID]types.NamespacedName{}, socketFolders: map[string]bool{}, unsettled: map[types.UID]bool{}}
	for uid, claim := range c.known {
		now.known[uid] = claim.Key()
		for _, p := range partsOf(claim) {
			now.socketFolders[socketID(uid, p.name)] = true
		}
	}
	for uid := range c.unsettled {
		now.unsettled[uid] = true
	}
	do(now)
}
