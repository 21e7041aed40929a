package driver

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
)

// Reasons of the Events that the driver creates.
const (
	reasonInvalidInventory     = "InvalidInventory"
	reasonInventoryApplied     = "InventoryApplied"
	reasonPartitionsWithdrawn  = "PartitionsWithdrawn"
	reasonPartitionsPublished  = "PartitionsPublished"
	reasonTaintsDropped        = "TaintsDropped"
	reasonTaintsKept           = "TaintsKept"
	reasonSharesDropped        = "SharesDropped"
	reasonSharesKept           = "SharesKept"
	reasonFieldsDropped        = "FieldsDropped"
	reasonPublishFailed        = "PublishFailed"
	reasonCheckpointUnreadable = "CheckpointUnreadable"
	reasonCheckpointRebuilt    = "CheckpointRebuilt"
	reasonPrepareFailed        = "PrepareFailed"
	reasonDeviceConflict       = "DeviceConflict"
	reasonUnprepareFailed      = "UnprepareFailed"
	reasonClaimReleased        = "ClaimReleased"
	reasonOrphansRemoved       = "OrphansRemoved"
	reasonFaultAdded           = "FaultAdded"
	reasonFaultCleared         = "FaultCleared"
	reasonInvalidFaults        = "InvalidFaults"
)

// maxMessage leaves room for a remark within the 1024 bytes that the API allows for a note.
const maxMessage = 960

// reporter tells people through Events. Repetitions are counted, not repeated, by the recorder.
type reporter struct {
	recorder record.EventRecorder
	nodeRef  *corev1.ObjectReference
}

// startReporter sends Events until the context ends.
func startReporter(ctx context.Context, client kubernetes.Interface, driverName, nodeName string) (*reporter, func()) {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	recorder := broadcaster.NewRecorder(clientscheme.Scheme, corev1.EventSource{Component: driverName, Host: nodeName})
	return newReporter(recorder, nodeName), broadcaster.Shutdown
}

func newReporter(recorder record.EventRecorder, nodeName string) *reporter {
	return &reporter{
		recorder: recorder,
		// The kubelet uses the name as the UID in its Events on its Node; "kubectl describe node" finds both.
		nodeRef: &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: nodeName, UID: types.UID(nodeName)},
	}
}

func (r *reporter) node(eventType, reason, format string, args ...any) {
	r.event(r.nodeRef, eventType, reason, format, args...)
}

func (r *reporter) claim(claim *resourceapi.ResourceClaim, eventType, reason, format string, args ...any) {
	r.event(claim, eventType, reason, format, args...)
}

// claimNamed is claim for a claim of which no more than this is known.
func (r *reporter) claimNamed(key types.NamespacedName, uid types.UID, eventType, reason, format string, args ...any) {
	claim := &corev1.ObjectReference{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim", Namespace: key.Namespace, Name: key.Name, UID: uid}
	r.event(claim, eventType, reason, format, args...)
}

func (r *reporter) event(object runtime.Object, eventType, reason, format string, args ...any) {
	message := fmt.Sprintf(format, args...)
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage], "") + " ... (see the log of the driver)"
	}
	r.recorder.Event(object, eventType, reason, message)
}
