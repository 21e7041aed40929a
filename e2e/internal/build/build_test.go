package build

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/simgpu/simgpu/e2e/internal/progress"
)

// newModule writes a module with two programs, of which only the first imports package shared.
func newModule(t *testing.T) *Builder {
	t.Helper()
	folder := t.TempDir()
	for path, content := range map[string]string{
		"go.mod":             "module example.test/m\n\ngo 1.26\n",
		"shared/shared.go":   "package shared\n\nvar Word = \"shared\"\n",
		"cmd/first/main.go":  "package main\n\nimport \"example.test/m/shared\"\n\nvar version string\n\nfunc main() { println(shared.Word, version) }\n",
		"cmd/second/main.go": "package main\n\nfunc main() { println(\"second\") }\n",
	} {
		write(t, filepath.Join(folder, path), content)
	}
	return &Builder{Module: folder, Cache: t.TempDir()}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

var (
	first  = Program{Name: "first", Package: "./cmd/first"}
	second = Program{Name: "second", Package: "example.test/m/cmd/second"}
)

func mustBuild(t *testing.T, b *Builder, programs ...Program) map[string]string {
	t.Helper()
	paths, err := b.Build(t.Context(), programs...)
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

func output(t *testing.T, executable string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), executable).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v", executable, err)
	}
	return strings.TrimSpace(string(out))
}

func TestStampIsLinkedIn(t *testing.T) {
	b := newModule(t)
	p := first
	p.Stamp = func(m Modules) map[string]string {
		if _, ok := m["example.test/m"]; !ok {
			t.Errorf("modules %v do not hold the program's own", m)
		}
		return map[string]string{"main.version": "v7"}
	}
	if got := output(t, mustBuild(t, b, p)["first"]); got != "shared v7" {
		t.Errorf("the program says %q, want %q", got, "shared v7")
	}
}

func TestOnlyWhatGoesInDecidesAboutRebuilding(t *testing.T) {
	b := newModule(t)
	before := mustBuild(t, b, first, second)
	if again := mustBuild(t, b, first, second); again["first"] != before["first"] || again["second"] != before["second"] {
		t.Errorf("unchanged programs moved from %v to %v", before, again)
	}
	write(t, filepath.Join(b.Module, "shared/shared.go"), "package shared\n\nvar Word = \"changed\"\n")
	after := mustBuild(t, b, first, second)
	if after["first"] == before["first"] {
		t.Error("the first program was not rebuilt after a change of what it imports")
	}
	if after["second"] != before["second"] {
		t.Error("the second program was rebuilt after a change of what it does not import")
	}
	if got := output(t, after["first"]); got != "changed" {
		t.Errorf("the rebuilt program says %q", got)
	}
	if got := output(t, before["first"]); got != "shared" {
		t.Errorf("the program from before says %q", got)
	}
}

func TestTagsAreBuiltIn(t *testing.T) {
	b := newModule(t)
	write(t, filepath.Join(b.Module, "shared/tagged.go"), "//go:build tagged\n\npackage shared\n\nfunc init() { Word = \"tagged\" }\n")
	plain := mustBuild(t, b, first)
	b.Tags = "tagged"
	tagged := mustBuild(t, b, first)
	if got := output(t, plain["first"]) + ", " + output(t, tagged["first"]); got != "shared, tagged" {
		t.Errorf("without and with the tag the program says %q, want %q", got, "shared, tagged")
	}
}

