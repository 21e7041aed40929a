package profiles

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Vendor is the vocabulary of one GPU vendor: every word that Go code must not spell.
type Vendor struct {
	// Name is the vendor's folder in the catalogue, e.g. nvidia.
	Name string
	// DriverName is the name of the vendor's own DRA driver, e.g. gpu.nvidia.com.
	DriverName string
	// DeviceClasses are the classes that the vendor's driver ships: whole GPUs, then partitions.
	DeviceClasses []DeviceClass
	ClaimConfig   ClaimConfig
	// GPUAttributes and PartitionAttributes are what devices publish about themselves.
	GPUAttributes, PartitionAttributes []Attribute
	// FixedAttributes are what partitions that exist for good, instead of being created on demand, publish beside those.
	FixedAttributes []Attribute
	// Countables are what devices publish as capacity and share as counters, one for each figure.
	Countables []Countable
	// Env is set in every container that gets a device, sorted by name.
	Env []EnvVar
	// ControlFiles are the device nodes that every container with a device gets, e.g. /dev/nvidiactl.
	ControlFiles []string
	// MaxGPUs is how many GPUs a node can have before the vendor's device files run out of minors.
	MaxGPUs int
	// Health is how the vendor's driver speaks of broken devices.
	Health Health

	format vendorFormat
}

// DeviceClass is a class that selects one type of device.
type DeviceClass struct {
	Name     string // e.g. mig.nvidia.com
	selector string
}

// Selector is the CEL expression of the class for a driver of that name.
func (c DeviceClass) Selector(driverName string) string {
	return fill(c.selector, "driver", driverName)
}

// ClaimConfig names the opaque parameters that the vendor's driver accepts in a claim.
type ClaimConfig struct {
	APIVersion string `json:"apiVersion"` // e.g. resource.nvidia.com/v1beta1
	GPU        string `json:"gpu"`        // kind for whole GPUs
	Partition  string `json:"partition"`  // kind for partitions
}

// Fact is something a device can publish as an attribute.
type Fact string

const (
	UUID              Fact = "uuid"       // of the device itself
	ParentUUID        Fact = "parentUUID" // of the GPU that a partition belongs to
	ProfileName       Fact = "profile"
	ProductName       Fact = "productName"
	Brand             Fact = "brand"
	Architecture      Fact = "architecture"
	ComputeCapability Fact = "computeCapability"
	DriverVersion     Fact = "driverVersion"
	CUDAVersion       Fact = "cudaVersion"
	AddressingMode    Fact = "addressingMode"
	PCIBusID          Fact = "pciBusID"
	PCIeRoot          Fact = "pcieRoot"
	NUMANode          Fact = "numaNode"
)

var facts = []Fact{UUID, ParentUUID, ProfileName, ProductName, Brand, Architecture, ComputeCapability,
	DriverVersion, CUDAVersion, AddressingMode, PCIBusID, PCIeRoot, NUMANode}

// Attribute is one published attribute: a fixed string or a fact. A fact that a device does not have
// is not published. Names without a domain are in that of the driver.
type Attribute struct {
	Name  string `json:"name"`
	Value string `json:"value"` // fixed; "" if From is set
	From  Fact   `json:"from"`
}

// Countable names a figure as a capacity of devices and as a counter.
type Countable struct {
	Figure   Figure `json:"figure"`
	Capacity string `json:"capacity"`
	Counter  string `json:"counter"`
}

// EnvVar is an environment variable.
type EnvVar struct{ Name, Value string }

// GPUName is the device name of a whole GPU, e.g. gpu-0.
func (v *Vendor) GPUName(minor int) string {
	return fill(v.format.Names.GPU, "minor", minor)
}

// PartitionName is the device name of a partition, e.g. gpu-0-mig-1g10gb-me-20-3.
func (v *Vendor) PartitionName(minor int, p *Partition) string {
	return fill(v.format.Names.Partition, "minor", minor, "profile", dnsName(p.Profile.Name), "profileID", p.Profile.ID, "start", p.Start)
}

// CounterSetName is the name of what the partitions of a GPU share, e.g. gpu-0-counter-set.
func (v *Vendor) CounterSetName(minor int) string {
	return fill(v.format.Names.CounterSet, "minor", minor)
}

// MemorySliceCounter is the counter of one memory slice, e.g. memory-slice-7.
func (v *Vendor) MemorySliceCounter(slice int) string {
	return fill(v.format.Names.MemorySliceCounter, "slice", slice)
}

