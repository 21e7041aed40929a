package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/simgpu/simgpu/e2e/image"
	"github.com/simgpu/simgpu/e2e/internal/cgroup"
)

// newConfig is for a cluster that has a state folder of its own and shares what is built with all others.
func newConfig(t *testing.T) Config {
	t.Helper()
	if testing.Short() {
		t.Skip("makes real clusters")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root to make clusters")
	}
	work, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := DefaultDirs(os.Getenv, work)
	if err != nil {
		t.Fatal(err)
	}
	dirs.State = t.TempDir()
	return Config{Dirs: dirs, Name: "lifecycle", Progress: t.Output()}
}

// settings of the machine that a kubelet would change.
var machineSettings = []string{"kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "vm/panic_on_oom", "net/ipv4/ip_forward"}

// expectNothingLeft checks that nothing of a cluster remains after the test, and that the machine is as it was.
func expectNothingLeft(t *testing.T, config Config) {
	t.Helper()
	settings := func() (values []string) {
		for _, setting := range machineSettings {
			value, err := os.ReadFile(filepath.Join("/proc/sys", setting))
			if err != nil {
				t.Fatal(err)
			}
			values = append(values, setting+"="+strings.TrimSpace(string(value)))
		}
		return values
	}
	before := settings()
	t.Cleanup(func() {
		if after := settings(); !slices.Equal(before, after) {
			t.Errorf("settings were %v and are %v", before, after)
		}
		c := &Cluster{dirs: config.Dirs, record: record{Name: config.Name}}
		left, err := filepath.Glob(filepath.Join(config.Dirs.State, "*"))
		if err != nil || len(left) > 0 {
			t.Errorf("files are left: %v, %v", left, err)
		}
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil || bytes.Contains(mounts, []byte(config.Dirs.State)) {
			t.Errorf("mounts are left: %s, %v", mounts, err)
		}
		groups, err := cgroup.Discover()
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range groups {
			if _, err := os.Stat(filepath.Join(h.MountPoint, c.group())); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a control group is left: %s in %s", c.group(), h.MountPoint)
			}
		}
		links, err := netlink.LinkList()
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if name := link.Attrs().Name; name == "br0" || strings.HasPrefix(name, "node") {
				t.Errorf("a network device is left: %s", name)
			}
		}
		if processes := processesWith(t, config.Dirs.State); len(processes) > 0 {
			t.Errorf("processes are left: %v", processes)
		}
	})
}

// processesWith returns the command lines that contain text.
func processesWith(t *testing.T, text string) (found []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err == nil && bytes.Contains(line, []byte(text)) {
			found = append(found, string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}
	return found
}

// kubectl runs the cluster's own kubectl.
func kubectl(t *testing.T, c *Cluster, stdin string, args ...string) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), filepath.Join(c.BinDir(), "kubectl"), args...)
	command.Env = append(os.Environ(), "KUBECONFIG="+c.KubeconfigPath())
	command.Stdin = strings.NewReader(stdin)
	out, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// askServer expects the answer of the server from the client. A Service follows its pods with a delay.
