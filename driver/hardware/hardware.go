// Package hardware is the simulated GPUs of one node and every device that each of them can be: names,
// identities, PCI addresses, and the attributes, capacities and counters that a device publishes.
//
// It is pure. The same configuration gives the same node on every start and every machine, and what a
// GPU is follows from the name of the node, the GPU's index and its own group alone, whatever the
// groups beside it are. All that a vendor names differently comes from the vendor block of the catalogue.
//
// How devices are spread over ResourceSlices is for package slices, and who uses them for the driver.
package hardware

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

// Config says what a node has.
type Config struct {
	NodeName string
	// DriverName is the domain of attributes without one; "" is the vendor's own driver name.
	DriverName string
	Groups     []inventory.GPUGroup
	Catalogue  *profiles.Catalogue
}

// Node is the simulated hardware of one node.
type Node struct {
	Name       string
	DriverName string
	GPUs       []*GPU // by PCI address, the order in which they are published

	devices map[string]*Device
}

// GPU is one simulated GPU.
type GPU struct {
	Index         int // its place in the inventory, counted from 0, and the minor of its device node
	UUID          string
	PCIBusID      string // e.g. 0000:11:00.0
	PCIeRoot      string // e.g. pci0000:10
	Serial        string
	NUMANode      *int   // nil: it reports none
	DriverVersion string // as nvidia-smi prints it, e.g. 580.95.05
	CUDAVersion   string // as nvidia-smi prints it, e.g. 13.0
	MIGMode       inventory.MIGMode
	Model         *profiles.Model
	Table         *profiles.Table
	// CounterSet is what the devices of the GPU share; nil where it is never more than one device, or always the same
	// partitions.
	CounterSet *resourceapi.CounterSet
	// Devices is everything the GPU can be, in published order: itself as a whole, then partitions by name.
	Devices []*Device
}

// Device is one thing that a claim can be given: a whole GPU or a partition.
type Device struct {
	Name      string // in the pool of the node, e.g. gpu-0-mig-3g40gb-9-4
	GPU       *GPU
	Partition *profiles.Partition // nil: the whole GPU
	UUID      string              // GPU-... or MIG-...
	// MemoryMiB is the total that nvidia-smi shows for it. Of a whole GPU that is more than its published
	// capacity, which is what its partitions share.
	MemoryMiB int64
	Published resourceapi.Device
	Instance  *Instance // nil: the whole GPU
}

// Instance identifies a partition inside its GPU as nvidia-smi and the device nodes do.
type Instance struct {
	GPUInstanceID        int
	ComputeInstanceID    int
	GPUInstanceMinor     int // N of /dev/nvidia-caps/nvidia-capN
	ComputeInstanceMinor int
}

// New builds the node. It fails for a model, a driver version or a figure that the catalogue does not
// have, for GPUs of several vendors, for more GPUs than the vendor can number, and for PCI addresses
// that clash; the error names all groups at fault.
func New(cfg Config) (*Node, error) {
	node := &Node{Name: cfg.NodeName, DriverName: cfg.DriverName, devices: map[string]*Device{}}
	var faults []error
	var vendor *profiles.Vendor
	for i, group := range cfg.Groups {
		table, err := tableFor(group, cfg.Catalogue)
		if err == nil && vendor != nil && table.Model.Vendor != vendor {
			err = fmt.Errorf("model %s is of vendor %s and those before it are of vendor %s; a node has the GPUs of one vendor only",
				group.Model, table.Model.Vendor.Name, vendor.Name)
		}
		if err == nil {
			vendor = table.Model.Vendor
			if len(node.GPUs)+group.Count > vendor.MaxGPUs {
				err = fmt.Errorf("%d GPUs of model %s after %d others are too many: a node can have %d", group.Count, group.Model, len(node.GPUs), vendor.MaxGPUs)
			}
		}
		if err == nil {
			err = node.add(group, table)
		}
		if err != nil {
			faults = append(faults, fmt.Errorf("GPU group %d: %w", i, err))
		}
	}
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}

	if vendor == nil {
		if vendors := cfg.Catalogue.Vendors(); len(vendors) == 1 {
			vendor = vendors[0]
		}
	}
	if node.DriverName == "" {
		if vendor == nil {
			return nil, errors.New("a node without GPUs needs a driver name: the catalogue has more than one vendor")
		}
		node.DriverName = vendor.DriverName
	}

	slices.SortFunc(node.GPUs, func(a, b *GPU) int { return strings.Compare(a.PCIBusID, b.PCIBusID) })
	for i, gpu := range node.GPUs {
		if i > 0 && gpu.PCIBusID == node.GPUs[i-1].PCIBusID {
			return nil, fmt.Errorf("GPUs %d and %d would both have the PCI address %s; give one of them another pcieRoot", node.GPUs[i-1].Index, gpu.Index, gpu.PCIBusID)
		}
		for _, device := range gpu.Devices {
			node.devices[device.Name] = device
		}
	}
	return node, nil
}

// tableFor returns the figures for a group, complete as far as its mode needs them.
func tableFor(group inventory.GPUGroup, catalogue *profiles.Catalogue) (*profiles.Table, error) {
	model, err := catalogue.Model(group.Model)
	if err != nil {
		return nil, err
	}
	if group.Count < 0 {
		return nil, fmt.Errorf("the count of model %s is negative: %d", group.Model, group.Count)
	}
	table, err := model.Table(group.DriverVersion)
	if err != nil {
		return nil, err
	}
	switch group.MIGMode {
	case inventory.MIGDisabled:
		return table, nil
	case inventory.MIGDynamic:
		_, err := table.Partitionable()
		return table, err
	case inventory.MIGStatic:
		_, err := layoutOf(group, table)
		return table, err
	}
	return nil, fmt.Errorf("unknown MIG mode %q of model %s", group.MIGMode, group.Model)
}

