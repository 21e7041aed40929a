package webhook

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/simgpu/simgpu/manageddra/api"
)

func TestHandle(t *testing.T) {
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}}
	validator := &Validator{Reader: fake.NewClientBuilder().WithObjects(class).Build()}
	const count, selector, container = api.AnnotationDeviceCount, api.AnnotationCELSelector, api.AnnotationContainerName
	for name, tc := range map[string]struct {
		annotations map[string]string
		operation   admissionv1.Operation
		refused     []string // parts of the message; none: allowed
		warns       string
	}{
		"nothing asked for":           {operation: admissionv1.Create},
		"a device":                    {annotations: map[string]string{api.AnnotationDeviceClass: "gpu", selector: "device.driver == 'x'"}, operation: admissionv1.Create},
		"a class that is not there":   {annotations: map[string]string{api.AnnotationDeviceClass: "nic"}, operation: admissionv1.Create, warns: `no DeviceClass "nic"`},
		"a container that is not":     {annotations: map[string]string{api.AnnotationDeviceClass: "gpu", container: "ghost"}, operation: admissionv1.Update, refused: []string{"there are main"}},
		"more devices than a claim":   {annotations: map[string]string{api.AnnotationDeviceClass: "gpu", count: "33"}, operation: admissionv1.Create, refused: []string{"at most 32 devices"}},
		"more selectors than a claim": {annotations: map[string]string{api.AnnotationDeviceClass: "gpu", selector: strings.Repeat("true\n", 33)}, operation: admissionv1.Create, refused: []string{"33 expressions", "at most 32"}},
		"no bool":                     {annotations: map[string]string{api.AnnotationDeviceClass: "gpu", selector: "true\n1"}, operation: admissionv1.Create, refused: []string{`expression 2, "1": must evaluate to bool`}},
		"all that is wrong":           {annotations: map[string]string{count: "x", selector: " "}, operation: admissionv1.Create, refused: []string{"Required value", "invalid syntax", "non-empty CEL"}},
		"deleted":                     {annotations: map[string]string{count: "x"}, operation: admissionv1.Delete},
	} {
		t.Run(name, func(t *testing.T) {
			raw, err := json.Marshal(&api.LLMInferenceService{ObjectMeta: metav1.ObjectMeta{Name: "qwen", Annotations: tc.annotations}})
			if err != nil {
				t.Fatal(err)
			}
			response := validator.Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: tc.operation, Object: runtime.RawExtension{Raw: raw}}})
			if response.Allowed != (len(tc.refused) == 0) {
				t.Fatalf("allowed: %v, %+v", response.Allowed, response.Result)
			}
			for _, want := range tc.refused {
				if response.Result.Code != http.StatusUnprocessableEntity || !strings.Contains(response.Result.Message, want) {
					t.Errorf("%d %q does not say %q", response.Result.Code, response.Result.Message, want)
				}
			}
			if warned := slices.ContainsFunc(response.Warnings, func(w string) bool { return strings.Contains(w, tc.warns) }); warned != (tc.warns != "") {
				t.Errorf("warnings %q", response.Warnings)
			}
		})
	}
	t.Run("nonsense", func(t *testing.T) {
		response := validator.Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{Operation: admissionv1.Create, Object: runtime.RawExtension{Raw: []byte(`{"spec": 1}`)}}})
		if response.Allowed || response.Result.Code != http.StatusBadRequest {
			t.Errorf("%+v", response)
		}
	})
}
