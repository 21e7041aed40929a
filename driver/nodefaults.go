package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/claimconfig"
	"github.com/simgpu/simgpu/driver/faults"
	"github.com/simgpu/simgpu/internal/durable"
)

// maxClaimStrikes bounds what is remembered of the faults in the configuration of claims.
const maxClaimStrikes = 1024

// nodeFaults knows the faults on the node, tells whoever shows them, and lets those of prepare and unprepare
// strike. What must not happen again after a restart is in a file.
type nodeFaults struct {
	nodeName, driverName string
	claims               *claims
	file                 string
	waypoints            Waypoints // is told before a crash
	reporter             *reporter
	metrics              *metrics
	// show is called with what is broken, when that changes.
	show func(*conditions)
	// crash ends the process.
	crash func()

	stopped chan struct{}

	mu         sync.Mutex
	annotation string
	read       bool
	list       []faults.Fault
	strikes    []strikes
	lostCount  bool // the file could not be read: what was spent is unknown
	// atWork are the devices of claims that are being prepared or unprepared, as far as a Crash needs them.
	atWork map[types.UID][]string
	wake   chan struct{} // closed when something has changed

	// The conditions of a stock and the present list.
	current *conditions
	of      *stock

	showing sync.Mutex // one show after the other
	shown   *conditions
}

// strikes is what is remembered of a fault: on the node by its id, in a claim by "<uid>/<place>".
type strikes struct {
	ID string `json:"id"`
	// Fault is in words; "" in a claim.
	Fault string `json:"fault,omitempty"`
	Count int64  `json:"count,omitempty"`
}

// newNodeFaults completes nodeFaults whose dependencies are set, and reads the file.
func newNodeFaults(n *nodeFaults) (*nodeFaults, error) {
	n.stopped = make(chan struct{})
	n.wake = make(chan struct{})
	n.atWork = map[types.UID][]string{}
	if err := durable.RemoveTemporary(filepath.Dir(n.file), filepath.Base(n.file)); err != nil {
		return nil, fmt.Errorf("what is remembered of faults: %w", err)
	}
	data, err := os.ReadFile(n.file)
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	if err != nil {
		return nil, fmt.Errorf("what is remembered of faults: %w", err)
	}
	if err := json.Unmarshal(data, &n.strikes); err != nil {
		n.strikes, n.lostCount = nil, true
	}
	return n, nil
}

// look is told the annotation of the Node. One with a fault of its own changes nothing.
func (n *nodeFaults) look(ctx context.Context, annotation string) {
	logger := klog.FromContext(ctx)
	n.mu.Lock()
	if n.read && annotation == n.annotation {
		n.mu.Unlock()
		return
	}
	n.annotation, n.read = annotation, true
	list, err := faults.Decode(annotation)
	if err != nil {
		n.mu.Unlock()
		logger.Error(err, "Faults of the node refused; those before stay in force", "node", n.nodeName)
		n.reporter.node(corev1.EventTypeWarning, reasonInvalidFaults, "Faults refused: %v. Those before stay in force. Correct the annotation, or remove it: kubectl annotate node %s %s-", err, n.nodeName, faults.Annotation)
		return
	}
	n.list, n.current = list, nil
	added, cleared := n.remember(ctx)
	n.mu.Unlock()

	for _, f := range added {
		logger.Info("Fault added", "fault", f)
		n.reporter.node(corev1.EventTypeWarning, reasonFaultAdded, "Fault %s", f)
	}
	for _, f := range cleared {
		logger.Info("Fault cleared", "fault", f)
		n.reporter.node(corev1.EventTypeNormal, reasonFaultCleared, "Fault cleared: %s", f)
	}
	n.metrics.setFaults(list)
	n.refresh()
	n.broadcast()
}

// remember brings what is remembered in step with the list, and says what is new and what has gone since the
// last time, be it before a restart. The caller holds the mutex.
func (n *nodeFaults) remember(ctx context.Context) (added, cleared []string) {
	var kept []strikes
	for _, f := range n.list {
		words := inWords(f)
		i := slices.IndexFunc(n.strikes, func(s strikes) bool { return s.ID == f.ID })
		now := strikes{ID: f.ID, Fault: words}
		if i >= 0 {
			now.Count = n.strikes[i].Count
		}
		if n.lostCount && f.Type == faults.Crash {
			now.Count = 1 // rather no crash than one after the other
		}
		if i < 0 || n.strikes[i].Fault != words {
			added = append(added, words)
		}
		kept = append(kept, now)
	}
	for _, s := range n.strikes {
		switch {
		case strings.Contains(s.ID, "/"):
			kept = append(kept, s)
		case !slices.ContainsFunc(kept, func(k strikes) bool { return k.ID == s.ID && k.Fault == s.Fault }):
			cleared = append(cleared, s.Fault)
		}
	}
	n.lostCount = false
	if !slices.Equal(n.strikes, kept) {
		n.strikes = kept
		if err := n.save(); err != nil {
			klog.FromContext(ctx).Error(err, "How often faults have struck is forgotten at the next restart")
		}
	}
	return added, cleared
}

