package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	applymetav1 "k8s.io/client-go/applyconfigurations/meta/v1"
	applyresource "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/checkpoint"
)

const (
	// conditionReady is the condition that the API documents for devices that are set up for their claim.
	conditionReady  = "Ready"
	reasonPrepared  = "Prepared"
	messagePrepared = "The device is set up for the containers of the claim"

	// statusWorkers is how many claims are written at once, statusAttempts how often one is tried. What is
	// given up is made good by the next prepare of the claim or the next round of the reconciler.
	statusWorkers  = 4
	statusAttempts = 8
)

// deviceData is what the status of a claim tells about one of its devices beside its conditions.
type deviceData struct {
	// UUID is what nvidia-smi shows for the device. A partition has it only once it is prepared.
	UUID string `json:"uuid"`
	// ParentUUID and Profile are those of a partition.
	ParentUUID string `json:"parentUUID,omitempty"`
	Profile    string `json:"profile,omitempty"`
	// Memory is what the claim can use of the device.
	Memory string `json:"memory"`
}

// deviceStatus keeps status.devices of claims in step with what is prepared: an entry with the condition
// Ready and the identity of each device while the claim is prepared, none after that.
//
// It works in the background and fails nobody. It applies on the server side under a name of its own, so
// that entries of other drivers, and what others say about our devices, are not its concern even where
// they write at the same time. A nil deviceStatus does nothing.
type deviceStatus struct {
	claims  *claims
	client  kubernetes.Interface
	metrics *metrics
	manager string
	queue   workqueue.TypedRateLimitingInterface[claimRef]
}

func newDeviceStatus(claims *claims, client kubernetes.Interface, metrics *metrics) *deviceStatus {
	return &deviceStatus{
		claims: claims, client: client, metrics: metrics,
		manager: "simgpu-kubelet-plugin/" + claims.driverName,
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[claimRef](500*time.Millisecond, 30*time.Second)),
	}
}

// prepared is told of a claim that is prepared, as it is in the API. If its status says so already there is
// nothing to do.
func (s *deviceStatus) prepared(claim *resourceapi.ResourceClaim) {
	if s == nil {
		return
	}
	record, ok := s.claims.lookup(claim.UID)
	if ok && record.State == checkpoint.Prepared && sameStatus(claim.Status.Devices, s.claims.statusOf(record)) {
		return
	}
	s.enqueue(claimRef{types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}, claim.UID})
}

// unprepared is told of a claim that is not prepared any more.
func (s *deviceStatus) unprepared(key types.NamespacedName, uid types.UID) {
	if s == nil {
		return
	}
	s.enqueue(claimRef{key, uid})
}

func (s *deviceStatus) enqueue(claim claimRef) {
	s.queue.Forget(claim)
	s.queue.Add(claim)
}

