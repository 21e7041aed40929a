package tools

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func install(t *testing.T, from, to string) string {
	t.Helper()
	dir, err := Install(from, to, []string{"smi", "run"})
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func list(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestInstall(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "tools")
	write(t, from, map[string]string{"smi": "one", "run": "two", "driver": "not for containers"})

	dir := install(t, from, to)
	if diff := cmp.Diff([]string{"run", "smi"}, list(t, dir)); diff != "" {
		t.Error(diff)
	}
	for name, want := range map[string]string{"smi": "one", "run": "two"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || string(data) != want {
			t.Errorf("%s: %q, %v", name, data, err)
		}
		if info, _ := os.Stat(filepath.Join(dir, name)); info.Mode().Perm() != 0o755 {
			t.Errorf("%s: mode %v", name, info.Mode())
		}
	}
	if info, _ := os.Stat(dir); info.Mode().Perm() != 0o755 {
		t.Errorf("folder: mode %v", info.Mode())
	}
	if again := install(t, from, to); again != dir {
		t.Errorf("the same programs went to %s and %s", dir, again)
	}
	if diff := cmp.Diff([]string{filepath.Base(dir)}, list(t, to)); diff != "" {
		t.Error(diff)
	}
}

func TestAnotherVersionGetsAFolderOfItsOwn(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	write(t, from, map[string]string{"smi": "one", "run": "two"})
	first := install(t, from, to)
	// Exchanged contents must not look like the same set.
	write(t, from, map[string]string{"smi": "two", "run": "one"})
	second := install(t, from, to)
	if first == second {
		t.Fatal("two versions in one folder")
	}
	if err := os.Mkdir(filepath.Join(to, unfinished+"123"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Prune(to, second); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{filepath.Base(second)}, list(t, to)); diff != "" {
		t.Error(diff)
	}
}

func TestMissingProgramLeavesNothing(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	write(t, from, map[string]string{"smi": "one"})
	if _, err := Install(from, to, []string{"smi", "run"}); err == nil {
		t.Error("accepted")
	}
	if diff := cmp.Diff([]string{}, list(t, to)); diff != "" {
		t.Error(diff)
	}
}
