package deviceapi

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
)

// errTooManyLeases refuses a lease beyond maxLeases of one socket.
var errTooManyLeases = errors.New("too many leases on this socket")

// ledger knows which devices are served and who holds how much memory of them. It
// is keyed by device UUID, not by socket: two claims that show the same device (a
// shared device, admin access) draw on the same memory.
type ledger struct {
	mu       sync.Mutex
	gpus     map[string]GPU      // the node's GPUs, by UUID
	health   map[string]Health   // of GPUs and partitions that are not healthy, by UUID
	accounts map[string]*account // open devices, by UUID
}

// account is one open device.
type account struct {
	device  Device
	sockets int // number of folders that show it
	// shares are the folders that give access to a share, and its size.
	shares map[string]int64
	holds  map[holdKey]*hold
}

// holdKey names a lease. The socket is part of it, so that no client can name, and
// so take over, the lease of another claim.
type holdKey struct {
	dir     string
	leaseID string
}

// hold is one granted lease.
type hold struct {
	Process
	key         holdKey
	utilization int
	// replaced is closed when a newer stream took the lease over.
	replaced chan struct{}
	// lost is closed when the GPU is lost.
	lost chan struct{}
}

func newLedger() *ledger {
	return &ledger{gpus: map[string]GPU{}, accounts: map[string]*account{}}
}

// setGPUs replaces the list of the node's GPUs.
func (l *ledger) setGPUs(gpus []GPU) {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.gpus)
	for _, g := range gpus {
		l.gpus[g.UUID] = g
	}
}

// setHealth replaces what is broken. What is held of GPUs that are lost is gone.
func (l *ledger) setHealth(health map[string]Health) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.health = health
	for _, a := range l.accounts {
		if !l.isLost(a) {
			continue
		}
		for key, h := range a.holds {
			close(h.lost)
			delete(a.holds, key)
		}
	}
}

func (l *ledger) isLost(a *account) bool { return l.health[a.device.GPU.UUID].Lost }

// open adds a socket to the account of d.
func (l *ledger) open(dir string, d Device) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[d.UUID()]
	if a == nil {
		a = &account{holds: map[holdKey]*hold{}, shares: map[string]int64{}}
		l.accounts[d.UUID()] = a
	}
	a.describe(dir, d)
	a.sockets++
}

// update replaces the description of an open device.
func (l *ledger) update(dir string, d Device) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.accounts[d.UUID()]; a != nil {
		a.describe(dir, d)
	}
}

func (a *account) describe(dir string, d Device) {
	if d.ShareBytes > 0 {
		a.shares[dir] = d.ShareBytes
	} else {
		delete(a.shares, dir)
	}
	d.ShareBytes = 0
	a.device = d
}

// close removes a socket from the account of the device and everything held
// through it.
func (l *ledger) close(uuid, dir string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[uuid]
	if a == nil {
		return
	}
	for key := range a.holds {
		if key.dir == dir {
			delete(a.holds, key)
		}
	}
	delete(a.shares, dir)
	if a.sockets--; a.sockets <= 0 {
		delete(l.accounts, uuid)
	}
}

// acquire grants h on the device, or fails with an OutOfMemoryError,
// ErrDeviceLost or errTooManyLeases. A lease with the same key is replaced in one step, so that a
// re-hold never competes with itself.
func (l *ledger) acquire(uuid string, h *hold) (free, total int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[uuid]
	if a == nil {
		return 0, 0, fmt.Errorf("device %s is not prepared", uuid)
	}
	if l.isLost(a) {
		return 0, 0, ErrDeviceLost
	}
	old := a.holds[h.key]
	total = a.device.MemoryBytes()
	free = max(total-l.used(a), 0)
	if share, ok := a.shares[h.key.dir]; ok {
		total = share
		free = min(free, max(share-a.heldThrough(h.key.dir), 0))
	}
	if old != nil {
		free += old.Memory
	} else if a.leases(h.key.dir) >= maxLeases {
		return 0, 0, errTooManyLeases
	}
	if h.Memory > free {
		return 0, 0, &OutOfMemoryError{DeviceUUID: uuid, Requested: h.Memory, Free: free, Total: total}
	}
	if old != nil {
		close(old.replaced)
	}
	a.holds[h.key] = h
	return free - h.Memory, total, nil
}

// release gives h back, unless a newer stream took the lease over.
func (l *ledger) release(uuid string, h *hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.accounts[uuid]; a != nil && a.holds[h.key] == h {
		delete(a.holds, h.key)
	}
}

// setUtilization records what the holder reports.
func (l *ledger) setUtilization(h *hold, percent int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h.utilization = percent
}

// leases counts the leases held through one socket.
func (a *account) leases(dir string) int {
	n := 0
	for key := range a.holds {
		if key.dir == dir {
			n++
		}
	}
	return n
}

// held is what is held on the account itself.
func (a *account) held() int64 {
	var sum int64
	for _, h := range a.holds {
		sum += h.Memory
	}
	return sum
}

// heldThrough is what is held through one socket.
func (a *account) heldThrough(dir string) int64 {
	var sum int64
	for key, h := range a.holds {
		if key.dir == dir {
			sum += h.Memory
		}
	}
	return sum
}

// used is what cannot be granted any more: for a partition what is held on it, for
// a whole GPU what is held on it and on its partitions.
func (l *ledger) used(a *account) int64 {
	if a.device.Partition != nil {
		return a.held()
	}
	return l.usedOnGPU(a.device.GPU.UUID)
}

