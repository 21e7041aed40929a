package cdi

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/simgpu/simgpu/internal/durable"
)

const extension = ".yaml"

// Directory holds the specs of one DRA driver in a folder shared with others. Its methods may be
// called concurrently for different claims.
type Directory struct {
	path       string
	driverName string
}

// OpenDirectory creates the folder if necessary and removes what an interrupted write left in it.
func OpenDirectory(path, driverName string) (*Directory, error) {
	if err := parser.ValidateVendorName(vendor(driverName)); err != nil {
		return nil, fmt.Errorf("driver name %q cannot be part of a CDI kind: %w", driverName, err)
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, fmt.Errorf("CDI folder: %w", err)
	}
	d := &Directory{path: path, driverName: driverName}
	if err := durable.RemoveTemporary(path, d.prefix()); err != nil {
		return nil, fmt.Errorf("CDI folder: remove unfinished files: %w", err)
	}
	return d, nil
}

// DeviceID is the qualified name under which a container runtime finds an allocated device.
func (d *Directory) DeviceID(claimUID, device string) string {
	return parser.QualifiedName(vendor(d.driverName), class, DeviceName(claimUID, device))
}

// Put makes sure that the spec of the claim is on disk, and says whether it had to write it. A file
// that holds what it should is left alone. The bytes are read back and validated as a container
// runtime does before they get their name, so that success means a spec that a runtime accepts.
func (d *Directory) Put(claim Claim) (written bool, err error) {
	spec, err := Build(Kind(d.driverName), claim)
	if err != nil {
		return false, err
	}
	data, err := yaml.Marshal(spec)
	if err != nil {
		return false, fmt.Errorf("CDI spec of claim %s: %w", claim.UID, err)
	}
	path := d.file(claim.UID)
	if current, err := os.ReadFile(path); err == nil && bytes.Equal(current, data) {
		return false, nil
	}
	// The folder is on a tmpfs that may have been emptied since the start.
	if err := os.MkdirAll(d.path, 0o755); err != nil {
		return false, fmt.Errorf("CDI folder: %w", err)
	}
	err = durable.WriteFile(path, data, 0o644, func(tmp string) error {
		_, err := cdilib.ReadSpec(tmp, 0)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("CDI spec of claim %s: %w", claim.UID, err)
	}
	return true, nil
}

// Remove removes the spec of a claim. A claim without one is no error.
func (d *Directory) Remove(claimUID string) error {
	if err := checkLabel("claim UID", claimUID); err != nil {
		return err
	}
	if err := durable.Remove(d.file(claimUID)); err != nil {
		return fmt.Errorf("CDI spec of claim %s: %w", claimUID, err)
	}
	return nil
}

// List returns the UIDs of all claims that have a spec, sorted.
func (d *Directory) List() ([]string, error) {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return nil, fmt.Errorf("CDI folder: %w", err)
	}
	var uids []string
	for _, e := range entries {
		uid, ours := strings.CutPrefix(e.Name(), d.prefix())
		uid, spec := strings.CutSuffix(uid, extension)
		if ours && spec && len(validation.IsDNS1123Label(uid)) == 0 {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids, nil
}

// Devices returns the names of the devices in the spec of a claim, sorted; none if it has no spec.
func (d *Directory) Devices(claimUID string) ([]string, error) {
	if err := checkLabel("claim UID", claimUID); err != nil {
		return nil, err
	}
	spec, err := cdilib.ReadSpec(d.file(claimUID), 0)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return nil, err
	}
	var names []string
	for _, device := range spec.Devices {
		if name, ok := strings.CutPrefix(device.Name, DeviceName(claimUID, "")); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

func (d *Directory) file(claimUID string) string {
	return filepath.Join(d.path, d.prefix()+claimUID+extension)
}

// prefix is what all files of the driver's transient specs begin with.
func (d *Directory) prefix() string {
	return cdilib.GenerateTransientSpecName(vendor(d.driverName), class, "")
}
