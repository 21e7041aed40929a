package claimconfig

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/profiles"
)

// FuzzParse checks that parameters of any content lead to a configuration that can be asked for each device,
// or to an error that names the claim and the entry.
func FuzzParse(f *testing.F) {
	catalogue, err := profiles.Load()
	if err != nil {
		f.Fatal(err)
	}
	vendor := catalogue.Vendors()[0]
	for _, seed := range []string{
		"", "null", "[]", "{}", `{"apiVersion":1}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi","defaultPerDevicePinnedMemoryLimit":{"0":"1Gi","GPU-x":"2Gi"}}}}`,
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"1e99999"}}}`,
		`{"apiVersion":"simgpu.dev/v1alpha1","kind":"FaultConfig","faults":[{"type":"FailPrepare","times":2}]}`,
	} {
		f.Add([]byte(seed), false)
		f.Add([]byte(seed), true)
	}
	f.Fuzz(func(t *testing.T, parameters []byte, named bool) {
		entry := resourceapi.DeviceAllocationConfiguration{Source: resourceapi.AllocationConfigSourceClaim}
		entry.Opaque = &resourceapi.OpaqueDeviceConfiguration{Driver: "gpu.example.com"}
		entry.Opaque.Parameters.Raw = parameters
		if named {
			entry.Requests = []string{"r"}
		}
		claim := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "a"},
			Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: "gpu.example.com"}},
				Config:  []resourceapi.DeviceAllocationConfiguration{entry},
			}}},
		}
		if _, err := Faults(claim, "gpu.example.com"); err != nil && !strings.Contains(err.Error(), "team/a") {
			t.Errorf("faults: %v", err)
		}
		set, err := Parse(claim, "gpu.example.com", vendor.ClaimConfig)
		if err != nil {
			if set != nil || !strings.Contains(err.Error(), "team/a") || !strings.Contains(err.Error(), "config[0]") {
				t.Errorf("%v with %v", set, err)
			}
			return
		}
		for _, partition := range []bool{false, true} {
			config, err := set.For("r", partition)
			if err != nil || config == nil || config.Sharing == nil {
				continue
			}
			limits, err := config.Sharing.PinnedMemory([]string{"GPU-x", "GPU-y"})
			if err == nil && len(limits) != 2 {
				t.Errorf("%d limits for two devices", len(limits))
			}
			if config.Sharing.String() == "" {
				t.Error("a sharing without a name")
			}
		}
	})
}
