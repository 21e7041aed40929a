package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/simgpu/simgpu/e2e/internal/cgroup"
	"github.com/simgpu/simgpu/e2e/internal/kubernetes"
	"github.com/simgpu/simgpu/e2e/internal/node"
)

// Node is a node of a cluster.
type Node struct {
	cluster *Cluster
	index   int
}

// Name is the name of the node, in Kubernetes too.
func (n *Node) Name() string { return kubernetes.NodeName(n.index) }

func (n *Node) dir() string         { return filepath.Join(n.cluster.Dir(), "nodes", n.Name()) }
func (n *Node) rootfs() string      { return filepath.Join(n.dir(), "root") }
func (n *Node) specPath() string    { return filepath.Join(n.dir(), "node.json") }
func (n *Node) processPath() string { return filepath.Join(n.dir(), "process.json") }
func (n *Node) group() string       { return n.cluster.group() + "/" + n.Name() }

// LogPath is the file of this machine with the output of a component of the node.
func (n *Node) LogPath(component string) string {
	if component == initComponent {
		return filepath.Join(n.dir(), "init.log")
	}
	return filepath.Join(n.rootfs(), node.LogDir, component+".log")
}

// initComponent is the name of the node's first process where components are named.
const initComponent = "init"

// process returns the node's first process. It is the zero process when the node was never started.
func (n *Node) process() (process, error) {
	var p process
	if err := readJSON(n.processPath(), &p); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return p, fmt.Errorf("node %s: %w", n.Name(), err)
	}
	return p, nil
}

// running returns the node's first process and an error unless it runs.
func (n *Node) running() (process, error) {
	p, err := n.process()
	if err != nil {
		return p, err
	}
	if !p.alive() {
		return p, fmt.Errorf("node %s of cluster %s does not run: `simgpu-cluster up --name %s` starts it", n.Name(), n.cluster.Name(), n.cluster.Name())
	}
	return p, nil
}

// Root is a path of this machine to the files of the running node as its processes see them.
func (n *Node) Root() (string, error) {
	p, err := n.running()
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("/proc/%d/root", p.PID), nil
}

func (n *Node) client() (*node.Client, error) {
	p, err := n.running()
	if err != nil {
		return nil, err
	}
	return node.NewClient(p.PID), nil
}

// Stop ends a component of the node and waits until it is gone.
func (n *Node) Stop(ctx context.Context, component string) error {
	client, err := n.client()
	if err != nil {
		return err
	}
	if err := client.Stop(ctx, component); err != nil {
		return fmt.Errorf("stop %s on %s: %w", component, n.Name(), err)
	}
	return nil
}

// Start starts a component of the node and waits until it is ready. One that runs stays as it is.
func (n *Node) Start(ctx context.Context, component string) error {
	client, err := n.client()
	if err != nil {
		return err
	}
	if err := client.Start(ctx, component); err != nil {
		return fmt.Errorf("start %s on %s: %w\n%s", component, n.Name(), err, n.logTail(component))
	}
	return nil
}

// Restart stops and starts a component of the node and waits until it is ready.
func (n *Node) Restart(ctx context.Context, component string) error {
	if err := n.Stop(ctx, component); err != nil {
		return err
	}
	return n.Start(ctx, component)
}

// RestartWith is Restart with other feature gates than the cluster's: these are set on top, for this component alone and
// until the next RestartWith, or until the node itself is started anew. Without any, the component is back to the
// cluster's. Only components whose command line has the gates can be restarted like this: those of the control plane.
func (n *Node) RestartWith(ctx context.Context, component string, gates map[string]bool) error {
	settings, err := n.cluster.settings()
	if err != nil {
		return err
	}
	settings.FeatureGates = maps.Clone(settings.FeatureGates)
	if settings.FeatureGates == nil {
		settings.FeatureGates = map[string]bool{}
	}
	maps.Copy(settings.FeatureGates, gates)
	command, err := kubernetes.GatedCommand(settings, n.index, component)
	if err != nil {
		return fmt.Errorf("restart %s with other feature gates: %w", component, err)
	}
	client, err := n.client()
	if err != nil {
		return err
	}
	if err := n.Stop(ctx, component); err != nil {
		return err
	}
	if err := client.SetCommand(ctx, component, command); err != nil {
		return fmt.Errorf("restart %s with other feature gates: %w", component, err)
	}
	return n.Start(ctx, component)
}

// Reboot does what switching the node off and on does: all containers and components end, /run is empty, what is on
// disk stays. It returns when every component is ready again. Everything that node 1 hosts is gone meanwhile.
func (n *Node) Reboot(ctx context.Context) error {
	client, err := n.client()
	if err != nil {
		return err
	}
	if err := client.Reboot(ctx); err != nil {
		return fmt.Errorf("reboot %s: %w", n.Name(), err)
	}
	return n.cluster.waitComponents(ctx, nil, n)
}

