package controller

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/simgpu/simgpu/manageddra/api"
)

const (
	fieldOwner = "managed-dra-controller"
	// appliedAnnotation has a hash of what was applied last, so that a field that is no longer wanted is noticed.
	appliedAnnotation = "simgpu.dev/applied"
)

// owned are the owners of all that a service has: deleting it takes everything away.
func owned(service *api.LLMInferenceService) []metav1.OwnerReference {
	return []metav1.OwnerReference{*metav1.NewControllerRef(service, api.ServiceKind)}
}

// foreign is the problem with an object that has the name of ours and belongs to somebody else.
func foreign(kind string, object client.Object) *problem {
	return &problem{"NameTaken", fmt.Sprintf("%s %s belongs to %s and is left alone: rename or delete it, or rename the service", kind, object.GetName(), ownerOf(object))}
}

// ownerOf says whose an object is.
func ownerOf(object client.Object) string {
	if owner := metav1.GetControllerOf(object); owner != nil {
		return fmt.Sprintf("%s %s", owner.Kind, owner.Name)
	}
	return "nobody that it names"
}

// apply brings an object to what is wanted, and writes nothing if it is. It returns what is there now.
// An object of that name that is somebody else's is a *problem.
func (r *reconciler) apply(ctx context.Context, service *api.LLMInferenceService, object client.Object) (*unstructured.Unstructured, error) {
	want, err := r.wanted(service, object)
	if err != nil {
		return nil, err
	}
	live, err := r.live(ctx, want.GroupVersionKind(), client.ObjectKeyFromObject(want))
	if err != nil {
		return nil, err
	}
	if live != nil {
		if !metav1.IsControlledBy(live, service) {
			return nil, foreign(want.GetKind(), live)
		}
		if live.GetAnnotations()[appliedAnnotation] == want.GetAnnotations()[appliedAnnotation] && contains(live.Object, want.Object) {
			return live, nil
		}
		if err := r.leaveReplicas(ctx, live, want); err != nil {
			return nil, err
		}
	}
	if err := r.Apply(ctx, client.ApplyConfigurationFromUnstructured(want), client.FieldOwner(fieldOwner), client.ForceOwnership); err != nil {
		return nil, fmt.Errorf("applying %s %s: %w", want.GetKind(), want.GetName(), err)
	}
	reason := "Updated"
	if live == nil {
		reason = "Created"
	}
	r.event(service, reason, "Apply"+want.GetKind(), "%s %s %s", reason, want.GetKind(), want.GetName())
	return want, nil
}

// wanted is an object as it is applied: what it says and nothing else, with its owner and hash.
func (r *reconciler) wanted(service *api.LLMInferenceService, object client.Object) (*unstructured.Unstructured, error) {
	kind, err := apiutil.GVKForObject(object, r.Scheme())
	if err != nil {
		return nil, err
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(object)
	if err != nil {
		return nil, err
	}
	delete(content, "status")
	prune(content)
	want := &unstructured.Unstructured{Object: content}
	want.SetGroupVersionKind(kind)
	want.SetNamespace(service.Namespace)
	want.SetOwnerReferences(owned(service))
	annotations := want.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[appliedAnnotation] = hashOf(want.Object)
	want.SetAnnotations(annotations)
	return want, nil
}

// live is the object as the cache has it, nil if there is none.
func (r *reconciler) live(ctx context.Context, kind schema.GroupVersionKind, key client.ObjectKey) (*unstructured.Unstructured, error) {
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(kind)
	if err := r.Get(ctx, key, live); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return live, nil
}

// remove deletes an object of the service. Somebody else's is left alone, and a kind that is not served has none.
func (r *reconciler) remove(ctx context.Context, service *api.LLMInferenceService, kind schema.GroupVersionKind, name string) error {
	if !r.apis.served(kind) {
		return nil
	}
	live, err := r.live(ctx, kind, client.ObjectKey{Namespace: service.Namespace, Name: name})
	if err != nil || live == nil || live.GetDeletionTimestamp() != nil || !metav1.IsControlledBy(live, service) {
		return err
	}
	uid := live.GetUID()
	if err := r.Delete(ctx, live, client.Preconditions{UID: &uid}, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil
		}
		return fmt.Errorf("deleting %s %s: %w", kind.Kind, name, err)
	}
	r.event(service, "Deleted", "Delete"+kind.Kind, "Deleted %s %s", kind.Kind, name)
	return nil
}

// leaveReplicas lets go of the number of replicas when it is no longer wanted: without another owner the API server would
// set it back to 1, and an autoscaler that has taken over would start from there.
func (r *reconciler) leaveReplicas(ctx context.Context, live, want *unstructured.Unstructured) error {
	replicas, found, _ := unstructured.NestedInt64(live.Object, "spec", "replicas")
	if _, wanted, _ := unstructured.NestedInt64(want.Object, "spec", "replicas"); wanted || !found || !owns(live, `"f:replicas"`) {
		return nil
	}
	keep := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"replicas": replicas}}}
	keep.SetGroupVersionKind(live.GroupVersionKind())
	keep.SetNamespace(live.GetNamespace())
	keep.SetName(live.GetName())
	return r.Apply(ctx, client.ApplyConfigurationFromUnstructured(keep), client.FieldOwner(fieldOwner+"-replicas"), client.ForceOwnership)
}

// owns is true if the controller has set that field; "" stands for any.
func owns(object client.Object, field string) bool {
	return slices.ContainsFunc(object.GetManagedFields(), func(entry metav1.ManagedFieldsEntry) bool {
		return entry.Manager == fieldOwner && entry.FieldsV1 != nil && strings.Contains(entry.FieldsV1.GetRawString(), field)
	})
}

// contains is true if all that is wanted is there. What is there beyond it, defaults and what others have set, does not
// count, except in lists.
func contains(live, want any) bool {
	switch want := want.(type) {
	case map[string]any:
		live, ok := live.(map[string]any)
		if !ok {
			return false
		}
		for key, value := range want {
			if !contains(live[key], value) {
				return false
			}
		}
		return true
	case []any:
		live, ok := live.([]any)
		if !ok || len(live) != len(want) {
			return false
		}
		for i := range want {
			if !contains(live[i], want[i]) {
				return false
			}
		}
		return true
	default:
		return fmt.Sprint(live) == fmt.Sprint(want) // numbers come as int64 or float64
	}
}

// prune removes what says nothing: null, and empty maps in maps.
func prune(object map[string]any) {
	for key, value := range object {
		switch value := value.(type) {
		case nil:
			delete(object, key)
		case map[string]any:
			if prune(value); len(value) == 0 && key != "emptyDir" {
				delete(object, key)
			}
		case []any:
			for _, item := range value {
				if item, ok := item.(map[string]any); ok {
					prune(item)
				}
			}
		}
	}
}

// hashOf is short and the same for the same content.
func hashOf(content any) string {
	data, err := json.Marshal(content) // maps are sorted
	if err != nil {
		panic(err) // it came from JSON
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:8])
}
