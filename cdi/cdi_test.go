package cdi

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
)

const (
	driver = "gpu.example.com"
	uid    = "8f1c7a54-6c0e-4a55-9a37-0d1d4b1f6f11"
	other  = "0f1c7a54-6c0e-4a55-9a37-0d1d4b1f6f12"
)

func twoPartitions() Claim {
	return Claim{
		UID: uid,
		Common: Edits{
			Env:    map[string]string{"VISIBLE": "void"},
			Mounts: []Mount{{HostPath: "/opt/tools/smi", ContainerPath: "/usr/bin/smi"}},
		},
		Devices: []Device{
			{Name: "gpu-0-mig-b", Edits: Edits{
				Env:    map[string]string{"DEVICE_B": "MIG-b"},
				Nodes:  []string{"/dev/gpuctl", "/dev/gpu0", "/dev/caps/cap2"},
				Mounts: []Mount{{HostPath: "/var/b", ContainerPath: "/run/simgpu/b", NoExec: true}},
			}},
			{Name: "gpu-0-mig-a", Edits: Edits{
				Env:    map[string]string{"Z": "2", "DEVICE_A": "MIG-a"},
				Nodes:  []string{"/dev/gpuctl", "/dev/gpu0", "/dev/caps/cap1"},
				Mounts: []Mount{{HostPath: "/var/a", ContainerPath: "/run/simgpu/a", NoExec: true}},
			}},
		},
	}
}

func open(t *testing.T) (*Directory, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cdi")
	d, err := OpenDirectory(path, driver)
	if err != nil {
		t.Fatal(err)
	}
	return d, path
}

func put(t *testing.T, d *Directory, claim Claim) bool {
	t.Helper()
	written, err := d.Put(claim)
	if err != nil {
		t.Fatal(err)
	}
	return written
}

// inject does what a container runtime does with a list of CDI device ids.
func inject(t *testing.T, dir string, ids ...string) *oci.Spec {
	t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dir), cdilib.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	if errs := cache.GetErrors(); len(errs) > 0 {
		t.Fatalf("the runtime rejects a spec: %v", errs)
	}
	spec := &oci.Spec{Process: &oci.Process{}}
	defer func() {
		if spec.Linux != nil && len(spec.Linux.Devices) > 0 {
			t.Errorf("nodes that a runtime cannot make in a user namespace: %v", spec.Linux.Devices)
		}
	}()
	if unresolved, err := cache.InjectDevices(spec, ids...); err != nil || len(unresolved) > 0 {
		t.Fatalf("inject %v: %v, unresolved %v", ids, err, unresolved)
	}
	return spec
}

func TestContainerSeesOnlyTheDevicesItReferences(t *testing.T) {
	d, dir := open(t)
	put(t, d, twoPartitions())

	for name, test := range map[string]struct {
		devices   []string
		env       []string
		nodes     []string
		mountedAt []string
	}{
		"one device": {
			devices:   []string{"gpu-0-mig-a"},
			env:       []string{"DEVICE_A=MIG-a", "VISIBLE=void", "Z=2"},
			nodes:     []string{"/dev/caps/cap1", "/dev/gpu0", "/dev/gpuctl"},
			mountedAt: []string{"/run/simgpu/a", "/usr/bin/smi"},
		},
		"both devices": {
			devices:   []string{"gpu-0-mig-a", "gpu-0-mig-b"},
			env:       []string{"DEVICE_A=MIG-a", "DEVICE_B=MIG-b", "VISIBLE=void", "Z=2"},
			nodes:     []string{"/dev/caps/cap1", "/dev/caps/cap2", "/dev/gpu0", "/dev/gpuctl"},
			mountedAt: []string{"/run/simgpu/a", "/run/simgpu/b", "/usr/bin/smi"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var ids []string
			for _, device := range test.devices {
				ids = append(ids, d.DeviceID(uid, device))
			}
			spec := inject(t, dir, ids...)
			var nodes, mountedAt []string
			for _, m := range spec.Mounts {
				if strings.HasPrefix(m.Destination, "/dev/") {
					nodes = append(nodes, m.Destination)
					if m.Source != "/dev/null" || slices.Contains(m.Options, "nodev") || slices.Contains(m.Options, "ro") {
						t.Errorf("%s is %s with options %v, want a usable null device", m.Destination, m.Source, m.Options)
					}
					continue
				}
				mountedAt = append(mountedAt, m.Destination)
				if !slices.Contains(m.Options, "ro") {
					t.Errorf("%s can be written", m.Destination)
				}
			}
			for _, sorted := range [][]string{nodes, mountedAt, spec.Process.Env} {
				slices.Sort(sorted)
			}
			if diff := cmp.Diff(test.env, spec.Process.Env); diff != "" {
				t.Errorf("env: %s", diff)
			}
			if diff := cmp.Diff(test.nodes, nodes); diff != "" {
				t.Errorf("nodes: %s", diff)
			}
			if diff := cmp.Diff(test.mountedAt, mountedAt); diff != "" {
				t.Errorf("mounts: %s", diff)
			}
		})
	}
}

