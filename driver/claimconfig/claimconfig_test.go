package claimconfig

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/simgpu/simgpu/profiles"
)

const driver = "gpu.example.com"

var kinds = profiles.ClaimConfig{APIVersion: "resource.example.com/v1beta1", GPU: "GpuConfig", Partition: "MigDeviceConfig"}

type entry struct {
	source   resourceapi.AllocationConfigSource
	driver   string
	requests []string
	raw      string
}

func fromClass(raw string, requests ...string) entry {
	return entry{resourceapi.AllocationConfigSourceClass, driver, requests, raw}
}

func fromClaim(raw string, requests ...string) entry {
	return entry{resourceapi.AllocationConfigSourceClaim, driver, requests, raw}
}

func gpu(interval string) string {
	return `{"apiVersion":"resource.example.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"` + interval + `"}}}`
}

func partition(percentage string) string {
	return `{"apiVersion":"resource.example.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":` + percentage + `}}}`
}

func object(kind, fields string) string {
	return `{"apiVersion":"resource.example.com/v1beta1","kind":"` + kind + `",` + fields + `}`
}

// allocated returns a claim whose requests were given devices of the driver, and one of another.
func allocated(requests []string, entries ...entry) *resourceapi.ResourceClaim {
	allocation := &resourceapi.AllocationResult{}
	for _, r := range requests {
		allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{Request: r, Driver: driver})
	}
	allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{Request: "nic", Driver: "net.example.com"})
	for _, e := range entries {
		allocation.Devices.Config = append(allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
			Source:   e.source,
			Requests: e.requests,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver:     e.driver,
				Parameters: runtime.RawExtension{Raw: []byte(e.raw)},
			}},
		})
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "llama"},
		Status:     resourceapi.ResourceClaimStatus{Allocation: allocation},
	}
}

func TestPrecedence(t *testing.T) {
	const none = ""
	for name, test := range map[string]struct {
		entries   []entry
		request   string
		partition bool
		want      string
	}{
		"nothing configured": {nil, "a", false, none},
		"class":              {[]entry{fromClass(gpu("Short"), "a")}, "a", false, "strategy=TimeSlicing,interval=Short"},
		"later class entry wins": {
			[]entry{fromClass(gpu("Short"), "a"), fromClass(gpu("Long"), "a")}, "a", false, "strategy=TimeSlicing,interval=Long"},
		"later claim entry wins": {
			[]entry{fromClaim(gpu("Short")), fromClaim(gpu("Long"), "a")}, "a", false, "strategy=TimeSlicing,interval=Long"},
		"later entry for all requests wins over an earlier one for the request": {
			[]entry{fromClaim(gpu("Short"), "a"), fromClaim(gpu("Long"))}, "a", false, "strategy=TimeSlicing,interval=Long"},
		"claim wins over class": {
			[]entry{fromClass(gpu("Short"), "a"), fromClaim(gpu("Long"))}, "a", false, "strategy=TimeSlicing,interval=Long"},
		"claim wins over class in whatever order they are listed": {
			[]entry{fromClaim(gpu("Long")), fromClass(gpu("Short"), "a")}, "a", false, "strategy=TimeSlicing,interval=Long"},
		"entry for another request": {
			[]entry{fromClaim(gpu("Short"), "b")}, "a", false, none},
		"per request": {
			[]entry{fromClaim(gpu("Short"), "a"), fromClaim(gpu("Long"), "b")}, "a", false, "strategy=TimeSlicing,interval=Short"},
		"request covers its subrequests": {
			[]entry{fromClaim(gpu("Short"), "sub")}, "sub/big", false, "strategy=TimeSlicing,interval=Short"},
		"subrequest": {
			[]entry{fromClaim(gpu("Short"), "sub/big"), fromClaim(gpu("Long"), "sub/small")}, "sub/big", false, "strategy=TimeSlicing,interval=Short"},
		"entry for all requests is skipped for the other type of device": {
			[]entry{fromClaim(partition("50")), fromClaim(gpu("Long"))}, "a", true, "strategy=MPS,activeThreadPercentage=50"},
		"other driver": {
			[]entry{{resourceapi.AllocationConfigSourceClaim, "net.example.com", nil, `{"kind":"Bandwidth"}`}}, "a", false, none},
		"faulty entry for a subrequest that was not chosen": {
			[]entry{fromClaim(`{"kind":"Nonsense"}`, "sub/small")}, "sub/big", false, none},
		"an entry replaces as a whole": {
			[]entry{fromClass(gpu("Short"), "a"), fromClaim(object("GpuConfig", `"sharing":null`), "a")}, "a", false, none},
		"default interval": {
			[]entry{fromClaim(object("GpuConfig", `"sharing":{"strategy":"TimeSlicing"}`))}, "a", false, "strategy=TimeSlicing,interval=Default"},
		"time slicing of a partition": {
			[]entry{fromClaim(object("MigDeviceConfig", `"sharing":{"strategy":"TimeSlicing"}`))}, "a", true, "strategy=TimeSlicing,interval=Default"},
	} {
		t.Run(name, func(t *testing.T) {
			set, err := Parse(allocated([]string{"a", "b", "sub/big"}, test.entries...), driver, kinds)
			if err != nil {
				t.Fatal(err)
			}
			config, err := set.For(test.request, test.partition)
			if err != nil {
				t.Fatal(err)
			}
			got := none
			if config != nil && config.Sharing != nil {
				got = config.Sharing.String()
			}
			if got != test.want {
				t.Errorf("in force: %q, want %q", got, test.want)
			}
		})
	}
}

