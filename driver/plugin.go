package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

var errStopping = errors.New("the driver is stopping")

// plugin answers the calls of the kubelet that reach it through the front. Each claim of a batch succeeds
// or fails by itself.
type plugin struct {
	claims     *claims
	reconciler *reconciler
	publisher  *publisher
	reporter   *reporter
	metrics    *metrics
	status     *deviceStatus
	faults     *nodeFaults

	mu       sync.Mutex
	stopping bool
	running  sync.WaitGroup
}

// PrepareResourceClaims does what [kubeletplugin.DRAPlugin] says.
func (p *plugin) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		start := time.Now()
		devices, err := p.prepare(ctx, claim)
		p.metrics.operation(opPrepare, start, err)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
		logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KObj(claim), "claimUID", claim.UID)
		if err != nil {
			// The kubelet has the last word on this, but says it about the pod only.
			logger.Error(err, "Claim not prepared")
			reason := reasonPrepareFailed
			if reasonOf(err) == failedConflict {
				reason = reasonDeviceConflict
			}
			p.reporter.claim(claim, corev1.EventTypeWarning, reason, "%v", err)
		} else {
			p.status.prepared(claim)
			logger.V(2).Info("Claim prepared", "devices", deviceList(devices), "duration", time.Since(start))
		}
	}
	return results, nil
}

// prepare prepares one claim. Where other claims are in the way it makes sure that they still exist.
func (p *plugin) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	if err := p.faults.beforePrepare(ctx, claim); err != nil {
		return nil, err
	}
	for {
		devices, err := p.claims.prepare(ctx, claim)
		var conflict *conflictError
		if !errors.As(err, &conflict) {
			return devices, err
		}
		// Each attempt finds some of what is in the way, and goes on only if it has become less.
		anyGone, checkErr := p.releaseGone(ctx, claim, conflict)
		p.metrics.conflict(anyGone && checkErr == nil)
		if checkErr != nil || !anyGone {
			return nil, errors.Join(err, checkErr)
		}
	}
}

// releaseGone releases those claims in a claim's way that do not exist any more.
func (p *plugin) releaseGone(ctx context.Context, claim *resourceapi.ResourceClaim, conflict *conflictError) (any bool, err error) {
	for _, h := range conflict.holders {
		if h.claim.UID == claim.UID || h.claim.Name == "" {
			continue
		}
		gone, err := p.reconciler.releaseIfGone(ctx, h.claim.UID, h.claim.NamespacedName)
		if err != nil {
			return any, fmt.Errorf("cannot tell whether claim %s still exists: %w", h.claim, err)
		}
		any = any || gone
	}
	return any, nil
}

// UnprepareResourceClaims does what [kubeletplugin.DRAPlugin] says.
func (p *plugin) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		start := time.Now()
		err := p.faults.beforeUnprepare(ctx, claim.UID)
		if err == nil {
			err = p.claims.unprepare(ctx, claim.UID)
		}
		p.metrics.operation(opUnprepare, start, err)
		results[claim.UID] = err
		logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", claim.NamespacedName, "claimUID", claim.UID)
		if err != nil {
			logger.Error(err, "Claim not unprepared")
			p.reporter.claimNamed(claim.NamespacedName, claim.UID, corev1.EventTypeWarning, reasonUnprepareFailed, "%v", err)
		} else {
			p.status.unprepared(claim.NamespacedName, claim.UID)
			logger.V(2).Info("Claim unprepared", "duration", time.Since(start))
		}
	}
	return results, nil
}

// begin registers a call, before anything else is done for it. The gRPC server does not wait for those it
// has started.
func (p *plugin) begin() (done func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopping {
		return nil, errStopping
	}
	p.running.Add(1)
	return p.running.Done, nil
}

// stop refuses new calls. What it returns is closed when those that run have ended.
func (p *plugin) stop() (idle <-chan struct{}) {
	p.mu.Lock()
	p.stopping = true
	p.mu.Unlock()
	p.faults.stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.running.Wait()
	}()
	return done
}

func deviceList(devices []kubeletplugin.Device) []string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.DeviceName
	}
	return names
}
