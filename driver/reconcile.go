package driver

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/driver/checkpoint"
)

// reconciler compares what the node has with the claims in the API, and removes what belongs to no
// claim.
type reconciler struct {
	claims   *claims
	metadata *metadataFiles
	client   kubernetes.Interface
	reporter *reporter
	metrics  *metrics
	status   *deviceStatus
}

// errNobodyKnows is a claim of which not even the name is known.
var errNobodyKnows = errors.New("nothing on the node tells the name of the claim")

// loop does a round now and then one every period, until the context ends. A round in which something
// failed that may work the next time, as on a node that starts together with its API server, is followed
// by the next one after retry, which doubles each time, up to the period.
func (r *reconciler) loop(ctx context.Context, period, retry time.Duration) {
	pause := retry
	for {
		next := wait.Jitter(period, 0.2)
		if r.run(ctx) {
			pause = retry
		} else {
			next = min(next, wait.Jitter(pause, 0.2))
			pause = min(2*pause, period)
		}
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

// run does one round. What fails is logged; false says that trying again may help.
func (r *reconciler) run(ctx context.Context) (complete bool) {
	logger := klog.FromContext(ctx)
	complete = true
	for _, u := range r.claims.unsettledClaims() {
		if err := r.settle(ctx, u); err != nil {
			complete = complete && errors.Is(err, errNobodyKnows)
			logger.Error(err, "The content of an unreadable checkpoint is still unknown", "claimUID", u.UID, "file", u.Path)
		}
	}
	keys := r.claims.preparedKeys()
	for _, uid := range slices.Sorted(maps.Keys(keys)) {
		gone, err := r.releaseIfGone(ctx, uid, keys[uid])
		if err != nil {
			complete = false
			logger.Error(err, "Cannot tell whether a prepared claim still exists", "claim", keys[uid], "claimUID", uid)
		}
		if gone {
			continue
		}
		// Whatever somebody has removed by hand.
		if err := r.claims.refresh(uid); err != nil {
			complete = false
			logger.Error(err, "What a prepared claim needs on the node is incomplete", "claim", keys[uid], "claimUID", uid)
		}
	}
	if err := r.removeOrphans(); err != nil {
		complete = false
		logger.Error(err, "Files of claims that are gone remain")
	}
	r.metrics.unsettledCheckpoints.Set(float64(len(r.claims.unsettledClaims())))
	return complete
}

// releaseIfGone unprepares a claim that does not exist in the API any more, or exists as another object
// of the same name, or has lost its devices where the kubelet does not say so.
func (r *reconciler) releaseIfGone(ctx context.Context, uid types.UID, key types.NamespacedName) (bool, error) {
	if isLent(uid) {
		return false, nil // the API knows nothing of it
	}
	claim, err := r.get(ctx, key)
	if err != nil {
		return false, err
	}
	if claim != nil && claim.UID == uid {
		if current, ok := r.claims.lookup(uid); ok && r.claims.abandoned(current, claim) {
			return r.releaseAbandoned(ctx, uid, key)
		}
		r.status.prepared(claim)
		return false, nil
	}
	if err := r.claims.unprepare(ctx, uid); err != nil {
		return false, err
	}
	r.released(ctx, key, uid, "Released a claim that no longer exists")
	return true, nil
}

// releaseAbandoned unprepares a claim that does not have its devices any more. It looks again while nobody can
// prepare the claim: it may have got them anew.
func (r *reconciler) releaseAbandoned(ctx context.Context, uid types.UID, key types.NamespacedName) (bool, error) {
	unlock, err := r.claims.locks.lock(ctx, uid)
	if err != nil {
		return false, err
	}
	defer unlock()
	claim, err := r.get(ctx, key)
	if err != nil {
		return false, err
	}
	current, ok := r.claims.lookup(uid)
	if !ok || claim == nil || claim.UID != uid || !r.claims.abandoned(current, claim) {
		return false, nil
	}
	if err := r.claims.undo(current); err != nil {
		return false, err
	}
	r.released(ctx, key, uid, "Released a claim that is not allocated any more")
	return true, nil
}

// get returns nil for a claim that does not exist.
func (r *reconciler) get(ctx context.Context, key types.NamespacedName) (*resourceapi.ResourceClaim, error) {
	claim, err := r.client.ResourceV1().ResourceClaims(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return claim, err
}

// settle finds out what a claim with an unreadable checkpoint has, by preparing it anew from the API,
// or that it is gone.
func (r *reconciler) settle(ctx context.Context, u checkpoint.Unreadable) error {
	logger := klog.FromContext(ctx)
	if isLent(u.UID) {
		_, err := r.claims.lend(ctx, strings.TrimPrefix(string(u.UID), lentPrefix))
		return err
	}
	// The name in the damaged file may be damaged, too: what the helper has noted counts as well.
	candidates := []types.NamespacedName{}
	if u.Claim.Name != "" && u.Claim.Namespace != "" {
		candidates = append(candidates, u.Claim)
	}
	noted, err := r.metadata.names(u.UID)
	if err != nil {
		return err
	}
	for _, key := range noted {
		if !slices.Contains(candidates, key) {
			candidates = append(candidates, key)
		}
	}
	if len(candidates) == 0 {
		if errors.Is(u.Err, errLost) {
			// Without a checkpoint nobody is promised anything; its spec is an orphan like others.
			return r.claims.unprepare(ctx, u.UID)
		}
		return errNobodyKnows
	}
	for _, key := range candidates {
		claim, err := r.get(ctx, key)
		if err != nil {
			return err
		}
		if claim == nil || claim.UID != u.UID {
			continue
		}
		if len(r.claims.results(claim)) == 0 {
			break // not allocated to this driver any more
		}
		if _, err := r.claims.prepare(ctx, claim); err != nil {
			return err
		}
		logger.Info("Rebuilt a claim from the API", "claim", key, "claimUID", u.UID)
		r.reporter.node(corev1.EventTypeNormal, reasonCheckpointRebuilt, "The checkpoint of claim %s (UID %s) could not be read and was rebuilt from the API", key, u.UID)
		return nil
	}
	if err := r.claims.unprepare(ctx, u.UID); err != nil {
		return err
	}
	r.released(ctx, candidates[0], u.UID, "Released a claim with an unreadable checkpoint that no longer exists")
	return nil
}

// released tells of a claim that was unprepared without anybody asking for it.
func (r *reconciler) released(ctx context.Context, key types.NamespacedName, uid types.UID, what string) {
	klog.FromContext(ctx).Info(what, "claim", key, "claimUID", uid)
	r.metrics.orphansRemoved.WithLabelValues(orphanClaim).Inc()
	r.reporter.node(corev1.EventTypeNormal, reasonClaimReleased, "%s: %s", what, claimRef{key, uid})
}

// removeOrphans removes CDI specs, device folders and device metadata that belong to no claim.
func (r *reconciler) removeOrphans() error {
	specs, err := r.claims.specs.List()
	errs := []error{err}
	folders, err := r.claims.socketFolders()
	errs = append(errs, err)
	metadata, err := r.metadata.list()
	errs = append(errs, err)

	// A claim has nothing on disk before it is known, so what is found to belong to none is nobody's for
	// as long as no claim comes to be known.
	removed := map[string]int{}
	count := func(kind string, err error) {
		if err == nil {
			removed[kind]++
		}
		errs = append(errs, err)
	}
	r.claims.holdStill(func(now present) {
		for _, uid := range specs {
			if !now.has(types.UID(uid)) {
				count(orphanSpec, r.claims.specs.Remove(uid))
			}
		}
		for _, folder := range folders {
			// Any folder may belong to a claim of unknown content.
			if len(now.unsettled) == 0 && !now.socketFolders[folder] {
				count(orphanSocket, r.claims.sockets.Close(filepath.Join(r.claims.devDir, folder)))
			}
		}
		for _, path := range r.metadata.orphans(metadata, now) {
			count(orphanMetadata, r.metadata.discard(path))
		}
		errs = append(errs, r.metadata.renewSpecs(now))
	})
	if len(removed) > 0 {
		for kind, n := range removed {
			r.metrics.orphansRemoved.WithLabelValues(kind).Add(float64(n))
		}
		r.reporter.node(corev1.EventTypeNormal, reasonOrphansRemoved,
			"Removed what belonged to no claim: %d CDI specs, %d device folders, %d files of device metadata",
			removed[orphanSpec], removed[orphanSocket], removed[orphanMetadata])
	}
	return errors.Join(errs...)
}
