package driver

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

// TestMetadataOfALongName goes through the steps of the kubeletplugin helper.
func TestMetadataOfALongName(t *testing.T) {
	longest := strings.Repeat("n", 63) + "_" + strings.Repeat("c", 253)
	for name, folder := range map[string]string{
		"usual":         "team_a",
		"just fits":     longest[:255],
		"just too long": longest[:256],
		"longest":       longest,
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			n.start()
			m := n.openMetadata()
			ops := m.operations()
			file := filepath.Join(m.dir, folder, "r0", "metadata.json")
			spec := specs.Spec{Devices: []specs.Device{{ContainerEdits: specs.ContainerEdits{
				Mounts: []*specs.Mount{{HostPath: file, ContainerPath: "/c/" + longest}},
			}}}}
			data, err := json.Marshal(spec)
			if err != nil {
				t.Fatal(err)
			}
			specFile := filepath.Join(m.cdiDir, m.specPrefix()+"uid-a_r0.json")
			if err := errors.Join(
				ops.MkdirAll(filepath.Dir(file), 0o755),
				ops.WriteFile(file, []byte("content"), 0o644),
				ops.WriteFile(specFile, data, 0o644),
			); err != nil {
				t.Fatal(err)
			}

			if data, err = os.ReadFile(specFile); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(data, &spec); err != nil {
				t.Fatal(err)
			}
			mount := spec.Devices[0].ContainerEdits.Mounts[0]
			mounted, err := os.ReadFile(mount.HostPath)
			if err != nil || string(mounted) != "content" || mount.ContainerPath != "/c/"+longest {
				t.Errorf("mounts %s as %s: %q, %v", mount.HostPath, mount.ContainerPath, mounted, err)
			}
			if again, err := ops.ReadFile(file); err != nil || string(again) != "content" {
				t.Errorf("read %q, %v", again, err)
			}
			for range 2 {
				if err := ops.RemoveAll(filepath.Join(m.dir, folder)); err != nil {
					t.Fatal(err)
				}
			}
			if left, _ := os.ReadDir(m.dir); len(left) != 0 {
				t.Errorf("left %v", left)
			}
		})
	}
}

func TestLongNamesStayApart(t *testing.T) {
	long := "team_" + strings.Repeat("c", 250)
	if a, b := shortName(long+"1"), shortName(long+"2"); a == b || len(a) > 255 || len(b) > 255 {
		t.Errorf("%s and %s", a, b)
	}
}

func TestReconcileKeepsTheMetadataOfALongName(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	long := claimOf(strings.Repeat("c", 253), []string{left0})
	long.UID = "uid-long"
	p.mustPrepare(t, long)
	plugin, _ := n.withAPI(p, newFakeAPI(long))
	m := plugin.reconciler.metadata
	folder := filepath.Join(m.dir, long.Namespace+"_"+long.Name)
	if err := m.operations().MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	plugin.reconciler.run(t.Context())
	if kept, _ := os.ReadDir(m.dir); len(kept) != 1 {
		t.Errorf("kept %v", kept)
	}
	p.mustUnprepare(t, long)
	plugin.reconciler.run(t.Context())
	if left, _ := os.ReadDir(m.dir); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

func TestOpenMetadataRemovesUnfinishedSpecs(t *testing.T) {
	n := newTestNode(t)
	n.start()
	unfinished := filepath.Join(n.cdiDir(), "."+driverName+"_metadata_uid-a_r0.json.123.tmp")
	foreign := filepath.Join(n.cdiDir(), ".net.example.com_metadata_uid-a_r0.json.123.tmp")
	if err := errors.Join(os.WriteFile(unfinished, nil, 0o600), os.WriteFile(foreign, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	n.openMetadata()
	if _, err := os.Stat(unfinished); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("unfinished file: %v", err)
	}
	if _, err := os.Stat(foreign); err != nil {
		t.Errorf("file of another driver: %v", err)
	}
}