// SharesCapacity is the capacity of a device that a fixed number of claims can share; a claim takes one.
func (v *Vendor) SharesCapacity() string { return v.format.Names.SharesCapacity }

// MemorySliceCapacity is the capacity by which a partition that exists for good tells a memory slice that it has, e.g.
// memorySlice7.
func (v *Vendor) MemorySliceCapacity(slice int) string {
	return fill(v.format.Names.MemorySliceCapacity, "slice", slice)
}

// GPUUUID spells the identity of a GPU, e.g. GPU-4cf8db2d-....
func (v *Vendor) GPUUUID(uuid string) string {
	return fill(v.format.Names.GPUUUID, "uuid", uuid)
}

// PartitionUUID spells the identity of a partition, e.g. MIG-4cf8db2d-....
func (v *Vendor) PartitionUUID(uuid string) string {
	return fill(v.format.Names.PartitionUUID, "uuid", uuid)
}

// GPUFile is the device node of a GPU, e.g. /dev/nvidia0.
func (v *Vendor) GPUFile(minor int) string {
	return fill(v.format.Files.GPU, "minor", minor)
}

// CapFile is the device node that guards an instance, e.g. /dev/nvidia-caps/nvidia-cap12.
func (v *Vendor) CapFile(capMinor int) string {
	return fill(v.format.Files.Capability, "capMinor", capMinor)
}

// InstanceMinor is the capability minor of a GPU instance.
func (v *Vendor) InstanceMinor(gpuMinor, instanceID int) int {
	m := v.format.Files.CapMinor
	return m.First + m.PerGPU*gpuMinor + m.PerInstance*instanceID
}

// ComputeInstanceMinor is the capability minor of a compute instance: they follow that of their GPU
// instance.
func (v *Vendor) ComputeInstanceMinor(gpuMinor, instanceID, computeInstanceID int) int {
	return v.InstanceMinor(gpuMinor, instanceID) + 1 + computeInstanceID
}

// maxInstanceID is the largest GPU instance id that has a capability minor of its own.
func (v *Vendor) maxInstanceID() int {
	m := v.format.Files.CapMinor
	return m.PerGPU/m.PerInstance - 1
}

// profileName is the name of a profile without its suffix.
func (v *Vendor) profileName(slices int, memoryMiB, totalMiB int64) string {
	return fill(v.format.Names.Profile, "slices", slices, "memoryGB", profileGB(memoryMiB, totalMiB))
}

// profileGB is the memory in a profile's name: the total in GiB, rounded up, times the share of the
// profile, rounded up to eighths; rounded to whole GiB.
func profileGB(memoryMiB, totalMiB int64) int64 {
	eighths := (8*memoryMiB + totalMiB - 1) / totalMiB
	total := (totalMiB + 1023) / 1024
	return (eighths*total + 4) / 8
}

// cudaVersion is the CUDA version that a driver version supports.
func (v *Vendor) cudaVersion(driverVersion string) (string, error) {
	branch := numbers(driverVersion)[0]
	if cuda, known := v.format.CUDAVersions[branch]; known {
		return cuda, nil
	}
	var branches []string
	for _, branch := range slices.Sorted(maps.Keys(v.format.CUDAVersions)) {
		branches = append(branches, strconv.Itoa(branch))
	}
	return "", fmt.Errorf("the CUDA version of driver version %s is not sourced; driver branches with one: %s", driverVersion, strings.Join(branches, ", "))
}

var placeholder = regexp.MustCompile(`\{[^{}]*\}`)

// fill replaces each {name} of a pattern. Arguments are pairs of name and value.
func fill(pattern string, pairs ...any) string {
	var replacements []string
	for i := 0; i < len(pairs); i += 2 {
		replacements = append(replacements, fmt.Sprintf("{%v}", pairs[i]), fmt.Sprint(pairs[i+1]))
	}
	return strings.NewReplacer(replacements...).Replace(pattern)
}

var notDNS = regexp.MustCompile(`[^a-z0-9-]`)

// dnsName turns a profile name into part of a device name: 1g.24gb+me.all becomes 1g24gb-meall.
func dnsName(profile string) string {
	name := strings.ToLower(strings.ReplaceAll(profile, ".", ""))
	return strings.Trim(notDNS.ReplaceAllString(name, "-"), "-")
}
