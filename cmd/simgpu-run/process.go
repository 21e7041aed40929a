package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// forwarded are the signals that go on to COMMAND: all but those that cannot be
// caught, those that tell of this process itself, and those of a terminal's job
// control, which must stop this process too.
func forwarded() []os.Signal {
	signals := []os.Signal{
		unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGABRT, unix.SIGUSR1, unix.SIGUSR2,
		unix.SIGALRM, unix.SIGTERM, unix.SIGWINCH, unix.SIGIO, unix.SIGPWR,
	}
	for realtime := syscall.Signal(34); realtime <= 64; realtime++ {
		signals = append(signals, realtime)
	}
	return signals
}

// ends says whether a signal asks a program to end.
func ends(s os.Signal) bool {
	switch s {
	case unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM:
		return true
	}
	return false
}

// startCommand starts a program with the standard streams of this process.
func startCommand(argv []string) (*os.Process, error) {
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return nil, startError(argv[0], err)
	}
	process, err := os.StartProcess(path, argv, &os.ProcAttr{
		Env:   os.Environ(),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
	})
	if err != nil {
		return nil, startError(argv[0], err)
	}
	return process, nil
}

// startError has the exit codes of env(1).
func startError(command string, err error) error {
	code := exitCannotRun
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		code = exitNotFound
	}
	return &exitError{code, fmt.Errorf("start %s: %w", command, errors.Unwrap(err))}
}

// supervise forwards signals until the process ends and returns its exit code,
// 128 and the signal's number where a signal ended it. Where memory is lost it says
// so, asks the process to end, and returns exitMemoryLost when that has ended. It waits
// for every child, since as process 1 this program is given those that lost their
// parents.
func supervise(process *os.Process, signals <-chan os.Signal, lost <-chan error, stderr io.Writer) (int, error) {
	ended := make(chan syscall.WaitStatus, 1)
	failed := make(chan error, 1)
	go func() {
		for {
			var status syscall.WaitStatus
			pid, err := syscall.Wait4(-1, &status, 0, nil)
			switch {
			case errors.Is(err, syscall.EINTR):
			case err != nil:
				failed <- fmt.Errorf("wait for process %d: %w", process.Pid, err)
				return
			case pid == process.Pid && (status.Exited() || status.Signaled()):
				ended <- status
				return
			}
		}
	}()
	loss := false
	for {
		select {
		case status := <-ended:
			if loss {
				return exitMemoryLost, nil
			}
			if status.Signaled() {
				return 128 + int(status.Signal()), nil
			}
			return status.ExitStatus(), nil
		case err := <-failed:
			return 0, err
		case err := <-lost:
			if loss {
				continue // the first one counts
			}
			loss = true
			fmt.Fprintf(stderr, "simgpu-run: %v\nsimgpu-run: ending the command\n", err)
			_ = process.Signal(unix.SIGTERM)
		case s := <-signals:
			if fromTerminal(s) {
				continue
			}
			// The process may just have ended, which is no fault.
			_ = process.Signal(s)
		}
	}
}

// fromTerminal says whether a key was pressed: the terminal has then sent the
// signal to COMMAND as well, and many programs take a second one for impatience.
func fromTerminal(s os.Signal) bool {
	if s != unix.SIGINT && s != unix.SIGQUIT {
		return false
	}
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer tty.Close()
	foreground, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && foreground == unix.Getpgrp()
}

// notifyForwarded catches signals from now on. What was ignored when this process
// started, as under nohup(1), stays ignored for it and for COMMAND.
func notifyForwarded() (signals chan os.Signal, stop func()) {
	signals = make(chan os.Signal, 64)
	for _, s := range forwarded() {
		if !signal.Ignored(s) {
			signal.Notify(signals, s)
		}
	}
	return signals, func() { signal.Stop(signals) }
}

// commandName is how COMMAND shows in process tables.
func commandName(argv []string) string {
	if len(argv) == 0 {
		return "simgpu-run"
	}
	return filepath.Base(argv[0])
}

// signalCode is the exit code of a program that a signal ended.
func signalCode(s os.Signal) int {
	if number, ok := s.(syscall.Signal); ok {
		return 128 + int(number)
	}
	return exitFailed
}
