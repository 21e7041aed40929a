package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/simgpu/simgpu/deviceapi"
)

const patience = 20 * time.Second

// TestMain turns the test binary into simgpu-run where a test starts it as such.
func TestMain(m *testing.M) {
	if os.Getenv("TEST_AS_SIMGPU_RUN") != "" {
		main()
	}
	// What is started under nohup or in the background of a script ignores signals, and so does all it starts. A
	// signal that is listened to is not ignored by children.
	for _, s := range forwarded() {
		if signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
	os.Exit(m.Run())
}

// node is a driver with devices for one container.
type node struct {
	dir     string
	devices []deviceapi.Device
	server  *deviceapi.Server
}

// newNode serves the two 3g.40gb partitions of an H100.
func newNode(t *testing.T) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "run") //nolint:usetesting // the path of t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	gpu := deviceapi.GPU{UUID: "GPU-1", ProductName: "NVIDIA H100 80GB HBM3", MIGMode: deviceapi.MIGDisabled, MemoryBytes: 81559 * deviceapi.MiB}
	n := &node{dir: dir}
	for i := range 2 {
		n.devices = append(n.devices, deviceapi.Device{GPU: gpu, Partition: &deviceapi.Partition{
			UUID: fmt.Sprintf("MIG-%d", i), Profile: "3g.40gb", GPUInstanceID: i + 1, MemoryBytes: 40448 * deviceapi.MiB,
		}})
	}
	n.start(t)
	return n
}

func (n *node) start(t *testing.T) {
	t.Helper()
	n.server = deviceapi.NewServer(deviceapi.ServerOptions{Grace: -1})
	t.Cleanup(n.server.Stop)
	for i, d := range n.devices {
		if err := n.server.Open(filepath.Join(n.dir, fmt.Sprint(i)), d); err != nil {
			t.Fatal(err)
		}
	}
}

// held describes what is held, for instance "MIG-0 15023 sh; MIG-1".
func (n *node) held() string {
	var devices []string
	for _, p := range n.server.Snapshot().GPUs[0].Partitions {
		text := p.UUID
		for _, process := range p.Processes {
			text += fmt.Sprintf(" %d %s", process.Memory/deviceapi.MiB, process.Name)
		}
		devices = append(devices, text)
	}
	return strings.Join(devices, "; ")
}

func (n *node) waitHeld(t *testing.T, want string) {
	t.Helper()
	if !eventually(t, func() bool { return n.held() == want }) {
		t.Fatalf("held is %q, want %q", n.held(), want)
	}
}

// eventually is false where the condition does not come true in time.
func eventually(t *testing.T, condition func() bool) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// program is a running simgpu-run.
type program struct {
	*exec.Cmd
	stderr *buffer
	exited chan struct{}
}

// buffer may be read while it is written.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func start(t *testing.T, dir string, attributes *syscall.SysProcAttr, args ...string) *program {
	t.Helper()
	p := &program{Cmd: exec.Command(os.Args[0], args...), stderr: &buffer{}, exited: make(chan struct{})}
	p.Env = append(os.Environ(), "TEST_AS_SIMGPU_RUN=1", "SIMGPU_DIR="+dir)
	p.Stderr, p.Stdout = p.stderr, p.stderr
	p.SysProcAttr = attributes
	p.WaitDelay = patience // a command that outlives a killed simgpu-run keeps the pipe open
	if err := p.Start(); err != nil {
		if attributes != nil && errors.Is(err, syscall.EPERM) {
			t.Skipf("namespaces are not allowed here: %v", err)
		}
		t.Fatal(err)
	}
	go func() {
		defer close(p.exited)
		_ = p.Wait()
	}()
	t.Cleanup(func() {
		_ = p.Process.Kill()
		<-p.exited
	})
	return p
}

func (p *program) wantExit(t *testing.T, code int) {
	t.Helper()
	select {
	case <-p.exited:
	case <-time.After(patience):
		t.Fatalf("still running; it says:\n%s", p.stderr)
	}
	if got := p.ProcessState.ExitCode(); got != code {
		t.Errorf("exit code %d, want %d; it says:\n%s", got, code, p.stderr)
	}
}

