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
	toolchain, _, err := b.run(ctx, downloads, "env", "GOVERSION", "GOOS", "GOARCH", "GOAMD64", "GOARM64")
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
	_, total, err := b.run(ctx, watch{
		counts: func(line string) bool { return strings.Contains(line, "/compile -o ") },
	}, slices.Concat([]string{"build", "-n", "-o", temporary + "/"}, flags, packages)...)
	if err != nil {
		return err
	}
	start := time.Now()
	seen := map[string]bool{}
	_, _, err = b.run(ctx, watch{
		counts: func(line string) bool {
			isNew := isImportPath(line) && !seen[line]
			seen[line] = true
			return isNew
		},
		status: func(count int) string {
			if count >= total {
				return "linking"
			}
			return fmt.Sprintf("compiled %d of %d packages", count, total)
		},
	}, slices.Concat([]string{"build", "-v", "-o", temporary + "/"}, flags, packages)...)
	if err != nil {
		return fmt.Errorf("build %s: %w", names(what), err)
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

// watch says which lines that a go command writes to standard error are progress, and how to tell it.
type watch struct {
	// counts tells a line of progress from one that belongs into an error.
	counts func(line string) bool
	// status describes that so many lines of progress have come. It may be nil.
	status func(count int) string
}

// downloads watches a command that gets modules which are not on this machine yet.
var downloads = watch{
	counts: func(line string) bool { return strings.HasPrefix(line, "go: downloading ") },
	status: func(count int) string {
		if count == 0 {
			return "finding out what to build"
		}
		return fmt.Sprintf("downloaded %d modules", count)
	},
}

// run executes a go command and returns what it wrote to standard output, and how many lines counted as progress.
func (b *Builder) run(ctx context.Context, w watch, args ...string) (output []byte, count int, err error) {
	command := exec.CommandContext(ctx, "go", args...)
	command.Dir = b.Module
	command.Env = append(os.Environ(), b.environment()...)
	command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
	command.WaitDelay = 5 * time.Second
	var stdout bytes.Buffer
	command.Stdout = &stdout
	pipe, err := command.StderrPipe()
	if err != nil {
		return nil, 0, err
	}
	start := time.Now()
	if err := command.Start(); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, 0, fmt.Errorf("start the go command, which builds the programs: %w", err)
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		for reader := bufio.NewReader(pipe); ; {
			line, err := reader.ReadString('\n')
			if line != "" {
				lines <- strings.TrimRight(line, "\n")
			}
			if err != nil {
				return // its end, or the command's
			}
		}
	}()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var messages []string
	for open := true; open; {
		select {
		case line, more := <-lines:
			open = more
			switch {
			case !more:
			case w.counts(line):
				count++
			default:
				messages = append(messages, line)
			}
		case <-tick.C:
			if w.status != nil {
				b.Progress.Status("  %s, %s", w.status(count), time.Since(start).Round(time.Second))
			}
		}
	}
	if err := command.Wait(); err != nil {
		if ctx.Err() != nil {
			return nil, 0, fmt.Errorf("go %s: %w", args[0], context.Cause(ctx))
		}
		return nil, 0, fmt.Errorf("go %s in %s: %w\n%s", args[0], b.Module, err, strings.Join(messages[max(0, len(messages)-errorLines):], "\n"))
	}
	return stdout.Bytes(), count, nil
}

// errorLines is how much of the compiler's output an error shows.
const errorLines = 30

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
