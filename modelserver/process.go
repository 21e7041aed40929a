package modelserver

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
)

// process is a running child.
type process struct {
	handle *os.Process
	// exited receives the status once, or is closed where nobody knows it.
	exited chan syscall.WaitStatus
}

// startProcess starts a program in a process group of its own, so that a Ctrl-C at a
// terminal reaches it once, through this process. It ends when this process does,
// however that comes about. With reap every child is waited for: a process with the
// pid 1 inherits the orphans of its container.
func startProcess(path string, args, env []string, stdout, stderr *os.File, reap bool) (*process, error) {
	stdin, err := os.Open(os.DevNull)
	if err != nil {
		return nil, fmt.Errorf("start the simulator: %w", err)
	}
	defer stdin.Close()

	p := &process{exited: make(chan syscall.WaitStatus, 1)}
	started := make(chan error)
	go func() {
		// The kernel sends the parent-death signal when the starting thread ends,
		// so that thread stays here until the child has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var err error
		p.handle, err = os.StartProcess(path, append([]string{path}, args...), &os.ProcAttr{
			Env:   env,
			Files: []*os.File{stdin, stdout, stderr},
			Sys:   &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
		})
		started <- err
		if err == nil {
			p.wait(reap)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start the simulator: %w", err)
	}
	return p, nil
}

// wait does not go through os.Process.Wait, which would compete for the status when
// all children are waited for.
func (p *process) wait(reap bool) {
	defer close(p.exited)
	which := p.handle.Pid
	if reap {
		which = -1
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(which, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return
		case pid == p.handle.Pid && !status.Stopped() && !status.Continued():
			p.exited <- status
			return
		}
	}
}

// signal passes a signal on. A process that has just ended needs none.
func (p *process) signal(sig os.Signal) { _ = p.handle.Signal(sig) }
