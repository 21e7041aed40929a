package app

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/simgpu/simgpu/e2e/cluster"
)

// run executes a command line against an empty state folder, or against one with clusters of these names.
func run(t *testing.T, clusters []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	state := t.TempDir()
	t.Setenv("XDG_STATE_HOME", state)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for _, name := range clusters {
		folder := filepath.Join(state, "simgpu/clusters", name)
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		record, err := json.Marshal(map[string]any{"name": name, "nodes": 2, "port": 1})
		if err != nil {
			t.Fatal(err)
		}
		for file, content := range map[string][]byte{"cluster.json": record, "kubeconfig": []byte("the kubeconfig of " + name)} {
			if err := os.WriteFile(filepath.Join(folder, file), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	var out, errs strings.Builder
	code = Run(t.Context(), args, Streams{In: strings.NewReader(""), Out: &out, Err: &errs})
	return code, strings.ReplaceAll(out.String(), state, "STATE"), strings.ReplaceAll(errs.String(), state, "STATE")
}

func TestCommands(t *testing.T) {
	two := []string{"demo", "other"}
	for name, test := range map[string]struct {
		clusters []string
		args     []string
		code     int
		out, err string // parts of what is written
	}{
		"list":                          {clusters: []string{"b", "a"}, args: []string{"list"}, out: "a\nb\n"},
		"list nothing":                  {args: []string{"list"}},
		"kubeconfig":                    {clusters: two, args: []string{"kubeconfig"}, out: "the kubeconfig of demo"},
		"kubeconfig path":               {clusters: two, args: []string{"kubeconfig", "--path"}, out: "STATE/simgpu/clusters/demo/kubeconfig\n"},
		"env":                           {clusters: two, args: []string{"env", "--name", "other"}, out: "export KUBECONFIG='STATE/simgpu/clusters/other/kubeconfig'\nexport PATH='STATE/simgpu/clusters/other/bin':\"$PATH\"\n"},
		"name that is a path":           {clusters: two, args: []string{"down", "--name", "../x"}, code: 1, err: `"../x"`},
		"status of nodes that are down": {clusters: two, args: []string{"status"}, out: "node-1  init       down   -    -    0\nnode-2  init       down   -    -    0\n"},
		"status as JSON":                {clusters: two, args: []string{"status", "-o", "json"}, out: `"state": "down"`},
		"status as something else":      {clusters: two, args: []string{"status", "-o", "xml"}, code: 1, err: `"xml": expected json`},
		"no cluster at all":             {args: []string{"status"}, code: 1, err: "`simgpu-cluster up` makes one"},
		"another cluster":               {clusters: []string{"b", "a"}, args: []string{"status"}, code: 1, err: "there are: a, b (choose with --name)"},
		"unknown node":                  {clusters: two, args: []string{"restart", "node-9", "kubelet"}, code: 1, err: "it has node-1, node-2"},
		"gates of what has none":        {clusters: two, args: []string{"restart", "node-1", "etcd", "--feature-gates", "A=true"}, code: 1, err: "these have: kube-apiserver"},
		"node that does not run":        {clusters: two, args: []string{"exec", "node-1", "--", "true"}, code: 1, err: "does not run"},
		"feature gate without value":    {args: []string{"up", "--feature-gates", "A=perhaps"}, code: 1, err: "A=perhaps: expected true or false"},
		"unknown image":                 {clusters: two, args: []string{"load-image", "nothing"}, code: 1, err: "known are simgpu, vllm-sim, epp, gateway, testimage, pause; or give the path"},
		"build an unknown image":        {args: []string{"build-image", "nothing"}, code: 1, err: `"nothing"`},
		"down of nothing is done":       {args: []string{"down"}, err: "There is no cluster demo."},
		"down all of nothing is done":   {args: []string{"down", "--all"}},
		"unknown command":               {args: []string{"upp"}, code: 1, err: `"upp"`},
		"logs of nothing":               {clusters: two, args: []string{"logs"}, code: 1, err: "nothing has been logged yet"},
		"logs of an unknown component":  {clusters: two, args: []string{"logs", "kubelett"}, code: 1, err: `no component "kubelett"`},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, err := run(t, test.clusters, test.args...)
			if code != test.code || !strings.Contains(out, test.out) || !strings.Contains(err, test.err) {
				t.Errorf("exit code %d, output:\n%s\nerrors:\n%s\nwant %d, %q and %q", code, out, err, test.code, test.out, test.err)
			}
			if test.code == 0 && strings.Contains(err, "Error:") {
				t.Errorf("succeeded with an error: %s", err)
			}
		})
	}
}

// A program that ends with an exit code is behind this error too, and has not told the caller anything.
func TestFailedBuildIsTold(t *testing.T) {
	repository := t.TempDir()
	source := filepath.Join(repository, "e2e")
	if err := os.MkdirAll(source, 0o755); err != nil {
		t.Fatal(err)
	}
	for folder, module := range map[string]string{repository: "github.com/simgpu/simgpu", source: cluster.ModulePath} {
		if err := os.WriteFile(filepath.Join(folder, "go.mod"), []byte("module "+module+"\n\ngo 1.26.0\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	code, _, err := run(t, nil, "build-image", "simgpu", "--source", source)
	if code != 1 || !strings.Contains(err, "Error: image simgpu:") {
		t.Errorf("exit code %d, errors:\n%s\nwant 1 and the reason", code, err)
	}
}

func TestExitedComponentShowsItsLog(t *testing.T) {
	var out strings.Builder
	o := &options{Streams: Streams{Out: &out}}
	err := o.printStatus([]cluster.ComponentStatus{
		{Node: "node-1", Component: "etcd", State: "ready", PID: 7, RSS: 5 << 20, Starts: 1},
		{Node: "node-1", Component: "kubelet", State: "exited", Exit: "exit code 1", Starts: 2, LogTail: []string{"one", "two"}},
	})
	want := `NODE    COMPONENT  STATE                 PID  RSS    STARTS
node-1  etcd       ready                 7    5 MiB  1
node-1  kubelet    exited (exit code 1)  -    -      2

The end of the log of kubelet on node-1:
  one
  two
`
	if err != nil || out.String() != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, out.String(), want)
	}
}

func TestQuote(t *testing.T) {
	if got, want := quote("it's"), `'it'\''s'`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
