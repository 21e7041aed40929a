// Command simgpu-run holds memory of a simulated device while another program runs,
// so that a program that knows nothing of simulated GPUs uses one. It holds the
// memory as package deviceapi does and is fit to be process 1 of a container.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/simgpu/simgpu/deviceapi"
)

// Exit codes. Any other is that of COMMAND.
const (
	exitMemoryLost  = 120
	exitOutOfMemory = 121
	exitNoDevice    = 122
	exitNoDriver    = 123
	exitFailed      = 125
	exitCannotRun   = 126
	exitNotFound    = 127
)

const usage = `Usage: simgpu-run --memory AMOUNT [OPTION]... [--] [COMMAND [ARGUMENT]...]

Holds memory of a simulated GPU or MIG device while COMMAND runs. COMMAND starts once
the memory is granted. Without COMMAND the memory is held until a signal to end.

  --memory AMOUNT      15023MiB, 14.5GiB, 15GB, bytes, or a share such as 90%
  --device DEVICE      index (GPUs, then MIG devices, as nvidia-smi -L lists them),
                       UUID, or all; default 0
  --utilization N      percent to report, 0 to 100; default 0
  --name NAME          process name to show; default that of COMMAND
  --timeout DURATION   how long to wait for the node driver; default 1m
  -h, --help           this text

A restart of the node driver is waited out, and the memory is held again after it.
Where the memory is lost for good (the device was unprepared, its GPU is lost, or the
memory does not fit any more) COMMAND gets SIGTERM, and simgpu-run ends with it.
Signals are passed on to COMMAND.

Exit code: that of COMMAND, or 128 and the number of the signal that ended it; else
  120  the memory was lost for good
  121  the memory does not fit
  122  this container has no such device, or its GPU is lost
  123  the node driver did not answer in time
  125  bad arguments, or another failure of simgpu-run
  126  COMMAND cannot be run
  127  COMMAND is not found

Environment: SIMGPU_DIR, where to look for devices instead of /run/simgpu.
`

// exitError is a failure with an exit code of its own.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

func failf(code int, format string, args ...any) error {
	return &exitError{code, fmt.Errorf(format, args...)}
}

func main() {
	dir := os.Getenv("SIMGPU_DIR")
	if dir == "" {
		dir = deviceapi.DefaultDir
	}
	code, err := run(os.Args[1:], dir, os.Stdout, os.Stderr)
	if err != nil {
		fmt.Fprintf(os.Stderr, "simgpu-run: %v\n", err)
		code = exitFailed
		var coded *exitError
		if errors.As(err, &coded) {
			code = coded.code
		}
	}
	os.Exit(code)
}

// options are the parsed command line.
type options struct {
	memory      amount
	device      string
	utilization int
	name        string
	timeout     time.Duration
	command     []string
}

// parse reads the command line. It fails with flag.ErrHelp where help is asked for.
func parse(args []string) (options, error) {
	o := options{}
	var memory string
	flags := flag.NewFlagSet("simgpu-run", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&memory, "memory", "", "")
	flags.StringVar(&o.device, "device", "0", "")
	flags.IntVar(&o.utilization, "utilization", 0, "")
	flags.StringVar(&o.name, "name", "", "")
	flags.DurationVar(&o.timeout, "timeout", time.Minute, "")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.command = flags.Args()
	if memory == "" {
		return o, errors.New("--memory is missing: say how much to hold, for instance --memory 15023MiB")
	}
	var err error
	if o.memory, err = parseAmount(memory); err != nil {
		return o, err
	}
	if o.utilization < 0 || o.utilization > 100 {
		return o, fmt.Errorf("--utilization %d: must be from 0 to 100", o.utilization)
	}
	if o.timeout <= 0 {
		return o, fmt.Errorf("--timeout %s: must be above 0", o.timeout)
	}
	if o.name == "" {
		o.name = commandName(o.command)
	}
	return o, nil
}