func TestFileIsStableAndOfTheLowestVersion(t *testing.T) {
	d, dir := open(t)
	put(t, d, twoPartitions())
	data, err := os.ReadFile(filepath.Join(dir, "k8s.gpu.example.com-claim_"+uid+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/two-partitions.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(data)); diff != "" {
		t.Errorf("spec changed (-want +got): %s", diff)
	}
}

func TestPutWritesOnlyWhatIsMissingOrDifferent(t *testing.T) {
	d, dir := open(t)
	claim := twoPartitions()
	file := filepath.Join(dir, "k8s.gpu.example.com-claim_"+uid+".yaml")

	for _, step := range []struct {
		name    string
		prepare func() error
		written bool
	}{
		{"new", func() error { return nil }, true},
		{"present", func() error { return nil }, false},
		{"removed by somebody", func() error { return os.Remove(file) }, true},
		{"folder removed by a reboot", func() error { return os.RemoveAll(dir) }, true},
		{"damaged", func() error { return os.Truncate(file, 10) }, true},
		{"new tools", func() error { claim.Common.Mounts[0].HostPath = "/opt/tools2/smi"; return nil }, true},
		{"present again", func() error { return nil }, false},
	} {
		if err := step.prepare(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		if written := put(t, d, claim); written != step.written {
			t.Errorf("%s: written %v, want %v", step.name, written, step.written)
		}
	}
	inject(t, dir, d.DeviceID(uid, "gpu-0-mig-a"))
}

func TestInvalidSpecsAreRefusedAndLeaveNothing(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Claim)
		want   string
	}{
		"uid that leaves the folder":  {func(c *Claim) { c.UID = "../../etc/x" }, "claim UID"},
		"empty uid":                   {func(c *Claim) { c.UID = "" }, "claim UID"},
		"device that is no DNS label": {func(c *Claim) { c.Devices[0].Name = "a/b" }, "device name"},
		"no devices":                  {func(c *Claim) { c.Devices = nil }, "no devices"},
		"device without edits":        {func(c *Claim) { c.Devices[0].Edits = Edits{} }, "empty device edits"},
		"same device twice":           {func(c *Claim) { c.Devices[1].Name = c.Devices[0].Name }, "multiple device"},
		"env without a name":          {func(c *Claim) { c.Common.Env = map[string]string{"": "x"} }, "environment variable"},
		"mount without a source":      {func(c *Claim) { c.Common.Mounts[0].HostPath = "" }, "empty host path"},
	} {
		t.Run(name, func(t *testing.T) {
			d, dir := open(t)
			claim := twoPartitions()
			test.change(&claim)
			_, err := d.Put(claim)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want it to mention %q", err, test.want)
			}
			if entries, _ := os.ReadDir(dir); len(entries) != 0 {
				t.Errorf("left %v", entries)
			}
		})
	}
}

func TestRemoveAndList(t *testing.T) {
	d, dir := open(t)
	claim := twoPartitions()
	put(t, d, claim)
	claim.UID = other
	put(t, d, claim)
	foreign := []string{
		"k8s.gpu.example.com-claim_not a uid.yaml",
		"k8s.gpu.example.com-claim_" + uid + ".json",
		"gpu.example.com_metadata_" + uid + "_r.json",
		"k8s.gpu.example.com.de-claim_" + uid + ".yaml",
	}
	for _, name := range foreign {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}

	uids, err := d.List()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{other, uid}, uids); diff != "" {
		t.Errorf("list: %s", diff)
	}
	devices, err := d.Devices(uid)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"gpu-0-mig-a", "gpu-0-mig-b"}, devices); diff != "" {
		t.Errorf("devices: %s", diff)
	}

	for range 2 {
		if err := d.Remove(uid); err != nil {
			t.Fatal(err)
		}
	}
	if devices, err := d.Devices(uid); err != nil || devices != nil {
		t.Errorf("after remove: %v, %v", devices, err)
	}
	if err := d.Remove("../" + other); err == nil {
		t.Error("a UID that leaves the folder was accepted")
	}
	uids, err = d.List()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{other}, uids); diff != "" {
		t.Errorf("list after remove: %s", diff)
	}
	for _, name := range foreign {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Errorf("foreign file: %v", err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if uids, err := d.List(); err != nil || len(uids) != 0 {
		t.Errorf("without the folder: %v, %v", uids, err)
	}
}

func TestOpenRemovesUnfinishedWrites(t *testing.T) {
	_, dir := open(t)
	tmp := filepath.Join(dir, ".k8s.gpu.example.com-claim_"+uid+".yaml.42.tmp")
	if err := os.WriteFile(tmp, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenDirectory(dir, driver); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(tmp); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("still there: %v", err)
	}
}

func TestOpenRefusesADriverNameThatIsNoVendor(t *testing.T) {
	if _, err := OpenDirectory(t.TempDir(), "gpu/example"); err == nil {
		t.Error("accepted")
	}
}
