package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// action is what the arguments ask for.
type action int

const (
	showTable action = iota
	showHelp
	showVersion
	showList
	showInstances
	showGPUs
	showComputeApps
	showGPUFields
	showComputeAppFields
)

// arguments are the parsed command line.
type arguments struct {
	action action
	fields string        // of a query
	format string        // of a query
	ids    string        // of -i; empty: all
	loop   time.Duration // between two outputs; 0: one output
	file   string        // of -f; empty: standard output
}

// defaultLoop is the interval of -l without a value.
const defaultLoop = 5 * time.Second

// notSimulated are options of the real tool that have no simulated counterpart yet.
// They are told apart from misspelt ones.
var notSimulated = map[string]bool{
	"-q": true, "--query": true, "-x": true, "--xml-format": true, "-d": true, "--display": true,
	"-B": true, "--list-excluded-gpus": true, "-u": true, "--unit": true,
	"-pm": true, "--persistence-mode": true, "-e": true, "--ecc-config": true, "-p": true, "--reset-ecc-errors": true,
	"-c": true, "--compute-mode": true, "-r": true, "--gpu-reset": true, "-mig": true, "--multi-instance-gpu": true,
	"-pl": true, "--power-limit": true, "-lgc": true, "--lock-gpu-clocks": true, "-rgc": true, "--reset-gpu-clocks": true,
	"-ac": true, "--applications-clocks": true, "-rac": true, "--reset-applications-clocks": true,
	"-cgi": true, "-dgi": true, "-cci": true, "-dci": true, "-lgip": true, "-lgipp": true, "-lci": true, "-lcip": true,
	"-C": true, "-gi": true, "-ci": true,
	"dmon": true, "pmon": true, "daemon": true, "replay": true, "topo": true, "nvlink": true, "clocks": true,
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

	mig := len(args) > 0 && args[0] == "mig"
	if mig {
		args = args[1:]
		if len(args) == 0 {
			return a, usagef("Subcommand mig needs an option: -lgi lists the GPU instances.")
		}
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
		// interval takes a value that may be absent, in the given unit.
		interval := func(unit time.Duration) error {
			if !hasValue && (len(args) == 0 || strings.HasPrefix(args[0], "-")) {
				a.loop = defaultLoop
				return nil
			}
			text, err := take()
			if err != nil {
				return err
			}
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 || n > 1_000_000 {
				return usagef("Invalid loop interval %q: give a whole number from 1 to 1000000.", text)
			}
			a.loop = time.Duration(n) * unit
			return nil
		}

		var err error
		switch option {
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
		case "-lgi", "--list-gpu-instances":
			if !mig {
				err = usagef("ERROR: Option %s is not recognized. Please run 'nvidia-smi -h' for help.", option)
				break
			}
			err = choose(showInstances, option)
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
	switch {
	case query && a.format == "":
		return a, usagef("\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.")
	case !query && a.format != "", mig && a.action != showInstances && a.action != showHelp:
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
    -l, --loop[=SECONDS]          Print again every SECONDS (5) until interrupted.
    -lms, --loop-ms=MILLISECONDS  The same in milliseconds.
    -f, --filename=FILE           Write to FILE instead of standard output.

    nvidia-smi mig -lgi [-i ID]   List the GPU instances.

Without options it prints a table of GPUs, MIG devices and processes. Memory is what
simgpu-run and other clients hold; temperature and power are made up.

Exit code: 0 success, 2 bad arguments, 3 not simulated, 6 no such device, 9 the node
driver does not answer, 15 a GPU is lost, 255 anything else.

Environment: SIMGPU_DIR, where to look for devices instead of /run/simgpu.
`
