// Package build compiles Go programs into static executables and keeps them outside the source tree.
//
// An executable is kept under a key made of exactly what goes into it: the Go version and target, the build flags,
// the version of every module and the content of every file of the main module that it links. So a change elsewhere
// never rebuilds it, and processes that want the same executable share one.
package build

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/simgpu/simgpu/e2e/internal/lock"
	"github.com/simgpu/simgpu/e2e/internal/progress"
)

// Program is one executable.
type Program struct {
	// Name is the file name of the executable.
	Name string
	// Package is its import path, or its path relative to the module (./cmd/x).
	Package string
	// Stamp gives the string variables to set when linking, by their full name. It may be nil.
	Stamp func(Modules) map[string]string
}

// Modules are the modules that a program links, by path.
type Modules map[string]Module

// Module is what is known about one module.
type Module struct {
	Version string
	// Time is when that version was made; zero for the main module.
	Time time.Time
}

// Builder builds the programs of one module.
type Builder struct {
	// Module is the folder of the module.
	Module string
	// Tags are build tags, separated by commas. May be empty.
	Tags string
	// Cache is the folder where executables are kept.
	Cache string
	// Progress is told what is going on. It may be nil.
	Progress *progress.Printer
}

// keepUnused is how long something is kept that nobody asks for. Who works on a program leaves one behind with every change.
const keepUnused = 3 * 24 * time.Hour

// environment makes the outcome independent of the caller's settings: static executables without paths of this machine in them.
func (b *Builder) environment() []string {
	flags := "-trimpath -buildvcs=false"
	if b.Tags != "" {
		flags += " -tags=" + b.Tags
	}
	return []string{"CGO_ENABLED=0", "GOFLAGS=" + flags, "GOWORK=off"}
}

// Build returns the path of each program's executable by its name, building those that are not there yet in one go.
func (b *Builder) Build(ctx context.Context, programs ...Program) (map[string]string, error) {
	paths, missing, err := b.look(ctx, programs)
	if err != nil || len(missing) == 0 {
		return paths, err
	}
	// In the same order everywhere, so that no two builds wait for each other.
	slices.SortFunc(missing, func(x, y planned) int { return strings.Compare(x.Name, y.Name) })
	for _, m := range missing {
		held, err := lock.Acquire(ctx, filepath.Join(b.Cache, ".lock-"+m.Name), func() { b.Progress.Step("Waiting for another build of %s", m.Name) })
		if err != nil {
			return nil, err
		}
		defer held.Release()
	}
	// Whoever held a lock may have built what is missing.
	paths, missing, err = b.look(ctx, programs)
	if err != nil || len(missing) == 0 {
		return paths, err
	}
	if err := b.compile(ctx, missing, paths); err != nil {
		return nil, err
	}
	for _, m := range missing {
		RemoveUnused(filepath.Join(b.Cache, m.Name))
	}
	return paths, nil
}

// planned is a program with all that decides its outcome.
type planned struct {
	Program
	importPath string
	linkFlags  string
}

// look works out where each program belongs and which are not there.
func (b *Builder) look(ctx context.Context, programs []Program) (paths map[string]string, missing []planned, err error) {
	toolchain, err := b.goCommand(ctx, "env", "GOVERSION", "GOOS", "GOARCH", "GOAMD64", "GOARM64")
	if err != nil {
		return nil, nil, err
	}
	all, err := b.inputs(ctx, programs)
	if err != nil {
		return nil, nil, fmt.Errorf("find out what %s consist of: %w", names(programs), err)
	}
	paths = map[string]string{}
	for i, p := range programs {
		in := all[i]
		plan := planned{Program: p, importPath: in.importPath, linkFlags: "-s -w"}
		if p.Stamp != nil {
			stamps := p.Stamp(in.modules)
			for _, variable := range slices.Sorted(maps.Keys(stamps)) {
				plan.linkFlags += fmt.Sprintf(" -X %s=%s", variable, stamps[variable])
			}
		}
		path := filepath.Join(b.Cache, p.Name, in.key(string(toolchain), plan.linkFlags, b.environment()), p.Name)
		paths[p.Name] = path
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			missing = append(missing, plan)
		} else if err != nil {
			return nil, nil, err
		} else {
			MarkUsed(filepath.Dir(path))
		}
	}
	return paths, missing, nil
}

