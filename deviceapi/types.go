package deviceapi

import (
	"fmt"
	"strings"
)

// SocketName is the name of the socket inside the folder of a device.
const SocketName = "device.sock"

// DefaultDir is where the folders of a container's devices are mounted.
const DefaultDir = "/run/simgpu"

// MiB is the unit in which people read device memory.
const MiB = int64(1) << 20

// MIGMode says whether a GPU can be partitioned and whether it is.
type MIGMode int

const (
	// MIGUnsupported is a GPU that cannot be partitioned.
	MIGUnsupported MIGMode = iota
	// MIGDisabled is a GPU that could be partitioned and is not.
	MIGDisabled
	// MIGEnabled is a GPU that works through partitions only.
	MIGEnabled
)

// GPU describes a physical GPU: what does not change while it is in use.
type GPU struct {
	UUID        string
	ProductName string // as nvidia-smi prints it: NVIDIA H100 80GB HBM3
	// Minor is the number of the device node and the index on the node.
	Minor         int
	PCIBusID      string // as published: 0000:04:00.0
	Serial        string // empty: unknown
	DriverVersion string // as nvidia-smi prints it: 580.95.05
	CUDAVersion   string // as nvidia-smi prints it: 13.0
	// ComputeCapability may have two or three parts: 9.0 or 9.0.0.
	ComputeCapability string
	Brand             string
	Architecture      string
	// MIGMode is the mode while no partition exists. A GPU with a prepared
	// partition shows as MIGEnabled whatever stands here.
	MIGMode     MIGMode
	MemoryBytes int64 // NVML total of the whole GPU
	// PowerLimitWatts is the default power limit; 0: unknown, shown as N/A.
	PowerLimitWatts int
	// Profiles are what the GPU can be partitioned into, in the order of its driver;
	// none: it cannot be partitioned.
	Profiles []Profile
	// FixedPartitions exist whether or not anybody has them. Only the view of the node shows them all; clients do not
	// see this list.
	FixedPartitions []Partition
}

// Profile is a kind of GPU instance.
type Profile struct {
	Name            string // 3g.40gb
	ID              int    // as nvidia-smi mig -lgip prints it
	Slices          int    // compute slices
	MaxInstances    int    // on an empty GPU
	MemoryBytes     int64
	Multiprocessors int
	CopyEngines     int
	Encoders        int
	Decoders        int
	JPEGEngines     int
	OFAEngines      int
	PlacementSize   int   // memory slices
	PlacementStarts []int // first memory slice of each placement
	Compute         []ComputeProfile
}

// ComputeProfile is a way to divide the compute slices of a GPU instance.
type ComputeProfile struct {
	ID           int
	Slices       int
	MaxInstances int
}

// Partition describes a MIG device of a GPU.
type Partition struct {
	UUID              string
	Profile           string // 3g.40gb, 1g.10gb+me
	GPUInstanceID     int
	ComputeInstanceID int
	ProfileID         int // as nvidia-smi mig -lgip prints it: 9 for 3g.40gb of an H100
	PlacementStart    int // first memory slice
	PlacementSize     int // number of memory slices
	MemoryBytes       int64
	Multiprocessors   int
	CopyEngines       int
	Encoders          int
	Decoders          int
	JPEGEngines       int
	OFAEngines        int
}

// Device is what one socket serves: a whole GPU, or one partition of it.
type Device struct {
	GPU       GPU
	Partition *Partition // nil: the whole GPU
	// ShareBytes is how much of the device's memory this socket gives access to; 0: all.
	// What is served of a share looks like a device of that size which nobody else uses.
	ShareBytes int64
}

// UUID is the key of the device in the ledger.
func (d Device) UUID() string {
	if d.Partition != nil {
		return d.Partition.UUID
	}
	return d.GPU.UUID
}

// MemoryBytes is what can be held of the device.
func (d Device) MemoryBytes() int64 {
	if d.Partition != nil {
		return d.Partition.MemoryBytes
	}
	return d.GPU.MemoryBytes
}