// inWords names a fault on the node for people: "x7k2p: XID 79 on gpu-0".
func inWords(f faults.Fault) string {
	on := f.Device
	if on == "" {
		on = "all devices"
	}
	text := fmt.Sprintf("%s: %s on %s", f.ID, f, on)
	if f.Effect != "" {
		text += fmt.Sprintf(" (%s)", f.Effect)
	}
	return text
}

// save writes the file. The caller holds the mutex.
func (n *nodeFaults) save() error {
	data, err := json.Marshal(n.strikes)
	if err != nil {
		return err
	}
	if err := durable.WriteFile(n.file, data, 0o600, nil); err != nil {
		return fmt.Errorf("what is remembered of faults: %w", err)
	}
	return nil
}

// fleet is what the node has to publish, with what is broken of it.
func (n *nodeFaults) fleet() fleet {
	f := n.claims.fleet()
	if f.stock != nil {
		f.broken = n.conditions(f.stock)
	}
	return f
}

// conditions says what is broken of a stock, the same pointer until that changes.
func (n *nodeFaults) conditions(s *stock) *conditions {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.current == nil || n.of != s {
		n.current, n.of = conditionsOf(s, n.list, n.driverName), s
	}
	return n.current
}

// refresh shows what is broken, if it is not what was shown last. It is called when the stock may have changed.
func (n *nodeFaults) refresh() {
	n.showing.Lock()
	defer n.showing.Unlock()
	now := n.conditions(n.claims.currentStock())
	if now == n.shown {
		return
	}
	n.shown = now
	n.show(now)
	n.broadcast()
}

// changes is closed at the next change of the list or of the stock.
func (n *nodeFaults) changes() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.wake
}

func (n *nodeFaults) broadcast() {
	n.mu.Lock()
	defer n.mu.Unlock()
	close(n.wake)
	n.wake = make(chan struct{})
}

// stop lets go whoever waits. It may be called twice, and on nil.
func (n *nodeFaults) stop() {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	select {
	case <-n.stopped:
	default:
		close(n.stopped)
	}
}