// run writes until the context ends.
func (s *deviceStatus) run(ctx context.Context) {
	if s == nil {
		return
	}
	var workers sync.WaitGroup
	defer workers.Wait()
	for range statusWorkers {
		workers.Go(func() {
			for s.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	s.queue.ShutDown()
}

// next works on one claim; false is the end.
func (s *deviceStatus) next(ctx context.Context) bool {
	claim, shutdown := s.queue.Get()
	if shutdown {
		return false
	}
	defer s.queue.Done(claim)
	err := s.write(ctx, claim)
	switch {
	case err == nil || ctx.Err() != nil:
	case s.queue.NumRequeues(claim) < statusAttempts-1:
		klog.FromContext(ctx).V(4).Info("The status of a claim was not written; trying again", "claim", claim, "err", err)
		s.queue.AddRateLimited(claim)
		return true
	default:
		s.metrics.deviceStatusErrors.Inc()
		klog.FromContext(ctx).Error(err, "Gave up writing devices into the status of a claim", "claim", claim)
	}
	s.queue.Forget(claim)
	return true
}

// write makes the API say what is the case now. A claim that is gone, or has been replaced, is no error.
func (s *deviceStatus) write(ctx context.Context, claim claimRef) error {
	status := applyresource.ResourceClaimStatus()
	if record, ok := s.claims.lookup(claim.UID); ok && record.State == checkpoint.Prepared {
		for _, entry := range s.claims.statusOf(record) {
			status.WithDevices(applied(entry))
		}
	}
	wanted := applyresource.ResourceClaim(claim.Name, claim.Namespace).WithUID(claim.UID).WithStatus(status)
	_, err := s.client.ResourceV1().ResourceClaims(claim.Namespace).ApplyStatus(ctx, wanted, metav1.ApplyOptions{FieldManager: s.manager, Force: true})
	if err == nil || apierrors.IsNotFound(err) {
		return nil
	}
	if apierrors.IsConflict(err) || apierrors.IsInvalid(err) {
		// The UID of another claim, or devices that the claim has no more: not ours to write about.
		current, getErr := s.client.ResourceV1().ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(getErr) || getErr == nil && (current.UID != claim.UID || current.Status.Allocation == nil) {
			return nil
		}
	}
	return err
}

// statusOf is what a prepared claim's status is to say, an entry per device and share.
func (c *claims) statusOf(claim checkpoint.Claim) []resourceapi.AllocatedDeviceStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	var entries []resourceapi.AllocatedDeviceStatus
	for _, d := range claim.Devices {
		device := c.stock.device(d.Device)
		entry := resourceapi.AllocatedDeviceStatus{Driver: c.driverName, Pool: d.Pool, Device: d.Device}
		if d.ShareID != "" {
			entry.ShareID = ptr.To(d.ShareID)
		}
		if device == nil || slices.ContainsFunc(entries, func(e resourceapi.AllocatedDeviceStatus) bool { return sameEntry(e, entry) }) {
			continue
		}
		data := deviceData{UUID: device.UUID, Memory: resource.NewQuantity(device.ShareMiB(d.Consumed)*deviceapi.MiB, resource.BinarySI).String()}
		if device.Partition != nil {
			data.ParentUUID, data.Profile = device.GPU.UUID, device.Partition.Profile.Name
		}
		raw, err := json.Marshal(data)
		if err != nil {
			continue // no value of these types fails
		}
		entry.Data = &runtime.RawExtension{Raw: raw}
		entry.Conditions = []metav1.Condition{{Type: conditionReady, Status: metav1.ConditionTrue, Reason: reasonPrepared, Message: messagePrepared}}
		entries = append(entries, entry)
	}
	return entries
}

func sameEntry(a, b resourceapi.AllocatedDeviceStatus) bool {
	return a.Driver == b.Driver && a.Pool == b.Pool && a.Device == b.Device && ptr.Deref(a.ShareID, "") == ptr.Deref(b.ShareID, "")
}

// sameStatus is true where the status has the wanted entries. Entries of other drivers, and other conditions
// of ours, do not count, nor does the time of a transition.
func sameStatus(got, want []resourceapi.AllocatedDeviceStatus) bool {
	return !slices.ContainsFunc(want, func(w resourceapi.AllocatedDeviceStatus) bool {
		return !slices.ContainsFunc(got, func(g resourceapi.AllocatedDeviceStatus) bool {
			if !sameEntry(g, w) || g.Data == nil || !sameJSON(g.Data.Raw, w.Data.Raw) {
				return false
			}
			for _, c := range w.Conditions {
				found := meta.FindStatusCondition(g.Conditions, c.Type)
				if found == nil || found.Status != c.Status || found.Reason != c.Reason || found.Message != c.Message {
					return false
				}
			}
			return true
		})
	})
}

// sameJSON compares objects of strings. The API server does not keep the order of fields.
func sameJSON(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	var x, y deviceData
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && x == y
}

func applied(entry resourceapi.AllocatedDeviceStatus) *applyresource.AllocatedDeviceStatusApplyConfiguration {
	config := applyresource.AllocatedDeviceStatus().WithDriver(entry.Driver).WithPool(entry.Pool).WithDevice(entry.Device)
	if entry.Data != nil {
		config.WithData(*entry.Data)
	}
	if entry.ShareID != nil {
		config.WithShareID(*entry.ShareID)
	}
	for _, c := range entry.Conditions {
		config.WithConditions(applymetav1.Condition().WithType(c.Type).WithStatus(c.Status).WithReason(c.Reason).WithMessage(c.Message).
			WithLastTransitionTime(metav1.Now()))
	}
	return config
}
