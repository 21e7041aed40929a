package node

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// TestMain lets this program be the component that the tests supervise, so that they depend on no other.
func TestMain(m *testing.M) {
	switch os.Getenv("SUPERVISED") {
	case "":
		os.Exit(m.Run())
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
		os.Stdout.WriteString("ignoring\n")
		<-time.After(time.Minute)
	case "fails":
		os.Stdout.WriteString("cannot go on\n")
		os.Exit(3)
	default:
		os.Stdout.WriteString("sleeping\n")
		<-time.After(time.Minute)
	}
}

// switchable is a server that is ready when told to be.
type switchable struct {
	*httptest.Server
	ready atomic.Bool
}

func newSwitchable(t *testing.T) *switchable {
	t.Helper()
	s := &switchable{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if !s.ready.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *switchable) probe() Probe { return Probe{URL: s.URL} }

// supervise returns a supervisor whose components behave as said.
func supervise(t *testing.T, behaviour string, components ...Component) *supervisor {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for i := range components {
		components[i].Command = []string{filepath.Base(program)}
	}
	s := newSupervisor(components, []string{"SUPERVISED=" + behaviour, "PATH=" + filepath.Dir(program)}, t.TempDir())
	ended := make(chan os.Signal, 64)
	signal.Notify(ended, syscall.SIGCHLD)
	go s.reap(ended)
	t.Cleanup(func() {
		for _, status := range s.statuses() {
			if status.PID != 0 {
				_ = syscall.Kill(status.PID, syscall.SIGKILL)
			}
			if err := s.stop(context.WithoutCancel(t.Context()), status.Name); err != nil {
				t.Error(err)
			}
		}
		signal.Stop(ended)
		close(ended)
	})
	return s
}

// patience is far more than anything here takes.
const patience = 30 * time.Second

// eventually waits until the component is in the state.
func eventually(t *testing.T, s *supervisor, name string, want State) Status {
	t.Helper()
	deadline := time.After(patience)
	for {
		for _, status := range s.statuses() {
			if status.Name == name && status.State == want {
				return status
			}
		}
		select {
		case <-deadline:
			t.Fatalf("%s is never %s: %+v", name, want, s.statuses())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func state(s *supervisor, name string) State {
	for _, status := range s.statuses() {
		if status.Name == name {
			return status.State
		}
	}
	return ""
}

func TestComponentStartsAfterWhatItNeeds(t *testing.T) {
	server := newSwitchable(t)
	own := newSwitchable(t)
	s := supervise(t, "sleeps",
		Component{Name: "server", Ready: server.probe()},
		Component{Name: "client", After: []Probe{server.probe()}, Ready: own.probe()},
	)
	s.startAll()
	eventually(t, s, "server", Starting)
	if got := state(s, "client"); got != Waiting {
		t.Errorf("the client is %s before the server is ready", got)
	}
	server.ready.Store(true)
	eventually(t, s, "server", Ready)
	eventually(t, s, "client", Starting)
	own.ready.Store(true)
	if status := eventually(t, s, "client", Ready); status.PID == 0 || status.Starts != 1 {
		t.Errorf("got %+v", status)
	}
}

func TestExitIsNoticedAndCanBeMended(t *testing.T) {
	server := newSwitchable(t)
	s := supervise(t, "fails", Component{Name: "broken", Ready: server.probe()})
	err := s.start(t.Context(), "broken")
	if err == nil || !strings.Contains(err.Error(), "exit code 3") {
		t.Errorf("got %v, want the exit code", err)
	}
	if status := eventually(t, s, "broken", Exited); status.PID != 0 || status.Exit != "exit code 3" {
		t.Errorf("got %+v", status)
	}
	log, err := os.ReadFile(filepath.Join(s.logDir, "broken.log"))
	if err != nil || string(log) != "cannot go on\n" {
		t.Errorf("its log is %q, %v", log, err)
	}
	s.environment[0] = "SUPERVISED=sleeps"
	server.ready.Store(true)
	if err := s.start(t.Context(), "broken"); err != nil {
		t.Fatal(err)
	}
	if status := eventually(t, s, "broken", Ready); status.Starts != 2 || status.Exit != "" {
		t.Errorf("got %+v", status)
	}
}

func TestKilledComponentHasExited(t *testing.T) {
	server := newSwitchable(t)
	server.ready.Store(true)
	s := supervise(t, "sleeps", Component{Name: "victim", Ready: server.probe()})
	if err := s.start(t.Context(), "victim"); err != nil {
		t.Fatal(err)
	}
	pid := eventually(t, s, "victim", Ready).PID
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if status := eventually(t, s, "victim", Exited); !strings.Contains(status.Exit, "signal 9") {
		t.Errorf("got %+v", status)
	}
}

func TestSetCommand(t *testing.T) {
	server := newSwitchable(t)
	server.ready.Store(true)
	s := supervise(t, "sleeps", Component{Name: "one", Ready: server.probe()})
	command := s.components[0].Command
	if err := s.start(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if err := s.setCommand("one", []string{"other"}); err == nil || !strings.Contains(err.Error(), "stop it first") {
		t.Errorf("the command of a running component: %v", err)
	}
	if err := s.stop(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if err := s.setCommand("one", nil); err == nil {
		t.Error("a command of nothing is accepted")
	}
	if err := s.setCommand("one", []string{"no-such-program"}); err != nil {
		t.Fatal(err)
	}
	if err := s.start(t.Context(), "one"); err == nil || !strings.Contains(err.Error(), "no-such-program") {
		t.Errorf("started with the other command: %v", err)
	}
	if err := s.setCommand("one", command); err != nil {
		t.Fatal(err)
	}
	if err := s.start(t.Context(), "one"); err != nil {
		t.Error(err)
	}
}

func TestStop(t *testing.T) {
	for name, test := range map[string]struct {
		ready bool
		after bool
		state State
	}{
		"a ready one":               {ready: true, state: Ready},
		"one that starts":           {state: Starting},
		"one that waits for others": {after: true, state: Waiting},
	} {
		t.Run(name, func(t *testing.T) {
			server := newSwitchable(t)
			server.ready.Store(test.ready)
			component := Component{Name: "one", Ready: server.probe()}
			if test.after {
				component.After = []Probe{server.probe()}
			}
			s := supervise(t, "sleeps", component)
			s.startAll()
			pid := eventually(t, s, "one", test.state).PID
			for range 2 {
				if err := s.stop(t.Context(), "one"); err != nil {
					t.Fatal(err)
				}
			}
			if got := state(s, "one"); got != Stopped {
				t.Errorf("it is %s after stop", got)
			}
			if pid != 0 && !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
				t.Errorf("its process %d still runs", pid)
			}
			server.ready.Store(true)
			if err := s.start(t.Context(), "one"); err != nil {
				t.Errorf("it does not start again: %v", err)
			}
		})
	}
}

func TestStubbornComponentIsKilled(t *testing.T) {
	server := newSwitchable(t)
	server.ready.Store(true)
	s := supervise(t, "stubborn", Component{Name: "one", Ready: server.probe()})
	s.grace = 10 * time.Millisecond
	if err := s.start(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(patience)
	for {
		if log, err := os.ReadFile(filepath.Join(s.logDir, "one.log")); err == nil && string(log) == "ignoring\n" {
			break
		}
		select {
		case <-deadline:
			t.Fatal("it never said that it ignores the signal")
		case <-time.After(5 * time.Millisecond):
		}
	}
	if err := s.stop(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if status := eventually(t, s, "one", Stopped); !strings.Contains(status.Exit, "signal 9") {
		t.Errorf("got %+v", status)
	}
}

func TestStartOfRunningComponentChangesNothing(t *testing.T) {
	server := newSwitchable(t)
	server.ready.Store(true)
	s := supervise(t, "sleeps", Component{Name: "one", Ready: server.probe()})
	if err := s.start(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	before := eventually(t, s, "one", Ready)
	s.startAll()
	if err := s.start(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if after := eventually(t, s, "one", Ready); after != before {
		t.Errorf("got %+v, want %+v", after, before)
	}
}

func TestUnknownComponentIsAnErrorThatNamesTheKnown(t *testing.T) {
	s := supervise(t, "sleeps", Component{Name: "b"}, Component{Name: "a"})
	for _, err := range []error{s.start(t.Context(), "c"), s.stop(t.Context(), "c")} {
		if err == nil || !strings.Contains(err.Error(), `"c"; it has a, b`) {
			t.Errorf("got %v", err)
		}
	}
}

func TestMissingProgramIsAnExit(t *testing.T) {
	s := supervise(t, "sleeps", Component{Name: "one"})
	s.components[0].Command = []string{"no-such-program"}
	if err := s.start(t.Context(), "one"); err == nil || !strings.Contains(err.Error(), "no-such-program is not on the PATH") {
		t.Errorf("got %v", err)
	}
}

func TestKillAllIsForProcessOneOnly(t *testing.T) {
	s := supervise(t, "sleeps", Component{Name: "one"})
	if err := s.killAll(t.Context()); err == nil {
		t.Error("it agreed to end every process of this machine")
	}
}
