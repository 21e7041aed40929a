package controller

import (
	"context"
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/simgpu/simgpu/manageddra/annotations"
	"github.com/simgpu/simgpu/manageddra/api"
)

// claimTemplateKind is what managed DRA needs of the cluster.
var claimTemplateKind = resourceapi.SchemeGroupVersion.WithKind("ResourceClaimTemplate")

// claimTemplate makes, replaces or removes the claim template of a service. A *problem is for the user to solve; the
// workload must not be touched before, since its pods would get what somebody else's template says, or nothing.
func (r *reconciler) claimTemplate(ctx context.Context, service *api.LLMInferenceService, request *annotations.Request) error {
	name := api.ClaimTemplateName(service.Name)
	if !r.apis.served(claimTemplateKind) {
		if request == nil {
			return nil
		}
		return &problem{"ResourceAPINotServed", fmt.Sprintf("this cluster does not serve %s, which %s needs: it is served by default from Kubernetes 1.34 on; "+
			"upgrade, enable the API, or remove the annotation", resourceapi.SchemeGroupVersion, api.AnnotationDeviceClass)}
	}
	if request == nil {
		return r.remove(ctx, service, claimTemplateKind, name)
	}
	want := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: service.Namespace, OwnerReferences: owned(service)},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: request.ClaimSpec()},
	}
	live := &resourceapi.ResourceClaimTemplate{}
	switch err := r.Get(ctx, client.ObjectKeyFromObject(want), live); {
	case apierrors.IsNotFound(err):
		return r.createTemplate(ctx, service, want, "Created")
	case err != nil:
		return err
	case live.DeletionTimestamp != nil:
		return errors.New("the claim template is being deleted: waiting for it to be gone")
	case metav1.IsControlledBy(live, service) && equality.Semantic.DeepEqual(live.Spec, resourceapi.ResourceClaimTemplateSpec{Spec: withDefaults(request.ClaimSpec())}):
		return nil
	case metav1.GetControllerOf(live) == nil && owns(live, ""), metav1.IsControlledBy(live, service):
		// Ours, changed or edited. The specification is immutable: the template makes place for another of its name. Claims
		// that were made from it stay as they are.
		if err := r.Delete(ctx, live, client.Preconditions{UID: &live.UID}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("replacing ResourceClaimTemplate %s: %w", name, err)
		}
		return r.createTemplate(ctx, service, want, "Updated")
	default:
		return foreign("ResourceClaimTemplate", live)
	}
}

func (r *reconciler) createTemplate(ctx context.Context, service *api.LLMInferenceService, template *resourceapi.ResourceClaimTemplate, reason string) error {
	err := r.Create(ctx, template, client.FieldOwner(fieldOwner))
	switch {
	case apierrors.IsInvalid(err):
		return &problem{"InvalidRequest", fmt.Sprintf("the API server refuses the claim that the annotations ask for: %v", err)}
	case meta.IsNoMatchError(err):
		return &problem{"ResourceAPINotServed", err.Error()}
	case err != nil:
		return fmt.Errorf("creating ResourceClaimTemplate %s: %w", template.Name, err)
	}
	r.event(service, reason, "ApplyResourceClaimTemplate", "%s ResourceClaimTemplate %s", reason, template.Name)
	return nil
}

// withDefaults is a claim as the API server stores it.
func withDefaults(spec resourceapi.ResourceClaimSpec) resourceapi.ResourceClaimSpec {
	for _, request := range spec.Devices.Requests {
		request.Exactly.AllocationMode = resourceapi.DeviceAllocationModeExactCount
		request.Exactly.Count = max(request.Exactly.Count, 1)
	}
	return spec
}
