package debian

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestMissingNamesEachPackageOnce(t *testing.T) {
	root := t.TempDir()
	all := []string{"runc", "nftables", "containernetworking-plugins", "mount", "util-linux"}
	if got := missing(root); !slices.Equal(got, all) {
		t.Errorf("on an empty machine: got %v, want %v", got, all)
	}
	for _, n := range needs {
		if n.pkg == "runc" || n.file == "/usr/lib/cni/ptp" {
			continue
		}
		path := filepath.Join(root, n.file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := missing(root), []string{"runc", "containernetworking-plugins"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got, want := missingFiles(root), []string{"/usr/sbin/runc", "/usr/lib/cni/ptp"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