func (p *program) signal(t *testing.T, s os.Signal) {
	t.Helper()
	if err := p.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

func (p *program) waitSays(t *testing.T, text string) {
	t.Helper()
	if !eventually(t, func() bool { return strings.Contains(p.stderr.String(), text) }) {
		t.Fatalf("does not say %q but\n%s", text, p.stderr)
	}
}

func TestExitCodes(t *testing.T) {
	n := newNode(t)
	marker := filepath.Join(t.TempDir(), "started")
	tests := map[string]struct {
		args []string
		code int
		says string
	}{
		"the command's":       {[]string{"--memory", "1GiB", "--", "sh", "-c", "exit 7"}, 7, ""},
		"success":             {[]string{"--memory", "1GiB", "true"}, 0, ""},
		"its arguments":       {[]string{"--memory", "1GiB", "--", "echo", "--memory", "x"}, 0, "--memory x\n"},
		"a signal":            {[]string{"--memory", "1GiB", "--", "sh", "-c", "kill -9 $$"}, 137, ""},
		"help":                {[]string{"--help"}, 0, "Usage: simgpu-run"},
		"no memory given":     {[]string{"true"}, exitFailed, "--memory is missing"},
		"a bad amount":        {[]string{"--memory", "much", "true"}, exitFailed, "want a number and a unit"},
		"a bad option":        {[]string{"--memry", "1GiB", "true"}, exitFailed, "Try 'simgpu-run --help'."},
		"a bad utilization":   {[]string{"--memory", "1GiB", "--utilization", "101", "true"}, exitFailed, "must be from 0 to 100"},
		"a bad timeout":       {[]string{"--memory", "1GiB", "--timeout", "0s", "true"}, exitFailed, "must be above 0"},
		"an unknown device":   {[]string{"--memory", "1GiB", "--device", "2", "true"}, exitNoDevice, `device "2" is not in this container; it has 2: 0 (MIG-0), 1 (MIG-1)`},
		"an unknown command":  {[]string{"--memory", "1GiB", "no-such-command"}, exitNotFound, "start no-such-command: executable file not found"},
		"an absent path":      {[]string{"--memory", "1GiB", "./no/such/command"}, exitNotFound, "no such file"},
		"a folder as command": {[]string{"--memory", "1GiB", "/tmp"}, exitCannotRun, "start /tmp"},
		"out of memory": {
			[]string{"--memory", "40449MiB", "--device", "mig-1", "--", "touch", marker}, exitOutOfMemory,
			"simgpu-run: CUDA out of memory. Tried to allocate 39.50 GiB. GPU 1 has a total capacity of 39.50 GiB of which 39.50 GiB is free.\n",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := start(t, n.dir, nil, test.args...)
			p.wantExit(t, test.code)
			if got := p.stderr.String(); !strings.Contains(got, test.says) {
				t.Errorf("says\n%s\nwant %q", got, test.says)
			}
		})
	}
	if _, err := os.Stat(marker); !os.IsNotExist(err) {
		t.Errorf("the command ran without its memory (%v)", err)
	}
	n.waitHeld(t, "MIG-0; MIG-1")

	t.Run("a lost GPU", func(t *testing.T) {
		n.server.SetHealth(map[string]deviceapi.Health{n.devices[0].GPU.UUID: {Lost: true}})
		defer n.server.SetHealth(nil)
		p := start(t, n.dir, nil, "--memory", "1GiB", "true")
		p.wantExit(t, exitNoDevice)
		p.waitSays(t, "GPU is lost")
	})
	t.Run("no device", func(t *testing.T) {
		p := start(t, t.TempDir(), nil, "--memory", "1GiB", "true")
		p.wantExit(t, exitNoDevice)
		p.waitSays(t, "resources.claims")
	})
	t.Run("no driver", func(t *testing.T) {
		n.server.Stop()
		p := start(t, n.dir, nil, "--memory", "1GiB", "--timeout", "100ms", "true")
		p.wantExit(t, exitNoDriver)
		p.waitSays(t, "simgpu-kubelet-plugin")
	})
	t.Run("a signal while waiting for the driver", func(t *testing.T) {
		p := start(t, n.dir, nil, "--memory", "1GiB", "true")
		p.waitSays(t, "Waiting for the node driver")
		p.signal(t, syscall.SIGTERM)
		p.wantExit(t, 143)
	})
}

func TestHoldsWhileTheCommandRuns(t *testing.T) {
	n := newNode(t)
	tests := map[string]struct {
		args []string
		held string
	}{
		"the first device":  {[]string{"--memory", "15023MiB"}, "MIG-0 15023 sh; MIG-1"},
		"a device by index": {[]string{"--memory", "50%", "--device", "1"}, "MIG-0; MIG-1 20224 sh"},
		"a device by UUID":  {[]string{"--memory", "1GiB", "--device", "MIG-1"}, "MIG-0; MIG-1 1024 sh"},
		"every device":      {[]string{"--memory", "90%", "--device", "all", "--name", "python3"}, "MIG-0 36403 python3; MIG-1 36403 python3"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := start(t, n.dir, nil, append(test.args, "--", "sh", "-c", "trap 'exit 42' TERM; echo ready; while :; do sleep 0.01; done")...)
			p.waitSays(t, "ready")
			if got := n.held(); got != test.held {
				t.Errorf("held is %q, want %q", got, test.held)
			}
			p.signal(t, syscall.SIGTERM)
			p.wantExit(t, 42)
			n.waitHeld(t, "MIG-0; MIG-1")
		})
	}
}

