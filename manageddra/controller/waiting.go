package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/simgpu/simgpu/manageddra/api"
	"github.com/simgpu/simgpu/placement"
	"github.com/simgpu/simgpu/placement/explain"
)

// patience is how long a pod may be without a node before the reason is looked for, unless the scheduler has said earlier
// that it finds none.
const patience = 5 * time.Second

// waiting remembers which services have pods that wait for devices, since a change of slices or claims concerns those
// alone, and what their pods were told.
type waiting struct {
	mutex    sync.Mutex
	services map[types.NamespacedName]map[types.UID]string // sentence by pod
}

// set remembers the sentences of a service's pods, and returns the pods that have a new one.
func (w *waiting) set(service types.NamespacedName, sentences map[types.UID]string) map[types.UID]bool {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	news := map[types.UID]bool{}
	for uid, sentence := range sentences {
		if w.services[service][uid] != sentence {
			news[uid] = true
		}
	}
	if len(sentences) == 0 {
		delete(w.services, service)
	} else {
		w.services[service] = sentences
	}
	return news
}

// requests are all services that wait.
func (w *waiting) requests(context.Context, client.Object) []reconcile.Request {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	var requests []reconcile.Request
	for service := range w.services {
		requests = append(requests, reconcile.Request{NamespacedName: service})
	}
	return requests
}

// placing lets through what of a Node may change why a pod waits for devices. Kubelets write the rest of it all the time.
var placing = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	before, ok1 := e.ObjectOld.(*corev1.Node)
	after, ok2 := e.ObjectNew.(*corev1.Node)
	return !ok1 || !ok2 || before.UID != after.UID || before.Spec.Unschedulable != after.Spec.Unschedulable ||
		!equality.Semantic.DeepEqual(before.Spec.Taints, after.Spec.Taints) || !maps.Equal(before.Labels, after.Labels)
}}

// devices sets the condition that says whether all pods have their devices, and tells those that wait why. It returns
// after what time to look again, 0 for never.
func (r *reconciler) devices(ctx context.Context, service *api.LLMInferenceService, c *conditions) (time.Duration, error) {
	key := client.ObjectKeyFromObject(service)
	var pods corev1.PodList
	if err := r.List(ctx, &pods, client.InNamespace(service.Namespace), client.MatchingLabels{api.LabelName: service.Name, api.LabelPartOf: api.PartOf}, client.UnsafeDisableDeepCopy); err != nil {
		return 0, err
	}
	var pending []*corev1.Pod
	var again time.Duration
	users := 0
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.DeletionTimestamp != nil || len(pod.Spec.ResourceClaims) == 0 {
			continue
		}
		users++
		switch age := time.Since(pod.CreationTimestamp.Time); {
		case pod.Spec.NodeName != "":
		case unschedulable(pod) || age >= patience:
			pending = append(pending, pod)
		default:
			again = patience - age
		}
	}
	if len(pending) == 0 || !r.apis.served(claimTemplateKind) {
		r.waiting.set(key, nil)
		if users > 0 {
			c.set(api.ConditionDevicesAllocated, corev1.ConditionTrue, "Allocated", fmt.Sprintf("%d pods have their devices", users))
		}
		return again, nil
	}
	slices.SortFunc(pending, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	snapshot, err := r.snapshot(ctx, pending)
	if err != nil {
		return 0, err
	}
	sentences := map[types.UID]string{}
	var worst *explain.Explanation
	explanations := make([]*explain.Explanation, len(pending))
	for i, pod := range pending {
		e, err := explain.Pod(ctx, snapshot, pod)
		if err != nil {
			return 0, fmt.Errorf("finding out why pod %s waits: %w", pod.Name, err)
		}
		sentences[pod.UID], explanations[i] = e.Sentence, e
		if worst == nil || e.Outcome == explain.Broken && worst.Outcome != explain.Broken || worst.Outcome == explain.Fits {
			worst = e
		}
	}
	message := fmt.Sprintf("pod %s: %s", worst.Name, worst.Sentence)
	if len(pending) > 1 {
		message = fmt.Sprintf("%d pods wait for devices; %s", len(pending), message)
	}
	c.set(api.ConditionDevicesAllocated, corev1.ConditionFalse, reasonOf(worst.Outcome), message)
	news := r.waiting.set(key, sentences)
	for i, pod := range pending {
		if e := explanations[i]; news[pod.UID] && (e.Outcome == explain.Waits || e.Outcome == explain.Broken) {
			r.tell(service, snapshot, pod, e)
		}
	}
	return again, nil
}

// reasonOf an outcome, in the words of conditions and Events.
func reasonOf(outcome explain.Outcome) string {
	switch outcome {
	case explain.Broken:
		return "ClaimCannotBeMet"
	case explain.Waits:
		return "DevicesNotAvailable"
	default:
		return "Scheduling"
	}
}

// tell says it where users look: at the pod, its claims, and the service.
func (r *reconciler) tell(service *api.LLMInferenceService, s *placement.Snapshot, pod *corev1.Pod, e *explain.Explanation) {
	const most = 1000 // characters of a note
	note := e.Sentence
	if len(note) > most {
		note = note[:most] + "..."
	}
	r.recorder.Eventf(pod, service, corev1.EventTypeWarning, reasonOf(e.Outcome), "Explain", "%s", note)
	r.recorder.Eventf(service, pod, corev1.EventTypeWarning, reasonOf(e.Outcome), "Explain", "pod %s: %s", pod.Name, note)
	for _, status := range pod.Status.ResourceClaimStatuses {
		if status.ResourceClaimName == nil {
			continue
		}
		if claim := s.Claim(pod.Namespace, *status.ResourceClaimName); claim != nil && claim.Status.Allocation == nil {
			r.recorder.Eventf(claim, pod, corev1.EventTypeWarning, reasonOf(e.Outcome), "Explain", "%s", note)
		}
	}
}

func unschedulable(pod *corev1.Pod) bool {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
			return true
		}
	}
	return false
}

// snapshot is the cluster as the caches have it. Nothing in it may be changed.
func (r *reconciler) snapshot(ctx context.Context, pods []*corev1.Pod) (*placement.Snapshot, error) {
	var nodes corev1.NodeList
	var resourceSlices resourceapi.ResourceSliceList
	var classes resourceapi.DeviceClassList
	var claims resourceapi.ResourceClaimList
	var templates resourceapi.ResourceClaimTemplateList
	err := errors.Join(
		r.List(ctx, &nodes, client.UnsafeDisableDeepCopy),
		r.List(ctx, &resourceSlices, client.UnsafeDisableDeepCopy),
		r.List(ctx, &classes, client.UnsafeDisableDeepCopy),
		r.List(ctx, &claims, client.UnsafeDisableDeepCopy),
		r.List(ctx, &templates, client.InNamespace(pods[0].Namespace), client.UnsafeDisableDeepCopy),
	)
	if err != nil {
		return nil, err
	}
	return placement.New(&nodes, &resourceSlices, &classes, &claims, &templates), nil
}

// serviceOfPod is named in the pod's labels.
func serviceOfPod(_ context.Context, pod client.Object) []reconcile.Request {
	labels := pod.GetLabels()
	if labels[api.LabelPartOf] != api.PartOf || labels[api.LabelName] == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: pod.GetNamespace(), Name: labels[api.LabelName]}}}
}
