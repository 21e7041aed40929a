package cluster

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/simgpu/simgpu/e2e/internal/build"
)

func TestDefaultDirs(t *testing.T) {
	for name, test := range map[string]struct {
		environment map[string]string
		want        Dirs
		wrong       string
	}{
		"home only":     {environment: map[string]string{"HOME": "/h"}, want: Dirs{State: "/h/.local/state/simgpu/clusters", Cache: "/h/.cache/simgpu"}},
		"XDG":           {environment: map[string]string{"HOME": "/h", "XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "/c"}, want: Dirs{State: "/s/simgpu/clusters", Cache: "/c/simgpu"}},
		"relative XDG":  {environment: map[string]string{"HOME": "/h", "XDG_STATE_HOME": "s"}, want: Dirs{State: "/h/.local/state/simgpu/clusters", Cache: "/h/.cache/simgpu"}},
		"nothing there": {environment: nil, wrong: "HOME"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := DefaultDirs(func(variable string) string { return test.environment[variable] }, t.TempDir())
			if test.wrong != "" {
				if err == nil || !strings.Contains(err.Error(), test.wrong) {
					t.Errorf("got %v, want %q", err, test.wrong)
				}
				return
			}
			if err != nil || got != test.want {
				t.Errorf("got %+v, %v, want %+v", got, err, test.want)
			}
		})
	}
	work, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := DefaultDirs(func(string) string { return "/x" }, work)
	if err != nil || dirs.Source != filepath.Dir(work) {
		t.Errorf("in the checkout the source is %q, %v", dirs.Source, err)
	}
}

func TestConfigFaultsAreReportedTogether(t *testing.T) {
	_, err := Config{Name: "Not_Good", Nodes: 1000}.complete()
	for _, want := range []string{`"Not_Good"`, "1000 nodes", "no folders"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}

func TestNames(t *testing.T) {
	for name, want := range map[string]bool{
		"a": true, "demo": true, "two-llamas": true, "1": true, strings.Repeat("x", 40): true,
		"": false, "-a": false, "a-": false, "A": false, "a/b": false, "..": false, "a.b": false, strings.Repeat("x", 41): false,
	} {
		if got := validName.MatchString(name); got != want {
			t.Errorf("name %q: got %t", name, got)
		}
	}
}

func TestExistingClusterMatches(t *testing.T) {
	c := &Cluster{record: record{Name: "x", Nodes: 2, FeatureGates: map[string]bool{"A": true}}}
	for name, test := range map[string]struct {
		config Config
		wrong  []string
	}{
		"no opinion": {config: Config{}},
		"the same":   {config: Config{Nodes: 2, FeatureGates: map[string]bool{"A": true}, RuntimeConfig: map[string]string{}}},
		"all differs": {
			config: Config{Nodes: 3, FeatureGates: map[string]bool{"A": false}, RuntimeConfig: map[string]string{"apps/v1": "false"}},
			wrong:  []string{"nodes: 2 (asked for: 3)", "map[A:true] (asked for: map[A:false])", "map[apps/v1:false]", "down --name x"},
		},
		"no gates wanted": {config: Config{FeatureGates: map[string]bool{}}, wrong: []string{"feature gates"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.matches(test.config)
			if (err == nil) != (len(test.wrong) == 0) {
				t.Errorf("got %v", err)
			}
			for _, want := range test.wrong {
				if err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q in it", err, want)
				}
			}
		})
	}
}

func TestOpenAndList(t *testing.T) {
	dirs := Dirs{State: t.TempDir()}
	if _, err := Open(dirs, "x"); !errors.Is(err, ErrNotFound) {
		t.Errorf("got %v, want that it is not found", err)
	}
	for _, name := range []string{"x", "a"} {
		c := &Cluster{dirs: dirs, record: record{Name: name, Nodes: 2, Port: 1234}}
		if err := c.save(); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dirs.State, "rest-of-a-failed-start"), 0o755); err != nil {
		t.Fatal(err)
	}
	names, err := List(dirs)
	if err != nil || !slices.Equal(names, []string{"a", "x"}) {
		t.Errorf("got %v, %v", names, err)
	}
	c, err := Open(dirs, "x")
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Nodes()) != 2 || c.Node(2).Name() != "node-2" {
		t.Errorf("got %+v", c.record)
	}
	if _, err := c.NodeByName("node-3"); err == nil || !strings.Contains(err.Error(), "it has node-1, node-2") {
		t.Errorf("got %v", err)
	}
	status, err := c.Status(t.Context())
	want := []ComponentStatus{{Node: "node-1", Component: "init", State: "down"}, {Node: "node-2", Component: "init", State: "down"}}
	if err != nil || !slices.EqualFunc(status, want, func(a, b ComponentStatus) bool {
		return a.Node == b.Node && a.Component == b.Component && a.State == b.State
	}) {
		t.Errorf("got %+v, %v", status, err)
	}
	if err := c.Node(1).Restart(t.Context(), "kubelet"); err == nil || !strings.Contains(err.Error(), "up --name x") {
		t.Errorf("got %v, want a hint at the command to use", err)
	}
}

