package smi

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/simgpu/simgpu/deviceapi"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

const mebibyte = deviceapi.MiB

var now = time.Date(2026, time.March, 4, 5, 6, 7, 89_000_000, time.UTC)

func h100(driver, cuda string) deviceapi.GPU {
	return deviceapi.GPU{
		UUID:              "GPU-5b6e0f1c-7d1f-4c55-9a25-6f0ad6f3a001",
		ProductName:       "NVIDIA H100 80GB HBM3",
		PCIBusID:          "0000:1b:00.0",
		Serial:            "1654422006081",
		DriverVersion:     driver,
		CUDAVersion:       cuda,
		ComputeCapability: "9.0.0",
		MIGMode:           deviceapi.MIGDisabled,
		MemoryBytes:       81559 * mebibyte,
		PowerLimitWatts:   700,
		Profiles:          h100Profiles(),
	}
}

func slice3g(instance int, used int64, processes ...deviceapi.Process) deviceapi.PartitionStatus {
	uuids := []string{"MIG-0d9a6b1e-52a4-5d0c-8f1d-2a6a4bb7c001", "MIG-4e7d2c9f-1b3a-5e8f-9c6d-7f5e3a2b1c02"}
	return deviceapi.PartitionStatus{
		Partition: deviceapi.Partition{
			UUID: uuids[instance-1], Profile: "3g.40gb", GPUInstanceID: instance, ProfileID: 9,
			PlacementStart: 4 * (instance - 1), PlacementSize: 4,
			MemoryBytes: 40448 * mebibyte, Multiprocessors: 60, CopyEngines: 3, Decoders: 3, JPEGEngines: 3,
		},
		MemoryUsed: used * mebibyte,
		Processes:  processes,
	}
}

func python(pid int, mib int64) deviceapi.Process {
	return deviceapi.Process{PID: pid, Name: "python3", Memory: mib * mebibyte}
}

// snapshots are the situations that the golden files show.
func snapshots() map[string]deviceapi.Snapshot {
	partitioned := func(driver, cuda string) deviceapi.GPU {
		g := h100(driver, cuda)
		g.MIGMode = deviceapi.MIGEnabled
		return g
	}
	two := []deviceapi.PartitionStatus{slice3g(1, 15023, python(12345, 15023)), slice3g(2, 15023, python(12389, 15023))}
	busy, idle := h100("580.95.05", "13.0"), h100("580.95.05", "13.0")
	idle.UUID, idle.PCIBusID, idle.Minor = "GPU-5b6e0f1c-7d1f-4c55-9a25-6f0ad6f3a002", "0000:43:00.0", 1
	t4 := deviceapi.GPU{
		UUID: "GPU-9c1d", ProductName: "Tesla T4", PCIBusID: "0000:00:04.0", DriverVersion: "550.54.15", CUDAVersion: "12.4",
		ComputeCapability: "7.5", MemoryBytes: 15360 * mebibyte,
	}
	blackwell := deviceapi.GPU{
		UUID: "GPU-77aa", ProductName: "NVIDIA RTX PRO 6000 Blackwell Server Edition", PCIBusID: "00000001:61:00.0",
		DriverVersion: "590.48.01", CUDAVersion: "13.1", MemoryBytes: 97887 * mebibyte, PowerLimitWatts: 600,
	}
	one := func(g deviceapi.GPUStatus) deviceapi.Snapshot {
		return deviceapi.Snapshot{GPUs: []deviceapi.GPUStatus{g}}
	}
	return map[string]deviceapi.Snapshot{
		// The article's picture: the node with both slices in use.
		"two-slices-node": one(deviceapi.GPUStatus{GPU: partitioned("580.95.05", "13.0"), Whole: true, MemoryUsed: 30046 * mebibyte, Partitions: two}),
		// The same in one of the two containers.
		"two-slices-container": one(deviceapi.GPUStatus{GPU: partitioned("580.95.05", "13.0"), Partitions: two[1:]}),
		"two-slices-570":       one(deviceapi.GPUStatus{GPU: partitioned("570.148.08", "12.8"), Whole: true, MemoryUsed: 30046 * mebibyte, Partitions: two}),
		"no-slice":             one(deviceapi.GPUStatus{GPU: partitioned("580.95.05", "13.0"), Whole: true}),
		"two-gpus": {GPUs: []deviceapi.GPUStatus{
			{GPU: busy, Whole: true, MemoryUsed: 70000 * mebibyte, Utilization: 87, Processes: []deviceapi.Process{
				python(1, 60000),
				{PID: 4194303, Name: "/opt/venvs/serving/lib/python3.12/bin/python3", Memory: 10000 * mebibyte},
			}},
			{GPU: idle, Whole: true},
		}},
		"ecc-errors": one(deviceapi.GPUStatus{GPU: busy, Whole: true, Health: deviceapi.Health{XID: 48, ECCCorrected: 3, ECCUncorrected: 12}}),
		"ecc-errors-of-a-slice": one(deviceapi.GPUStatus{GPU: partitioned("580.95.05", "13.0"), Whole: true, Health: deviceapi.Health{ECCUncorrected: 12},
			Partitions: []deviceapi.PartitionStatus{slice3g(1, 0), func() deviceapi.PartitionStatus {
				p := slice3g(2, 0)
				p.Health.ECCUncorrected = 12
				return p
			}()}}),
		"no-partitions-no-power-limit": one(deviceapi.GPUStatus{GPU: t4, Whole: true}),
		"long-name":                    one(deviceapi.GPUStatus{GPU: blackwell, Whole: true, Utilization: 100}),
	}
}

