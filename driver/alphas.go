package driver

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/driver/checkpoint"
)

// partitionTypeAttribute labels devices that take the same of the same counters. Placements of one profile take
// different memory slices, and those of two GPUs are of different counter sets, so that each device is a type
// of its own: the profile would be refused by the controller that counts partitions. It counts no more than 32
// types in a pool.
const partitionTypeAttribute = "simgpu.dev/partitionType"

// alphas are fields of ResourceSlices that Kubernetes 1.37 has behind feature gates that are off by default.
// An API server without them drops them, which changes nothing else.
type alphas struct {
	// partitionTypes has slices name the attribute by which partitions are counted.
	partitionTypes bool
	// skip are the calls that the kubelet does not make for devices of the node.
	skip []resourceapi.SkipNodeOperation
}

// alphaGates are the feature gates of alphas.
var alphaGates = []string{"DRAPartitionableDevicesType", "DRAOptionalNodeOperations"}

func (a alphas) declare(resources resourceslice.DriverResources) {
	for _, pool := range resources.Pools {
		for i := range pool.Slices {
			slice := &pool.Slices[i]
			if len(slice.Devices) > 0 {
				slice.SkipNodeOperations = a.skip
			}
			if !a.partitionTypes {
				continue
			}
			for n := range slice.Devices {
				device := &slice.Devices[n]
				if len(device.ConsumesCounters) > 0 {
					device.Attributes[partitionTypeAttribute] = resourceapi.DeviceAttribute{StringValue: ptr.To(device.Name)}
					slice.PartitionTypeAttribute = ptr.To(resourceapi.FullyQualifiedName(partitionTypeAttribute))
				}
			}
		}
	}
}

// checkSkip returns the operations to skip, by name.
func checkSkip(names []string) ([]resourceapi.SkipNodeOperation, error) {
	known := []resourceapi.SkipNodeOperation{resourceapi.SkipNodeOperationNodePrepareResources, resourceapi.SkipNodeOperationNodeUnprepareResources, resourceapi.SkipNodeOperationAll}
	var operations []resourceapi.SkipNodeOperation
	for _, name := range names {
		operation := resourceapi.SkipNodeOperation(name)
		if !slices.Contains(known, operation) || slices.Contains(operations, operation) {
			return nil, fmt.Errorf("node operations to skip: %q is unknown or named twice; known: %q", name, known)
		}
		operations = append(operations, operation)
	}
	if slices.Equal(operations, known[:1]) {
		return nil, fmt.Errorf("node operations to skip: %s cannot be skipped without %s", known[0], known[1])
	}
	return operations, nil
}

// unprepareSkipped says whether the kubelet leaves out the call to unprepare a claim with these devices of the driver: it
// does if all of them say so.
func unprepareSkipped(results []resourceapi.DeviceRequestAllocationResult) bool {
	for _, r := range results {
		if !slices.Contains(r.SkipNodeOperations, resourceapi.SkipNodeOperationNodeUnprepareResources) &&
			!slices.Contains(r.SkipNodeOperations, resourceapi.SkipNodeOperationAll) {
			return false
		}
	}
	return len(results) > 0
}

// abandoned says whether a prepared claim does not have its devices any more, according to the API, and nobody is going to
// unprepare it. Of other claims the kubelet tells when no container uses them.
func (c *claims) abandoned(prepared checkpoint.Claim, claim *resourceapi.ResourceClaim) bool {
	return prepared.NotUnprepared && !sameAllocation(prepared, c.results(claim))
}
