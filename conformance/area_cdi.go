package conformance

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

const cdiSpec = "CDI specification, https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md"

func cdiChecks() []Check {
	return []Check{
		{
			Name: "cdi/resolves", Level: Must,
			Asserts: "Every CDI device id in the answer is found in the CDI folder, as the container runtime looks for it.",
			Source:  cdiSpec + "; containerd: \"unresolvable CDI devices\"",
			Fix:     "Write the spec before answering, into the folder that the runtime reads.",
			run:     checkResolves,
		},
		{
			Name: "cdi/valid", Level: Must,
			Asserts: "All specs in the CDI folder can be read: one that cannot is ignored with everything in it.",
			Source:  cdiSpec,
			Fix:     "Validate with tags.cncf.io/container-device-interface before writing.",
			run:     checkSpecsValid,
		},
		{
			Name: "cdi/minimal-version", Level: Should,
			Asserts: "A spec asks for no newer version than its content needs, so that older container runtimes can read it.",
			Source:  "tags.cncf.io/container-device-interface/specs-go MinimumRequiredVersion",
			Fix:     "Set cdiVersion to the minimum required version.",
			run:     checkMinimalVersion,
		},
		{
			Name: "cdi/injects", Level: Must,
			Asserts: "The devices can be injected into the configuration of a container, and change it.",
			Source:  cdiSpec + ", containerEdits",
			Fix:     "A device needs edits that do something; device nodes and mounts must exist on the host.",
			run:     checkInjects,
		},
		{
			Name: "cdi/absolute-paths", Level: Must,
			Asserts: "Paths in the specs are absolute, and mounts are from what exists.",
			Source:  cdiSpec + ", mounts",
			Fix:     "Write the paths of the host.",
			run:     checkAbsolutePaths,
		},
		{
			Name: "cdi/restored-by-prepare", Level: Should,
			Asserts: "Preparing a prepared claim again restores a CDI spec that is gone, even if the driver has not been restarted since. (recovery/reboot is the MUST.)",
			Source:  "kubernetes/kubernetes#141433: \"unresolvable CDI devices\" for ever",
			Fix:     "Check on every prepare that the spec is there.",
			run:     checkRestoredByPrepare,
		},
		{
			Name: "cdi/not-world-writable", Level: Must,
			Asserts: "No spec can be written by everybody: what is in it is run as root.",
			Source:  "CDI hooks are run by the container runtime",
			Fix:     "Write specs with mode 0644 or less.",
			run:     checkNotWorldWritable,
		},
	}
}

func qualified(id string) error {
	_, _, _, err := parser.ParseQualifiedName(id)
	return err
}

// cdiCache reads the CDI folder as a container runtime does.
func (t *T) cdiCache() *cdi.Cache {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(t.vars.CDIDir), cdi.WithAutoRefresh(false))
	t.must(err)
	return cache
}

func (t *T) resolve(id string) (*cdi.Device, error) {
	device := t.cdiCache().GetDevice(id)
	if device == nil {
		return nil, fmt.Errorf("CDI device %s is in none of the specs in the CDI folder", id)
	}
	return device, nil
}

// prepared prepares a claim and returns its CDI device ids.
func (t *T) prepared() (workload, []string) {
	w := t.newWorkload()
	var ids []string
	for _, device := range t.prepareOne(w.claim()) {
		ids = append(ids, device.CdiDeviceIds...)
	}
	for name, content := range t.cdiFiles() {
		t.show("CDI spec "+name, "%s", content)
	}
	return w, ids
}

func checkResolves(t *T) {
	_, ids := t.prepared()
	for _, id := range ids {
		if _, err := t.resolve(id); err != nil {
			t.Errorf("%v", err)
		}
	}
}

func checkSpecsValid(t *T) {
	t.prepared()
	for file, errs := range t.cdiCache().GetErrors() {
		for _, err := range errs {
			t.Errorf("%s: %v", filepath.Base(file), err)
		}
	}
}

// specsOf are the specs that the ids are in.
func (t *T) specsOf(ids []string) map[string]*specs.Spec {
	found := map[string]*specs.Spec{}
	for _, id := range ids {
		if device, err := t.resolve(id); err == nil {
			found[filepath.Base(device.GetSpec().GetPath())] = device.GetSpec().Spec
		}
	}
	return found
}

func checkMinimalVersion(t *T) {
	_, ids := t.prepared()
	for file, spec := range t.specsOf(ids) {
		minimum, err := specs.MinimumRequiredVersion(spec)
		t.must(err)
		if spec.Version != minimum {
			t.Errorf("%s has version %s, and %s would do", file, spec.Version, minimum)
		}
	}
}

func checkInjects(t *T) {
	_, ids := t.prepared()
	config := &oci.Spec{}
	before, err := json.Marshal(config)
	t.must(err)
	if unresolved, err := t.cdiCache().InjectDevices(config, ids...); err != nil {
		t.Fatalf("injecting %v: %v (unresolved: %v)", ids, err, unresolved)
	}
	after, err := json.MarshalIndent(config, "", "  ")
	t.must(err)
	t.show("container with the devices", "%s", after)
	if len(after) <= len(before) {
		t.Errorf("the devices change nothing in the container")
	}
}

func checkAbsolutePaths(t *T) {
	_, ids := t.prepared()
	for file, spec := range t.specsOf(ids) {
		edits := []specs.ContainerEdits{spec.ContainerEdits}
		for _, device := range spec.Devices {
			edits = append(edits, device.ContainerEdits)
		}
		for _, edit := range edits {
			for _, mount := range edit.Mounts {
				if !filepath.IsAbs(mount.HostPath) || !filepath.IsAbs(mount.ContainerPath) {
					t.Errorf("%s: the mount of %s at %s has a relative path", file, mount.HostPath, mount.ContainerPath)
				} else if _, err := os.Stat(mount.HostPath); err != nil {
					t.Errorf("%s: the mount of %s: %v", file, mount.HostPath, err)
				}
			}
			for _, node := range edit.DeviceNodes {
				if !filepath.IsAbs(node.Path) {
					t.Errorf("%s: the device node %s has a relative path", file, node.Path)
				}
			}
		}
	}
}

func checkRestoredByPrepare(t *T) {
	w, ids := t.prepared()
	t.emptyCDI()
	t.prepareOne(w.claim())
	for _, id := range ids {
		if _, err := t.resolve(id); err != nil {
			t.Errorf("after the CDI folder was emptied and the claim prepared again: %v", err)
		}
	}
}

// emptyCDI removes all specs, as a reboot does.
func (t *T) emptyCDI() {
	for name := range t.cdiFiles() {
		t.must(os.Remove(filepath.Join(t.vars.CDIDir, name)))
	}
}

func checkNotWorldWritable(t *T) {
	t.prepared()
	for name := range t.cdiFiles() {
		info, err := os.Stat(filepath.Join(t.vars.CDIDir, name))
		t.must(err)
		if info.Mode().Perm()&0o002 != 0 {
			t.Errorf("%s has mode %s", name, strings.TrimSpace(info.Mode().String()))
		}
	}
}
