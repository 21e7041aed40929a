package driver

import (
	"context"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	applyresource "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listersresource "k8s.io/client-go/listers/resource/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

const (
	// conditionAttached is what the scheduler waits for before it binds a pod, conditionAttachFailed what makes
	// it look for other devices. They are the binding conditions of devices that have to be attached first.
	conditionAttached     = "simgpu.dev/attached"
	conditionAttachFailed = "simgpu.dev/attach-failed"
	// failAttachAnnotation on a claim makes its devices fail to be attached; its value is the message.
	failAttachAnnotation = "simgpu.dev/fail-attach"
)

// requireAttaching gives every device of a pool the binding conditions.
func requireAttaching(resources resourceslice.DriverResources) {
	for _, pool := range resources.Pools {
		for i := range pool.Slices {
			for n := range pool.Slices[i].Devices {
				device := &pool.Slices[i].Devices[n]
				device.BindsToNode = ptr.To(true)
				device.BindingConditions = []string{conditionAttached}
				device.BindingFailureConditions = []string{conditionAttachFailed}
			}
		}
	}
}

// attacher simulates devices that have to be attached to the node first: some time after a claim was
// allocated such devices it says in the claim's status that they are there, or that this failed, and the
// scheduler binds the pod, or allocates anew. A nil attacher does nothing.
//
// It watches all claims of the cluster, since it has to act before the kubelet knows of the pod.
type attacher struct {
	client               kubernetes.Interface
	driverName, nodeName string
	delay                time.Duration
	queue                workqueue.TypedRateLimitingInterface[types.NamespacedName]
	lister               listersresource.ResourceClaimLister
}

func newAttacher(client kubernetes.Interface, driverName, nodeName string, delay time.Duration) *attacher {
	return &attacher{
		client: client, driverName: driverName, nodeName: nodeName, delay: delay,
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[types.NamespacedName](500*time.Millisecond, 30*time.Second)),
	}
}

// run attaches until the context ends.
func (a *attacher) run(ctx context.Context) {
	if a == nil {
		return
	}
	factory := informers.NewSharedInformerFactory(a.client, 0)
	claims := factory.Resource().V1().ResourceClaims()
	a.lister = claims.Lister()
	see := func(object any) {
		if claim, ok := object.(*resourceapi.ResourceClaim); ok && len(a.waiting(claim)) > 0 {
			a.queue.AddAfter(types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}, a.left(claim))
		}
	}
	_, err := claims.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: see, UpdateFunc: func(_, object any) { see(object) }})
	if err != nil {
		klog.FromContext(ctx).Error(err, "Devices are not attached")
		return
	}
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	factory.WaitForCacheSyncWithContext(ctx)
	stop := context.AfterFunc(ctx, a.queue.ShutDown)
	defer stop()
	for a.next(ctx) {
	}
}

// left is how long it takes until the devices of an allocated claim are attached.
func (a *attacher) left(claim *resourceapi.ResourceClaim) time.Duration {
	since := claim.Status.Allocation.AllocationTimestamp
	if since == nil {
		return a.delay
	}
	return time.Until(since.Add(a.delay))
}

// waiting are the devices of a claim that the scheduler waits for.
func (a *attacher) waiting(claim *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	if claim.Status.Allocation == nil {
		return nil
	}
	var waiting []resourceapi.DeviceRequestAllocationResult
	for _, r := range claim.Status.Allocation.Devices.Results {
		if r.Driver != a.driverName || r.Pool != a.nodeName || !slices.Contains(r.BindingConditions, conditionAttached) {
			continue
		}
		done := slices.ContainsFunc(claim.Status.Devices, func(d resourceapi.AllocatedDeviceStatus) bool {
			return sameEntry(d, entryFor(r)) && (meta.IsStatusConditionTrue(d.Conditions, conditionAttached) || meta.IsStatusConditionTrue(d.Conditions, conditionAttachFailed))
		})
		if !done {
			waiting = append(waiting, r)
		}
	}
	return waiting
}

func entryFor(r resourceapi.DeviceRequestAllocationResult) resourceapi.AllocatedDeviceStatus {
	entry := resourceapi.AllocatedDeviceStatus{Driver: r.Driver, Pool: r.Pool, Device: r.Device}
	if r.ShareID != nil {
		entry.ShareID = ptr.To(string(*r.ShareID))
	}
	return entry
}

// next works on one claim; false is the end.
func (a *attacher) next(ctx context.Context) bool {
	key, shutdown := a.queue.Get()
	if shutdown {
		return false
	}
	defer a.queue.Done(key)
	if err := a.attach(ctx, key); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Cannot say that the devices of a claim are attached; trying again", "claim", key)
		a.queue.AddRateLimited(key)
		return true
	}
	a.queue.Forget(key)
	return true
}

func (a *attacher) attach(ctx context.Context, key types.NamespacedName) error {
	claim, err := a.lister.ResourceClaims(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	waiting := a.waiting(claim)
	if len(waiting) == 0 {
		return nil
	}
	if left := a.left(claim); left > 0 && claim.Status.Allocation.AllocationTimestamp != nil {
		// Allocated anew.
		a.queue.AddAfter(key, left)
		return nil
	}
	condition := metav1.Condition{Type: conditionAttached, Status: metav1.ConditionTrue, Reason: "Attached", Message: "The device is attached to the node"}
	if message, fail := claim.Annotations[failAttachAnnotation]; fail {
		condition = metav1.Condition{Type: conditionAttachFailed, Status: metav1.ConditionTrue, Reason: "AttachFailed", Message: message}
	}
	status := applyresource.ResourceClaimStatus()
	var written []resourceapi.AllocatedDeviceStatus
	for _, r := range waiting {
		entry := entryFor(r)
		if slices.ContainsFunc(written, func(w resourceapi.AllocatedDeviceStatus) bool { return sameEntry(w, entry) }) {
			continue
		}
		entry.Conditions = []metav1.Condition{condition}
		written = append(written, entry)
		status.WithDevices(applied(entry))
	}
	wanted := applyresource.ResourceClaim(key.Name, key.Namespace).WithUID(claim.UID).WithStatus(status)
	_, err = a.client.ResourceV1().ResourceClaims(key.Namespace).ApplyStatus(ctx, wanted,
		metav1.ApplyOptions{FieldManager: "simgpu-attacher/" + a.driverName, Force: true})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone or replaced
	}
	return err
}
