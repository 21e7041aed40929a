package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/simgpu/simgpu/e2e/internal/cgroup"
)

// The init is started twice in the same process: first it waits to be let go and enters its control group
// namespace, then it executes itself, so that every thread of the second is inside.
const (
	firstStage  = "enter"
	secondStage = "run"
)

// File descriptors that the init inherits.
const (
	goFD       = 3 // read: one byte lets the init go; its end without one means that nobody wants the node any more
	reportFD   = 4 // write: the error that stopped the init, or nothing when the node is up
	listenerFD = 5 // the listener to pass on, only with Spec.Proxy
)

// leaf is the control group of the init and the components, beside the kubelet's groups for pods: in version 2 only leaves hold processes.
const leaf = "init"

// Main is what the init process does; args are those of the process. It returns only when it could not become an init.
func Main(args []string) error {
	if os.Getpid() != 1 {
		return errors.New("this program is process 1 of a simulated node and is started by simgpu-cluster only")
	}
	if len(args) != 3 {
		return fmt.Errorf("expected a stage and the file of the node's specification, got %q", args[1:])
	}
	report := os.NewFile(reportFD, "report")
	var err error
	switch args[1] {
	case firstStage:
		err = enter(args)
	case secondStage:
		err = run(args[2], report)
	default:
		err = fmt.Errorf("unknown stage %q", args[1])
	}
	if err != nil {
		_, _ = io.WriteString(report, err.Error()) // when that fails, the log has it
	}
	return err
}

// enter waits until the machine has prepared everything around this process, and goes on inside its control group namespace.
func enter(args []string) error {
	gate := os.NewFile(goFD, "go")
	if n, err := gate.Read(make([]byte, 1)); n != 1 {
		return fmt.Errorf("not let go: %w", err)
	}
	gate.Close()
	spec, err := ReadSpec(args[2])
	if err != nil {
		return err
	}
	keep := []int{reportFD}
	if spec.Proxy != "" {
		keep = append(keep, listenerFD)
	}
	if err := closeOnExec(keep); err != nil {
		return fmt.Errorf("let go of inherited files: %w", err)
	}
	// Namespaces belong to threads. This one becomes the process when it executes.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("separate the node's control groups: %w", err)
	}
	err = unix.Exec("/proc/self/exe", []string{args[0], secondStage, args[2]}, os.Environ())
	return fmt.Errorf("execute the init again: %w", err)
}

// closeOnExec lets everything above standard error but what to keep end with this program: whoever started the
// cluster may have left open a lock or the end of a pipe that somebody else waits for.
func closeOnExec(keep []int) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		fd, err := strconv.Atoi(entry.Name())
		if err != nil {
			return err
		}
		if fd > 2 && !slices.Contains(keep, fd) {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}

// run makes the node and serves it until the process is killed.
func run(specPath string, report *os.File) error {
	// No component may hold the report open: the machine waits for its end.
	if err := closeOnExec(nil); err != nil {
		return fmt.Errorf("keep files from components: %w", err)
	}
	spec, err := ReadSpec(specPath)
	if err != nil {
		return err
	}
	groups, err := cgroup.Discover()
	if err != nil {
		return err
	}
	groups, err = buildRoot(spec, groups)
	if err != nil {
		return fmt.Errorf("build the file system of the node: %w", err)
	}
	if err := groups.Settle(leaf, os.Getpid()); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(spec.Name)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	if err := raiseFileLimit(); err != nil {
		return err
	}
	if err := boot(); err != nil {
		return fmt.Errorf("boot the node: %w", err)
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return fmt.Errorf("let the node forward packets: %w", err)
	}
	if spec.Proxy != "" {
		listener, err := net.FileListener(os.NewFile(listenerFD, "listener"))
		if err != nil {
			return fmt.Errorf("take over the listener for %s: %w", spec.Proxy, err)
		}
		go forward(listener, spec.Proxy)
	}
	i := &initProcess{
		groups: groups,
		supervisor: newSupervisor(spec.Components, []string{
			"HOME=/root",
			"LANG=C.UTF-8",
			"PATH=" + Path,
		}, LogDir),
	}
	socket, err := listen(socketPath)
	if err != nil {
		return err
	}
	ended := make(chan os.Signal, 64)
	signal.Notify(ended, syscall.SIGCHLD)
	go i.supervisor.reap(ended)
	i.supervisor.startAll()
	report.Close()
	return i.serve(socket)
}

// Path is the PATH inside a node.
const Path = BinDir + ":/usr/sbin:/usr/bin:/sbin:/bin"

// initProcess is the running init.
type initProcess struct {
	groups     cgroup.Hierarchies
	supervisor *supervisor
}

// rebootTimeout bounds the end of all processes and control groups.
const rebootTimeout = 30 * time.Second

// reboot does to the node what switching it off and on does to a machine: processes, /run, mounts and control
// groups are gone, what is on disk stays. Its network stays as well, without the links of pods.
func (i *initProcess) reboot() error {
	ctx, cancel := context.WithTimeout(context.Background(), rebootTimeout)
	defer cancel()
	if err := i.supervisor.killAll(ctx); err != nil {
		return err
	}
	if err := boot(); err != nil {
		return err
	}
	if err := i.groups.RemoveChildren(ctx, "", leaf); err != nil {
		return err
	}
	i.supervisor.startAll()
	return nil
}

// raiseFileLimit lets the node's processes open as many files as this one may.
func raiseFileLimit() error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("read the limit of open files: %w", err)
	}
	limit.Cur = limit.Max
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("raise the limit of open files: %w", err)
	}
	return nil
}

func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	socket, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	return socket, os.Chmod(path, 0o600)
}

// forward passes each connection on to address.
func forward(listener net.Listener, address string) {
	for {
		client, err := listener.Accept()
		if err != nil {
			// Too many open files is the one error to expect, and it passes.
			<-time.After(probeInterval)
			continue
		}
		go func() {
			defer client.Close()
			server, err := net.DialTimeout("tcp", address, probeTimeout)
			if err != nil {
				return
			}
			defer server.Close()
			done := make(chan struct{}, 2)
			for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
				go func() {
					// Either end may be gone: then the other end has to learn it, and nobody else.
					_, _ = io.Copy(way[0], way[1])
					_ = way[0].(*net.TCPConn).CloseWrite()
					done <- struct{}{}
				}()
			}
			<-done
			<-done
		}()
	}
}
