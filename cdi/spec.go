package cdi

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// nullDevice is what every simulated device node is: it exists on every host, and the default device
// rules of every runtime allow it, so that no container needs a privilege for a simulated device.
//
// It is mounted over the path of the node rather than described as a CDI device node: inside a user
// namespace a runtime cannot make nodes and mounts the host's node of the same path instead, of which
// a simulated device has none. Pods with hostUsers: false remain out of reach where the runtime asks for
// id-mapped mounts, which the file system of /dev does not offer.
const nullDevice = "/dev/null"

// Claim is what containers get from one prepared claim.
type Claim struct {
	// UID of the claim, a DNS label as the API server makes them.
	UID string
	// Common goes to each container that gets at least one of the devices.
	Common Edits
	// Devices by name; each name at most once.
	Devices []Device
}

// Device is one allocated device.
type Device struct {
	// Name in its pool, a DNS label.
	Name  string
	Edits Edits
}

// Edits is what changes in a container.
type Edits struct {
	// Env holds environment variables by name.
	Env map[string]string
	// Nodes are paths of device nodes in the container. Each is the host's /dev/null.
	Nodes []string
	// Mounts are read-only.
	Mounts []Mount
}

// Mount shows a file or folder of the host in the container, read-only.
type Mount struct {
	HostPath      string
	ContainerPath string
	// NoExec is for what no container has to run.
	NoExec bool
}

// Kind is the CDI kind of the specs of a DRA driver, e.g. k8s.gpu.example.com/claim.
func Kind(driverName string) string { return vendor(driverName) + "/" + class }

// DeviceName is the CDI name of an allocated device, unique on the node for as long as the claim lives.
func DeviceName(claimUID, device string) string { return claimUID + "-" + device }

const class = "claim"

func vendor(driverName string) string { return "k8s." + driverName }

// Build returns the spec of a claim in the lowest CDI version that can express it. It fails for names
// that are not DNS labels, so that whatever it returns is safe to use in a file name.
func Build(kind string, claim Claim) (*specs.Spec, error) {
	if err := checkLabel("claim UID", claim.UID); err != nil {
		return nil, err
	}
	spec := &specs.Spec{Kind: kind, ContainerEdits: claim.Common.build()}
	devices := slices.SortedFunc(slices.Values(claim.Devices), func(a, b Device) int { return strings.Compare(a.Name, b.Name) })
	for _, d := range devices {
		if err := checkLabel("device name", d.Name); err != nil {
			return nil, fmt.Errorf("claim %s: %w", claim.UID, err)
		}
		spec.Devices = append(spec.Devices, specs.Device{
			Name:           DeviceName(claim.UID, d.Name),
			ContainerEdits: d.Edits.build(),
		})
	}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("claim %s: choose the CDI version: %w", claim.UID, err)
	}
	spec.Version = version
	return spec, nil
}

func (e Edits) build() specs.ContainerEdits {
	var edits specs.ContainerEdits
	for name, value := range e.Env {
		edits.Env = append(edits.Env, name+"="+value)
	}
	slices.Sort(edits.Env)
	for _, path := range e.Nodes {
		edits.Mounts = append(edits.Mounts, &specs.Mount{HostPath: nullDevice, ContainerPath: path, Options: []string{"bind", "rw", "nosuid", "noexec"}})
	}
	for _, m := range e.Mounts {
		options := []string{"rbind", "ro", "nosuid", "nodev"}
		if m.NoExec {
			options = append(options, "noexec")
		}
		edits.Mounts = append(edits.Mounts, &specs.Mount{HostPath: m.HostPath, ContainerPath: m.ContainerPath, Options: options})
	}
	return edits
}

func checkLabel(what, value string) error {
	if problems := validation.IsDNS1123Label(value); len(problems) > 0 {
		return fmt.Errorf("%s %q: %s", what, value, strings.Join(problems, "; "))
	}
	return nil
}
