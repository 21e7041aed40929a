package process

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"
)

func started(t *testing.T, command string, vars Vars) *Process {
	t.Helper()
	c, err := Parse(command)
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.Start(vars, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	return p
}

func text(p *Process) string {
	var all []string
	for _, line := range p.Output(time.Time{}) {
		all = append(all, line.Text)
	}
	return strings.Join(all, "\n")
}

func TestParseRefuses(t *testing.T) {
	for name, command := range map[string]string{
		"an unknown variable": "driver {{.Kubekonfig}}",
		"broken braces":       "driver {{.Kubeconfig",
		"nothing":             " ",
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Parse(command); err == nil {
				t.Error("accepted")
			}
		})
	}
}

func TestRunsWithVarsAndKeepsOutput(t *testing.T) {
	p := started(t, `sh -c 'echo node {{.NodeName}} $POD_UID; echo wrong >&2; exit 3'`, Vars{NodeName: "n1", PodUID: "u1"})
	<-p.Done()
	if got := text(p); got != "node n1 u1\nwrong" {
		t.Errorf("output %q", got)
	}
	if p.Exit() == nil || !strings.Contains(p.Exit().Error(), "3") {
		t.Errorf("exit: %v", p.Exit())
	}
}

func TestStopIsGentle(t *testing.T) {
	p := started(t, `sh -c 'trap "echo bye; exit 0" TERM; echo up; while :; do sleep 0.05; done'`, Vars{})
	for text(p) == "" { // before that there is no trap
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := text(p); got != "up\nbye" || p.Exit() != nil {
		t.Errorf("output %q, exit %v", got, p.Exit())
	}
}

func TestStopKillsInTheEnd(t *testing.T) {
	p := started(t, `sh -c 'trap "" TERM; echo up; while :; do sleep 0.05; done'`, Vars{})
	for text(p) == "" {
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := p.Stop(ctx); err == nil {
		t.Error("stopped although it ignores SIGTERM")
	}
	<-p.Done()
}

func TestBoundByModes(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o555); err != nil { //nolint:gosec // what the test is about
		t.Fatal(err)
	}
	c, err := Parse("touch {{.StateDir}}/file")
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.StartBound(Vars{StateDir: dir}, nil)
	if err != nil {
		t.Skip(err) // not allowed here
	}
	<-p.Done()
	if p.Exit() == nil {
		t.Error("it writes into a folder that nobody may write to")
	}
}
