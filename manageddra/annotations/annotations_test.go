package annotations_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/simgpu/simgpu/manageddra/annotations"
	"github.com/simgpu/simgpu/manageddra/api"
)

const (
	class     = api.AnnotationDeviceClass
	count     = api.AnnotationDeviceCount
	selector  = api.AnnotationCELSelector
	container = api.AnnotationContainerName
)

func TestParse(t *testing.T) {
	for name, tc := range map[string]struct {
		annotations map[string]string
		want        *annotations.Request
	}{
		"nothing":            {annotations: map[string]string{"serving.kserve.io/stop": "true"}},
		"class alone":        {map[string]string{class: " gpu.nvidia.com\n"}, &annotations.Request{DeviceClass: "gpu.nvidia.com", Count: 1}},
		"blank count":        {map[string]string{class: "gpu", count: "  "}, &annotations.Request{DeviceClass: "gpu", Count: 1}},
		"count with a sign":  {map[string]string{class: "gpu", count: "+2"}, &annotations.Request{DeviceClass: "gpu", Count: 2}},
		"count with blanks":  {map[string]string{class: "gpu", count: " 8 "}, &annotations.Request{DeviceClass: "gpu", Count: 8}},
		"container, trimmed": {map[string]string{class: "gpu", container: " main "}, &annotations.Request{DeviceClass: "gpu", Count: 1, Container: "main"}},
		"block of selectors": {
			map[string]string{class: "gpu", selector: "\n  a == 1\n\n\t b == 2 \n"},
			&annotations.Request{DeviceClass: "gpu", Count: 1, Selectors: []string{"a == 1", "b == 2"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, errs := annotations.Parse(tc.annotations)
			if len(errs) > 0 {
				t.Fatal(errs.ToAggregate())
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestParseSaysAllThatIsWrong(t *testing.T) {
	for name, tc := range map[string]struct {
		annotations map[string]string
		want        []string // each a part of one error, in order
	}{
		"count without class":     {map[string]string{count: "2"}, []string{"metadata.annotations[" + class + "]: Required value: " + class + " is required"}},
		"selector without class":  {map[string]string{selector: "true"}, []string{"[" + class + "]: Required"}},
		"container without class": {map[string]string{container: "main"}, []string{"[" + class + "]: Required"}},
		"empty class":             {map[string]string{class: "  "}, []string{`[` + class + `]: Invalid value: "  ": device class must not be empty`}},
		"class in capitals":       {map[string]string{class: "GPU"}, []string{"device class must be a DNS subdomain"}},
		"class with two dots":     {map[string]string{class: "gpu..com"}, []string{"device class must be a DNS subdomain"}},
		"count of zero":           {map[string]string{class: "gpu", count: "0"}, []string{"must be >= 1"}},
		"negative count":          {map[string]string{class: "gpu", count: "-1"}, []string{"must be >= 1"}},
		"count with a fraction":   {map[string]string{class: "gpu", count: "1.5"}, []string{"invalid syntax"}},
		"empty selector":          {map[string]string{class: "gpu", selector: " \n "}, []string{"at least one non-empty CEL expression"}},
		"empty container":         {map[string]string{class: "gpu", container: ""}, []string{"container name must not be empty"}},
		"container with a dot":    {map[string]string{class: "gpu", container: "a.b"}, []string{"container name must be a DNS label"}},
		"container too long":      {map[string]string{class: "gpu", container: strings.Repeat("a", 64)}, []string{"no more than 63"}},
		"several": {
			map[string]string{class: "", count: "x", selector: "", container: "_"},
			[]string{"device class", "invalid syntax", "cel selector", "container name"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			request, errs := annotations.Parse(tc.annotations)
			if request != nil || len(errs) != len(tc.want) {
				t.Fatalf("%+v, %v, want %d errors", request, errs, len(tc.want))
			}
			for i, want := range tc.want {
				if !strings.Contains(errs[i].Error(), want) {
					t.Errorf("error %d is %q, want %q", i, errs[i], want)
				}
			}
		})
	}
}

func TestClaimSpec(t *testing.T) {
	one := (&annotations.Request{DeviceClass: "gpu", Count: 1}).ClaimSpec().Devices.Requests
	if len(one) != 1 || one[0].Name != "device" || one[0].Exactly.Count != 0 || one[0].Exactly.AllocationMode != "" {
		t.Errorf("one device of a class is %+v", one)
	}
	many := (&annotations.Request{DeviceClass: "gpu", Count: 3, Selectors: []string{"a", "b"}}).ClaimSpec().Devices.Requests[0].Exactly
	if many.Count != 3 || len(many.Selectors) != 2 || many.Selectors[1].CEL.Expression != "b" {
		t.Errorf("three devices with two selectors are %+v", many)
	}
}