// Command prepares a command that runs in the node's namespaces. The first argument is looked up on the node.
func (n *Node) Command(ctx context.Context, args ...string) (*exec.Cmd, error) {
	p, err := n.running()
	if err != nil {
		return nil, err
	}
	enter := []string{"--target", strconv.Itoa(p.PID), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--", "/usr/bin/env", "--chdir=/", "-i"}
	enter = append(enter, "HOME=/root", "LANG=C.UTF-8", "PATH="+node.Path, "CONTAINERD_NAMESPACE=k8s.io")
	if term := os.Getenv("TERM"); term != "" {
		enter = append(enter, "TERM="+term)
	}
	if n.index == 1 {
		enter = append(enter, "KUBECONFIG=/etc/kubernetes/admin.conf")
	}
	return exec.CommandContext(ctx, "nsenter", append(enter, args...)...), nil
}

// launched is a node's first process between its start and the moment it is let go.
type launched struct {
	node    *Node
	process process
	gate    io.WriteCloser
	report  io.ReadCloser
}

// launch starts the first process of the node, in namespaces and a control group of its own, and leaves it waiting.
// A listener is handed to it, and may be closed afterwards.
func (n *Node) launch(ctx context.Context, executable string, groups cgroup.Hierarchies, listener *net.TCPListener) (_ *launched, err error) {
	if err := groups.Remove(ctx, n.group()); err != nil {
		return nil, err
	}
	if err := groups.Create(n.group()); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(n.LogPath(initComponent), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	gateIn, gate, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer gateIn.Close()
	report, reportOut, err := os.Pipe()
	if err != nil {
		gate.Close()
		return nil, err
	}
	defer reportOut.Close()
	defer func() {
		if err != nil {
			gate.Close() // a process that waits behind it ends
			report.Close()
		}
	}()

	command := exec.Command(executable, "enter", n.specPath())
	command.Dir = "/"
	command.Env = []string{}
	command.Stdout, command.Stderr = log, log
	command.ExtraFiles = []*os.File{gateIn, reportOut}
	if listener != nil {
		file, err := listener.File()
		if err != nil {
			return nil, err
		}
		defer file.Close()
		command.ExtraFiles = append(command.ExtraFiles, file)
	}
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		Setsid:     true,
	}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("start node %s: %w", n.Name(), err)
	}
	// So that it does not stay behind as a zombie. How it ended is in its log and report.
	go func() { _ = command.Wait() }()
	p, err := identify(command.Process.Pid)
	if err != nil {
		return nil, fmt.Errorf("start node %s: %w", n.Name(), err)
	}
	if err := writeJSON(n.processPath(), p); err != nil {
		return nil, err
	}
	if err := groups.Add(n.group(), command.Process.Pid); err != nil {
		return nil, err
	}
	return &launched{node: n, process: p, gate: gate, report: report}, nil
}

// release lets the process go and waits until it has made the node.
func (l *launched) release(ctx context.Context) error {
	defer l.report.Close()
	_, err := l.gate.Write([]byte{1})
	err = errors.Join(err, l.gate.Close())
	if err != nil {
		return fmt.Errorf("let node %s go: %w", l.node.Name(), err)
	}
	stop := context.AfterFunc(ctx, func() { _ = l.process.kill() }) // it ends with the error of ctx in any case
	defer stop()
	var report bytes.Buffer
	if _, err := io.Copy(&report, l.report); err != nil {
		return fmt.Errorf("start node %s: %w", l.node.Name(), err)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("start node %s: %w", l.node.Name(), context.Cause(ctx))
	}
	if report.Len() > 0 {
		return fmt.Errorf("start node %s: %s", l.node.Name(), report.String())
	}
	return nil
}

// abandon lets the process end, since nobody can let it go any more.
func (l *launched) abandon() error { return errors.Join(l.gate.Close(), l.report.Close()) }

// tailLines is how much of a log an error shows.
const tailLines = 15

// logTail returns the end of a component's log, indented, under a line that says whose it is.
func (n *Node) logTail(component string) string {
	path := n.LogPath(component)
	lines, err := tail(path, tailLines)
	if err != nil {
		return fmt.Sprintf("(no log: %v)", err)
	}
	if len(lines) == 0 {
		return fmt.Sprintf("(its log %s is empty)", path)
	}
	return fmt.Sprintf("the end of %s:\n  %s", path, strings.Join(lines, "\n  "))
}

// tail returns the last lines of a file.
func tail(path string, count int) ([]string, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	// Lines are hundreds of bytes long; very few are longer than this allows for.
	const perLine = 4096
	start := max(0, info.Size()-int64(count)*perLine)
	content, err := io.ReadAll(io.NewSectionReader(file, start, info.Size()-start))
	if err != nil {
		return nil, err
	}
	text := strings.TrimRight(string(content), "\n")
	if text == "" {
		return nil, nil
	}
	lines := strings.Split(text, "\n")
	return lines[max(0, len(lines)-count):], nil
}
