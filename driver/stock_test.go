package driver

import (
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/driver/inventory"
)

// TestCheckpointRemembersAllOfAGPU fails when the inventory says more of a GPU than a checkpoint keeps.
func TestCheckpointRemembersAllOfAGPU(t *testing.T) {
	group := inventory.GPUGroup{
		Model: "h100-sxm5-80gb", Count: 1, MIGMode: inventory.MIGStatic, NUMANode: ptr.To(1),
		Partitions: []inventory.Partition{{Profile: "1g.10gb", Start: 2}, {Profile: "3g.40gb", Start: 4}},
		PCIeRoot:   "pci0000:40", DriverVersion: "580.95.05", Seed: "lab", ConsumableShares: "memory",
	}
	fields := reflect.ValueOf(group)
	for i := range fields.NumField() {
		if fields.Field(i).IsZero() {
			t.Errorf("the test does not set %s", fields.Type().Field(i).Name)
		}
	}
	f := newTestNode(t).startWithoutInventory().factory
	gpus, err := f.fromInventory([]inventory.GPUGroup{{Model: "h100-sxm5-80gb", Count: 2, MIGMode: inventory.MIGDisabled}, group})
	if err != nil {
		t.Fatal(err)
	}
	last := gpus[len(gpus)-1]
	if diff := cmp.Diff(group, groupOf(last.source)); diff != "" {
		t.Errorf("remembered: %s", diff)
	}
	again, err := f.fromSource(last.source)
	if err != nil {
		t.Fatal(err)
	}
	if again.UUID != last.UUID || again.PCIBusID != last.PCIBusID || again.Serial != last.Serial || !reflect.DeepEqual(again.source, last.source) {
		t.Errorf("made again: %s %s, was %s %s", again.UUID, again.PCIBusID, last.UUID, last.PCIBusID)
	}
	for i, device := range again.Devices {
		if device.UUID != last.Devices[i].UUID {
			t.Errorf("device %s became another", device.Name)
		}
	}
}