func TestFaultsNameClaimEntryRequestAndField(t *testing.T) {
	for name, test := range map[string]struct {
		entry entry
		want  []string
	}{
		"unknown kind": {
			fromClaim(`{"apiVersion":"resource.example.com/v1beta1","kind":"GpuConfg"}`, "a"),
			[]string{"team/llama", "config[0] (FromClaim, request a)", `"GpuConfg"`, "GpuConfig and MigDeviceConfig of resource.example.com/v1beta1"}},
		"unknown version": {
			fromClass(`{"apiVersion":"resource.example.com/v9","kind":"GpuConfig"}`),
			[]string{"config[0] (FromClass, all requests)", `"resource.example.com/v9"`, "resource.example.com/v1beta1"}},
		"no kind":       {fromClaim(`{}`), []string{`unknown kind ""`}},
		"not an object": {fromClaim(`"x"`), []string{"not an object"}},
		"empty":         {fromClaim(``), []string{`unknown kind ""`}},
		"unknown field": {
			fromClaim(object("GpuConfig", `"sharing":{"stratgy":"MPS"},"x":1`)),
			[]string{"sharing.stratgy: unknown field", "known here: mpsConfig, strategy, timeSlicingConfig", "x: unknown field"}},
		"wrong case":      {fromClaim(object("GpuConfig", `"Sharing":{}`)), []string{"Sharing: unknown field"}},
		"no strategy":     {fromClaim(object("GpuConfig", `"sharing":{}`)), []string{"sharing.strategy", "TimeSlicing, MPS"}},
		"other strategy":  {fromClaim(object("MigDeviceConfig", `"sharing":{"strategy":"Fabric"}`)), []string{"sharing.strategy", `"Fabric"`}},
		"interval":        {fromClaim(gpu("Eternal")), []string{"timeSlicingConfig.interval", "Default, Short, Medium, Long", `"Eternal"`}},
		"percentage":      {fromClaim(partition("101")), []string{"defaultActiveThreadPercentage", "101"}},
		"percentage type": {fromClaim(partition(`"50"`)), []string{"defaultActiveThreadPercentage", "must be an integer"}},
		"time slices of a partition": {
			fromClaim(object("MigDeviceConfig", `"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`)),
			[]string{"sharing.timeSlicingConfig: unknown field"}},
		"MPS settings for time slicing": {
			fromClaim(object("GpuConfig", `"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}`)),
			[]string{"sharing.mpsConfig", "does not go with strategy TimeSlicing"}},
		"time slicing settings for MPS": {
			fromClaim(object("GpuConfig", `"sharing":{"strategy":"MPS","timeSlicingConfig":{}}`)),
			[]string{"sharing.timeSlicingConfig", "does not go with strategy MPS"}},
		"limits": {
			fromClaim(object("GpuConfig", `"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"much","defaultPerDevicePinnedMemoryLimit":{"0":"1Ki"}}}`)),
			[]string{"defaultPinnedDeviceMemoryLimit", `"much"`, "defaultPerDevicePinnedMemoryLimit.0", "at least 1Mi"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse(allocated([]string{"a"}, test.entry), driver, kinds)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not mention %q", err, want)
				}
			}
		})
	}
}

func TestEntryForARequestMustSuitItsDevice(t *testing.T) {
	set, err := Parse(allocated([]string{"a"}, fromClaim(gpu("Long"), "a")), driver, kinds)
	if err != nil {
		t.Fatal(err)
	}
	_, err = set.For("a", true)
	if err == nil || !strings.Contains(err.Error(), "GpuConfig") || !strings.Contains(err.Error(), `request "a"`) || !strings.Contains(err.Error(), "use kind MigDeviceConfig") {
		t.Errorf("got %v", err)
	}
}

func TestPinnedMemory(t *testing.T) {
	uuids := []string{"GPU-a", "GPU-b", "GPU-c"}
	for name, test := range map[string]struct {
		config string
		want   []string
		err    string
	}{
		"none":        {`{}`, []string{"", "", ""}, ""},
		"all devices": {`{"defaultPinnedDeviceMemoryLimit":"10Gi"}`, []string{"10Gi", "10Gi", "10Gi"}, ""},
		"by UUID and position": {
			`{"defaultPinnedDeviceMemoryLimit":"10Gi","defaultPerDevicePinnedMemoryLimit":{"GPU-b":"1Gi","2":"2Gi"}}`,
			[]string{"10Gi", "1Gi", "2Gi"}, ""},
		"position out of range": {`{"defaultPerDevicePinnedMemoryLimit":{"3":"1Gi"}}`, nil, `"3"`},
		"unknown UUID":          {`{"defaultPerDevicePinnedMemoryLimit":{"GPU-x":"1Gi"}}`, nil, `"GPU-x"`},
	} {
		t.Run(name, func(t *testing.T) {
			set, err := Parse(allocated([]string{"a"}, fromClaim(object("GpuConfig", `"sharing":{"strategy":"MPS","mpsConfig":`+test.config+`}`))), driver, kinds)
			if err != nil {
				t.Fatal(err)
			}
			config, err := set.For("a", false)
			if err != nil {
				t.Fatal(err)
			}
			limits, err := config.Sharing.PinnedMemory(uuids)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Errorf("got %v, want it to mention %s", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for i, limit := range limits {
				got := ""
				if limit != nil {
					got = limit.String()
				}
				if got != test.want[i] {
					t.Errorf("device %d: %q, want %q", i, got, test.want[i])
				}
			}
		})
	}
}
