package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/simgpu/simgpu/manageddra/api"
)

// merged is the specification of a service on top of those that it refers to, the last one on top of those before.
// Containers, volumes and environment merge by name, as Kubernetes merges them in a patch.
func (r *reconciler) merged(ctx context.Context, service *api.LLMInferenceService) (*api.ServiceSpec, error) {
	specs := make([]api.ServiceSpec, 0, len(service.Spec.BaseRefs)+1)
	for _, ref := range service.Spec.BaseRefs {
		var config api.LLMInferenceServiceConfig
		err := r.Get(ctx, client.ObjectKey{Namespace: service.Namespace, Name: ref.Name}, &config)
		if apierrors.IsNotFound(err) {
			return nil, &problem{"ConfigNotFound", fmt.Sprintf("spec.baseRefs names LLMInferenceServiceConfig %s, which namespace %s does not have", ref.Name, service.Namespace)}
		}
		if err != nil {
			return nil, err
		}
		specs = append(specs, config.Spec)
	}
	return mergeSpecs(append(specs, service.Spec)...)
}

func mergeSpecs(specs ...api.ServiceSpec) (*api.ServiceSpec, error) {
	base := []byte("{}")
	for _, spec := range specs {
		patch, err := json.Marshal(spec)
		if err != nil {
			return nil, err
		}
		if base, err = strategicpatch.StrategicMergePatch(base, patch, api.ServiceSpec{}); err != nil {
			return nil, &problem{"CombineBaseError", fmt.Sprintf("the configurations of spec.baseRefs do not fit together: %v", err)}
		}
	}
	merged := &api.ServiceSpec{}
	return merged, json.Unmarshal(base, merged)
}

// problem is something that the user has to change. It ends up in a condition.
type problem struct{ reason, message string }

func (p *problem) Error() string { return p.message }

// transient is what is worth trying again: the error without those that are problems.
func transient(err error) error {
	switch e := err.(type) { //nolint:errorlint // takes errors apart
	case *problem:
		return nil
	case interface{ Unwrap() []error }:
		var rest []error
		for _, part := range e.Unwrap() {
			rest = append(rest, transient(part))
		}
		return errors.Join(rest...)
	default:
		return err
	}
}