func TestHoldsWithoutACommand(t *testing.T) {
	n := newNode(t)
	p := start(t, n.dir, nil, "--memory", "1GiB", "--utilization", "30")
	p.waitSays(t, "held until a signal")
	n.waitHeld(t, "MIG-0 1024 simgpu-run; MIG-1")
	p.signal(t, syscall.SIGUSR1) // not one that ends it
	p.signal(t, syscall.SIGTERM)
	p.wantExit(t, 0)
	n.waitHeld(t, "MIG-0; MIG-1")
}

func TestOtherSignalsReachTheCommand(t *testing.T) {
	n := newNode(t)
	p := start(t, n.dir, &syscall.SysProcAttr{Setsid: true}, "--memory", "1GiB", "--", "sh", "-c",
		"trap 'echo hup' HUP; trap 'echo int' INT; trap 'echo usr1' USR1; trap 'exit 3' USR2; echo ready; while :; do sleep 0.01; done")
	p.waitSays(t, "ready")
	for _, s := range []struct {
		signal os.Signal
		echo   string
	}{{syscall.SIGHUP, "hup"}, {syscall.SIGINT, "int"}, {syscall.SIGUSR1, "usr1"}} {
		p.signal(t, s.signal)
		p.waitSays(t, s.echo)
	}
	p.signal(t, syscall.SIGUSR2)
	p.wantExit(t, 3)
}

func TestSurvivesADriverRestart(t *testing.T) {
	n := newNode(t)
	p := start(t, n.dir, nil, "--memory", "1GiB", "--device", "all", "--", "sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.01; done")
	const held = "MIG-0 1024 sh; MIG-1 1024 sh"
	n.waitHeld(t, held)
	n.server.Stop()
	p.waitSays(t, "Lost the node driver")
	n.start(t)
	n.waitHeld(t, held)
	p.waitSays(t, "The node driver is back")
	p.signal(t, syscall.SIGTERM)
	p.wantExit(t, 0)
	if lines := strings.Count(p.stderr.String(), "\n"); lines != 2 {
		t.Errorf("a restart takes %d lines, want 2:\n%s", lines, p.stderr)
	}
}

func TestEndsWhenItsMemoryIsLost(t *testing.T) {
	unprepare := func(t *testing.T, n *node) {
		if err := n.server.Close(filepath.Join(n.dir, "1")); err != nil {
			t.Fatal(err)
		}
	}
	breakGPU := func(_ *testing.T, n *node) {
		n.server.SetHealth(map[string]deviceapi.Health{n.devices[1].GPU.UUID: {Lost: true}})
	}
	shrink := func(t *testing.T, n *node) {
		n.server.Stop()
		partition := *n.devices[1].Partition
		partition.MemoryBytes = deviceapi.MiB
		n.devices[1].Partition = &partition
		n.start(t)
	}
	command := []string{"--", "sh", "-c", "trap 'echo got TERM; exit 0' TERM; echo ready; while :; do sleep 0.01; done"}
	tests := map[string]struct {
		command []string
		ready   string
		lose    func(*testing.T, *node)
		says    []string
	}{
		"the device was unprepared":    {command, "ready", unprepare, []string{"MIG-1 is lost for good: the device is gone", "ending the command", "got TERM"}},
		"the GPU is lost":              {command, "ready", breakGPU, []string{"is lost for good: MIG-", "GPU is lost", "ending the command", "got TERM"}},
		"the memory fits no more":      {command, "ready", shrink, []string{"MIG-1 is lost for good: out of memory", "ending the command", "got TERM"}},
		"unprepared without a command": {nil, "held until", unprepare, []string{"MIG-1 is lost for good: the device is gone"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			p := start(t, n.dir, nil, append([]string{"--memory", "1GiB", "--device", "all", "--name", "x"}, test.command...)...)
			p.waitSays(t, test.ready)
			test.lose(t, n)
			p.wantExit(t, exitMemoryLost)
			for _, says := range test.says {
				if got := p.stderr.String(); strings.Count(got, says) != 1 {
					t.Errorf("says\n%s\nwant %q once", got, says)
				}
			}
			if held := n.held(); strings.Contains(held, "1024") {
				t.Errorf("held is %q after the end", held)
			}
		})
	}
}

// As process 1 it is the parent of orphans. Here the command leaves one behind and
// goes on only when somebody has waited for it.
func TestReapsOrphansAsProcessOne(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("a pid namespace needs root")
	}
	n := newNode(t)
	orphan := filepath.Join(t.TempDir(), "pid")
	script := fmt.Sprintf(`[ $PPID = 1 ] || exit 9
sh -c 'sleep 0.2 & echo $! >%[1]s'
while kill -0 $(cat %[1]s); do sleep 0.01; done 2>/dev/null
exit 7`, orphan)
	p := start(t, n.dir, &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}, "--memory", "1GiB", "--", "sh", "-c", script)
	p.wantExit(t, 7)
}
