package modelserver

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/simgpu/simgpu/deviceapi"
)

// Device is a device as a CUDA program counts it.
type Device struct {
	UUID       string
	Name       string // NVIDIA H100 80GB HBM3, with MIG 3g.40gb behind it for a partition
	TotalBytes int64
	UsedBytes  int64
}

// FreeBytes is what nobody holds.
func (d Device) FreeBytes() int64 { return d.TotalBytes - d.UsedBytes }

func (d Device) isPartition() bool { return strings.HasPrefix(d.UUID, "MIG-") }

// Visible lists the devices that CUDA would enumerate in a container that sees
// snapshot, in CUDA's order. cudaVisibleDevices is the value of CUDA_VISIBLE_DEVICES,
// nil where it is not set: positions or UUIDs (a unique beginning is enough), of
// which the first that names nothing ends the list.
//
// CUDA's rules for partitions hold here too (NVIDIA MIG user guide, "CUDA device
// enumeration"): a program works with one partition, and where it sees one it sees
// no whole GPU.
func Visible(snapshot deviceapi.Snapshot, cudaVisibleDevices *string) []Device {
	var gpus, partitions []Device
	for _, gpu := range snapshot.GPUs {
		if gpu.Whole {
			gpus = append(gpus, Device{
				UUID:       gpu.UUID,
				Name:       gpu.ProductName,
				TotalBytes: gpu.MemoryBytes,
				UsedBytes:  gpu.MemoryUsed,
			})
		}
		for _, p := range gpu.Partitions {
			partitions = append(partitions, Device{
				UUID:       p.UUID,
				Name:       fmt.Sprintf("%s MIG %s", gpu.ProductName, p.Profile),
				TotalBytes: p.MemoryBytes,
				UsedBytes:  p.MemoryUsed,
			})
		}
	}

	candidates := gpus
	if len(partitions) > 0 {
		candidates = partitions
	}
	if cudaVisibleDevices != nil {
		candidates = chosen(append(partitions, gpus...), candidates, *cudaVisibleDevices)
	}
	if i := slices.IndexFunc(candidates, Device.isPartition); i >= 0 {
		return candidates[i : i+1]
	}
	return candidates
}

// chosen follows CUDA_VISIBLE_DEVICES: UUIDs among all devices, positions among
// those that are enumerated by default.
func chosen(all, byPosition []Device, list string) []Device {
	var devices []Device
	for word := range strings.SplitSeq(list, ",") {
		word = strings.TrimSpace(word)
		if n, err := strconv.Atoi(word); err == nil {
			if n < 0 || n >= len(byPosition) {
				return devices
			}
			devices = append(devices, byPosition[n])
			continue
		}
		var found []Device
		for _, d := range all {
			if word != "" && strings.HasPrefix(d.UUID, word) {
				found = append(found, d)
			}
		}
		if len(found) != 1 {
			return devices
		}
		devices = append(devices, found[0])
	}
	return devices
}