func (l *ledger) usedOnGPU(uuid string) int64 {
	var sum int64
	for _, a := range l.accounts {
		if a.device.GPU.UUID == uuid {
			sum += a.held()
		}
	}
	return sum
}

// utilization of the device in percent.
func (a *account) utilization() int {
	sum := 0
	for _, h := range a.holds {
		sum += h.utilization
	}
	return min(sum, 100)
}

// migMode is the current mode of a GPU: a prepared partition means that it is on.
func (l *ledger) migMode(g GPU) MIGMode {
	for _, a := range l.accounts {
		if a.device.Partition != nil && a.device.GPU.UUID == g.UUID {
			return MIGEnabled
		}
	}
	return g.MIGMode
}

// device is the snapshot of one open device, as the socket in dir shows it.
func (l *ledger) device(uuid, dir string) Snapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[uuid]
	if a == nil {
		return Snapshot{}
	}
	share, limited := a.shares[dir]
	if limited {
		a = a.through(dir)
	}
	g := GPUStatus{GPU: a.device.GPU}
	g.MIGMode = l.migMode(g.GPU)
	if a.device.Partition != nil {
		g.Health = Health{Lost: l.isLost(a)}
		g.Partitions = []PartitionStatus{l.partition(a, ownPID)}
	} else {
		l.whole(&g, a, ownPID)
	}
	if limited {
		g.limit(share, a.held())
	}
	return Snapshot{GPUs: []GPUStatus{g}}
}

// through is the account as if nothing were held but through one socket.
func (a *account) through(dir string) *account {
	own := &account{device: a.device, holds: map[holdKey]*hold{}}
	for key, h := range a.holds {
		if key.dir == dir {
			own.holds[key] = h
		}
	}
	return own
}

// limit makes the status of a device that of a share of it.
func (g *GPUStatus) limit(share, held int64) {
	if len(g.Partitions) > 0 {
		g.Partitions[0].MemoryBytes, g.Partitions[0].MemoryUsed = share, held
		return
	}
	g.MemoryBytes, g.MemoryUsed = share, held
}

// node is the snapshot of the whole node.
func (l *ledger) node() Snapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	byUUID := map[string]*GPUStatus{}
	show := func(g GPU) *GPUStatus {
		status := byUUID[g.UUID]
		if status == nil {
			status = &GPUStatus{GPU: g}
			status.MIGMode = l.migMode(g)
			l.whole(status, l.accounts[g.UUID], hostPID)
			byUUID[g.UUID] = status
		}
		return status
	}
	for _, g := range l.gpus {
		status := show(g)
		for _, p := range g.FixedPartitions {
			if l.accounts[p.UUID] == nil {
				status.Partitions = append(status.Partitions, PartitionStatus{Partition: p, Health: l.health[p.UUID]})
			}
		}
	}
	// A GPU that left the inventory while a claim uses it is still there.
	for _, a := range l.accounts {
		status := show(a.device.GPU)
		if a.device.Partition != nil {
			status.Partitions = append(status.Partitions, l.partition(a, hostPID))
		}
	}
	var s Snapshot
	for _, g := range byUUID {
		s.GPUs = append(s.GPUs, *g)
	}
	s.sort()
	return s
}

// whole fills in what is known where the GPU itself is visible; a is its account,
// nil where no claim has the GPU.
func (l *ledger) whole(g *GPUStatus, a *account, pid func(*hold) int) {
	g.Whole = true
	g.Health = l.health[g.UUID]
	g.MemoryUsed = l.usedOnGPU(g.UUID)
	if a != nil {
		g.Utilization = a.utilization()
		g.Processes = a.processes(pid)
	}
}

func (l *ledger) partition(a *account, pid func(*hold) int) PartitionStatus {
	return PartitionStatus{Partition: *a.device.Partition, Health: l.health[a.device.Partition.UUID], MemoryUsed: a.held(), Utilization: a.utilization(), Processes: a.processes(pid)}
}

func (a *account) processes(pid func(*hold) int) []Process {
	var processes []Process
	for _, h := range a.holds {
		processes = append(processes, Process{PID: pid(h), Name: h.Name, Memory: h.Memory})
	}
	sortProcesses(processes)
	return processes
}

// ownPID is the pid as the holder sees it.
func ownPID(h *hold) int { return h.PID }

// hostPID makes up a pid for the node view, which cannot know the real one: the
// driver shares no pid namespace with the holders. It is stable for a lease and in
// the range of the kernel's default maximum on 64-bit machines.
func hostPID(h *hold) int {
	const first, last = 10_000, 4_194_303
	sum := fnv.New32a()
	fmt.Fprintf(sum, "%s\x00%s", h.key.dir, h.key.leaseID)
	return first + int(sum.Sum32()%(last-first+1))
}

// sort puts a snapshot into its documented order.
func (s *Snapshot) sort() {
	slices.SortFunc(s.GPUs, func(a, b GPUStatus) int {
		return cmp.Or(cmp.Compare(a.Minor, b.Minor), cmp.Compare(a.UUID, b.UUID))
	})
	for i := range s.GPUs {
		slices.SortFunc(s.GPUs[i].Partitions, func(a, b PartitionStatus) int {
			return cmp.Or(cmp.Compare(a.GPUInstanceID, b.GPUInstanceID),
				cmp.Compare(a.ComputeInstanceID, b.ComputeInstanceID), cmp.Compare(a.UUID, b.UUID))
		})
	}
}

func sortProcesses(processes []Process) {
	slices.SortFunc(processes, func(a, b Process) int {
		return cmp.Or(cmp.Compare(a.PID, b.PID), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Memory, b.Memory))
	})
}
