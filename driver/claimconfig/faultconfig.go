package claimconfig

import (
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/simgpu/simgpu/driver/faults"
)

// Faults returns what the FaultConfigs of an allocated claim break: for each request that was given devices
// of the driver, the one in force, each once and in the order of the list. The ID of a fault is its place in
// the claim. Entries of other kinds are not looked at.
func Faults(claim *resourceapi.ResourceClaim, driverName string) ([]faults.Fault, error) {
	if claim.Status.Allocation == nil {
		return nil, nil
	}
	entries := claim.Status.Allocation.Devices.Config
	var errs []error
	inForce := map[int]bool{}
	for _, request := range requestsOf(claim, driverName) {
		chosen, ofClaim := -1, false
		for i, entry := range entries {
			if entry.Opaque == nil || entry.Opaque.Driver != driverName || !fits(entry.Requests, request) || !isFaultConfig(entry.Opaque.Parameters.Raw) {
				continue
			}
			fromClaim := entry.Source != resourceapi.AllocationConfigSourceClass
			if fromClaim || !ofClaim {
				chosen, ofClaim = i, fromClaim
			}
		}
		if chosen >= 0 {
			inForce[chosen] = true
		}
	}
	var list []faults.Fault
	for i, entry := range entries {
		if !inForce[i] {
			continue
		}
		found, err := decodeFaults(entry, originOf(i, entry))
		errs = append(errs, err)
		for n, fault := range found {
			fault.ID = fmt.Sprintf("config[%d].faults[%d]", i, n)
			list = append(list, fault)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("configuration of claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	return list, nil
}

// isFaultConfig goes by the kind alone: another version is an error, not another kind.
func isFaultConfig(raw []byte) bool {
	var meta metav1.TypeMeta
	return yaml.Unmarshal(raw, &meta) == nil && meta.Kind == faults.ConfigKind
}

func decodeFaults(entry resourceapi.DeviceAllocationConfiguration, origin string) ([]faults.Fault, error) {
	list, problems := faults.DecodeConfig(entry.Opaque.Parameters.Raw)
	return list, problems.Err(origin + ": " + faults.ConfigKind)
}
