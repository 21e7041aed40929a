package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/simgpu/simgpu/manageddra/api"
)

// stopped is the reason of all conditions of a service that serving.kserve.io/stop has ended.
const stopped = "Stopped"

// conditions are collected during a reconcile, and replace those of the status.
type conditions struct {
	list []api.Condition
}

func (c *conditions) set(kind string, status corev1.ConditionStatus, reason, message string) {
	c.list = slices.DeleteFunc(c.list, func(old api.Condition) bool { return old.Type == kind })
	c.list = append(c.list, api.Condition{Type: kind, Status: status, Reason: reason, Message: message})
}

func (c *conditions) ok(kind string) { c.set(kind, corev1.ConditionTrue, "", "") }

// fail says why something is not as it should be. What the user has to change has a reason of its own.
func (c *conditions) fail(kind, reason string, err error) {
	var p *problem
	if errors.As(err, &p) {
		reason = p.reason
	}
	c.set(kind, corev1.ConditionFalse, reason, err.Error())
}

func (c *conditions) find(kind string) *api.Condition {
	if i := slices.IndexFunc(c.list, func(c api.Condition) bool { return c.Type == kind }); i >= 0 {
		return &c.list[i]
	}
	return nil
}

// summarize sets a condition from parts of it: it is that of the first part that is false, else of the first that is unknown.
// Parts that do not exist do not count, and with none of them all is well.
func (c *conditions) summarize(kind string, parts ...string) {
	for _, status := range []corev1.ConditionStatus{corev1.ConditionFalse, corev1.ConditionUnknown} {
		for _, part := range parts {
			if p := c.find(part); p != nil && p.Status == status {
				c.set(kind, status, p.Reason, p.Message)
				return
			}
		}
	}
	c.ok(kind)
}

func (c *conditions) complete() {
	c.summarize(api.ConditionWorkloadsReady, api.ConditionClaimTemplateReady, api.ConditionMainWorkloadReady, api.ConditionWorkerWorkloadReady,
		api.ConditionPrefillWorkloadReady, api.ConditionPrefillWorkerReady)
	if c.find(api.ConditionRouterReady) == nil {
		c.summarize(api.ConditionRouterReady, api.ConditionHTTPRoutesReady, api.ConditionInferencePoolReady)
	}
	c.summarize(api.ConditionReady, api.ConditionPresetsCombined, api.ConditionWorkloadsReady, api.ConditionRouterReady)
}

// deploymentReady takes over what a Deployment says of itself.
func (c *conditions) deploymentReady(kind string, d *appsv1.Deployment) {
	find := func(kind appsv1.DeploymentConditionType) *appsv1.DeploymentCondition {
		if i := slices.IndexFunc(d.Status.Conditions, func(c appsv1.DeploymentCondition) bool { return c.Type == kind }); i >= 0 {
			return &d.Status.Conditions[i]
		}
		return nil
	}
	available, progressing := find(appsv1.DeploymentAvailable), find(appsv1.DeploymentProgressing)
	switch {
	case d.Status.ObservedGeneration < d.Generation || available == nil:
		c.set(kind, corev1.ConditionFalse, "Progressing", "the Deployment is being worked on")
	case progressing != nil && progressing.Status == corev1.ConditionFalse:
		c.set(kind, corev1.ConditionFalse, progressing.Reason, progressing.Message)
	case available.Status != corev1.ConditionTrue:
		c.set(kind, corev1.ConditionFalse, available.Reason, available.Message)
	case ptr.Deref(d.Spec.Replicas, 0) > 0 && d.Status.AvailableReplicas == 0:
		// One that may be without its only pod during updates calls itself available without any.
		c.set(kind, corev1.ConditionFalse, "MinimumReplicasUnavailable", fmt.Sprintf("0 of %d replicas are available", *d.Spec.Replicas))
	default:
		c.ok(kind)
	}
}

// writeStatus patches what has changed. A condition keeps its time for as long as its status is the same.
func (r *reconciler) writeStatus(ctx context.Context, service *api.LLMInferenceService, c *conditions) error {
	status := api.ServiceStatus{ObservedGeneration: service.Generation, Conditions: c.list}
	if ready := c.find(api.ConditionReady); ready != nil && ready.Reason != stopped {
		status.URL = fmt.Sprintf("http://%s.%s.svc:%d", api.WorkloadServiceName(service.Name), service.Namespace, servingPort)
	}
	slices.SortFunc(status.Conditions, func(a, b api.Condition) int { return strings.Compare(a.Type, b.Type) })
	was := conditions{list: service.Status.Conditions}
	now := metav1.NewTime(time.Now().Truncate(time.Second))
	for i := range status.Conditions {
		status.Conditions[i].LastTransitionTime = now
		if old := was.find(status.Conditions[i].Type); old != nil && old.Status == status.Conditions[i].Status {
			status.Conditions[i].LastTransitionTime = old.LastTransitionTime
		}
	}
	if equality.Semantic.DeepEqual(service.Status, status) {
		return nil
	}
	changed := service.DeepCopy()
	changed.Status = status
	if err := r.Status().Patch(ctx, changed, client.MergeFrom(service), client.FieldOwner(fieldOwner)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("writing the status: %w", err)
	}
	ready, before := c.find(api.ConditionReady), was.find(api.ConditionReady)
	switch {
	case ready.Status == corev1.ConditionTrue && (before == nil || before.Status != corev1.ConditionTrue):
		r.event(service, "LLMInferenceServiceReady", "Reconcile", "the service is ready")
	case ready.Status != corev1.ConditionTrue && before != nil && before.Status == corev1.ConditionTrue:
		r.warn(service, "LLMInferenceServiceNotReady", "Reconcile", "the service is no longer ready: %s", ready.Message)
	}
	return nil
}
