// Package webhook says at admission what is wrong with the managed-DRA annotations of an LLMInferenceService: KServe's rules
// (package annotations), and what would fail later and be harder to find: a container that no pod has, a CEL expression
// that does not compile, more devices or selectors than a claim can have. A DeviceClass that does not exist yet is a warning.
//
// It also makes the certificates that the API server needs to call it (certificates.go).
package webhook

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/validation/field"
	dracel "k8s.io/dynamic-resource-allocation/cel"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/simgpu/simgpu/manageddra/annotations"
	"github.com/simgpu/simgpu/manageddra/api"
	"github.com/simgpu/simgpu/manageddra/controller"
)

// Path is where the API server calls the webhook.
const Path = "/validate-serving-kserve-io-llminferenceservice"

// Validator reviews services of both versions, whose annotations are the same.
type Validator struct {
	Reader client.Reader
}

// Handle answers one admission review.
func (v *Validator) Handle(ctx context.Context, request admission.Request) admission.Response {
	if request.Operation != admissionv1.Create && request.Operation != admissionv1.Update {
		return admission.Allowed("")
	}
	service := &api.LLMInferenceService{}
	if err := json.Unmarshal(request.Object.Raw, service); err != nil {
		return admission.Errored(http.StatusBadRequest, fmt.Errorf("reading the LLMInferenceService: %w", err))
	}
	if service.DeletionTimestamp != nil {
		return admission.Allowed("")
	}
	warnings, errs := v.validate(ctx, service)
	if len(errs) > 0 {
		status := apierrors.NewInvalid(api.ServiceKind.GroupKind(), service.Name, errs).Status()
		return admission.Response{AdmissionResponse: admissionv1.AdmissionResponse{Allowed: false, Result: &status, Warnings: warnings}}
	}
	return admission.Allowed("").WithWarnings(warnings...)
}

func (v *Validator) validate(ctx context.Context, service *api.LLMInferenceService) (admission.Warnings, field.ErrorList) {
	request, errs := annotations.Parse(service.Annotations)
	if request == nil {
		return nil, errs
	}
	path := field.NewPath("metadata", "annotations")
	invalid := func(key, detail string) {
		errs = append(errs, field.Invalid(path.Key(key), service.Annotations[key], detail))
	}
	if request.Count > resourceapi.AllocationResultsMaxSize {
		invalid(api.AnnotationDeviceCount, fmt.Sprintf("a claim can have at most %d devices", resourceapi.AllocationResultsMaxSize))
	}
	if len(request.Selectors) > resourceapi.DeviceSelectorsMaxSize {
		invalid(api.AnnotationCELSelector, fmt.Sprintf("has %d expressions, a request can have at most %d: join some with &&", len(request.Selectors), resourceapi.DeviceSelectorsMaxSize))
	}
	for i, expression := range request.Selectors {
		if problem := compile(expression); problem != "" {
			invalid(api.AnnotationCELSelector, fmt.Sprintf("expression %d, %q: %s", i+1, expression, problem))
		}
	}
	// What a configuration in baseRefs adds is not known here; the controller checks the whole.
	if names := controller.Containers(&service.Spec); request.Container != "" && len(service.Spec.BaseRefs) == 0 && !slices.Contains(names, request.Container) {
		invalid(api.AnnotationContainerName, fmt.Sprintf("no pod of the service has a container of this name: there are %s", strings.Join(names, ", ")))
	}
	var warnings admission.Warnings
	err := v.Reader.Get(ctx, client.ObjectKey{Name: request.DeviceClass}, &resourceapi.DeviceClass{})
	switch {
	case apierrors.IsNotFound(err):
		warnings = append(warnings, fmt.Sprintf("%s: there is no DeviceClass %q, so that pods will wait until there is: kubectl get deviceclasses", api.AnnotationDeviceClass, request.DeviceClass))
	case meta.IsNoMatchError(err):
		warnings = append(warnings, fmt.Sprintf("%s: this cluster does not serve %s: the service waits until it does", api.AnnotationDeviceClass, resourceapi.SchemeGroupVersion))
	}
	return warnings, errs
}

// compile says what is wrong with an expression, in the environment that the API server gives it: "" if nothing.
func compile(expression string) string {
	if length := len(expression); length > resourceapi.CELSelectorExpressionMaxLength {
		return fmt.Sprintf("has %d bytes, at most %d are allowed", length, resourceapi.CELSelectorExpressionMaxLength)
	}
	result := dracel.GetCompiler(dracel.Features{EnableConsumableCapacity: true}).CompileCELExpression(expression, dracel.Options{})
	switch {
	case result.Error != nil:
		return result.Error.Detail
	case result.MaxCost > resourceapi.CELSelectorExpressionMaxCost:
		return "may take too long to evaluate: make it simpler"
	}
	return ""
}
