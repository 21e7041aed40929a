package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/simgpu/simgpu/deviceapi/smi"
)

// action is what the arguments ask for.
type action int

const (
	showTable action = iota
	showHelp
	showVersion
	showList
	showLog
	showInstances
	showProfiles
	showPlacements
	showComputeProfiles
	showComputeInstances
	showDeviceMonitor
	showProcessMonitor
	showGPUs
	showComputeApps
	showGPUFields
	showComputeAppFields
)

// arguments are the parsed command line.
type arguments struct {
	action    action
	fields    string        // of a query
	format    string        // of a query
	ids       string        // of -i; empty: all
	instances string        // of -gi; empty: all
	displays  string        // of -d; empty: all
	xml       bool          // of -x
	loop      time.Duration // between two outputs; 0: one output
	count     int           // of outputs with a loop; 0: no end
	file      string        // of -f; empty: standard output
}

const (
	defaultLoop  = 5 * time.Second // of -l without a value
	defaultDelay = time.Second     // of a monitor
)

// migActions are what the subcommand mig can list.
var migActions = map[string]action{
	"-lgi": showInstances, "--list-gpu-instances": showInstances,
	"-lgip": showProfiles, "--list-gpu-instance-profiles": showProfiles,
	"-lgipp": showPlacements, "--list-gpu-instance-possible-placements": showPlacements,
	"-lci": showComputeInstances, "--list-compute-instances": showComputeInstances,
	"-lcip": showComputeProfiles, "--list-compute-instance-profiles": showComputeProfiles,
}

// notSimulated are options of the real tool that have no simulated counterpart yet.
// They are told apart from misspelt ones.
var notSimulated = map[string]bool{
	"-B": true, "--list-excluded-gpus": true, "-u": true, "--unit": true,
	"-pm": true, "--persistence-mode": true, "-e": true, "--ecc-config": true, "-p": true, "--reset-ecc-errors": true,
	"-c": true, "--compute-mode": true, "-r": true, "--gpu-reset": true, "-mig": true, "--multi-instance-gpu": true,
	"-pl": true, "--power-limit": true, "-lgc": true, "--lock-gpu-clocks": true, "-rgc": true, "--reset-gpu-clocks": true,
	"-ac": true, "--applications-clocks": true, "-rac": true, "--reset-applications-clocks": true,
	"-cgi": true, "-dgi": true, "-cci": true, "-dci": true, "-lcipp": true,
	"-C": true, "-ci": true, "-s": true, "-o": true, "--dtd": true, "-col": true, "--columns": true,
	"daemon": true, "replay": true, "topo": true, "nvlink": true, "clocks": true,
	"drain": true, "encodersessions": true, "fbcsessions": true, "vgpu": true, "compute-policy": true,
	"boost-slider": true, "power-hint": true, "conf-compute": true, "c2c": true, "gpm": true, "pci": true, "stats": true,
}

// usageError is a command line that cannot be understood.
type usageError struct{ message string }

func (e *usageError) Error() string { return e.message }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// notSimulatedError is a command line that the real tool would understand.
type notSimulatedError struct{ option string }

func (e *notSimulatedError) Error() string {
	return fmt.Sprintf("Option %s of nvidia-smi is not simulated. Please run 'nvidia-smi -h' for what is.", e.option)
}