func report(t *testing.T, s deviceapi.Snapshot) *Report {
	t.Helper()
	r, err := NewReport(s, now)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; go test -update accepts it):\n%s", path, diff)
	}
}

func TestTable(t *testing.T) {
	for name, s := range snapshots() {
		t.Run(name, func(t *testing.T) {
			got := report(t, s).Table()
			golden(t, name+".table", got)
			for i, line := range strings.Split(strings.TrimSuffix(got, "\n"), "\n") {
				if i == 0 || strings.TrimSpace(line) == "" {
					continue // the date and the lines between the boxes
				}
				if width := utf8.RuneCountInString(line); width != lineWidth {
					t.Errorf("line %d has %d characters, want %d: %s", i+1, width, lineWidth, line)
				}
			}
		})
	}
}

// Lines of real hardware, with values that a snapshot can say.
func TestTableLinesAreThoseOfTheRealTool(t *testing.T) {
	s := snapshots()
	tests := map[string][]string{
		"two-slices-node": {
			"| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |",
			"|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                   On |",
			"|                                         |                        |              Enabled |",
			"| GPU  GI  CI  MIG |              Shared Memory-Usage |        Vol|        Shared         |",
			"|  0    1   0   0  |           15023MiB / 40448MiB    | 60      0 |  3   0    3    0    3 |",
			"|    0    1    0            12345      C   python3                               15023MiB |",
		},
		"two-slices-container": {
			" |                  N/A   |     N/A      Default |",
		},
		"two-slices-570": {
			"|-----------------------------------------+------------------------+----------------------+",
			"| GPU  GI  CI  MIG |                     Memory-Usage |        Vol|        Shared         |",
			"|      ID  ID  Dev |                       BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG |",
			"|                  |                 0MiB / 65535MiB  |           |                       |",
		},
		"no-slice": {
			"|  No MIG devices found                                                                   |",
			"|  No running processes found                                                             |",
		},
		"two-gpus": {
			"|                                         |                        |             Disabled |",
			" |       0MiB /  81559MiB |      0%      Default |",
			"|    0   N/A  N/A               1      C   python3                               60000MiB |",
			"|    0   N/A  N/A         4194303      C   ...ng/lib/python3.12/bin/python3      10000MiB |",
		},
		"no-partitions-no-power-limit": {
			"    P8            N/A  /  N/A  |       0MiB /  15360MiB |      0%      Default |",
			"|                                         |                        |                  N/A |",
		},
		"long-name": {
			"|   0  NVIDIA RTX PRO 6000 Blac...    On  |   00000001:61:00.0 Off |                    0 |",
		},
	}
	for name, lines := range tests {
		t.Run(name, func(t *testing.T) {
			got := report(t, s[name]).Table()
			for _, line := range lines {
				if !strings.Contains(got, line) {
					t.Errorf("missing: %s\nin\n%s", line, got)
				}
			}
		})
	}
}

