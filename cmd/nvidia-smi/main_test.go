package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/simgpu/simgpu/deviceapi"
)

func TestParse(t *testing.T) {
	tests := map[string]struct {
		args string
		want arguments
	}{
		"nothing":                    {"", arguments{}},
		"list":                       {"-L", arguments{action: showList}},
		"list of one":                {"-i 0 --list-gpus", arguments{action: showList, ids: "0"}},
		"ids after an equals sign":   {"--id=0,1", arguments{ids: "0,1"}},
		"a query":                    {"--query-gpu=index,name --format=csv,noheader", arguments{action: showGPUs, fields: "index,name", format: "csv,noheader"}},
		"a query with spaces":        {"--format csv --query-gpu index", arguments{action: showGPUs, fields: "index", format: "csv"}},
		"processes":                  {"--query-compute-apps=pid --format=csv", arguments{action: showComputeApps, fields: "pid", format: "csv"}},
		"a loop with a value":        {"-l 2", arguments{loop: 2 * time.Second}},
		"a loop without a value":     {"-l", arguments{loop: defaultLoop}},
		"a loop before an option":    {"--loop -i 0", arguments{loop: defaultLoop, ids: "0"}},
		"milliseconds":               {"-lms=250", arguments{loop: 250 * time.Millisecond}},
		"a file":                     {"-f out -L", arguments{action: showList, file: "out"}},
		"instances":                  {"mig -lgi -i 0", arguments{action: showInstances, ids: "0"}},
		"instances, options swapped": {"mig -i 0 -lgi", arguments{action: showInstances, ids: "0"}},
		"the log":                    {"-q", arguments{action: showLog}},
		"the log as XML":             {"-x -q -i 1", arguments{action: showLog, xml: true, ids: "1"}},
		"parts of the log":           {"-q -d memory,ECC", arguments{action: showLog, displays: "memory,ECC"}},
		"profiles":                   {"mig -lgip", arguments{action: showProfiles}},
		"placements":                 {"mig --list-gpu-instance-possible-placements", arguments{action: showPlacements}},
		"compute instances of one":   {"mig -gi 1 -lci", arguments{action: showComputeInstances, instances: "1"}},
		"compute profiles":           {"mig -lcip -i 0 -gi 2", arguments{action: showComputeProfiles, instances: "2", ids: "0"}},
		"the device monitor":         {"dmon", arguments{action: showDeviceMonitor, loop: defaultDelay}},
		"one sample":                 {"dmon -c 1 -i 0", arguments{action: showDeviceMonitor, loop: defaultDelay, count: 1, ids: "0"}},
		"the process monitor":        {"pmon --count=3 -d 2", arguments{action: showProcessMonitor, loop: 2 * time.Second, count: 3}},
		"help of a subcommand":       {"mig -h", arguments{action: showHelp}},
		"fields of a query":          {"--help-query-gpu", arguments{action: showGPUFields}},
		"version":                    {"--version", arguments{action: showVersion}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := parse(strings.Fields(test.args))
			if err != nil || got != test.want {
				t.Errorf("parse(%s) = %+v, %v, want %+v", test.args, got, err, test.want)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	tests := map[string]struct {
		args string
		want string
		code int
	}{
		"an unknown option":       {"--frobnicate", "ERROR: Option --frobnicate is not recognized. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"a word":                  {"list", "ERROR: Option list is not recognized. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"a missing value":         {"-i", "ERROR: Option -i is missing its value. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"an empty value":          {"--query-gpu= --format=csv", "ERROR: Option --query-gpu is missing its value. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"a query without format":  {"--query-gpu=index", `"--format=" switch is missing. Please run 'nvidia-smi -h' for help.`, exitBadArguments},
		"two queries":             {"--query-gpu=index --query-compute-apps=pid --format=csv", "Only one --query-* switch can be used at a time.", exitBadArguments},
		"two outputs":             {"-L --version", "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"a format without query":  {"-L --format=csv", "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"instances outside mig":   {"-lgi", "ERROR: Option -lgi is not recognized. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"mig alone":               {"mig", "Subcommand mig needs an option: -lgi lists the GPU instances.", exitBadArguments},
		"mig with a main option":  {"mig -L", "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"a loop of zero":          {"-l 0", `Invalid loop interval "0": give a whole number from 1 to 1000000.`, exitBadArguments},
		"XML of the table":        {"-x", "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"parts of XML":            {"-q -x -d ECC", "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"parts of the table":      {"-d ECC", "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"an instance of profiles": {"mig -lgip -gi 1", "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"no samples":              {"dmon -c 0", `Invalid count "0": give a whole number from 1 to 1000000.`, exitBadArguments},
		"a loop of a monitor":     {"pmon -l 2", "ERROR: Option -l is not recognized. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"two lists of mig":        {"mig -lgi -lci", "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"a list of a monitor":     {"dmon -L", "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.", exitBadArguments},
		"what is not simulated":   {"topo -m", "Option topo of nvidia-smi is not simulated. Please run 'nvidia-smi -h' for what is.", exitNotSupported},
		"metrics of a monitor":    {"dmon -s pu", "Option -s of nvidia-smi is not simulated. Please run 'nvidia-smi -h' for what is.", exitNotSupported},
		"changing partitions":     {"mig -cgi 9 -C", "Option -cgi of nvidia-smi is not simulated. Please run 'nvidia-smi -h' for what is.", exitNotSupported},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := parse(strings.Fields(test.args))
			if err == nil || err.Error() != test.want || exitCode(err) != test.code {
				t.Errorf("parse(%s) fails with %v, code %d; want %s, code %d", test.args, err, exitCode(err), test.want, test.code)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add("--query-gpu=index\x00--format=csv")
	f.Add("-l\x00-i\x000")
	f.Add("mig\x00-lgi")
	f.Fuzz(func(t *testing.T, line string) {
		a, err := parse(strings.Split(line, "\x00"))
		if err != nil {
			if code := exitCode(err); code != exitBadArguments && code != exitNotSupported {
				t.Errorf("%q fails with %v, code %d", line, err, code)
			}
			return
		}
		if a.loop < 0 || (a.format == "") == (a.action == showGPUs || a.action == showComputeApps) {
			t.Errorf("%q is understood as %+v", line, a)
		}
	})
}

// serve starts a driver with one GPU and returns the folder to look in.
func serve(t *testing.T) (dir string, server *deviceapi.Server) {
	t.Helper()
	dir, err := os.MkdirTemp("", "smi") //nolint:usetesting // the path of t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	server = deviceapi.NewServer(deviceapi.ServerOptions{})
	t.Cleanup(func() {
		server.Stop()
		os.RemoveAll(dir)
	})
	gpu := deviceapi.GPU{
		UUID: "GPU-1", ProductName: "NVIDIA H100 80GB HBM3", PCIBusID: "0000:1b:00.0", DriverVersion: "580.95.05", CUDAVersion: "13.0",
		MIGMode: deviceapi.MIGDisabled, MemoryBytes: 81559 * deviceapi.MiB,
	}
	if err := server.Open(filepath.Join(dir, "dev"), deviceapi.Device{GPU: gpu}); err != nil {
		t.Fatal(err)
	}
	return dir, server
}

func TestRun(t *testing.T) {
	dir, server := serve(t)
	tests := map[string]struct {
		args     string
		want     string // in the output or the message
		wantCode int
	}{
		"table":            {"", "0MiB /  81559MiB", 0},
		"list":             {"-L", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n", 0},
		"query":            {"--query-gpu=uuid,memory.total --format=csv,noheader", "GPU-1, 81559 MiB\n", 0},
		"processes":        {"--query-compute-apps=pid --format=csv", "pid\n", 0},
		"help":             {"-h", "Exit code: 0 success", 0},
		"fields":           {"--help-query-gpu", `"uuid" or "gpu_uuid"`, 0},
		"process fields":   {"--help-query-compute-apps", `"used_gpu_memory" or "used_memory"`, 0},
		"version":          {"--version", "DRIVER version      : 580.95.05", 0},
		"an unknown field": {"--query-gpu=x --format=csv", "Field \"x\" is not a valid field to query.\n", exitBadArguments},
		"an unknown form":  {"--query-gpu=uuid --format=xml", `format option "xml" is not known`, exitBadArguments},
		"another GPU":      {"-i 1", "No devices were found", exitNotFound},
		"no instances":     {"mig -lgi", "No MIG-enabled devices found.", exitNotFound},
		"no profiles":      {"mig -lgip", "No MIG-enabled devices found.", exitNotFound},
		"the log":          {"-q", "==============NVSMI LOG==============", 0},
		"a part of it":     {"-q -d MEMORY", "FB Memory Usage", 0},
		"XML":              {"-q -x", "<uuid>GPU-1</uuid>", 0},
		"an unknown part":  {"-q -d WEATHER", `Display type "WEATHER" is not known: use MEMORY, `, exitBadArguments},
		"a sample":         {"dmon -c 1", "# gpu    pwr", 0},
		"processes of one": {"pmon -c 1 -i 0", "# gpu         pid", 0},
		"a bad file":       {"-L -f /dev/null/x", "not a directory", exitOther},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			err := run(t.Context(), strings.Fields(test.args), dir, &out)
			if err != nil {
				out.WriteString(message(err))
			}
			if code := exitCode(err); code != test.wantCode || !strings.Contains(out.String(), test.want) {
				t.Errorf("code %d, want %d; output\n%s\nwant in it: %s", code, test.wantCode, out.String(), test.want)
			}
		})
	}

	t.Run("a file", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "out")
		var out strings.Builder
		if err := run(t.Context(), []string{"-L", "-f", path}, dir, &out); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || !strings.HasPrefix(string(got), "GPU 0:") || out.Len() != 0 {
			t.Errorf("the file has %q (%v), standard output %q", got, err, out.String())
		}
	})

	t.Run("a loop ends with its context", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		out := &lineCounter{enough: 3, then: cancel}
		if err := run(ctx, []string{"-L", "-lms", "1"}, dir, out); err != nil {
			t.Error(err)
		}
	})

	t.Run("samples have one head", func(t *testing.T) {
		a, err := parse(strings.Fields("pmon -c 2"))
		if err != nil {
			t.Fatal(err)
		}
		if a.loop != defaultDelay {
			t.Errorf("a sample every %s", a.loop)
		}
		var out strings.Builder
		for n := range 2 {
			if err := show(t.Context(), a, dir, &out, n == 0); err != nil {
				t.Fatal(err)
			}
		}
		if heads, lines := strings.Count(out.String(), "# gpu"), strings.Count(out.String(), "\n"); heads != 1 || lines != 4 {
			t.Errorf("%d heads in %d lines:\n%s", heads, lines, out.String())
		}
	})

	t.Run("a lost GPU", func(t *testing.T) {
		server.SetHealth(map[string]deviceapi.Health{"GPU-1": {Lost: true}})
		defer server.SetHealth(nil)
		for _, args := range []string{"", "-L", "--query-gpu=uuid --format=csv"} {
			var out strings.Builder
			err := run(t.Context(), strings.Fields(args), dir, &out)
			if exitCode(err) != exitGPULost || !strings.Contains(message(err), "GPU 00000000:1B:00.0: GPU is lost.") || out.Len() != 0 {
				t.Errorf("%q fails with %v, code %d, after %q", args, err, exitCode(err), out.String())
			}
		}
	})

	t.Run("no driver", func(t *testing.T) {
		server.Stop()
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		err := run(ctx, nil, dir, &strings.Builder{})
		if exitCode(err) != exitNoDriver || !strings.Contains(message(err), "simgpu-kubelet-plugin") {
			t.Errorf("fails with %v, code %d, want code %d and what to look at", err, exitCode(err), exitNoDriver)
		}
	})

	t.Run("no devices", func(t *testing.T) {
		err := run(t.Context(), nil, filepath.Join(dir, "absent"), &strings.Builder{})
		if !errors.Is(err, deviceapi.ErrNoDevices) || exitCode(err) != exitNotFound || !strings.HasPrefix(message(err), "No devices were found\n") {
			t.Errorf("fails with %q, code %d, want the real tool's message and code %d", message(err), exitCode(err), exitNotFound)
		}
	})
}

// lineCounter calls then after enough writes.
type lineCounter struct {
	enough int
	then   func()
}

func (c *lineCounter) Write(p []byte) (int, error) {
	if c.enough--; c.enough == 0 {
		c.then()
	}
	return len(p), nil
}
