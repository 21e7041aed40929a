package driver

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
)

// socketID names the folder of a prepared device: unguessable for whoever does not know the claim's
// UID, and short, because the path of a socket is.
func socketID(claim types.UID, part string) string {
	digest := sha256.Sum256([]byte(string(claim) + "/" + part))
	return hex.EncodeToString(digest[:8])
}

const socketIDLength = 16

// envSuffix is a device name as part of the name of an environment variable.
func envSuffix(device string) string {
	return strings.ToUpper(strings.ReplaceAll(device, "-", "_"))
}

// metadataOf is what containers can read about a device: all that is published, and its UUID, which
// for a partition exists only once it is prepared.
func metadataOf(device *hardware.Device) *kubeletplugin.DeviceMetadata {
	attributes := map[string]resourceapi.DeviceAttribute{"uuid": {StringValue: ptr.To(device.UUID)}}
	for name, value := range device.Published.Attributes {
		attributes[string(name)] = value
	}
	return &kubeletplugin.DeviceMetadata{Attributes: attributes}
}

// servedDevice is a device as the device API describes it.
func servedDevice(device *hardware.Device) deviceapi.Device {
	served := deviceapi.Device{GPU: servedGPU(device.GPU)}
	if device.Partition != nil {
		partition := servedPartition(device)
		served.Partition = &partition
	}
	return served
}

func servedPartition(device *hardware.Device) deviceapi.Partition {
	profile := device.Partition.Profile
	return deviceapi.Partition{
		UUID:              device.UUID,
		Profile:           profile.Name,
		GPUInstanceID:     device.Instance.GPUInstanceID,
		ComputeInstanceID: device.Instance.ComputeInstanceID,
		ProfileID:         profile.ID,
		PlacementStart:    device.Partition.Start,
		PlacementSize:     profile.Size,
		MemoryBytes:       device.MemoryMiB * deviceapi.MiB,
		Multiprocessors:   int(profile.Figures.Multiprocessors),
		CopyEngines:       int(profile.Figures.CopyEngines),
		Encoders:          int(profile.Figures.Encoders),
		Decoders:          int(profile.Figures.Decoders),
		JPEGEngines:       int(profile.Figures.JPEGEngines),
		OFAEngines:        int(profile.Figures.OFAEngines),
	}
}

// servedProfiles is what the GPU can be partitioned into, whether or not it offers that, as far as the figures are
// known.
func servedProfiles(gpu *hardware.GPU) []deviceapi.Profile {
	var all []deviceapi.Profile
	for _, profile := range gpu.Table.Profiles {
		if len(profile.Absent) > 0 {
			continue
		}
		served := deviceapi.Profile{
			Name:            profile.Name,
			ID:              profile.ID,
			Slices:          profile.Slices,
			MaxInstances:    profile.MaxInstances,
			MemoryBytes:     profile.Figures.MemoryMiB * deviceapi.MiB,
			Multiprocessors: int(profile.Figures.Multiprocessors),
			CopyEngines:     int(profile.Figures.CopyEngines),
			Encoders:        int(profile.Figures.Encoders),
			Decoders:        int(profile.Figures.Decoders),
			JPEGEngines:     int(profile.Figures.JPEGEngines),
			OFAEngines:      int(profile.Figures.OFAEngines),
			PlacementSize:   profile.Size,
			PlacementStarts: profile.Starts,
		}
		for _, compute := range profile.ComputeInstances {
			served.Compute = append(served.Compute, deviceapi.ComputeProfile{ID: compute.ID, Slices: compute.Slices, MaxInstances: compute.MaxInstances})
		}
		all = append(all, served)
	}
	return all
}

func servedGPU(gpu *hardware.GPU) deviceapi.GPU {
	mode := deviceapi.MIGUnsupported
	if partitioning := gpu.Model.Partitioning; partitioning != nil {
		mode = deviceapi.MIGDisabled
		// A GPU that offers partitions but not itself is always in MIG mode.
		if gpu.MIGMode == inventory.MIGStatic || gpu.MIGMode != inventory.MIGDisabled && partitioning.Exclusive {
			mode = deviceapi.MIGEnabled
		}
	}
	var fixed []deviceapi.Partition
	if gpu.MIGMode == inventory.MIGStatic {
		for _, device := range gpu.Devices {
			fixed = append(fixed, servedPartition(device))
		}
	}
	return deviceapi.GPU{
		UUID:              gpu.UUID,
		ProductName:       gpu.Model.ProductName,
		Minor:             gpu.Index,
		PCIBusID:          gpu.PCIBusID,
		Serial:            gpu.Serial,
		DriverVersion:     gpu.DriverVersion,
		CUDAVersion:       gpu.CUDAVersion,
		ComputeCapability: gpu.Model.ComputeCapability,
		Brand:             gpu.Model.Brand,
		Architecture:      gpu.Model.Architecture,
		MIGMode:           mode,
		MemoryBytes:       gpu.Model.MemoryMiB * deviceapi.MiB,
		PowerLimitWatts:   int(gpu.Model.PowerLimitWatts),
		Profiles:          servedProfiles(gpu),
		FixedPartitions:   fixed,
	}
}
