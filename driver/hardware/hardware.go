// Package hardware is the simulated GPUs of one node and every device each of them can be: names,
// UUIDs, PCI addresses, and the attributes, capacities and counters that a device publishes.
// It is pure: the same configuration gives the same node, on every start and every machine.
// It does not decide how devices are spread over ResourceSlices; that is package slices.
package hardware

import (
	"errors"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

// Config says what a node has.
type Config struct {
	NodeName   string
	DriverName string // "": the vendor's own
	Groups     []inventory.GPUGroup
	Catalogue  *profiles.Catalogue
}

// Node is the simulated hardware of one node.
type Node struct {
	Name       string
	DriverName string
	Vendor     *profiles.Vendor
	GPUs       []*GPU // by PCI address
}

// GPU is one simulated GPU.
type GPU struct {
	Index         int // position in the inventory, also the minor of its device node
	UUID          string
	PCIBusID      string // e.g. 0000:11:00.0
	PCIeRoot      string // e.g. pci0000:10
	Serial        string
	NUMANode      *int
	DriverVersion string // as nvidia-smi prints it, e.g. 580.95.05
	CUDAVersion   string // as nvidia-smi prints it, e.g. 13.0
	MIGMode       inventory.MIGMode
	Model         *profiles.Model
	Table         *profiles.Table
	// CounterSet is what partitions share; nil for a GPU that offers only itself.
	CounterSet *resourceapi.CounterSet
	// Devices is everything the GPU can be, in published order.
	Devices []*Device
}

// Device is one thing a claim can be given: a whole GPU or a partition.
type Device struct {
	Name      string // in the pool, e.g. gpu-0-mig-3g40gb-9-4
	GPU       *GPU
	Partition *profiles.Partition // nil: the whole GPU
	UUID      string              // GPU-... or MIG-...
	MemoryMiB int64               // what a process in the container can use
	Published resourceapi.Device
	Instance  *Instance // nil: the whole GPU
}

// Instance identifies a partition inside its GPU as nvidia-smi and the capability nodes do.
type Instance struct {
	GPUInstanceID        int
	ComputeInstanceID    int
	GPUInstanceMinor     int // N of /dev/nvidia-caps/nvidia-capN
	ComputeInstanceMinor int
}

// New builds the node. It fails, naming everything that is missing, where a group asks for a figure
// nobody sourced, mixes vendors, or has more GPUs than the node can address.
func New(cfg Config) (*Node, error) { return nil, errors.New("not built yet") }

// Device returns the device of that name.
func (n *Node) Device(name string) (*Device, bool) { return nil, false }

// Devices returns the devices of all GPUs in published order: GPUs by PCI address, in each the whole
// GPU first, then partitions by name.
func (n *Node) Devices() []*Device { return nil }

// Overlaps is true when d and o cannot be in use at once: they are the same device, or together
// they take more of a counter of their GPU than it has.
func (d *Device) Overlaps(o *Device) bool { return false }

// Files returns the device nodes a container with the device gets, the vendor's control nodes first.
func (d *Device) Files() []string { return nil }