func TestOtherOutputs(t *testing.T) {
	s := snapshots()
	container, node, gpus := report(t, s["two-slices-container"]), report(t, s["two-slices-node"]), report(t, s["two-gpus"])
	must := func(text string, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	const fields = "index,name,uuid,serial,pci.bus_id,driver_version,memory.total,memory.used,memory.free,utilization.gpu," +
		"temperature.gpu,power.draw,power.limit,mig.mode.current,compute_cap,count,timestamp,pstate,fan.speed,gpu_name"
	golden(t, "two-slices-node.list", node.List())
	golden(t, "two-slices-node.instances", must(node.Instances()))
	golden(t, "two-slices-node.gpus.csv", must(node.GPUs(fields, Format{})))
	golden(t, "two-slices-container.gpus.csv", must(container.GPUs(fields, Format{})))
	golden(t, "two-gpus.gpus.csv", must(gpus.GPUs(fields, Format{})))
	golden(t, "two-gpus.gpus-bare.csv", must(gpus.GPUs("memory.total, memory.used,pci.domain,pci.bus,pci.device", Format{NoHeader: true, NoUnits: true})))
	golden(t, "two-slices-node.processes.csv", must(node.ComputeApps("pid,process_name,used_memory,gpu_uuid", Format{})))
	golden(t, "two-gpus.processes.csv", must(gpus.ComputeApps("pid,name,used_gpu_memory,gpu_bus_id", Format{NoUnits: true})))
	golden(t, "version", node.Version())
	golden(t, "fields", GPUFields()+"\n"+ComputeAppFields())
}

func TestEveryFieldHasAValue(t *testing.T) {
	for name, s := range snapshots() {
		t.Run(name, func(t *testing.T) {
			r := report(t, s)
			for _, p := range gpuProperties() {
				for _, field := range p.names {
					got, err := r.GPUs(field, Format{NoHeader: true})
					if err != nil || strings.Contains(got, "\n\n") || strings.HasPrefix(got, "\n") {
						t.Errorf("field %s gives %q, %v", field, got, err)
					}
				}
			}
		})
	}
}

func TestUnknownField(t *testing.T) {
	r := report(t, snapshots()["two-gpus"])
	const want = `Field "cuda_version" is not a valid field to query.`
	for name, query := range map[string]func(string, Format) (string, error){"GPUs": r.GPUs, "ComputeApps": r.ComputeApps} {
		_, err := query("gpu_uuid,cuda_version", Format{})
		var unknown *UnknownFieldError
		if !errors.As(err, &unknown) || err.Error() != want {
			t.Errorf("%s fails with %v, want %s", name, err, want)
		}
	}
}

func TestSelect(t *testing.T) {
	r := report(t, snapshots()["two-gpus"])
	first, second := r.gpus[0].UUID, r.gpus[1].UUID
	tests := map[string]struct {
		ids  string
		want []string // nil: ErrNoDevices
	}{
		"an index":                {"1", []string{second}},
		"an index and a UUID":     {"1, " + first, []string{first, second}},
		"the same twice":          {"0,0", []string{first}},
		"a UUID in other case":    {strings.ToUpper(second), []string{second}},
		"a serial number":         {"1654422006081", []string{first, second}},
		"a short PCI address":     {"0000:43:00.0", []string{second}},
		"the tool's PCI address":  {"00000000:43:00.0", []string{second}},
		"an unknown index":        {"0,2", nil},
		"nothing":                 {"", nil},
		"something else entirely": {"x:y", nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			selected, err := r.Select(test.ids)
			if test.want == nil {
				if !errors.Is(err, ErrNoDevices) {
					t.Errorf("got %v, want ErrNoDevices", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got, err := selected.GPUs("uuid", Format{NoHeader: true})
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.Join(test.want, "\n") + "\n"; got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
	selected, err := r.Select("1")
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := selected.GPUs("index,count", Format{NoHeader: true}); got != "1, 2\n" {
		t.Errorf("a selected GPU shows index and count as %q, want its own index and all GPUs", got)
	}
}

func TestNothingToShow(t *testing.T) {
	if _, err := NewReport(deviceapi.Snapshot{}, now); !errors.Is(err, ErrNoDevices) {
		t.Errorf("an empty snapshot gives %v, want ErrNoDevices", err)
	}
	s := snapshots()
	if _, err := report(t, s["two-gpus"]).Instances(); !errors.Is(err, ErrNoMIGDevices) {
		t.Errorf("GPUs without MIG give %v, want ErrNoMIGDevices", err)
	}
	if _, err := report(t, s["no-slice"]).Instances(); !errors.Is(err, ErrNoInstances) {
		t.Errorf("a GPU without partitions gives %v, want ErrNoInstances", err)
	}
}

// Figures of drivers up to 570 on real hardware.
func TestBAR1(t *testing.T) {
	tests := map[string]struct{ gpu, partition, want int64 }{
		"H100 80GB 3g.40gb":  {81559, 40448, 65535},
		"H100 80GB 1g.10gb":  {81559, 9984, 16383},
		"H100 NVL 3g.47gb":   {95830, 47488, 65535},
		"H100 NVL 1g.24gb":   {95830, 22144, 32767},
		"A100 80GB 2g.20gb":  {81920, 19968, 32767},
		"A100 40GB 1g.5gb":   {40960, 4864, 8191},
		"A100 40GB 2g.10gb":  {40960, 9856, 16383},
		"A100 80GB 1g.10gb":  {81920, 9728, 16383},
		"A100 80GB 3g.40gb":  {81920, 40192, 65535},
		"not a power of two": {65536, 65536, 65535},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := bar1(deviceapi.GPU{MemoryBytes: test.gpu * mebibyte}, deviceapi.Partition{MemoryBytes: test.partition * mebibyte})
			if got != test.want {
				t.Errorf("got %d MiB, want %d", got, test.want)
			}
		})
	}
}

func TestECCErrorsInQueries(t *testing.T) {
	s := snapshots()["ecc-errors"]
	got, err := report(t, s).GPUs("ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total", Format{NoHeader: true})
	if want := "3, 12, 12\n"; err != nil || got != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
}

func TestLostGPU(t *testing.T) {
	s := snapshots()["two-gpus"]
	s.GPUs[1].Health.Lost = true
	r := report(t, s)
	const want = "Unable to determine the device handle for GPU 00000000:43:00.0: GPU is lost.  Reboot the system to recover this GPU"
	if err := r.Lost(); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	other, err := r.Select("0")
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Lost(); err != nil {
		t.Errorf("the other GPU: %v", err)
	}
}

func TestParseFormat(t *testing.T) {
	tests := map[string]struct {
		list    string
		want    Format
		wantErr string
	}{
		"csv":            {list: "csv"},
		"all of it":      {list: "csv,noheader,nounits", want: Format{NoHeader: true, NoUnits: true}},
		"in other order": {list: "nounits, csv", want: Format{NoUnits: true}},
		"no csv":         {list: "noheader", wantErr: "must contain csv"},
		"xml":            {list: "csv,xml", wantErr: `"xml" is not known`},
		"empty":          {list: "", wantErr: `"" is not known`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := ParseFormat(test.list)
			if test.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), test.wantErr) {
					t.Errorf("got %v, want an error that says %q", err, test.wantErr)
				}
				return
			}
			if err != nil || got != test.want {
				t.Errorf("got %+v, %v, want %+v", got, err, test.want)
			}
		})
	}
}

// Whatever is asked, a query answers with one line a GPU or with an error.
func FuzzQuery(f *testing.F) {
	f.Add("index,memory.used", "csv,noheader")
	f.Add(",,", "csv")
	f.Add("timestamp , gpu_name", "nounits,csv,")
	f.Fuzz(func(t *testing.T, fields, format string) {
		parsed, err := ParseFormat(format)
		if err != nil {
			return
		}
		r := report(t, snapshots()["two-gpus"])
		got, err := r.GPUs(fields, parsed)
		if err != nil {
			var unknown *UnknownFieldError
			if !errors.As(err, &unknown) {
				t.Errorf("GPUs(%q) fails with %v, want an UnknownFieldError", fields, err)
			}
			return
		}
		lines := len(r.gpus)
		if !parsed.NoHeader {
			lines++
		}
		if strings.Count(got, "\n") != lines {
			t.Errorf("GPUs(%q) writes %q, want %d lines", fields, got, lines)
		}
	})
}
