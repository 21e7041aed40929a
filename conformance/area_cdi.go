package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
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
			Name: "cdi/device-metadata", Level: Must,
			Asserts: "Metadata of devices that is mounted into the container can be decoded, is valid and about the devices that the claim has for that request, and is gone after unprepare. A restart does not change it.",
			Source:  "KEP-5304; k8s.io/dynamic-resource-allocation/devicemetadata, which programs in containers read it with",
			Fix:     "Leave writing it to k8s.io/dynamic-resource-allocation/kubeletplugin EnableDeviceMetadata.",
			run:     checkDeviceMetadata,
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

// edits are what the devices give a container, a line for each variable, mount, device and hook.
func (t *T) edits(ids []string) map[string]bool {
	config := &oci.Spec{}
	if unresolved, err := t.cdiCache().InjectDevices(config, ids...); err != nil {
		t.Fatalf("injecting %v: %v (unresolved: %v)", ids, err, unresolved)
	}
	lines := map[string]bool{}
	add := func(kind string, item any) {
		data, err := json.Marshal(item)
		t.must(err)
		lines[kind+" "+string(data)] = true
	}
	if config.Process != nil {
		for _, variable := range config.Process.Env {
			add("variable", variable)
		}
	}
	for _, mount := range config.Mounts {
		add("mount", mount)
	}
	if config.Linux != nil {
		for _, device := range config.Linux.Devices {
			add("device", device)
		}
	}
	if config.Hooks != nil {
		add("hooks", config.Hooks)
	}
	return lines
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

// metadataOf reads what is mounted where programs in containers look for metadata, by the path of the file on the host.
func (t *T) metadataOf(ids []string) map[string]*metadata.DeviceMetadata {
	config := &oci.Spec{}
	if unresolved, err := t.cdiCache().InjectDevices(config, ids...); err != nil {
		t.Fatalf("injecting %v: %v (unresolved: %v)", ids, err, unresolved)
	}
	found := map[string]*metadata.DeviceMetadata{}
	for _, mount := range config.Mounts {
		if !strings.HasPrefix(mount.Destination, metadata.ContainerDir+"/") || !strings.HasSuffix(mount.Destination, ".json") {
			continue
		}
		data, err := os.ReadFile(mount.Source)
		if err != nil {
			t.Errorf("%s: %v", mount.Destination, err)
			continue
		}
		t.show(mount.Destination, "%s", data)
		var decoded metadata.DeviceMetadata
		var invalid error
		err = devicemetadata.DecodeMetadataFromStream(json.NewDecoder(bytes.NewReader(data)), &decoded, devicemetadata.DecodeMetadataWithValidationResult(&invalid))
		if err := errors.Join(err, invalid); err != nil {
			t.Errorf("%s: %v", mount.Destination, err)
			continue
		}
		found[mount.Source] = &decoded
	}
	return found
}

func checkDeviceMetadata(t *T) {
	w := t.newWorkload(t.withRequests("one", "two"))
	claim := w.claim()
	ids := map[string][]string{} // by request
	for _, device := range t.prepareOne(claim) {
		for _, request := range device.RequestNames {
			ids[request] = append(ids[request], device.CdiDeviceIds...)
		}
	}
	var files []string
	look := func() {
		files = nil
		for _, request := range []string{"one", "two"} {
			want := map[string]bool{}
			for _, result := range claim.Status.Allocation.Devices.Results {
				if result.Request == request && result.Driver == t.vars.DriverName {
					want[key(result.Pool, result.Device)] = true
				}
			}
			for file, found := range t.metadataOf(ids[request]) {
				files = append(files, file)
				if found.Name != claim.Name || found.Namespace != claim.Namespace || found.UID != claim.UID {
					t.Errorf("the metadata in the container for request %q is about claim %s/%s (%s), not %s/%s (%s)", request,
						found.Namespace, found.Name, found.UID, claim.Namespace, claim.Name, claim.UID)
				}
				got := map[string]bool{}
				for _, r := range found.Requests {
					for _, device := range r.Devices {
						if r.Name == request && device.Driver == t.vars.DriverName {
							got[key(device.Pool, device.Name)] = true
						}
					}
				}
				if !maps.Equal(got, want) {
					t.Errorf("the metadata for request %q is about %v; allocated was %v", request, slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
				}
			}
		}
	}
	look()
	if len(files) == 0 && len(t.messages) == 0 {
		t.Skipf("the driver gives containers no metadata of their devices below %s", metadata.ContainerDir)
	}
	t.restartDriver(false)
	t.prepareOne(claim)
	look()
	t.unprepare(claim)
	for _, file := range files {
		if _, err := os.Stat(file); err == nil {
			t.Errorf("%s is still there after unprepare", file)
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
