package modelserver

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/simgpu/simgpu/deviceapi"
)

func TestVisible(t *testing.T) {
	gpu := func(uuid string, whole bool, partitions ...string) deviceapi.GPUStatus {
		status := deviceapi.GPUStatus{
			GPU:        deviceapi.GPU{UUID: uuid, ProductName: "H100", MemoryBytes: 80, MIGMode: deviceapi.MIGDisabled},
			Whole:      whole,
			MemoryUsed: 8,
		}
		for _, p := range partitions {
			status.Partitions = append(status.Partitions, deviceapi.PartitionStatus{
				Partition:  deviceapi.Partition{UUID: p, Profile: "3g.40gb", MemoryBytes: 40},
				MemoryUsed: 4,
			})
		}
		return status
	}
	twoGPUs := deviceapi.Snapshot{GPUs: []deviceapi.GPUStatus{gpu("GPU-aa", true), gpu("GPU-ab", true)}}
	twoPartitions := deviceapi.Snapshot{GPUs: []deviceapi.GPUStatus{gpu("GPU-aa", false, "MIG-1", "MIG-2")}}
	mixed := deviceapi.Snapshot{GPUs: []deviceapi.GPUStatus{gpu("GPU-aa", true), gpu("GPU-ab", false, "MIG-1")}}
	text := func(s string) *string { return &s }

	for name, test := range map[string]struct {
		snapshot deviceapi.Snapshot
		chosen   *string
		want     []string
	}{
		"whole GPUs":                              {twoGPUs, nil, []string{"GPU-aa", "GPU-ab"}},
		"one partition of several":                {twoPartitions, nil, []string{"MIG-1"}},
		"a partition hides whole GPUs":            {mixed, nil, []string{"MIG-1"}},
		"chosen by position, in that order":       {twoGPUs, text("1,0"), []string{"GPU-ab", "GPU-aa"}},
		"chosen by the beginning of a UUID":       {twoGPUs, text("GPU-ab"), []string{"GPU-ab"}},
		"a beginning of two is none":              {twoGPUs, text("GPU-a"), nil},
		"nothing counts after one that is absent": {twoGPUs, text("0,7,1"), []string{"GPU-aa"}},
		"an empty choice hides all":               {twoGPUs, text(""), nil},
		"none by number":                          {twoGPUs, text("-1"), nil},
		"the other partition":                     {twoPartitions, text("MIG-2"), []string{"MIG-2"}},
		"the whole GPU beside a partition":        {mixed, text("GPU-aa"), []string{"GPU-aa"}},
		"no device":                               {deviceapi.Snapshot{}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, d := range Visible(test.snapshot, test.chosen) {
				got = append(got, d.UUID)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}

	want := Device{UUID: "MIG-1", Name: "H100 MIG 3g.40gb", TotalBytes: 40, UsedBytes: 4}
	if diff := cmp.Diff(want, Visible(twoPartitions, nil)[0]); diff != "" {
		t.Errorf("partition (-want +got):\n%s", diff)
	}
	want = Device{UUID: "GPU-aa", Name: "H100", TotalBytes: 80, UsedBytes: 8}
	if diff := cmp.Diff(want, Visible(twoGPUs, nil)[0]); diff != "" {
		t.Errorf("GPU (-want +got):\n%s", diff)
	}
}