// compile builds the programs into a temporary folder and moves each to its place.
func (b *Builder) compile(ctx context.Context, programs []planned, paths map[string]string) error {
	var what []Program
	for _, p := range programs {
		what = append(what, p.Program)
	}
	b.Progress.Step("Building %s (once per version; kept in %s)", names(what), b.Cache)
	temporary, err := os.MkdirTemp(b.Cache, ".build-")
	if err != nil {
		return fmt.Errorf("make a folder to build in: %w", err)
	}
	defer os.RemoveAll(temporary)

	var flags, packages []string
	for _, p := range programs {
		flags = append(flags, fmt.Sprintf("-ldflags=%s=%s", p.importPath, p.linkFlags))
		packages = append(packages, p.importPath)
	}
	// What is not compiled yet is exactly what a dry run would compile.
	dryRun, err := b.goCommand(ctx, slices.Concat([]string{"build", "-n", "-o", temporary + "/"}, flags, packages)...)
	if err != nil {
		return err
	}
	total := bytes.Count(dryRun, []byte("/compile -o "))

	start := time.Now()
	var output bytes.Buffer
	command := b.command(ctx, slices.Concat([]string{"build", "-v", "-o", temporary + "/"}, flags, packages)...)
	pipe, err := command.StderrPipe()
	if err != nil {
		return err
	}
	if err := command.Start(); err != nil {
		return fmt.Errorf("start the Go compiler: %w", err)
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		for scanner := bufio.NewScanner(pipe); scanner.Scan(); {
			lines <- scanner.Text()
		}
		_, _ = io.Copy(io.Discard, pipe) // after a line that is too long for the scanner
	}()
	known := map[string]bool{}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for open := true; open; {
		select {
		case line, ok := <-lines:
			if open = ok; ok && isImportPath(line) {
				known[line] = true
			} else if ok {
				fmt.Fprintln(&output, line)
			}
		case <-tick.C:
			state := fmt.Sprintf("compiled %d of %d packages", min(len(known), total), total)
			if len(known) >= total {
				state = "linking"
			}
			b.Progress.Status("  %s, %s", state, time.Since(start).Round(time.Second))
		}
	}
	if err := command.Wait(); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("build %s: %w", names(what), context.Cause(ctx))
		}
		return fmt.Errorf("build %s: %w\n%s", names(what), err, lastLines(output.String(), 30))
	}
	for _, p := range programs {
		built := filepath.Join(temporary, executableName(p.importPath))
		if err := os.MkdirAll(filepath.Dir(paths[p.Name]), 0o755); err != nil {
			return err
		}
		if err := os.Rename(built, paths[p.Name]); err != nil {
			return fmt.Errorf("keep the built %s: %w", p.Name, err)
		}
	}
	b.Progress.Step("Built %s: %d packages in %s", names(what), total, time.Since(start).Round(time.Second))
	return nil
}

// MarkUsed notes that something in a cache was asked for.
func MarkUsed(path string) {
	now := time.Now()
	_ = os.Chtimes(path, now, now) // where that is not allowed, nothing is removed either
}

// names lists programs for people.
func names(programs []Program) string {
	var all []string
	for _, p := range programs {
		all = append(all, p.Name)
	}
	return strings.Join(all, ", ")
}

// RemoveUnused removes what is in a folder of a cache and was not asked for in three days. Programs that run go on running.
func RemoveUnused(folder string) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return
	}
	for _, entry := range entries {
		if info, err := entry.Info(); err == nil && time.Since(info.ModTime()) > keepUnused {
			os.RemoveAll(filepath.Join(folder, entry.Name()))
		}
	}
}

func (b *Builder) command(ctx context.Context, args ...string) *exec.Cmd {
	command := exec.CommandContext(ctx, "go", args...)
	command.Dir = b.Module
	command.Env = append(os.Environ(), b.environment()...)
	command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
	command.WaitDelay = 5 * time.Second
	return command
}

// goCommand returns the output of a go command: of a dry run, which the go command writes to standard error, that too.
func (b *Builder) goCommand(ctx context.Context, args ...string) ([]byte, error) {
	command := b.command(ctx, args...)
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("go %s in %s: %w\n%s", args[0], b.Module, err, lastLines(stderr.String(), 30))
	}
	if slices.Contains(args, "-n") {
		return stderr.Bytes(), nil
	}
	return stdout.Bytes(), nil
}

// isImportPath tells a package name that go build -v prints from its messages.
func isImportPath(line string) bool {
	return line != "" && !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "go: ") && !strings.ContainsAny(line, " \t:")
}

// executableName is the name go build gives an executable: the last element of the import path that is no major version.
func executableName(importPath string) string {
	elements := strings.Split(importPath, "/")
	last := elements[len(elements)-1]
	if len(elements) > 1 && len(last) > 1 && last[0] == 'v' && strings.Trim(last[1:], "0123456789") == "" {
		return elements[len(elements)-2]
	}
	return last
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// FindModule returns the folder of the module with this path: dir or one above it holds its go.mod, or holds the go.mod of a module that has it as a sub-folder.
func FindModule(dir, path string) (string, error) {
	start := dir
	for {
		for _, candidate := range []string{dir, filepath.Join(dir, filepath.Base(path))} {
			if modulePath(filepath.Join(candidate, "go.mod")) == path {
				return candidate, nil
			}
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("the source of %s is not in %s nor in a folder above it: run inside a checkout, or name one", path, cmp.Or(start, "."))
		}
		dir = parent
	}
}

func modulePath(file string) string {
	content, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(content)) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), "module "); ok {
			return strings.Trim(strings.TrimSpace(rest), `"`)
		}
	}
	return ""
}
