// Package process runs the driver under test: any executable, started from a command template, with its output kept
// together with the times at which it came.
package process

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"text/template"
	"time"

	"golang.org/x/sys/unix"
)

// Vars are what a command template can refer to, as in {{.Kubeconfig}}.
type Vars struct {
	// Kubeconfig is a file with which the driver reaches the API server.
	Kubeconfig string
	NodeName   string
	// PluginsDir stands for /var/lib/kubelet/plugins, and PluginDir for the folder of the driver in it.
	PluginsDir, PluginDir string
	// RegistryDir stands for /var/lib/kubelet/plugins_registry.
	RegistryDir string
	CDIDir      string
	// StateDir is a folder for whatever else the driver wants to keep.
	StateDir   string
	DriverName string
	// AdminKubeconfig may do everything. It is for commands that do something to a driver, not for the driver.
	AdminKubeconfig string
	// Device is the device that a command is about.
	Device string
	// Namespace and PodUID are those of the driver's pod in a cluster. Each instance has a PodUID of its own, which a restart
	// does not change.
	Namespace, PodUID string
}

// Command is a parsed command template.
type Command struct{ parsed *template.Template }

// Parse reads a command template: a shell command in which Vars can be used. It fails for an unknown name.
func Parse(text string) (*Command, error) {
	parsed, err := template.New("driver command").Option("missingkey=error").Parse(text)
	if err != nil {
		return nil, err
	}
	c := &Command{parsed}
	line, err := c.render(Vars{})
	if err != nil {
		return nil, err
	}
	if strings.TrimSpace(line) == "" {
		return nil, errors.New("the driver command is empty")
	}
	return c, nil
}

func (c *Command) render(vars Vars) (string, error) {
	var line bytes.Buffer
	if err := c.parsed.Execute(&line, vars); err != nil {
		return "", err
	}
	return line.String(), nil
}

// Uses is true if the command has that variable: it is another command with another value of it.
func (c *Command) Uses(name string) bool {
	var some Vars
	field := reflect.ValueOf(&some).Elem().FieldByName(name)
	field.SetString("some value")
	without, err1 := c.render(Vars{})
	with, err2 := c.render(some)
	return err1 == nil && err2 == nil && with != without
}

// Line is one line of output.
type Line struct {
	Time time.Time
	Text string
}

// Process is a driver that was started.
type Process struct {
	// Command is the command line as the shell got it.
	Command string

	cmd  *exec.Cmd
	done chan struct{}
	err  error // of Wait, once done is closed

	mu    sync.Mutex
	lines []Line
}

// Start starts the driver. Its output also goes to tee, if that is not nil.
func (c *Command) Start(vars Vars, tee io.Writer) (*Process, error) {
	return c.start(vars, tee, (*exec.Cmd).Start)
}

// StartBound starts the driver without root's right to pass over the modes of files and folders, so that it cannot write
// where its owner cannot.
func (c *Command) StartBound(vars Vars, tee io.Writer) (*Process, error) {
	return c.start(vars, tee, func(cmd *exec.Cmd) error {
		started := make(chan error)
		go func() {
			// What a thread has given up it never gets back, so it can do nothing else after this. Nor can it end: processes
			// die with the thread that has started them, and it may have started other drivers before.
			runtime.LockOSThread()
			if os.Geteuid() == 0 {
				if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_DAC_OVERRIDE, 0, 0, 0); err != nil {
					runtime.UnlockOSThread()
					started <- fmt.Errorf("give up CAP_DAC_OVERRIDE: %w", err)
					return
				}
			}
			started <- cmd.Start()
			select {}
		}()
		return <-started
	})
}

func (c *Command) start(vars Vars, tee io.Writer, start func(*exec.Cmd) error) (*Process, error) {
	line, err := c.render(vars)
	if err != nil {
		return nil, err
	}
	p := &Process{Command: line, done: make(chan struct{})}
	// exec, so that signals reach the driver itself.
	p.cmd = exec.Command("/bin/sh", "-c", "exec "+line)
	p.cmd.Env = append(os.Environ(), "NODE_NAME="+vars.NodeName, "KUBECONFIG="+vars.Kubeconfig, "NAMESPACE="+vars.Namespace, "POD_UID="+vars.PodUID)
	// A group of its own: interrupting the kit does not interrupt the driver, and a kill reaches its children as well. It
	// dies with the kit.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	output, writer := io.Pipe()
	p.cmd.Stdout, p.cmd.Stderr = writer, writer
	p.cmd.WaitDelay = 5 * time.Second // for children that keep the output open
	if err := start(p.cmd); err != nil {
		return nil, fmt.Errorf("start the driver with %q: %w", line, err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		p.read(output, tee)
	}()
	go func() {
		p.err = p.cmd.Wait()
		writer.Close()
		<-read
		close(p.done)
	}()
	return p, nil
}

func (p *Process) read(output io.Reader, tee io.Writer) {
	reader := bufio.NewReader(output)
	for {
		text, err := reader.ReadString('\n')
		if text != "" {
			line := Line{time.Now(), strings.TrimRight(text, "\r\n")}
			p.mu.Lock()
			p.lines = append(p.lines, line)
			p.mu.Unlock()
			if tee != nil {
				fmt.Fprintf(tee, "%s %s\n", line.Time.Format("15:04:05.000"), line.Text)
			}
		}
		if err != nil {
			return
		}
	}
}

// Run runs a command that ends by itself and returns its output.
func (c *Command) Run(ctx context.Context, vars Vars) (string, error) {
	line, err := c.render(vars)
	if err != nil {
		return "", err
	}
	output, err := exec.CommandContext(ctx, "/bin/sh", "-c", line).CombinedOutput()
	if err != nil {
		return string(output), fmt.Errorf("%s: %w", line, err)
	}
	return string(output), nil
}

// PID is the process id of the driver.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed once the driver has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Exit says how the driver ended, nil for exit code 0. It may be called once Done is closed.
func (p *Process) Exit() error { return p.err }

// Stop asks the driver to end (SIGTERM) and waits for it. An error says that it did not end while the context lasted; it
// is killed then.
func (p *Process) Stop(ctx context.Context) error {
	select {
	case <-p.done:
		return nil
	default:
		_ = syscall.Kill(p.PID(), syscall.SIGTERM)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		p.Kill()
		return fmt.Errorf("the driver did not end after SIGTERM: %w", context.Cause(ctx))
	}
}

// Kill kills the driver and all its children (SIGKILL) and waits for their end.
func (p *Process) Kill() {
	_ = syscall.Kill(-p.PID(), syscall.SIGKILL)
	<-p.done
}

// Output is what the driver has said since the time.
func (p *Process) Output(since time.Time) []Line {
	p.mu.Lock()
	defer p.mu.Unlock()
	var lines []Line
	for _, line := range p.lines {
		if !line.Time.Before(since) {
			lines = append(lines, line)
		}
	}
	return lines
}
