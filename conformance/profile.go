package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"sigs.k8s.io/yaml"
)

// Profile is what to know about a driver beyond what it publishes. All of it is optional.
type Profile struct {
	// DriverName is the DRA driver name. Without it, it is taken from the first driver that registers.
	DriverName string `json:"driverName,omitempty"`
	// Selector is a CEL expression for devices that any claim can be given; "" is every device of the driver.
	Selector string `json:"selector,omitempty"`
	// Parameters are opaque parameters in claims.
	Parameters Parameters `json:"parameters,omitzero"`
	// Health says how to break a device.
	Health HealthCommands `json:"health,omitzero"`
	// KnownFailures are failures that are known and do not count. They are reported as such, and so is a check that passes
	// although it is listed here.
	KnownFailures []KnownFailure `json:"knownFailures,omitempty"`
}

// Parameters are examples of opaque parameters for a device that the Selector selects.
type Parameters struct {
	Valid   []json.RawMessage `json:"valid,omitempty"`
	Invalid []json.RawMessage `json:"invalid,omitempty"`
	// Different are two that are valid and set the same to different values, so that the container shows which of them
	// counted: in its environment, mounts, devices or hooks.
	Different []json.RawMessage `json:"different,omitempty"`
}

// HealthCommands are templates of shell commands, like the driver command. {{.Device}} is the name of the device, and
// {{.AdminKubeconfig}} of a kubeconfig that may do everything.
type HealthCommands struct {
	Break  string `json:"break,omitempty"`
	Repair string `json:"repair,omitempty"`
}

// KnownFailure names a check that fails, and says why that is accepted.
type KnownFailure struct {
	Check  string `json:"check"`
	Reason string `json:"reason"`
}

// ReadProfile reads a profile from a file. It fails for unknown fields, and for known failures of checks that do not exist.
func ReadProfile(file string) (Profile, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return Profile{}, err
	}
	var p Profile
	if err := yaml.UnmarshalStrict(data, &p); err != nil {
		return Profile{}, fmt.Errorf("profile %s: %w", file, err)
	}
	var faults []error
	if n := len(p.Parameters.Different); n != 0 && n != 2 {
		faults = append(faults, fmt.Errorf("parameters.different has %d entries; two are needed to tell them apart", n))
	}
	for i, known := range p.KnownFailures {
		if _, err := FindCheck(known.Check); err != nil {
			faults = append(faults, fmt.Errorf("knownFailures[%d]: %w", i, err))
		}
		if known.Reason == "" {
			faults = append(faults, fmt.Errorf("knownFailures[%d]: a reason is required", i))
		}
	}
	if err := errors.Join(faults...); err != nil {
		return Profile{}, fmt.Errorf("profile %s: %w", file, err)
	}
	return p, nil
}
