package driver

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

func TestServedGPU(t *testing.T) {
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	gpu := hardware.GPU{
		Index: 3, UUID: "GPU-1", PCIBusID: "0000:04:00.0", Serial: "1650000000001",
		DriverVersion: "580.95.05", CUDAVersion: "13.0", MIGMode: inventory.MIGDynamic,
	}
	h100 := deviceapi.GPU{
		UUID: "GPU-1", ProductName: "NVIDIA H100 80GB HBM3", Minor: 3, PCIBusID: "0000:04:00.0", Serial: "1650000000001",
		DriverVersion: "580.95.05", CUDAVersion: "13.0", ComputeCapability: "9.0.0", Brand: "Nvidia", Architecture: "Hopper",
		MIGMode: deviceapi.MIGDisabled, MemoryBytes: 81559 * deviceapi.MiB, PowerLimitWatts: 700,
	}
	a100 := h100
	a100.ProductName, a100.ComputeCapability, a100.Architecture = "NVIDIA A100-SXM4-40GB", "8.0.0", "Ampere"
	a100.MIGMode, a100.MemoryBytes, a100.PowerLimitWatts = deviceapi.MIGEnabled, 40960*deviceapi.MiB, 400
	for model, want := range map[string]deviceapi.GPU{"h100-sxm5-80gb": h100, "a100-40gb": a100} {
		if gpu.Model, err = catalogue.Model(model); err != nil {
			t.Fatal(err)
		}
		if gpu.Table, err = gpu.Model.Table("580.95.05"); err != nil {
			t.Fatal(err)
		}
		got := servedGPU(&gpu)
		half := map[string]deviceapi.Profile{
			"h100-sxm5-80gb": {Name: "3g.40gb", ID: 9, Slices: 3, MaxInstances: 2, MemoryBytes: 40448 * deviceapi.MiB, Multiprocessors: 60,
				CopyEngines: 3, Decoders: 3, JPEGEngines: 3, PlacementSize: 4, PlacementStarts: []int{0, 4}},
			"a100-40gb": {Name: "3g.20gb", ID: 9, Slices: 3, MaxInstances: 2, MemoryBytes: 20096 * deviceapi.MiB, Multiprocessors: 42,
				CopyEngines: 3, Decoders: 2, PlacementSize: 4, PlacementStarts: []int{0, 4}},
		}[model]
		half.Compute = []deviceapi.ComputeProfile{{ID: 0, Slices: 1, MaxInstances: 3}, {ID: 1, Slices: 2, MaxInstances: 1}, {ID: 2, Slices: 3, MaxInstances: 1}}
		at := slices.IndexFunc(got.Profiles, func(p deviceapi.Profile) bool { return p.ID == 9 })
		if at < 0 {
			t.Fatalf("%s: no profile 9 in %+v", model, got.Profiles)
		}
		if diff := cmp.Diff(half, got.Profiles[at]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", model, diff)
		}
		got.Profiles = nil
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", model, diff)
		}
	}
}