func TestGroupsOfClustersDiffer(t *testing.T) {
	group := func(state, name string) string {
		return (&Cluster{dirs: Dirs{State: state}, record: record{Name: name}}).group()
	}
	a, b := group("/one", "demo"), group("/two", "demo")
	if a == b || !strings.HasPrefix(a, "simgpu-demo-") || len(a) != len("simgpu-demo-")+6 {
		t.Errorf("got %s and %s", a, b)
	}
	if a != group("/one", "demo") {
		t.Error("the same cluster has two groups")
	}
}

func TestProcessIsKnownBeyondItsID(t *testing.T) {
	child := exec.CommandContext(t.Context(), "sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := identify(child.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if !p.alive() {
		t.Error("a running process is not alive")
	}
	for name, other := range map[string]process{
		"started at another time": {PID: p.PID, Start: p.Start + 1, Boot: p.Boot},
		"of another boot":         {PID: p.PID, Start: p.Start, Boot: "x"},
		"none":                    {},
	} {
		if other.alive() {
			t.Errorf("%s: taken for the same process", name)
		}
		if err := other.kill(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !p.alive() {
		t.Fatal("the wrong process was killed")
	}
	if err := p.kill(); err != nil {
		t.Fatal(err)
	}
	if err := p.waitEnd(t.Context()); err != nil { // it is a zombie now
		t.Fatal(err)
	}
	if err := child.Wait(); err == nil {
		t.Error("the process was not killed")
	}
	if err := p.kill(); err != nil {
		t.Errorf("killing it again: %v", err)
	}
}

func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	for name, test := range map[string]struct {
		content string
		want    []string
	}{
		"empty":            {"", nil},
		"fewer":            {"a\nb\n", []string{"a", "b"}},
		"more":             {"a\nb\nc\nd\n", []string{"b", "c", "d"}},
		"without newline":  {"a\nb\nc\nd", []string{"b", "c", "d"}},
		"a very long line": {strings.Repeat("x", 100_000) + "\nb\nc\nd\n", []string{"b", "c", "d"}},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(path, []byte(test.content), 0o644); err != nil {
				t.Fatal(err)
			}
			if got, err := tail(path, 3); err != nil || !slices.Equal(got, test.want) {
				t.Errorf("got %.100q, %v, want %q", got, err, test.want)
			}
		})
	}
	if _, err := tail(path+"x", 3); err == nil {
		t.Error("read a file that is not there")
	}
}

func TestWriteFileLeavesOldContentWhenItFails(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "sub", "file")
	if err := writeFile(path, []byte("one"), 0o640); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := os.Mkdir(filepath.Join(folder, "taken"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := writeFile(filepath.Join(folder, "taken"), []byte("two"), 0o640); err == nil {
		t.Error("replaced a folder")
	}
	left, err := filepath.Glob(filepath.Join(folder, ".*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestStatusOfOwnProcess(t *testing.T) {
	inside, err := processesOf(os.Getpid())
	if err != nil || inside[os.Getpid()] != os.Getpid() {
		t.Errorf("this process is not in its own namespace: %v", err)
	}
	if rss := residentSet(os.Getpid()); rss < 1<<20 {
		t.Errorf("this process has %d bytes in RAM", rss)
	}
	if rss := residentSet(1 << 30); rss != 0 {
		t.Errorf("a process that does not exist has %d bytes in RAM", rss)
	}
}

func TestVersionStamps(t *testing.T) {
	stamps := kubeVersions(build.Modules{
		"k8s.io/kubernetes": {Version: "v1.37.2", Time: time.Date(2026, 10, 27, 12, 1, 4, 0, time.UTC)},
		"helm.sh/helm/v4":   {Version: "v4.3.1"},
	})
	for variable, want := range map[string]string{
		"k8s.io/component-base/version.gitVersion": "v1.37.2",
		"k8s.io/component-base/version.gitMajor":   "1",
		"k8s.io/component-base/version.gitMinor":   "37",
		"k8s.io/component-base/version.buildDate":  "2026-10-27T12:01:04Z",
		"k8s.io/client-go/pkg/version.gitVersion":  "v1.37.2",
		"helm.sh/helm/v4/internal/version.version": "v4.3.1",
	} {
		if stamps[variable] != want {
			t.Errorf("%s is %q, want %q", variable, stamps[variable], want)
		}
	}
}