// run does what args say with the devices below dir and returns the exit code.
func run(args []string, dir string, stdout, stderr io.Writer) (int, error) {
	o, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		_, err := io.WriteString(stdout, usage)
		return 0, err
	}
	if err != nil {
		return 0, failf(exitFailed, "%w\nTry 'simgpu-run --help'.", err)
	}
	signals, stop := notifyForwarded()
	defer stop()

	logger := slog.New(slog.NewTextHandler(stderr, nil)).With("program", "simgpu-run")
	client, err := deviceapi.Discover(dir, logger)
	if errors.Is(err, deviceapi.ErrNoDevices) {
		return 0, failf(exitNoDevice, "this container has no simulated GPU (%w): does it reference a ResourceClaim in resources.claims?", err)
	}
	if err != nil {
		return 0, err
	}
	defer client.Close()

	lost := make(chan error, 1)
	ended, err := acquire(client, o, signals, lost)
	if err != nil {
		return 0, err
	}
	if ended != nil {
		return signalCode(ended), nil
	}
	if len(o.command) == 0 {
		fmt.Fprintln(stderr, "simgpu-run: the memory is held until a signal to end")
		return 0, waitForEnd(signals, lost)
	}
	process, err := startCommand(o.command)
	if err != nil {
		return 0, err
	}
	return supervise(process, signals, lost, stderr)
}

// waitForEnd returns nil at a signal to end.
func waitForEnd(signals <-chan os.Signal, lost <-chan error) error {
	for {
		select {
		case s := <-signals:
			if ends(s) {
				return nil
			}
		case err := <-lost:
			return err
		}
	}
}

// acquire takes the memory. A signal to end, which it returns, interrupts it. What
// is lost for good later is reported to lost.
func acquire(client *deviceapi.Client, o options, signals <-chan os.Signal, lost chan<- error) (os.Signal, error) {
	ctx, cancel := context.WithTimeout(context.Background(), o.timeout)
	defer cancel()
	held := make(chan error, 1)
	go func() { held <- hold(ctx, client, o, lost) }()
	var interrupted os.Signal
	for {
		select {
		case err := <-held:
			if interrupted != nil {
				return interrupted, nil
			}
			return nil, err
		case s := <-signals:
			if ends(s) {
				interrupted = s
				cancel()
			}
		}
	}
}

// hold takes the memory of every chosen device; the client's Close gives it back.
func hold(ctx context.Context, client *deviceapi.Client, o options, lost chan<- error) error {
	snapshot, err := client.Snapshot(ctx)
	if err != nil {
		return driverError(err)
	}
	devices := snapshot.Devices()
	chosen, err := choose(devices, o.device)
	if err != nil {
		return err
	}
	for _, ordinal := range chosen {
		device := devices[ordinal]
		lease, err := client.Hold(ctx, deviceapi.HoldOptions{
			Device:      device.UUID(),
			MemoryBytes: o.memory.of(device.MemoryBytes()),
			ProcessName: o.name,
			Utilization: o.utilization,
		})
		var oom *deviceapi.OutOfMemoryError
		if errors.As(err, &oom) {
			return failf(exitOutOfMemory, "%s", oom.CUDAMessage(ordinal))
		}
		if err != nil {
			return driverError(err)
		}
		go reportLoss(lease, lost)
	}
	return nil
}

// reportLoss waits for the end of a lease. Of several losses the first one counts.
func reportLoss(lease *deviceapi.Lease, lost chan<- error) {
	<-lease.Done()
	if err := lease.Err(); err != nil {
		select {
		case lost <- failf(exitMemoryLost, "the memory held on %s is lost for good: %w", lease.DeviceUUID(), err):
		default:
		}
	}
}

func driverError(err error) error {
	if errors.Is(err, deviceapi.ErrUnreachable) {
		return failf(exitNoDriver, "%w: is the simgpu-kubelet-plugin pod of this node running?", err)
	}
	if errors.Is(err, deviceapi.ErrDeviceGone) || errors.Is(err, deviceapi.ErrDeviceLost) {
		return failf(exitNoDevice, "%w", err)
	}
	return err
}

// choose returns the positions of the devices that a person named.
func choose(devices []deviceapi.Device, name string) ([]int, error) {
	if name == "all" && len(devices) > 0 {
		all := make([]int, len(devices))
		for i := range all {
			all[i] = i
		}
		return all, nil
	}
	at := slices.IndexFunc(devices, func(d deviceapi.Device) bool { return strings.EqualFold(d.UUID(), name) })
	if n, err := strconv.Atoi(name); err == nil && n >= 0 && n < len(devices) {
		at = n
	}
	if at < 0 {
		var known []string
		for i, d := range devices {
			known = append(known, fmt.Sprintf("%d (%s)", i, d.UUID()))
		}
		return nil, failf(exitNoDevice, "device %q is not in this container; it has %d: %s", name, len(devices), strings.Join(known, ", "))
	}
	return []int{at}, nil
}
