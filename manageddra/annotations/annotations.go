// Package annotations reads the four annotations that ask for managed DRA, and says what is wrong with them.
//
// The rules, the paths of the fields and what is accepted are KServe's (pkg/validation/managed_dra.go there), so that an
// object that one of the two admits is admitted by the other.
package annotations

import (
	"fmt"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/simgpu/simgpu/manageddra/api"
)

// Request is what the annotations of a service ask for, for each of its pods.
type Request struct {
	DeviceClass string
	Count       int64
	// Selectors are CEL expressions, all of which a device has to meet.
	Selectors []string
	// Container gets the devices; "" is the first one.
	Container string
}

// Enabled is true if the annotations ask for devices, rightly or wrongly.
func Enabled(annotations map[string]string) bool {
	_, enabled := annotations[api.AnnotationDeviceClass]
	return enabled
}

// Parse returns what the annotations ask for, nil if they do not, and all that is wrong with them.
func Parse(annotations map[string]string) (*Request, field.ErrorList) {
	path := field.NewPath("metadata", "annotations")
	var errs field.ErrorList
	invalid := func(key, detail string) {
		errs = append(errs, field.Invalid(path.Key(key), annotations[key], detail))
	}
	class, enabled := annotations[api.AnnotationDeviceClass]
	count, hasCount := annotations[api.AnnotationDeviceCount]
	selector, hasSelector := annotations[api.AnnotationCELSelector]
	container, hasContainer := annotations[api.AnnotationContainerName]

	request := &Request{DeviceClass: strings.TrimSpace(class), Count: 1, Container: strings.TrimSpace(container)}
	switch {
	case !enabled && !hasCount && !hasSelector && !hasContainer:
		return nil, nil
	case !enabled:
		errs = append(errs, field.Required(path.Key(api.AnnotationDeviceClass), fmt.Sprintf("%s is required to enable managed DRA when %s, %s or %s is set",
			api.AnnotationDeviceClass, api.AnnotationDeviceCount, api.AnnotationCELSelector, api.AnnotationContainerName)))
	case request.DeviceClass == "":
		invalid(api.AnnotationDeviceClass, "device class must not be empty")
	default:
		if problems := validation.IsDNS1123Subdomain(request.DeviceClass); len(problems) > 0 {
			invalid(api.AnnotationDeviceClass, "device class must be a DNS subdomain: "+strings.Join(problems, "; "))
		}
	}
	if value := strings.TrimSpace(count); value != "" {
		number, err := strconv.Atoi(value)
		switch {
		case err != nil:
			invalid(api.AnnotationDeviceCount, fmt.Sprintf("invalid %s value %q: %v", api.AnnotationDeviceCount, value, err))
		case number < 1:
			invalid(api.AnnotationDeviceCount, fmt.Sprintf("invalid %s value %q: must be >= 1", api.AnnotationDeviceCount, value))
		}
		request.Count = int64(number)
	}
	for line := range strings.SplitSeq(selector, "\n") {
		if line = strings.TrimSpace(line); line != "" {
			request.Selectors = append(request.Selectors, line)
		}
	}
	if hasSelector && len(request.Selectors) == 0 {
		invalid(api.AnnotationCELSelector, "cel selector must contain at least one non-empty CEL expression")
	}
	if hasContainer {
		if request.Container == "" {
			invalid(api.AnnotationContainerName, "container name must not be empty")
		} else if problems := validation.IsDNS1123Label(request.Container); len(problems) > 0 {
			invalid(api.AnnotationContainerName, "container name must be a DNS label: "+strings.Join(problems, "; "))
		}
	}
	if len(errs) > 0 {
		return nil, errs
	}
	return request, nil
}

// ClaimSpec is the claim that each pod gets: one request, as KServe writes it.
func (r *Request) ClaimSpec() resourceapi.ResourceClaimSpec {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: r.DeviceClass}
	if r.Count > 1 {
		exactly.Count = r.Count
	}
	for _, expression := range r.Selectors {
		exactly.Selectors = append(exactly.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}})
	}
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{{Name: api.RequestName, Exactly: exactly}},
	}}
}
