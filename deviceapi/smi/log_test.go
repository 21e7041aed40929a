package smi

import (
	"encoding/xml"
	"strings"
	"testing"

	"github.com/simgpu/simgpu/deviceapi"
)

func TestLog(t *testing.T) {
	for _, name := range []string{"two-slices-node", "two-slices-container", "two-gpus", "no-partitions-no-power-limit"} {
		t.Run(name, func(t *testing.T) {
			r := report(t, snapshots()[name])
			golden(t, name+".log", r.Log())
			document := r.XML()
			golden(t, name+".xml", document)
			var parsed struct {
				GPUs []struct {
					UUID   string `xml:"uuid"`
					Memory struct {
						Used string `xml:"used"`
					} `xml:"fb_memory_usage"`
					Partitions []struct {
						Instance string `xml:"gpu_instance_id"`
					} `xml:"mig_devices>mig_device"`
					Processes []struct {
						PID string `xml:"pid"`
					} `xml:"processes>process_info"`
				} `xml:"gpu"`
			}
			if err := xml.Unmarshal([]byte(document), &parsed); err != nil {
				t.Fatalf("%v\n%s", err, document)
			}
			if len(parsed.GPUs) != len(r.gpus) {
				t.Fatalf("%d GPUs, want %d", len(parsed.GPUs), len(r.gpus))
			}
			for i, g := range r.gpus {
				got := parsed.GPUs[i]
				if got.UUID != g.UUID || len(got.Partitions) != len(g.Partitions) || len(got.Processes) != len(g.everyProcess()) || got.Memory.Used == "" {
					t.Errorf("GPU %d reads %+v", i, got)
				}
			}
		})
	}
}

// Lines of real hardware: an H200 with driver 580, and others with a driver before that.
func TestLogLinesAreThoseOfTheRealTool(t *testing.T) {
	for name, lines := range map[string][]string{
		"two-slices-node": {
			"Driver Version                                         : 580.95.05",
			"Attached GPUs                                          : 1",
			"    MIG Mode",
			"        Current                                        : Enabled",
			"    MIG Device",
			"        GPU Instance ID                                : 2",
			"                Multiprocessor count                   : 60",
			"                SRAM Uncorrectable                     : 0",
			"            Reserved                                   : 0 MiB",
			"        Encoder                                        : N/A",
			"        Process ID                        : 12345",
			"            Used GPU Memory               : 15023 MiB",
		},
		"no-partitions-no-power-limit": {
			"Driver Version                            : 550.54.15",
			"    Processes                             : None",
		},
	} {
		got := "\n" + report(t, snapshots()[name]).Log()
		for _, line := range lines {
			if !strings.Contains(got, "\n"+line+"\n") {
				t.Errorf("%s: missing: %s\nin\n%s", name, line, got)
			}
		}
	}
}

func TestDisplays(t *testing.T) {
	r := report(t, snapshots()["two-gpus"])
	displays, err := ParseDisplays("memory, Pids")
	if err != nil {
		t.Fatal(err)
	}
	got := r.Log(displays...)
	for _, want := range []string{"FB Memory Usage", "BAR1 Memory Usage", "Processes", "GPU 00000000:1B:00.0"} {
		if strings.Count(got, want) < 1 {
			t.Errorf("%q is missing in\n%s", want, got)
		}
	}
	for _, avoid := range []string{"Product Name", "Utilization", "ECC"} {
		if strings.Contains(got, avoid) {
			t.Errorf("%q was not asked for:\n%s", avoid, got)
		}
	}
	if _, err := ParseDisplays("MEMORY,WEATHER"); err == nil {
		t.Error("WEATHER is known")
	}
	// What the log has under a name can be asked for.
	for _, e := range r.gpus[0].log() {
		if e.display == "" {
			continue
		}
		if _, err := ParseDisplays(e.display); err != nil {
			t.Errorf("%s: %v", e.label, err)
		}
	}
}

func TestBrokenDevicesInTheLog(t *testing.T) {
	s := snapshots()["two-slices-node"]
	s.GPUs[0].Health = deviceapi.Health{ECCCorrected: 12, ECCUncorrected: 3}
	s.GPUs[0].Partitions[1].Health = deviceapi.Health{ECCUncorrected: 3}
	text := report(t, s).Log("ECC")
	for _, want := range []string{"DRAM Correctable                           : 12\n", "DRAM Uncorrectable                         : 3\n"} {
		if strings.Count(text, want) != 2 { // volatile and aggregate
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
	if document := report(t, s).XML(); !strings.Contains(document, "<sram_uncorrectable>3</sram_uncorrectable>") {
		t.Errorf("the partition has no errors in\n%s", document)
	}
}

func TestXMLEscapes(t *testing.T) {
	s := snapshots()["two-gpus"]
	s.GPUs[0].Processes[0].Name = "a<b>&c"
	document := report(t, s).XML()
	if !strings.Contains(document, "<process_name>a&lt;b&gt;&amp;c</process_name>") {
		t.Error(document)
	}
}

func TestMonitors(t *testing.T) {
	for _, name := range []string{"two-slices-node", "two-gpus", "no-partitions-no-power-limit"} {
		r := report(t, snapshots()[name])
		golden(t, name+".dmon", DeviceMonitorHead+r.DeviceMonitor())
		golden(t, name+".pmon", ProcessMonitorHead+r.ProcessMonitor())
	}
	// A line of an idle H200 in MIG mode.
	const idle = "    0          -     -      -      -      -      -      -      -    -              \n"
	if got := report(t, snapshots()["no-slice"]).ProcessMonitor(); got != idle {
		t.Errorf("got %q, want %q", got, idle)
	}
}
