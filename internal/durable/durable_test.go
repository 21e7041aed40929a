package durable

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestWriteFileReplacesContentAndMode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.json")
	for _, content := range []string{"old", "new"} {
		if err := WriteFile(path, []byte(content), 0o640, nil); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(path)
	if err != nil || string(data) != "new" {
		t.Fatalf("got %q, %v", data, err)
	}
	if info, _ := os.Stat(path); info.Mode().Perm() != 0o640 {
		t.Errorf("mode %v", info.Mode())
	}
	if got := names(t, filepath.Dir(path)); len(got) != 1 {
		t.Errorf("folder holds %v", got)
	}
}

func TestFailedVerifyLeavesTheOldFileAndNothingElse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.json")
	if err := WriteFile(path, []byte("old"), 0o600, nil); err != nil {
		t.Fatal(err)
	}
	refused := errors.New("refused")
	var seen string
	err := WriteFile(path, []byte("new"), 0o600, func(tmp string) error {
		data, err := os.ReadFile(tmp)
		if err != nil {
			t.Fatal(err)
		}
		seen = string(data)
		return refused
	})
	if !errors.Is(err, refused) {
		t.Fatalf("got %v", err)
	}
	if seen != "new" {
		t.Errorf("verify saw %q", seen)
	}
	if data, _ := os.ReadFile(path); string(data) != "old" {
		t.Errorf("content %q", data)
	}
	if got := names(t, filepath.Dir(path)); len(got) != 1 {
		t.Errorf("folder holds %v", got)
	}
}

func TestRemoveIsIdempotent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.json")
	if err := WriteFile(path, nil, 0o600, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if got := names(t, filepath.Dir(path)); len(got) != 0 {
		t.Errorf("folder holds %v", got)
	}
}

func TestRemoveTemporaryKeepsForeignFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{".mine_1.yaml.123.tmp", ".other.yaml.123.tmp", "mine_1.yaml", ".mine_note"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := RemoveTemporary(dir, "mine_"); err != nil {
		t.Fatal(err)
	}
	got := names(t, dir)
	want := []string{".mine_note", ".other.yaml.123.tmp", "mine_1.yaml"}
	if len(got) != len(want) || got[0] != want[0] || got[1] != want[1] || got[2] != want[2] {
		t.Errorf("got %v, want %v", got, want)
	}
}