// parse reads the command line as the real tool does: values follow after a space
// or an equals sign, and the order does not matter.
func parse(args []string) (arguments, error) {
	var a arguments
	var chosen string // the option that set the action
	choose := func(what action, option string) error {
		if chosen != "" && a.action != what {
			if (a.action == showGPUs || a.action == showComputeApps) && (what == showGPUs || what == showComputeApps) {
				return usagef("Only one --query-* switch can be used at a time.")
			}
			return usagef("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")
		}
		a.action, chosen = what, option
		return nil
	}

	subcommand := ""
	if len(args) > 0 && slices.Contains([]string{"mig", "dmon", "pmon"}, args[0]) {
		subcommand, args = args[0], args[1:]
	}
	mig, monitor := subcommand == "mig", subcommand == "dmon" || subcommand == "pmon"
	switch {
	case mig && len(args) == 0:
		return a, usagef("Subcommand mig needs an option: -lgi lists the GPU instances.")
	case monitor:
		a.action, a.loop, chosen = map[string]action{"dmon": showDeviceMonitor, "pmon": showProcessMonitor}[subcommand], defaultDelay, subcommand
	}
	for len(args) > 0 {
		option, value, hasValue := strings.Cut(args[0], "=")
		args = args[1:]
		take := func() (string, error) {
			if hasValue && value != "" {
				return value, nil
			}
			if hasValue || len(args) == 0 {
				return "", usagef("ERROR: Option %s is missing its value. Please run 'nvidia-smi -h' for help.", option)
			}
			taken := args[0]
			args = args[1:]
			return taken, nil
		}
		// number takes a whole number.
		number := func(what string) (int, error) {
			text, err := take()
			if err != nil {
				return 0, err
			}
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 || n > 1_000_000 {
				return 0, usagef("Invalid %s %q: give a whole number from 1 to 1000000.", what, text)
			}
			return n, nil
		}
		// interval takes a value that may be absent, in the given unit.
		interval := func(unit time.Duration) error {
			if !hasValue && (len(args) == 0 || strings.HasPrefix(args[0], "-")) {
				a.loop = defaultLoop
				return nil
			}
			n, err := number("loop interval")
			a.loop = time.Duration(n) * unit
			return err
		}

		var err error
		list, lists := migActions[option]
		switch {
		case monitor && (option == "-c" || option == "--count"):
			if a.count, err = number("count"); err != nil {
				return a, err
			}
			continue
		case monitor && (option == "-d" || option == "--delay"):
			n, err := number("delay")
			if err != nil {
				return a, err
			}
			a.loop = time.Duration(n) * time.Second
			continue
		case mig && (option == "-gi" || option == "--gpu-instance-id"):
			if a.instances, err = take(); err != nil {
				return a, err
			}
			continue
		case mig && lists:
			if err = choose(list, option); err != nil {
				return a, err
			}
			continue
		case monitor && slices.Contains([]string{"-l", "--loop", "-lms", "--loop-ms"}, option):
			return a, usagef("ERROR: Option %s is not recognized. Please run 'nvidia-smi -h' for help.", option)
		}
		switch option {
		case "-q", "--query":
			err = choose(showLog, option)
		case "-x", "--xml-format":
			a.xml = true
		case "-d", "--display":
			if a.displays, err = take(); err == nil {
				if _, unknown := smi.ParseDisplays(a.displays); unknown != nil {
					err = &usageError{unknown.Error()}
				}
			}
		case "-h", "--help":
			err = choose(showHelp, option)
		case "--version":
			err = choose(showVersion, option)
		case "-L", "--list-gpus":
			err = choose(showList, option)
		case "--help-query-gpu":
			err = choose(showGPUFields, option)
		case "--help-query-compute-apps":
			err = choose(showComputeAppFields, option)
		case "--query-gpu":
			if err = choose(showGPUs, option); err == nil {
				a.fields, err = take()
			}
		case "--query-compute-apps", "--query-apps":
			if err = choose(showComputeApps, option); err == nil {
				a.fields, err = take()
			}
		case "--format":
			a.format, err = take()
		case "-i", "--id":
			a.ids, err = take()
		case "-f", "--filename":
			a.file, err = take()
		case "-l", "--loop":
			err = interval(time.Second)
		case "-lms", "--loop-ms":
			err = interval(time.Millisecond)
		default:
			if notSimulated[option] {
				return a, &notSimulatedError{option}
			}
			return a, usagef("ERROR: Option %s is not recognized. Please run 'nvidia-smi -h' for help.", option)
		}
		if err != nil {
			return a, err
		}
	}

	query := a.action == showGPUs || a.action == showComputeApps
	_, listed := migActions[chosen]
	switch {
	case a.instances != "" && a.action != showComputeInstances && a.action != showComputeProfiles,
		a.xml && a.displays != "", a.action != showLog && (a.xml || a.displays != ""):
		return a, usagef("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")
	case query && a.format == "":
		return a, usagef("\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.")
	case !query && a.format != "", mig && !listed && a.action != showHelp:
		return a, usagef("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")
	}
	return a, nil
}

const help = `nvidia-smi of simgpu: shows the simulated GPUs that this container has been given.

    nvidia-smi [OPTION]...

    -h, --help                    Print this text.
        --version                 Print the versions of the tool, the driver and CUDA.
    -L, --list-gpus               List GPUs and MIG devices with their UUIDs.
    -i, --id=ID[,ID...]           Only these GPUs: index, UUID, serial number or PCI bus id.
        --query-gpu=FIELD[,...]   Print properties of each GPU as CSV.
        --query-compute-apps=FIELD[,...]
                                  Print properties of each process as CSV.
        --format=csv[,noheader][,nounits]
                                  How to print a query; required with one.
        --help-query-gpu          List the fields of --query-gpu.
        --help-query-compute-apps List the fields of --query-compute-apps.
    -q, --query                   Print all that is known of each GPU.
    -d, --display=NAME[,NAME...]  Of that only MEMORY, UTILIZATION, ECC, TEMPERATURE, POWER,
                                  CLOCK, COMPUTE, PIDS, PERFORMANCE, ...
    -x, --xml-format              Print it as XML.
    -l, --loop[=SECONDS]          Print again every SECONDS (5) until interrupted.
    -lms, --loop-ms=MILLISECONDS  The same in milliseconds.
    -f, --filename=FILE           Write to FILE instead of standard output.

    nvidia-smi mig OPTION [-i ID]
          -lgi                    List the GPU instances.
          -lgip, -lgipp           List what GPU instances can be made, and where.
          -lci, -lcip [-gi ID]    List the compute instances, or what they can be.
    nvidia-smi dmon [-c COUNT] [-d SECONDS] [-i ID]
    nvidia-smi pmon [-c COUNT] [-d SECONDS] [-i ID]
                                  Print load and power of GPUs, or processes, every SECONDS (1).

Without options it prints a table of GPUs, MIG devices and processes. Memory is what
simgpu-run and other clients hold; temperature and power are made up.

Exit code: 0 success, 2 bad arguments, 3 not simulated, 4 not visible from here, 6 no
such device, 9 the node driver does not answer, 15 a GPU is lost, 255 anything else.

Environment: SIMGPU_DIR, where to look for devices instead of /run/simgpu.
`
