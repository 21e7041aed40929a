package hardware

import (
	"maps"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/simgpu/simgpu/profiles"
)

const mib = 1 << 20

// whole is a GPU that offers nothing but itself: all it publishes as capacity is its memory.
func (g *GPU) whole() *Device {
	device := g.newWhole()
	for _, countable := range g.Model.Vendor.Countables {
		if countable.Figure == profiles.Memory {
			device.Published.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
				resourceapi.QualifiedName(countable.Capacity): {Value: quantity(profiles.Memory, g.Model.MemoryMiB)},
			}
		}
	}
	return device
}

// wholeOf is a GPU beside its partitions: it takes everything that they share.
func (g *GPU) wholeOf(shared profiles.Figures) *Device {
	device := g.newWhole()
	device.Published.Capacity = g.capacity(shared)
	device.Published.ConsumesCounters = g.consume(maps.Clone(g.CounterSet.Counters))
	return device
}

func (g *GPU) newWhole() *Device {
	device := &Device{
		Name:      g.Model.Vendor.GPUName(g.Index),
		GPU:       g,
		UUID:      g.UUID,
		MemoryMiB: g.Model.MemoryMiB,
	}
	device.Published = resourceapi.Device{Name: device.Name, Attributes: device.attributes(g.Model.Vendor.GPUAttributes)}
	return device
}

// partition is a partition that is created on demand, out of what the devices of the GPU share.
func (g *GPU) partition(p *profiles.Partition, self identity) *Device {
	device := g.newPartition(p, self)
	device.Published.ConsumesCounters = g.consume(g.counters(p.Profile.Figures, p.Start, p.Profile.Size))
	return device
}

// fixedPartition is a partition that is there for good: it has an identity before it is given out, and memory slices of
// its own.
func (g *GPU) fixedPartition(p *profiles.Partition, self identity) *Device {
	device := g.newPartition(p, self)
	vendor := g.Model.Vendor
	maps.Copy(device.Published.Attributes, device.attributes(vendor.FixedAttributes))
	for slice := p.Start; slice < p.Start+p.Profile.Size; slice++ {
		device.Published.Capacity[resourceapi.QualifiedName(vendor.MemorySliceCapacity(slice))] = resourceapi.DeviceCapacity{Value: count(1)}
	}
	return device
}

func (g *GPU) newPartition(p *profiles.Partition, self identity) *Device {
	vendor := g.Model.Vendor
	device := &Device{
		Name:      vendor.PartitionName(g.Index, p),
		GPU:       g,
		Partition: p,
		UUID:      vendor.PartitionUUID(self.partitionUUID(p)),
		MemoryMiB: p.Profile.Figures.MemoryMiB,
		Instance: &Instance{
			GPUInstanceID:        p.InstanceID,
			ComputeInstanceID:    p.ComputeInstanceID,
			GPUInstanceMinor:     vendor.InstanceMinor(g.Index, p.InstanceID),
			ComputeInstanceMinor: vendor.ComputeInstanceMinor(g.Index, p.InstanceID, p.ComputeInstanceID),
		},
	}
	device.Published = resourceapi.Device{
		Name:       device.Name,
		Attributes: device.attributes(vendor.PartitionAttributes),
		Capacity:   g.capacity(p.Profile.Figures),
	}
	return device
}

// counterSet is all that the devices of the GPU share: the figures and each memory slice.
func (g *GPU) counterSet(shared profiles.Figures) *resourceapi.CounterSet {
	return &resourceapi.CounterSet{
		Name:     g.Model.Vendor.CounterSetName(g.Index),
		Counters: g.counters(shared, 0, g.Model.Partitioning.MemorySlices),
	}
}

func (g *GPU) counters(figures profiles.Figures, start, size int) map[string]resourceapi.Counter {
	counters := map[string]resourceapi.Counter{}
	for _, countable := range g.Model.Vendor.Countables {
		counters[countable.Counter] = resourceapi.Counter{Value: quantity(countable.Figure, figures.Get(countable.Figure))}
	}
	for slice := start; slice < start+size; slice++ {
		counters[g.Model.Vendor.MemorySliceCounter(slice)] = resourceapi.Counter{Value: count(1)}
	}
	return counters
}

func (g *GPU) consume(counters map[string]resourceapi.Counter) []resourceapi.DeviceCounterConsumption {
	return []resourceapi.DeviceCounterConsumption{{CounterSet: g.CounterSet.Name, Counters: counters}}
}

func (g *GPU) capacity(figures profiles.Figures) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	capacity := map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}
	for _, countable := range g.Model.Vendor.Countables {
		capacity[resourceapi.QualifiedName(countable.Capacity)] = resourceapi.DeviceCapacity{
			Value: quantity(countable.Figure, figures.Get(countable.Figure)),
		}
	}
	return capacity
}

// quantity has the API's canonical spelling: memory in bytes, 81152Mi and 95Gi; the rest as numbers.
func quantity(figure profiles.Figure, n int64) resource.Quantity {
	if figure == profiles.Memory {
		n *= mib
	}
	return count(n)
}

func count(n int64) resource.Quantity {
	q := *resource.NewQuantity(n, resource.BinarySI)
	_ = q.String() // spelled once here, because a quantity keeps its spelling and is read in parallel
	return q
}

func (d *Device) attributes(wanted []profiles.Attribute) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	attributes := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	for _, attribute := range wanted {
		if value, published := d.attribute(attribute); published {
			attributes[resourceapi.QualifiedName(attribute.Name)] = value
		}
	}
	return attributes
}

// attribute returns false for a fact that the device does not have.
func (d *Device) attribute(attribute profiles.Attribute) (resourceapi.DeviceAttribute, bool) {
	if attribute.From == "" {
		return text(attribute.Value)
	}
	gpu := d.GPU
	switch attribute.From {
	case profiles.UUID:
		return text(d.UUID)
	case profiles.ParentUUID:
		return text(gpu.UUID)
	case profiles.ProfileName:
		if d.Partition != nil {
			return text(d.Partition.Profile.Name)
		}
	case profiles.ProductName:
		return text(gpu.Model.ProductName)
	case profiles.Brand:
		return text(gpu.Model.Brand)
	case profiles.Architecture:
		return text(gpu.Model.Architecture)
	case profiles.AddressingMode:
		return text(gpu.Model.AddressingMode)
	case profiles.ComputeCapability:
		return version(gpu.Model.ComputeCapability)
	case profiles.DriverVersion:
		return version(gpu.DriverVersion)
	case profiles.CUDAVersion:
		return version(gpu.CUDAVersion)
	case profiles.PCIBusID:
		return text(gpu.PCIBusID)
	case profiles.PCIeRoot:
		return text(gpu.PCIeRoot)
	case profiles.NUMANode:
		if gpu.NUMANode != nil {
			return resourceapi.DeviceAttribute{IntValue: new(int64(*gpu.NUMANode))}, true
		}
	}
	return resourceapi.DeviceAttribute{}, false
}

func text(value string) (resourceapi.DeviceAttribute, bool) {
	return resourceapi.DeviceAttribute{StringValue: &value}, value != ""
}

func version(value string) (resourceapi.DeviceAttribute, bool) {
	return resourceapi.DeviceAttribute{VersionValue: new(profiles.SemanticVersion(value))}, true
}