// add appends the GPUs of a group.
func (n *Node) add(group inventory.GPUGroup, table *profiles.Table) error {
	for range group.Count {
		gpu, err := newGPU(n.Name, len(n.GPUs), group, table)
		if err != nil {
			return err
		}
		n.GPUs = append(n.GPUs, gpu)
	}
	return nil
}

func newGPU(nodeName string, index int, group inventory.GPUGroup, table *profiles.Table) (*GPU, error) {
	root, address, err := pciAddress(index, group.PCIeRoot)
	if err != nil {
		return nil, err
	}
	model := table.Model
	self := identity{nodeName, index, group.Seed}
	gpu := &GPU{
		Index:         index,
		UUID:          model.Vendor.GPUUUID(self.uuid()),
		PCIBusID:      address,
		PCIeRoot:      root,
		Serial:        self.serial(),
		NUMANode:      group.NUMANode,
		DriverVersion: table.DriverVersion,
		CUDAVersion:   table.CUDAVersion,
		MIGMode:       group.MIGMode,
		Model:         model,
		Table:         table,
	}
	switch group.MIGMode {
	case inventory.MIGDisabled:
		gpu.Devices = []*Device{gpu.whole()}
	case inventory.MIGStatic:
		err = gpu.divideForGood(group, self)
	default:
		err = gpu.divide(self)
	}
	if err != nil {
		return nil, err
	}
	return gpu, gpu.share(group.ConsumableShares)
}

// layoutOf returns the partitions of each GPU of a static group.
func layoutOf(group inventory.GPUGroup, table *profiles.Table) ([]*profiles.Partition, error) {
	var wanted []profiles.Wanted
	for _, p := range group.Partitions {
		wanted = append(wanted, profiles.Wanted{Profile: p.Profile, Start: &p.Start})
	}
	return table.Layout(wanted)
}

// divideForGood makes the devices of a GPU with a fixed layout: its partitions, which do not share anything any more,
// but not itself, since the GPU is in MIG mode.
func (g *GPU) divideForGood(group inventory.GPUGroup, self identity) error {
	partitions, err := layoutOf(group, g.Table)
	if err != nil {
		return err
	}
	for _, partition := range partitions {
		g.Devices = append(g.Devices, g.fixedPartition(partition, self))
	}
	slices.SortFunc(g.Devices, func(a, b *Device) int { return strings.Compare(a.Name, b.Name) })
	return nil
}

// divide makes the devices of a GPU that offers partitions.
func (g *GPU) divide(self identity) error {
	shared, err := g.Table.Partitionable()
	if err != nil {
		return err
	}
	partitions, err := g.Table.Partitions()
	if err != nil {
		return err
	}
	g.CounterSet = g.counterSet(shared)
	for _, partition := range partitions {
		g.Devices = append(g.Devices, g.partition(partition, self))
	}
	slices.SortFunc(g.Devices, func(a, b *Device) int { return strings.Compare(a.Name, b.Name) })
	if !g.Model.Partitioning.Exclusive {
		g.Devices = slices.Insert(g.Devices, 0, g.wholeOf(shared))
	}
	return nil
}

// Device returns the device of that name.
func (n *Node) Device(name string) (*Device, bool) {
	device, found := n.devices[name]
	return device, found
}

// Devices returns the devices of all GPUs in published order.
func (n *Node) Devices() []*Device {
	var devices []*Device
	for _, gpu := range n.GPUs {
		devices = append(devices, gpu.Devices...)
	}
	return devices
}

// Absent is what nobody sourced of the GPUs that are partitioned on demand, so that some of their partitions are not
// offered.
func Absent(gpus []*GPU) []string {
	var all []string
	for _, gpu := range gpus {
		if gpu.MIGMode != inventory.MIGDynamic {
			continue
		}
		for _, absent := range gpu.Table.Absent() {
			text := fmt.Sprintf("%s (model %s, driver version %s)", absent, gpu.Model.ID, gpu.DriverVersion)
			if !slices.Contains(all, text) {
				all = append(all, text)
			}
		}
	}
	return all
}

// Overlaps is true when d and o cannot be in use at once: they are the same device, or together they
// take more of a counter of their GPU than it has.
func (d *Device) Overlaps(o *Device) bool {
	if d.GPU.UUID != o.GPU.UUID {
		return false
	}
	if d.Name == o.Name {
		return true
	}
	if d.GPU.CounterSet == nil {
		return d.Partition == nil || o.Partition == nil
	}
	for name, available := range d.GPU.CounterSet.Counters {
		left := available.Value.DeepCopy()
		for _, device := range []*Device{d, o} {
			for _, consumption := range device.Published.ConsumesCounters {
				left.Sub(consumption.Counters[name].Value)
			}
		}
		if left.Sign() < 0 {
			return true
		}
	}
	return false
}

// Files returns the device nodes that a container with the device gets: those that every container
// gets, the GPU's, and for a partition those that guard its instances.
func (d *Device) Files() []string {
	vendor := d.GPU.Model.Vendor
	files := append(slices.Clone(vendor.ControlFiles), vendor.GPUFile(d.GPU.Index))
	if d.Instance != nil {
		files = append(files, vendor.CapFile(d.Instance.GPUInstanceMinor), vendor.CapFile(d.Instance.ComputeInstanceMinor))
	}
	return files
}
