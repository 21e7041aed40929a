package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stopGrace is enough for all components. All but the API server take less than a second; that one would wait for a
// minute for requests that nobody finishes.
const stopGrace = 5 * time.Second

// supervisor runs the components of a node. It is the only one who waits for processes, since process 1 also
// inherits those whose parents have ended.
type supervisor struct {
	environment []string
	logDir      string
	// grace is how long a component may take to end by itself.
	grace time.Duration

	mu         sync.Mutex
	components []*supervised
}

// supervised is a component and its current process. The fields below are guarded by the supervisor's mutex.
type supervised struct {
	Component
	status Status
	// cancel ends waiting for what the component needs or for it to become ready.
	cancel context.CancelCauseFunc
	// settled is closed when the start that it belongs to has come to an end: ready, exited or stopped.
	settled chan struct{}
	// gone is closed when the process has ended.
	gone     chan struct{}
	stopping bool
}

func newSupervisor(components []Component, environment []string, logDir string) *supervisor {
	s := &supervisor{environment: environment, logDir: logDir, grace: stopGrace}
	for _, c := range components {
		s.components = append(s.components, &supervised{Component: c, status: Status{Name: c.Name, State: Stopped}})
	}
	return s
}

// reap waits for ended processes until signals is closed. It must run before the first component starts.
func (s *supervisor) reap(signals <-chan os.Signal) {
	for range signals {
		s.mu.Lock()
		for {
			var status unix.WaitStatus
			pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil || pid <= 0 {
				break
			}
			for _, c := range s.components {
				if c.status.PID == pid {
					c.ended(status)
				}
			}
		}
		s.mu.Unlock()
	}
}

// ended records the end of the process.
func (c *supervised) ended(status unix.WaitStatus) {
	c.status.PID = 0
	c.status.State = Exited
	c.status.Exit = fmt.Sprintf("exit code %d", status.ExitStatus())
	if status.Signaled() {
		c.status.Exit = fmt.Sprintf("killed by signal %d (%s)", status.Signal(), status.Signal())
	}
	if c.stopping {
		c.status.State = Stopped
	}
	c.cancel(errors.New(c.status.Exit))
	close(c.gone)
}

// statuses returns how every component is, in their order.
func (s *supervisor) statuses() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Status
	for _, c := range s.components {
		all = append(all, c.status)
	}
	return all
}

// startAll begins to start every component that does not run.
func (s *supervisor) startAll() {
	for _, c := range s.components {
		s.begin(c)
	}
}