// Health is what is broken of a GPU or a partition. The zero value is a healthy one.
type Health struct {
	// Lost says that the GPU does not answer any more. Nothing can be held of it or of
	// its partitions.
	Lost bool
	// XID is the last error code of the kernel module; 0: none.
	XID int
	// ECCCorrected and ECCUncorrected count memory errors. Those of a GPU include those
	// of its partitions.
	ECCCorrected, ECCUncorrected int64
}

// Snapshot is what a client sees at one moment. The position of a GPU is its
// index, and the position of a partition its MIG device number, as the real tool
// numbers what a container can see.
type Snapshot struct {
	GPUs []GPUStatus // sorted by minor, then UUID
}

// GPUStatus is a GPU in a snapshot.
type GPUStatus struct {
	GPU // MIGMode is the current mode
	// Health holds no more than Lost where only partitions are visible.
	Health Health
	// Whole says that the GPU itself is visible, not only partitions of it.
	// Only then are MemoryUsed, Utilization and Processes known.
	Whole       bool
	MemoryUsed  int64 // held on the GPU and on all its partitions
	Utilization int   // percent
	Processes   []Process
	Partitions  []PartitionStatus // sorted by GPU instance, compute instance, UUID
}

// PartitionStatus is a partition in a snapshot.
type PartitionStatus struct {
	Partition
	Health      Health // but for Lost, which is the GPU's
	MemoryUsed  int64
	Utilization int // percent of the partition
	Processes   []Process
}

// Process is a holder of memory.
type Process struct {
	PID    int
	Name   string
	Memory int64
}

// Devices lists what can be held: each GPU that is visible as a whole and each
// visible partition, in the order of the snapshot.
func (s Snapshot) Devices() []Device {
	var devices []Device
	for _, g := range s.GPUs {
		if g.Whole {
			devices = append(devices, Device{GPU: g.GPU})
		}
		for _, p := range g.Partitions {
			devices = append(devices, Device{GPU: g.GPU, Partition: &p.Partition})
		}
	}
	return devices
}

// BusID writes a PCI address as the vendor's tools do: eight digits of domain, upper
// case. Text that is none comes back unchanged.
func BusID(address string) string {
	domain, rest, ok := strings.Cut(address, ":")
	if !ok || len(domain) > 8 || strings.Count(rest, ":") != 1 {
		return address
	}
	return strings.Repeat("0", 8-len(domain)) + strings.ToUpper(domain+":"+rest)
}

// OutOfMemoryError is the refusal of a Hold that does not fit.
type OutOfMemoryError struct {
	DeviceUUID string
	Requested  int64
	Free       int64
	Total      int64
}

func (e *OutOfMemoryError) Error() string {
	return fmt.Sprintf("out of memory on %s: %d MiB requested, %d MiB of %d MiB free",
		e.DeviceUUID, (e.Requested+MiB-1)/MiB, e.Free/MiB, e.Total/MiB)
}

// CUDAMessage words the refusal as CUDA programs do; ordinal is the position of
// the device in Snapshot.Devices.
func (e *OutOfMemoryError) CUDAMessage(ordinal int) string {
	return fmt.Sprintf("CUDA out of memory. Tried to allocate %s. GPU %d has a total capacity of %s of which %s is free.",
		binarySize(e.Requested), ordinal, binarySize(e.Total), binarySize(e.Free))
}

// binarySize writes bytes with two decimals in the largest unit up to GiB.
func binarySize(bytes int64) string {
	switch {
	case bytes >= 1<<30:
		return fmt.Sprintf("%.2f GiB", float64(bytes)/(1<<30))
	case bytes >= 1<<20:
		return fmt.Sprintf("%.2f MiB", float64(bytes)/(1<<20))
	case bytes >= 1<<10:
		return fmt.Sprintf("%.2f KiB", float64(bytes)/(1<<10))
	default:
		return fmt.Sprintf("%d bytes", bytes)
	}
}
