// Package claimconfig reads the opaque device configuration that a claim or a device class addresses
// to the driver. It owns the decoding, the validation and the precedence, and says for each allocated
// device what is in force. It does not apply anything, and what is addressed to other drivers is not
// its concern.
//
// # Precedence
//
// An allocation carries the configuration of the device classes and of the claim in one list. For a
// device the last entry counts that fits its request and its type; entries of the claim come after
// entries of a class, whatever their position. An entry without requests fits all requests. An entry
// for a request fits all subrequests of it; an entry for <request>/<subrequest> fits that one alone.
// An entry replaces an earlier one as a whole: fields are not merged.
//
// An entry that names a request must suit the type of device the request got. An entry without
// requests is skipped for the devices of the other type, so that a claim with both types can carry
// one entry for each.
//
// Of the vendor's kinds only those for GPUs and their partitions are known. Kinds for pass-through devices, and
// those of the vendor's driver for compute domains, are for devices that are not simulated: an error says
// which kinds there are. Defaults are the vendor's: an entry without sharing shares nothing, time slices have
// the interval Default, MPS has no limits.
//
// A FaultConfig (package faults), which breaks the preparation of the claim, stands beside these kinds: it
// follows the same precedence among its own kind, suits every type of device and replaces nothing else.
package claimconfig

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"sigs.k8s.io/yaml"

	"github.com/simgpu/simgpu/driver/faults"
	"github.com/simgpu/simgpu/internal/strictyaml"
	"github.com/simgpu/simgpu/profiles"
)

// Config is one entry of the configuration, valid.
type Config struct {
	// Sharing is nil where the entry does not ask for it.
	Sharing *Sharing

	origin    string
	kind      string
	partition bool
	requests  []string
}

// Set is all configuration of a claim for the driver.
type Set struct {
	// entries in order of precedence, the strongest last
	entries []*Config
	kinds   profiles.ClaimConfig
}

// Parse decodes every entry of an allocated claim that is addressed to the driver and fits at least
// one of its devices. Its error names the claim and lists, for each faulty entry, its position, source,
// requests, and all its faults.
func Parse(claim *resourceapi.ResourceClaim, driverName string, kinds profiles.ClaimConfig) (*Set, error) {
	set := &Set{kinds: kinds}
	if claim.Status.Allocation == nil {
		return set, nil
	}
	ours := requestsOf(claim, driverName)
	var fromClass, fromClaim []*Config
	var errs []error
	for i, entry := range claim.Status.Allocation.Devices.Config {
		if entry.Opaque == nil || entry.Opaque.Driver != driverName || !slices.ContainsFunc(ours, func(r string) bool { return fits(entry.Requests, r) }) {
			continue
		}
		if isFaultConfig(entry.Opaque.Parameters.Raw) {
			_, err := decodeFaults(entry, originOf(i, entry))
			errs = append(errs, err)
			continue
		}
		config, err := decode(entry.Opaque.Parameters.Raw, originOf(i, entry), kinds)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		config.requests = entry.Requests
		if entry.Source == resourceapi.AllocationConfigSourceClass {
			fromClass = append(fromClass, config)
		} else {
			fromClaim = append(fromClaim, config)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("configuration of claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	set.entries = slices.Concat(fromClass, fromClaim)
	return set, nil
}

// For returns what is in force for a device that was allocated for the request, nil if nothing is. It
// fails if the entry is for the other type of device.
func (s *Set) For(request string, partition bool) (*Config, error) {
	for _, config := range slices.Backward(s.entries) {
		if !fits(config.requests, request) {
			continue
		}
		if config.partition == partition {
			return config, nil
		}
		if len(config.requests) > 0 {
			got, use := "a whole GPU", s.kinds.GPU
			if partition {
				got, use = "a partition", s.kinds.Partition
			}
			return nil, fmt.Errorf("%s: kind %s does not suit request %q, which was given %s: use kind %s", config.origin, config.kind, request, got, use)
		}
	}
	return nil, nil
}

func fits(requests []string, request string) bool {
	return len(requests) == 0 || slices.Contains(requests, request) || slices.Contains(requests, resourceclaim.BaseRequestRef(request))
}

// requestsOf are the requests, once per device, that were given devices of the driver.
func requestsOf(claim *resourceapi.ResourceClaim, driverName string) []string {
	var requests []string
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == driverName {
			requests = append(requests, result.Request)
		}
	}
	return requests
}

// originOf says where an entry stands.
func originOf(i int, entry resourceapi.DeviceAllocationConfiguration) string {
	return fmt.Sprintf("config[%d] (%s, %s)", i, entry.Source, requestsText(entry.Requests))
}

func requestsText(requests []string) string {
	if len(requests) == 0 {
		return "all requests"
	}
	return "request " + strings.Join(requests, ", ")
}

// wireGPU and wirePartition are the two kinds as people write them.
type wireGPU struct {
	APIVersion string       `json:"apiVersion"`
	Kind       string       `json:"kind"`
	Sharing    *wireSharing `json:"sharing"`
}

type wirePartition struct {
	APIVersion string                `json:"apiVersion"`
	Kind       string                `json:"kind"`
	Sharing    *wirePartitionSharing `json:"sharing"`
}

func decode(raw []byte, origin string, kinds profiles.ClaimConfig) (*Config, error) {
	var meta metav1.TypeMeta
	if err := yaml.Unmarshal(raw, &meta); err != nil {
		return nil, fmt.Errorf("%s: not an object with apiVersion and kind: %w", origin, err)
	}
	if meta.APIVersion != kinds.APIVersion || meta.Kind != kinds.GPU && meta.Kind != kinds.Partition {
		return nil, fmt.Errorf("%s: unknown kind %q of apiVersion %q; known: %s and %s of %s, %s of %s",
			origin, meta.Kind, meta.APIVersion, kinds.GPU, kinds.Partition, kinds.APIVersion, faults.ConfigKind, faults.APIVersion)
	}

	config := &Config{origin: origin, kind: meta.Kind, partition: meta.Kind == kinds.Partition}
	var problems strictyaml.Faults
	if config.partition {
		var wire wirePartition
		problems = strictyaml.Decode(raw, &wire)
		if wire.Sharing != nil {
			config.Sharing = sharing(wireSharing{Strategy: wire.Sharing.Strategy, MPS: wire.Sharing.MPS}, &problems)
		}
	} else {
		var wire wireGPU
		problems = strictyaml.Decode(raw, &wire)
		if wire.Sharing != nil {
			config.Sharing = sharing(*wire.Sharing, &problems)
		}
	}
	return config, problems.Err(origin + ": " + meta.Kind)
}