func TestBuildsAtTheSameTimeShareOneResult(t *testing.T) {
	b := newModule(t)
	var outputs [3]bytes.Buffer
	var wait sync.WaitGroup
	for i := range outputs {
		wait.Go(func() {
			mine := *b
			mine.Progress = progress.New(&outputs[i])
			if _, err := mine.Build(t.Context(), first); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	built := 0
	for i := range outputs {
		built += strings.Count(outputs[i].String(), "Built first")
	}
	if built != 1 {
		t.Errorf("built %d times, want once", built)
	}
}

func TestCompilerErrorIsShown(t *testing.T) {
	b := newModule(t)
	write(t, filepath.Join(b.Module, "cmd/second/main.go"), "package main\n\nfunc main() { undefinedName() }\n")
	_, err := b.Build(t.Context(), second)
	if err == nil || !strings.Contains(err.Error(), "build second") || !strings.Contains(err.Error(), "undefined: undefinedName") {
		t.Errorf("got %v, want the program and the compiler's words", err)
	}
	left, err := filepath.Glob(filepath.Join(b.Cache, ".build-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("the failed build left %v (%v)", left, err)
	}
}

func TestUnknownPackageIsAnError(t *testing.T) {
	b := newModule(t)
	_, err := b.Build(t.Context(), Program{Name: "third", Package: "./cmd/third"})
	if err == nil || !strings.Contains(err.Error(), "third") {
		t.Errorf("got %v, want an error that names the program", err)
	}
}

func TestCancelledBuildSaysWhy(t *testing.T) {
	b := newModule(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(context.DeadlineExceeded)
	if _, err := b.Build(ctx, first); err == nil || !strings.Contains(err.Error(), context.DeadlineExceeded.Error()) {
		t.Errorf("got %v, want the reason", err)
	}
}

func TestIsImportPath(t *testing.T) {
	for line, want := range map[string]bool{
		"k8s.io/api/core/v1":                   true,
		"fmt":                                  true,
		"# example.test/m":                     false,
		"go: downloading k8s.io/api v0.37.2":   false,
		"cmd/x/main.go:3:4: undefined: y":      false,
		"":                                     false,
		"\tmore about the error in line three": false,
	} {
		if got := isImportPath(line); got != want {
			t.Errorf("isImportPath(%q) = %t", line, got)
		}
	}
}

func TestExecutableName(t *testing.T) {
	for importPath, want := range map[string]string{
		"example.test/m/cmd/first": "first",
		"example.test/tool/v2":     "tool",
		"example.test/v":           "v",
		"v1":                       "v1",
	} {
		if got := executableName(importPath); got != want {
			t.Errorf("executableName(%q) = %q, want %q", importPath, got, want)
		}
	}
}

func TestFindModule(t *testing.T) {
	repository := t.TempDir()
	write(t, filepath.Join(repository, "go.mod"), "module example.test/root\n")
	write(t, filepath.Join(repository, "e2e/go.mod"), "// comment\nmodule example.test/root/e2e\n")
	write(t, filepath.Join(repository, "e2e/deep/er/x.go"), "package x\n")
	want := filepath.Join(repository, "e2e")
	for _, from := range []string{".", "e2e", "e2e/deep/er"} {
		got, err := FindModule(filepath.Join(repository, from), "example.test/root/e2e")
		if err != nil || got != want {
			t.Errorf("from %s: got %q, %v, want %q", from, got, err, want)
		}
	}
	if _, err := FindModule(t.TempDir(), "example.test/root/e2e"); err == nil {
		t.Error("found the module outside of its repository")
	}
}

func TestUnusedThingsAreRemoved(t *testing.T) {
	folder := t.TempDir()
	for _, name := range []string{"old", "asked", "new"} {
		write(t, filepath.Join(folder, name, "program"), name)
		if name == "new" {
			continue
		}
		long := time.Now().Add(-keepUnused - time.Hour)
		if err := os.Chtimes(filepath.Join(folder, name), long, long); err != nil {
			t.Fatal(err)
		}
	}
	MarkUsed(filepath.Join(folder, "asked"))
	RemoveUnused(folder)
	left, err := filepath.Glob(filepath.Join(folder, "*"))
	want := []string{filepath.Join(folder, "asked"), filepath.Join(folder, "new")}
	if err != nil || !slices.Equal(left, want) {
		t.Errorf("left %v, %v, want %v", left, err, want)
	}
}