// start starts a component and waits until it is ready. One that runs is not started again.
func (s *supervisor) start(ctx context.Context, name string) error {
	c, err := s.find(name)
	if err != nil {
		return err
	}
	settled := s.begin(c)
	select {
	case <-settled:
	case <-ctx.Done():
		return fmt.Errorf("start %s: %w", name, context.Cause(ctx))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.status.State != Ready {
		return fmt.Errorf("%s is %s: %s", name, c.status.State, c.status.Exit)
	}
	return nil
}

// begin starts a component in the background, unless it runs or is about to. The returned channel is closed when that has come to an end.
func (s *supervisor) begin(c *supervised) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.status.State != Stopped && c.status.State != Exited {
		return c.settled
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	c.cancel, c.settled, c.stopping = cancel, make(chan struct{}), false
	c.status.State, c.status.Exit = Waiting, ""
	go s.bringUp(ctx, c, c.settled)
	return c.settled
}

// bringUp takes a component from waiting to ready, or to its early end.
func (s *supervisor) bringUp(ctx context.Context, c *supervised, settled chan struct{}) {
	defer close(settled)
	for _, probe := range c.After {
		if probe.wait(ctx) != nil {
			return
		}
	}
	s.mu.Lock()
	if ctx.Err() != nil {
		s.mu.Unlock()
		return
	}
	pid, err := s.launch(c.Component)
	if err != nil {
		c.status.State, c.status.Exit = Exited, err.Error()
		s.mu.Unlock()
		return
	}
	c.status.PID, c.status.State, c.gone = pid, Starting, make(chan struct{})
	c.status.Starts++
	s.mu.Unlock()

	if c.Ready.wait(ctx) != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.status.State == Starting {
		c.status.State = Ready
	}
}

// launch starts the process. The caller holds the mutex, so that a process which ends at once is known when it is reaped.
func (s *supervisor) launch(c Component) (int, error) {
	program, err := s.lookUp(c.Command[0])
	if err != nil {
		return 0, err
	}
	log, err := os.OpenFile(filepath.Join(s.logDir, c.Name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	pid, err := syscall.ForkExec(program, c.Command, &syscall.ProcAttr{
		Dir:   "/",
		Env:   s.environment,
		Files: []uintptr{null.Fd(), log.Fd(), log.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return 0, fmt.Errorf("start %s: %w", program, err)
	}
	return pid, nil
}

// lookUp finds a program on the PATH of the components.
func (s *supervisor) lookUp(program string) (string, error) {
	for _, variable := range s.environment {
		folders, ok := strings.CutPrefix(variable, "PATH=")
		if !ok {
			continue
		}
		for _, folder := range filepath.SplitList(folders) {
			if path, err := exec.LookPath(filepath.Join(folder, program)); err == nil {
				return path, nil
			}
		}
	}
	return "", fmt.Errorf("%s is not on the PATH of the node", program)
}

// stop ends a component: politely, and after a while by force. A component that does not run is stopped already.
func (s *supervisor) stop(ctx context.Context, name string) error {
	c, err := s.find(name)
	if err != nil {
		return err
	}
	s.mu.Lock()
	if c.status.State == Stopped || c.status.State == Exited {
		c.status.State = Stopped
		s.mu.Unlock()
		return nil
	}
	c.stopping = true
	pid, gone, settled := c.status.PID, c.gone, c.settled
	if pid == 0 {
		// It still waits for what it needs.
		c.status.State = Stopped
		c.cancel(errors.New("stopped"))
		s.mu.Unlock()
		<-settled
		return nil
	}
	err = unix.Kill(pid, unix.SIGTERM)
	s.mu.Unlock()
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("stop %s: %w", name, err)
	}
	select {
	case <-gone:
	case <-ctx.Done():
		return fmt.Errorf("stop %s: %w", name, context.Cause(ctx))
	case <-time.After(s.grace):
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("kill %s: %w", name, err)
		}
		<-gone
	}
	<-settled
	return nil
}

// setCommand changes the program and arguments of a component that does not run.
func (s *supervisor) setCommand(name string, command []string) error {
	c, err := s.find(name)
	if err != nil {
		return err
	}
	if len(command) == 0 {
		return fmt.Errorf("no command given for %s", name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.status.State != Stopped && c.status.State != Exited {
		return fmt.Errorf("%s is %s: stop it first", name, c.status.State)
	}
	c.Command = command
	return nil
}

// killAll ends every process of the node but the init, at once, and waits until they are gone.
func (s *supervisor) killAll(ctx context.Context) error {
	if os.Getpid() != 1 {
		return errors.New("only process 1 of a node may end everything around it")
	}
	s.mu.Lock()
	var waits []<-chan struct{}
	for _, c := range s.components {
		if c.status.State == Stopped || c.status.State == Exited {
			c.status.State = Stopped
			continue
		}
		c.stopping = true
		waits = append(waits, c.settled)
		if c.status.PID != 0 {
			waits = append(waits, c.gone)
		} else {
			c.status.State = Stopped
			c.cancel(errors.New("stopped"))
		}
	}
	s.mu.Unlock()
	// -1 is everybody whom process 1 may signal: the processes of its own namespace.
	for {
		err := unix.Kill(-1, unix.SIGKILL)
		if errors.Is(err, unix.ESRCH) {
			break
		} else if err != nil {
			return fmt.Errorf("end all processes of the node: %w", err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("end all processes of the node: %w", context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
	for _, wait := range waits {
		select {
		case <-wait:
		case <-ctx.Done():
			return fmt.Errorf("end all processes of the node: %w", context.Cause(ctx))
		}
	}
	return nil
}

func (s *supervisor) find(name string) (*supervised, error) {
	for _, c := range s.components {
		if c.Name == name {
			return c, nil
		}
	}
	var names []string
	for _, c := range s.components {
		names = append(names, c.Name)
	}
	slices.Sort(names)
	return nil, fmt.Errorf("this node has no component %q; it has %s", name, strings.Join(names, ", "))
}
