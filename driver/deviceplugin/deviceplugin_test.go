package deviceplugin

import (
	"slices"
	"testing"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func TestPrefersWhatIsNotTaken(t *testing.T) {
	s := &service{plugin: &Plugin{Devices: func() []Device {
		return []Device{{ID: "a", Healthy: true, Taken: true}, {ID: "b", Healthy: true}, {ID: "c", Healthy: true}, {ID: "d", Healthy: true}}
	}}}
	for name, tc := range map[string]struct {
		request *api.ContainerPreferredAllocationRequest
		want    []string
	}{
		"one":                    {&api.ContainerPreferredAllocationRequest{AvailableDeviceIDs: []string{"d", "c", "a"}, AllocationSize: 1}, []string{"c"}},
		"two, one of them fixed": {&api.ContainerPreferredAllocationRequest{AvailableDeviceIDs: []string{"a", "b", "d"}, MustIncludeDeviceIDs: []string{"d"}, AllocationSize: 2}, []string{"d", "b"}},
		"none that can be had":   {&api.ContainerPreferredAllocationRequest{AvailableDeviceIDs: []string{"a"}, AllocationSize: 1}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			answer, err := s.GetPreferredAllocation(t.Context(), &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{tc.request}})
			if err != nil || !slices.Equal(answer.ContainerResponses[0].DeviceIDs, tc.want) {
				t.Errorf("preferred are %v, want %v (%v)", answer, tc.want, err)
			}
		})
	}
}
