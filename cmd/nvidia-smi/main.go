// Command nvidia-smi shows the simulated devices of the container it runs in, with
// the arguments, layouts and exit codes of the real tool. Package smi draws,
// package deviceapi asks the node driver.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/deviceapi/smi"
)

// Exit codes of the real tool.
const (
	exitBadArguments = 2
	exitNotSupported = 3
	exitNoPermission = 4
	exitNotFound     = 6
	exitNoDriver     = 9
	exitGPULost      = 15
	exitOther        = 255
)

// patience is how long a driver may take to answer, which covers its restart.
const patience = 10 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	dir := os.Getenv("SIMGPU_DIR")
	if dir == "" {
		dir = deviceapi.DefaultDir
	}
	err := run(ctx, os.Args[1:], dir, os.Stdout)
	if err != nil {
		// Standard output, as the real tool does.
		fmt.Fprintln(os.Stdout, message(err))
	}
	os.Exit(exitCode(err))
}

// run does what args say with the devices below dir.
func run(ctx context.Context, args []string, dir string, out io.Writer) (err error) {
	a, err := parse(args)
	if err != nil {
		return err
	}
	switch a.action {
	case showHelp:
		_, err = io.WriteString(out, help)
		return err
	case showGPUFields:
		_, err = io.WriteString(out, smi.GPUFields())
		return err
	case showComputeAppFields:
		_, err = io.WriteString(out, smi.ComputeAppFields())
		return err
	}
	if a.file != "" {
		file, createErr := os.Create(a.file)
		if createErr != nil {
			return createErr
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		out = file
	}
	for n := 1; ; n++ {
		if err := show(ctx, a, dir, out, n == 1); err != nil {
			if a.loop > 0 && ctx.Err() != nil {
				return nil
			}
			return err
		}
		if a.loop == 0 || n == a.count {
			return nil
		}
		select {
		case <-time.After(a.loop):
		case <-ctx.Done():
			return nil
		}
	}
}

// show writes one output, which may be the first of several.
func show(ctx context.Context, a arguments, dir string, out io.Writer, first bool) error {
	report, err := fetch(ctx, dir)
	if err != nil {
		return err
	}
	if a.ids != "" {
		if report, err = report.Select(a.ids); err != nil {
			return err
		}
	}
	if err := report.Lost(); err != nil {
		return err
	}
	if a.instances != "" {
		if report, err = report.SelectInstances(a.instances); err != nil {
			return err
		}
	}
	text, err := write(report, a)
	if err != nil {
		return err
	}
	if first {
		text = heads[a.action] + text
	}
	_, err = io.WriteString(out, text)
	return err
}

// fetch asks the driver what is visible.
func fetch(ctx context.Context, dir string) (*smi.Report, error) {
	client, err := deviceapi.Discover(dir, nil)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	snapshot, err := client.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	return smi.NewReport(snapshot, time.Now())
}

// heads stand above the first output.
var heads = map[action]string{
	showDeviceMonitor:  smi.DeviceMonitorHead,
	showProcessMonitor: smi.ProcessMonitorHead,
}

func write(r *smi.Report, a arguments) (string, error) {
	switch a.action {
	case showVersion:
		return r.Version(), nil
	case showList:
		return r.List(), nil
	case showLog:
		if a.xml {
			return r.XML(), nil
		}
		if a.displays == "" {
			return r.Log(), nil
		}
		displays, err := smi.ParseDisplays(a.displays)
		if err != nil {
			return "", &usageError{err.Error()}
		}
		return r.Log(displays...), nil
	case showInstances:
		return r.Instances()
	case showProfiles:
		return r.Profiles()
	case showPlacements:
		return r.Placements()
	case showComputeProfiles:
		return r.ComputeProfiles()
	case showComputeInstances:
		return r.ComputeInstances()
	case showDeviceMonitor:
		return r.DeviceMonitor(), nil
	case showProcessMonitor:
		return r.ProcessMonitor(), nil
	case showGPUs, showComputeApps:
		format, err := smi.ParseFormat(a.format)
		if err != nil {
			return "", &usageError{err.Error()}
		}
		if a.action == showGPUs {
			return r.GPUs(a.fields, format)
		}
		return r.ComputeApps(a.fields, format)
	default:
		return r.Table(), nil
	}
}

// message is what a person reads of an error.
func message(err error) string {
	var unknown *smi.UnknownFieldError
	switch {
	case errors.As(err, &unknown):
		return err.Error() + "\n" // the real tool leaves a line free
	case errors.Is(err, deviceapi.ErrNoDevices):
		return smi.ErrNoDevices.Error() + "\n\n" +
			"No simulated GPU is mounted into this container. Does it reference a\n" +
			"ResourceClaim (resources.claims in the pod's spec)? Details: " + err.Error()
	case errors.Is(err, deviceapi.ErrUnreachable):
		return "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n\n" +
			"Is the simgpu-kubelet-plugin pod of this node running? Details: " + err.Error()
	default:
		return err.Error()
	}
}

func exitCode(err error) int {
	var usage *usageError
	var unknown *smi.UnknownFieldError
	var unsupported *notSimulatedError
	var lost *smi.LostError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &lost):
		return exitGPULost
	case errors.As(err, &usage), errors.As(err, &unknown):
		return exitBadArguments
	case errors.As(err, &unsupported):
		return exitNotSupported
	case errors.Is(err, smi.ErrNoPermission):
		return exitNoPermission
	case errors.Is(err, deviceapi.ErrNoDevices), errors.Is(err, smi.ErrNoDevices),
		errors.Is(err, smi.ErrNoMIGDevices), errors.Is(err, smi.ErrNoInstances):
		return exitNotFound
	case errors.Is(err, deviceapi.ErrUnreachable):
		return exitNoDriver
	default:
		return exitOther
	}
}
