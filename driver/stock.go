package driver

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"

	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

// stock is the GPUs that a node has at one moment, sorted by index. It is immutable.
type stock struct {
	gpus    []stockGPU
	devices map[string]*hardware.Device
}

// stockGPU is a GPU together with the entry of the inventory it came from.
type stockGPU struct {
	*hardware.GPU
	source checkpoint.GPU
	// retiring is a GPU that the inventory no longer has, or has otherwise, and that is in use.
	retiring bool
}

func newStock(gpus []stockGPU) *stock {
	s := &stock{gpus: gpus, devices: map[string]*hardware.Device{}}
	slices.SortFunc(s.gpus, func(a, b stockGPU) int { return cmp.Compare(a.Index, b.Index) })
	for _, gpu := range s.gpus {
		for _, device := range gpu.Devices {
			s.devices[device.Name] = device
		}
	}
	return s
}

// device returns nil for an unknown name.
func (s *stock) device(name string) *hardware.Device { return s.devices[name] }

// gpu returns nil for an unknown index.
func (s *stock) gpu(index int) *stockGPU {
	i, found := slices.BinarySearchFunc(s.gpus, index, func(g stockGPU, index int) int { return cmp.Compare(g.Index, index) })
	if !found {
		return nil
	}
	return &s.gpus[i]
}

// merge returns what the node has after its inventory has become wanted: those of wanted, but a GPU in
// use that is not the same there stays as it is.
func (s *stock) merge(wanted []stockGPU, inUse func(index int) bool) *stock {
	merged := slices.Clone(wanted)
	for _, old := range s.gpus {
		if !inUse(old.Index) {
			continue
		}
		i := slices.IndexFunc(merged, func(g stockGPU) bool { return g.Index == old.Index })
		if i >= 0 && reflect.DeepEqual(merged[i].source, old.source) {
			continue
		}
		old.retiring = true
		if i >= 0 {
			merged[i] = old
		} else {
			merged = append(merged, old)
		}
	}
	return newStock(merged)
}

// factory makes the GPUs of one node.
type factory struct {
	nodeName, driverName string
	catalogue            *profiles.Catalogue
}

// fromInventory makes the GPUs that an inventory has for the node.
func (f factory) fromInventory(groups []inventory.GPUGroup) ([]stockGPU, error) {
	node, err := hardware.New(hardware.Config{
		NodeName:   f.nodeName,
		DriverName: f.driverName,
		Groups:     groups,
		Catalogue:  f.catalogue,
	})
	if err != nil {
		return nil, err
	}
	var single []inventory.GPUGroup
	for _, group := range groups {
		for range group.Count {
			single = append(single, group)
		}
	}
	gpus := make([]stockGPU, len(node.GPUs))
	for i, gpu := range node.GPUs {
		gpus[i] = stockGPU{GPU: gpu, source: sourceOf(gpu, single[gpu.Index])}
	}
	return gpus, nil
}

// fromSource makes a GPU again that the inventory may no longer have.
func (f factory) fromSource(source checkpoint.GPU) (stockGPU, error) {
	group := groupOf(source)
	// What a GPU is depends on its index: it is made together with those before it.
	group.Count = source.Index + 1
	gpus, err := f.fromInventory([]inventory.GPUGroup{group})
	if err != nil {
		return stockGPU{}, err
	}
	for _, gpu := range gpus {
		if gpu.Index == source.Index {
			return gpu, nil
		}
	}
	return stockGPU{}, fmt.Errorf("no GPU of index %d", source.Index)
}

// absentOf is what nobody sourced of the GPUs.
func absentOf(gpus []stockGPU) []string {
	var all []*hardware.GPU
	for _, gpu := range gpus {
		all = append(all, gpu.GPU)
	}
	return hardware.Absent(all)
}

// sourceOf and groupOf turn the part of an inventory that a GPU came from into what is remembered of it
// in a checkpoint, and back.
func sourceOf(gpu *hardware.GPU, group inventory.GPUGroup) checkpoint.GPU {
	var partitions []checkpoint.Partition
	for _, p := range group.Partitions {
		partitions = append(partitions, checkpoint.Partition(p))
	}
	return checkpoint.GPU{
		Index:      gpu.Index,
		Model:      group.Model,
		MIGMode:    string(group.MIGMode),
		Partitions: partitions,
		NUMANode:   group.NUMANode,
		PCIeRoot:   group.PCIeRoot,
		// The version itself, because the model's default may be another in the next release.
		DriverVersion: gpu.DriverVersion,
		Seed:          group.Seed,

		ConsumableShares: group.ConsumableShares,
	}
}

func groupOf(source checkpoint.GPU) inventory.GPUGroup {
	var partitions []inventory.Partition
	for _, p := range source.Partitions {
		partitions = append(partitions, inventory.Partition(p))
	}
	return inventory.GPUGroup{
		Model:         source.Model,
		Count:         1,
		MIGMode:       inventory.MIGMode(source.MIGMode),
		Partitions:    partitions,
		NUMANode:      source.NUMANode,
		PCIeRoot:      source.PCIeRoot,
		DriverVersion: source.DriverVersion,
		Seed:          source.Seed,

		ConsumableShares: source.ConsumableShares,
	}
}