func askServer(t *testing.T, c *Cluster, url string) {
	t.Helper()
	deadline := time.After(patience)
	for {
		command := exec.CommandContext(t.Context(), filepath.Join(c.BinDir(), "kubectl"), "--kubeconfig="+c.KubeconfigPath(), "exec", "client", "--", "wget", url)
		out, err := command.CombinedOutput()
		if err == nil {
			if string(out) != "server\n" {
				t.Errorf("the server answers %q", out)
			}
			return
		}
		select {
		case <-deadline:
			t.Fatalf("%v\n%s", err, out)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// patience is far more than anything here takes.
const patience = 30 * time.Second

// up makes the cluster and takes it down after the test.
func up(t *testing.T, config Config) *Cluster {
	t.Helper()
	expectNothingLeft(t, config)
	c, err := Up(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return c
}

const pods = `
apiVersion: v1
kind: Pod
metadata: {name: server, labels: {app: server}}
spec:
  nodeName: node-2
  terminationGracePeriodSeconds: 1
  containers:
  - {name: c, image: "simgpu/testimage:0.1.0", imagePullPolicy: Never, command: [serve, ":8080"], readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}}
---
apiVersion: v1
kind: Service
metadata: {name: server}
spec: {selector: {app: server}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  nodeName: node-1
  terminationGracePeriodSeconds: 1
  containers:
  - {name: c, image: "simgpu/testimage:0.1.0", imagePullPolicy: Never}
`

func TestLifecycle(t *testing.T) {
	config := newConfig(t)
	config.Nodes = 2
	c := up(t, config)

	t.Run("pods of two nodes reach each other by name", func(t *testing.T) {
		archive, err := BuildImage(t.Context(), config.Dirs, nil, image.Test)
		if err != nil {
			t.Fatal(err)
		}
		names, err := c.LoadImage(t.Context(), archive)
		if err != nil || !slices.Equal(names, []string{"docker.io/simgpu/testimage:0.1.0"}) {
			t.Fatalf("loaded %v, %v", names, err)
		}
		kubectl(t, c, pods, "apply", "-f", "-")
		kubectl(t, c, "", "wait", "--for=condition=Ready", "pod/server", "pod/client", "--timeout=60s")
		askServer(t, c, "http://server.default.svc.cluster.local/")
		if got := kubectl(t, c, "", "logs", "server"); !strings.Contains(got, "GET /") {
			t.Errorf("the server logs %q", got)
		}
	})

	t.Run("components hold nothing of the init", func(t *testing.T) {
		init := connections(t, component(t, c.Node(1), initComponent).PID)
		if len(init) == 0 {
			t.Fatal("the init has no socket, not even the one to the API server")
		}
		for _, name := range []string{"containerd", "etcd", "kubelet"} {
			for _, connection := range connections(t, component(t, c.Node(1), name).PID) {
				if slices.Contains(init, connection) {
					t.Errorf("%s has %s of the init", name, connection)
				}
			}
		}
	})

	t.Run("up again changes nothing", func(t *testing.T) {
		before, err := c.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		again, err := Up(t.Context(), Config{Dirs: config.Dirs, Name: config.Name})
		if err != nil {
			t.Fatal(err)
		}
		after, err := again.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		same := func(a, b ComponentStatus) bool {
			return a.Component == b.Component && a.PID == b.PID && a.State == b.State
		}
		if !slices.EqualFunc(before, after, same) {
			t.Errorf("before %+v\nafter %+v", before, after)
		}
	})

	t.Run("a killed component is reported and started again", func(t *testing.T) {
		if err := identifyComponent(t, c.Node(1), "kube-scheduler").kill(); err != nil {
			t.Fatal(err)
		}
		var status ComponentStatus
		for deadline := time.After(patience); status.State != "exited"; {
			status = component(t, c.Node(1), "kube-scheduler")
			select {
			case <-deadline:
				t.Fatalf("got %+v", status)
			case <-time.After(20 * time.Millisecond):
			}
		}
		if !strings.Contains(status.Exit, "signal 9") || len(status.LogTail) == 0 {
			t.Errorf("got %+v", status)
		}
		if _, err := Up(t.Context(), config); err != nil {
			t.Fatal(err)
		}
		if status := component(t, c.Node(1), "kube-scheduler"); status.State != "ready" || status.Starts != 2 {
			t.Errorf("got %+v", status)
		}
	})

	t.Run("containers outlive kubelet and containerd", func(t *testing.T) {
		before := kubectl(t, c, "", "get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[*].containerID}")
		for _, name := range []string{"kubelet", "containerd"} {
			if err := c.Node(2).Restart(t.Context(), name); err != nil {
				t.Fatal(err)
			}
			if status := component(t, c.Node(2), name); status.Starts != 2 {
				t.Errorf("got %+v", status)
			}
		}
		after := kubectl(t, c, "", "get", "pods", "-o", "jsonpath={.items[*].status.containerStatuses[*].containerID}")
		if before != after {
			t.Errorf("containers were %s and are %s", before, after)
		}
	})

	t.Run("a reboot empties run and keeps the disk", func(t *testing.T) {
		n := c.Node(2)
		root, err := n.Root()
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{"run/marker", "var/lib/marker"} {
			if err := os.WriteFile(filepath.Join(root, path), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		boot := inNode(t, n, "cat", "/proc/sys/kernel/random/boot_id")
		if err := n.Reboot(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(root, "run/marker")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the file in /run is still there: %v", err)
		}
		if _, err := os.Stat(filepath.Join(root, "var/lib/marker")); err != nil {
			t.Errorf("the file on disk is gone: %v", err)
		}
		if now := inNode(t, n, "cat", "/proc/sys/kernel/random/boot_id"); now == boot {
			t.Error("the boot identifier is the same")
		}
		kubectl(t, c, "", "wait", "--for=jsonpath={.status.containerStatuses[0].restartCount}=1", "pod/server", "--timeout=60s")
		kubectl(t, c, "", "wait", "--for=condition=Ready", "pod/server", "--timeout=60s")
	})

	t.Run("a lost node comes back", func(t *testing.T) {
		p, err := c.Node(2).process()
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(p.kill(), p.waitEnd(t.Context())); err != nil {
			t.Fatal(err)
		}
		if status := component(t, c.Node(2), "init"); status.State != "down" {
			t.Errorf("got %+v", status)
		}
		if _, err := Up(t.Context(), config); err != nil {
			t.Fatal(err)
		}
		kubectl(t, c, "", "wait", "--for=jsonpath={.status.containerStatuses[0].restartCount}=2", "pod/server", "--timeout=60s")
		kubectl(t, c, "", "wait", "--for=condition=Ready", "pod/server", "--timeout=60s")
		askServer(t, c, "http://server/")
	})

	t.Run("another cluster beside it", func(t *testing.T) {
		other := newConfig(t)
		other.Name = "beside"
		o := up(t, other)
		if got := kubectl(t, o, "", "get", "nodes", "-o", "name"); got != "node/node-1\n" {
			t.Errorf("the other cluster has %q", got)
		}
		if got := kubectl(t, c, "", "get", "nodes", "-o", "name"); got != "node/node-1\nnode/node-2\n" {
			t.Errorf("the first cluster has %q", got)
		}
	})
}

// connections returns the sockets and pipes that a process holds.
func connections(t *testing.T, pid int) (names []string) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if name, err := os.Readlink(file); err == nil && (strings.HasPrefix(name, "socket:") || strings.HasPrefix(name, "pipe:")) {
			names = append(names, name)
		}
	}
	return names
}

// component returns how a component of the node is.
func component(t *testing.T, n *Node, name string) ComponentStatus {
	t.Helper()
	statuses, err := n.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range statuses {
		if s.Component == name {
			return s
		}
	}
	t.Fatalf("%s has no %s: %+v", n.Name(), name, statuses)
	return ComponentStatus{}
}

func identifyComponent(t *testing.T, n *Node, name string) process {
	t.Helper()
	p, err := identify(component(t, n, name).PID)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func inNode(t *testing.T, n *Node, args ...string) string {
	t.Helper()
	command, err := n.Command(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", args, err, out)
	}
	return string(out)
}

func TestFailedStartSaysWhichComponentAndLeavesNothing(t *testing.T) {
	config := newConfig(t)
	config.FeatureGates = map[string]bool{"NoSuchGate": true}
	expectNothingLeft(t, config)
	_, err := Up(t.Context(), config)
	for _, want := range []string{"kube-apiserver on node-1 ended", "the end of ", "unrecognized feature gate: NoSuchGate"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v\nwant %q in it", err, want)
		}
	}
}

func TestRetainedFailureCanBeLookedInto(t *testing.T) {
	config := newConfig(t)
	config.FeatureGates = map[string]bool{"NoSuchGate": true}
	config.Retain = true
	expectNothingLeft(t, config)
	if _, err := Up(t.Context(), config); err == nil {
		t.Fatal("came up with an impossible feature gate")
	}
	c, err := Open(config.Dirs, config.Name)
	if err != nil {
		t.Fatal(err)
	}
	if status := component(t, c.Node(1), "kube-apiserver"); status.State != "exited" {
		t.Errorf("got %+v", status)
	}
	if err := c.Down(t.Context()); err != nil {
		t.Error(err)
	}
}

// stopAt is a writer that calls stop when text is written.
type stopAt struct {
	text string
	stop func()
}

func (s stopAt) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(s.text)) {
		s.stop()
	}
	return len(p), nil
}

func TestInterruptedStartLeavesNothing(t *testing.T) {
	for _, text := range []string{"Started", "The API server is ready", "All components are ready"} {
		t.Run(text, func(t *testing.T) {
			config := newConfig(t)
			expectNothingLeft(t, config)
			reason := errors.New("the person has changed his mind")
			ctx, cancel := context.WithCancelCause(t.Context())
			config.Progress = stopAt{text: text, stop: func() { cancel(reason) }}
			if _, err := Up(ctx, config); err == nil {
				t.Error("came up after it was interrupted")
			}
		})
	}
}