// beforePrepare lets faults strike a prepare that is about to begin: it takes its time, hangs, or returns the
// error with which the prepare fails.
func (n *nodeFaults) beforePrepare(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	if n == nil {
		return nil
	}
	own, err := claimconfig.Faults(claim, n.driverName)
	if err != nil {
		return because(failedConfig, err)
	}
	for i := range own {
		own[i].ID = string(claim.UID) + "/" + own[i].ID
	}
	if _, known := n.claims.lookup(claim.UID); !known {
		// With the inventory the faults are known.
		select {
		case <-n.claims.evaluated:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	var devices []string
	for _, r := range n.claims.results(claim) {
		devices = append(devices, r.Device)
	}
	return n.disturb(ctx, "prepare", devices, own, faults.SlowPrepare, faults.HangPrepare, faults.FailPrepare)
}

// beforeUnprepare is beforePrepare for an unprepare. A claim that is not prepared is left in peace.
func (n *nodeFaults) beforeUnprepare(ctx context.Context, uid types.UID) error {
	if n == nil {
		return nil
	}
	claim, known := n.claims.lookup(uid)
	if !known {
		return nil
	}
	return n.disturb(ctx, "unprepare", devicesIn(claim), nil, faults.SlowUnprepare, faults.HangUnprepare, faults.FailUnprepare)
}

// devicesIn are the names of the devices of a claim.
func devicesIn(claim checkpoint.Claim) []string {
	var names []string
	for _, d := range claim.Devices {
		names = append(names, d.Device)
	}
	return names
}

func (n *nodeFaults) disturb(ctx context.Context, operation string, devices []string, own []faults.Fault, slow, hang, fail faults.Type) error {
	done := map[string]bool{}
	next := func(t faults.Type) *faults.Fault {
		f := n.strike(t, devices, own, done)
		if f != nil {
			done[f.ID] = true
			klog.FromContext(ctx).Info("Fault strikes", "fault", inWords(*f), "operation", operation)
		}
		return f
	}
	for f := next(slow); f != nil; f = next(slow) {
		if err := n.wait(ctx, *f, operation, time.After(f.Delay)); err != nil {
			return err
		}
	}
	for f := next(hang); f != nil; f = next(hang) {
		if err := n.wait(ctx, *f, operation, nil); err != nil {
			return err
		}
	}
	if f := next(fail); f != nil {
		return because(failedFault, fmt.Errorf("%s fails because of fault %s: %s", operation, inWords(*f), n.remedy(*f)))
	}
	return nil
}

// remedy tells how to get rid of a fault.
func (n *nodeFaults) remedy(f faults.Fault) string {
	switch {
	case f.Times > 0:
		return "it passes by itself"
	case strings.Contains(f.ID, "/"):
		return "it is in the configuration of the claim"
	}
	return fmt.Sprintf("simgpuctl fault clear %s %s ends it", n.nodeName, f.ID)
}

// strike returns a fault of that type that strikes now, and counts it.
func (n *nodeFaults) strike(t faults.Type, devices []string, own []faults.Fault, done map[string]bool) *faults.Fault {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, f := range slices.Concat(n.list, own) {
		if f.Type != t || done[f.ID] || !strings.Contains(f.ID, "/") && !n.concerns(f, devices) {
			continue
		}
		if f.Times > 0 {
			if n.count(f.ID) >= f.Times {
				continue
			}
			if err := n.add(f.ID); err != nil {
				klog.Background().Error(err, "A fault strikes once more after a restart", "fault", inWords(f))
			}
		}
		return &f
	}
	return nil
}

// concerns says whether a fault on the node is on one of the devices. The caller holds the mutex.
func (n *nodeFaults) concerns(f faults.Fault, devices []string) bool {
	if f.Device == "" {
		return true
	}
	s := n.claims.currentStock()
	return slices.ContainsFunc(devices, func(name string) bool {
		device := s.device(name)
		return name == f.Device || device != nil && affects(f, device)
	})
}

func (n *nodeFaults) count(id string) int64 {
	i := slices.IndexFunc(n.strikes, func(s strikes) bool { return s.ID == id })
	if i < 0 {
		return 0
	}
	return n.strikes[i].Count
}

// add counts a strike, on disk before it happens. The caller holds the mutex.
func (n *nodeFaults) add(id string) error {
	i := slices.IndexFunc(n.strikes, func(s strikes) bool { return s.ID == id })
	if i < 0 {
		i = len(n.strikes)
		n.strikes = append(n.strikes, strikes{ID: id})
	}
	n.strikes[i].Count++
	inClaims := func(s strikes) bool { return strings.Contains(s.ID, "/") }
	if len(n.strikes) > faults.Max+maxClaimStrikes {
		oldest := slices.IndexFunc(n.strikes, inClaims)
		n.strikes = slices.Delete(n.strikes, oldest, oldest+1)
	}
	return n.save()
}

// wait returns nil when the time has come or the fault is cleared.
func (n *nodeFaults) wait(ctx context.Context, f faults.Fault, operation string, until <-chan time.Time) error {
	for {
		changes := n.changes()
		if !strings.Contains(f.ID, "/") && !n.has(f.ID) {
			return nil
		}
		select {
		case <-until:
			return nil
		case <-changes:
		case <-n.stopped:
			return errStopping
		case <-ctx.Done():
			return because(failedFault, fmt.Errorf("%s hangs because of fault %s: %s: %w", operation, inWords(f), n.remedy(f), context.Cause(ctx)))
		}
	}
}

func (n *nodeFaults) has(id string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(n.list, func(f faults.Fault) bool { return f.ID == id })
}

// Reached implements [Waypoints]: it crashes where a fault says so, once per fault.
func (n *nodeFaults) Reached(at Waypoint, claim types.UID) {
	n.waypoints.Reached(at, claim)
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.ContainsFunc(n.list, func(f faults.Fault) bool { return f.Type == faults.Crash }) {
		return
	}
	if known, ok := n.claims.lookup(claim); ok {
		n.atWork[claim] = devicesIn(known)
	}
	devices := n.atWork[claim]
	if at == ClaimPrepared || at == ClaimRemoved {
		delete(n.atWork, claim)
	}
	for _, f := range n.list {
		if f.Type != faults.Crash || f.At != string(at) || n.count(f.ID) > 0 || !n.concerns(f, devices) {
			continue
		}
		if err := n.add(f.ID); err != nil {
			klog.Background().Error(err, "No crash, because it would be followed by others", "fault", inWords(f))
			continue
		}
		klog.Background().Error(nil, "Crash because of a fault", "fault", inWords(f), "claimUID", claim)
		n.crash()
	}
}

// crashNow ends the process as a crash does: nothing is tidied up.
func crashNow() {
	klog.Flush()
	os.Exit(exitCrash)
}

// exitCrash is the exit code of a crash that a fault ordered.
const exitCrash = 70
