package profiles

import (
	"io/fs"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

func builtIn(t *testing.T) *Catalogue {
	t.Helper()
	catalogue, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	return catalogue
}

func table(t *testing.T, catalogue *Catalogue, id, driverVersion string) *Table {
	t.Helper()
	model, err := catalogue.Model(id)
	if err != nil {
		t.Fatal(err)
	}
	table, err := model.Table(driverVersion)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func TestModels(t *testing.T) {
	var ids []string
	for _, model := range builtIn(t).Models() {
		ids = append(ids, model.ID)
	}
	all := []string{"a10-24gb", "a100-40gb", "a100-80gb", "a30-24gb", "b200-180gb", "b300-288gb", "gb200-186gb", "gb300-288gb", "gh200-144gb",
		"gh200-96gb", "h100-nvl-94gb", "h100-pcie-80gb", "h100-sxm5-80gb", "h200-141gb", "l4-24gb", "l40s-48gb", "rtx-pro-6000-96gb", "t4-16gb", "v100-16gb"}
	if diff := cmp.Diff(all, ids); diff != "" {
		t.Errorf("models (-want +got):\n%s", diff)
	}
	_, err := builtIn(t).Model("h100")
	if want := `unknown model "h100"; known models: ` + strings.Join(all, ", "); err == nil || err.Error() != want {
		t.Errorf("unknown model: got error %v, want %s", err, want)
	}
}

func TestDefaultTable(t *testing.T) {
	for id, want := range map[string][2]string{
		"h100-sxm5-80gb": {"580.95.05", "13.0"},
		"a100-40gb":      {"580.95.05", "13.0"},
		"a100-80gb":      {"570.169", "12.8"},
	} {
		t.Run(id, func(t *testing.T) {
			got := table(t, builtIn(t), id, "")
			if diff := cmp.Diff(want, [2]string{got.DriverVersion, got.CUDAVersion}); diff != "" {
				t.Errorf("driver and CUDA version (-want +got):\n%s", diff)
			}
			if _, err := got.Partitions(); err != nil {
				t.Errorf("the default table must be complete: %v", err)
			}
		})
	}
}

func TestTableOfDriverVersion(t *testing.T) {
	memory := func(driverVersion, profile string) int64 {
		t.Helper()
		profiles := table(t, builtIn(t), "a100-40gb", driverVersion).Profiles
		i := slices.IndexFunc(profiles, func(p *Profile) bool { return p.Name == profile })
		return profiles[i].Figures.MemoryMiB
	}
	if got := memory("590.48.01", "7g.40gb"); got != 40320 {
		t.Errorf("memory of 7g.40gb from driver 580 on: got %d MiB, want 40320", got)
	}
	h100 := table(t, builtIn(t), "h100-sxm5-80gb", "550.54.15")
	if h100.CUDAVersion != "12.4" {
		t.Errorf("CUDA version of driver 550.54.15: got %s, want 12.4", h100.CUDAVersion)
	}

	for name, test := range map[string]struct{ id, driverVersion, want string }{
		"between two ranges":   {"a100-40gb", "550.54.15", "no figures of model a100-40gb are sourced for driver version 550.54.15; sourced: from 580; 470 through 525 (default 580.95.05)"},
		"after the last range": {"a100-80gb", "580.95.05", "no figures of model a100-80gb are sourced for driver version 580.95.05; sourced: through 570 (default 570.169)"},
		"unknown branch":       {"h100-sxm5-80gb", "999.1", "the CUDA version of driver version 999.1 is not sourced; driver branches with one: 470, 495,"},
		"no version":           {"h100-sxm5-80gb", "latest", `driver version "latest" of model h100-sxm5-80gb is not a version like 580.95.05`},
		"branch only":          {"h100-sxm5-80gb", "580", `driver version "580" of model h100-sxm5-80gb is not a version like 580.95.05`},
	} {
		t.Run(name, func(t *testing.T) {
			model, err := builtIn(t).Model(test.id)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := model.Table(test.driverVersion); err == nil || !strings.HasPrefix(err.Error(), test.want) {
				t.Errorf("got error %v, want %s...", err, test.want)
			}
		})
	}
}

func TestAbsentFigures(t *testing.T) {
	_, err := table(t, builtIn(t), "h100-sxm5-80gb", "525.125").Partitions()
	want := "model h100-sxm5-80gb cannot be partitioned with driver version 525.125, nobody sourced: memory of 1g.10gb+me, 7g.80gb"
	if err == nil || err.Error() != want {
		t.Errorf("a range with absent memory: got error %v, want %s", err, want)
	}
	_, err = table(t, builtIn(t), "l4-24gb", "").Partitions()
	if want := "model l4-24gb cannot be partitioned"; err == nil || err.Error() != want {
		t.Errorf("a model without partitions: got error %v, want %s", err, want)
	}
}

// TestAsFarAsTheFiguresGo divides every model of the catalogue, or is told what is missing.
func TestAsFarAsTheFiguresGo(t *testing.T) {
	type known struct {
		partitions int    // 0: see err
		err        string // of the partitions
		absent     []string
	}
	eight := known{partitions: 25}
	whole := func(id string) known { return known{err: "model " + id + " cannot be partitioned"} }
	names := func(id, driver, absent string) known {
		return known{err: "model " + id + " cannot be partitioned with driver version " + driver + ", nobody sourced: " + absent, absent: []string{absent}}
	}
	want := map[string]known{
		"a10-24gb": whole("a10-24gb"), "l4-24gb": whole("l4-24gb"), "l40s-48gb": whole("l40s-48gb"), "t4-16gb": whole("t4-16gb"), "v100-16gb": whole("v100-16gb"),
		"a100-40gb": eight, "a100-80gb": eight, "b200-180gb": eight, "h100-nvl-94gb": eight, "h100-pcie-80gb": eight, "h100-sxm5-80gb": eight, "h200-141gb": eight,
		"a30-24gb": {partitions: 13}, "rtx-pro-6000-96gb": {partitions: 30},
		"gh200-96gb":  {partitions: 11, absent: []string{"memory of 1g.12gb, 1g.12gb+me"}},
		"b300-288gb":  names("b300-288gb", "580.95.05", "all figures of 1g.34gb, 1g.34gb+me, 1g.67gb, 2g.67gb, 3g.135gb, 4g.135gb, 7g.269gb"),
		"gb300-288gb": names("gb300-288gb", "590.48.01", "all figures of 1g.35gb, 1g.35gb+me, 1g.70gb, 2g.70gb, 3g.139gb, 4g.139gb, 7g.278gb"),
		"gb200-186gb": names("gb200-186gb", "580.95.05", "all figures of 3g.93gb, 4g.93gb, 7g.186gb"),
		"gh200-144gb": names("gh200-144gb", "580.95.05", "all figures of 3g.72gb, 4g.72gb, 7g.144gb"),
	}
	for _, model := range builtIn(t).Models() {
		t.Run(model.ID, func(t *testing.T) {
			table, err := model.Known("")
			if err != nil {
				t.Fatal(err)
			}
			partitions, err := table.Partitions()
			got := known{partitions: len(partitions), absent: table.Absent()}
			if err != nil {
				got.err = err.Error()
			}
			if diff := cmp.Diff(want[model.ID], got, cmp.AllowUnexported(known{})); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			_, err = model.Table("")
			if needed := "model gh200-144gb cannot be simulated, nobody sourced its product name and its memory"; model.ID == "gh200-144gb" {
				if err == nil || err.Error() != needed {
					t.Errorf("as a whole: got error %v, want %s", err, needed)
				}
			} else if err != nil {
				t.Errorf("as a whole: %v", err)
			}
		})
	}
}

func TestProfile(t *testing.T) {
	gb200 := table(t, builtIn(t), "gb200-186gb", "")
	if p, err := gb200.Profile("2g.47gb"); err != nil || p.ID != 14 {
		t.Errorf("2g.47gb: got %+v, %v", p, err)
	}
	for name, want := range map[string]string{
		"3g.93gb": "model gb200-186gb cannot have 3g.93gb with driver version 580.95.05, nobody sourced its multiprocessors, copyEngines, decoders, encoders, jpegEngines, ofaEngines, memory",
		"3g.40gb": `model gb200-186gb has no profile "3g.40gb" with driver version 580.95.05; it has: 1g.23gb, 1g.23gb+me, 1g.47gb, 2g.47gb, 3g.93gb, 4g.93gb, 7g.186gb`,
	} {
		if _, err := gb200.Profile(name); err == nil || err.Error() != want {
			t.Errorf("%s: got error %v, want %s", name, err, want)
		}
	}
}

// TestUnsourcedModel loads models of which little more than names is known; using them says what is missing.
func TestUnsourcedModel(t *testing.T) {
	const names = `
apiVersion: simgpu.dev/v1alpha1
kind: GPUModel
id: names-only
confidence: names-only
sources: [a list of product names]
gpu: {brand: Nvidia, architecture: Blackwell, computeCapability: 10.3.0, pciVendorID: "0x10de", pciDeviceID: "0x3182"}
defaultDriverVersion: 580.95.05
partitioning:
  memorySlices: 8
  maxInstances: 7
  wholeGPU: always
  profiles:
  - {id: 0, slices: 7, maxInstances: 1, placements: {size: 8, starts: [0]}, computeInstances: [{id: 0, slices: 7, maxInstances: 1}]}
drivers:
- source: a list of profile names
  profiles: {0: {name: 7g.269gb}}
`
	catalogue, err := LoadFS(withModel(t, "names-only", names))
	if err != nil {
		t.Fatal(err)
	}
	model, _ := catalogue.Model("names-only")
	_, err = model.Table("")
	if want := "model names-only cannot be simulated, nobody sourced its product name and its memory"; err == nil || err.Error() != want {
		t.Errorf("whole GPU: got error %v, want %s", err, want)
	}

	whole := strings.Replace(names, "brand: Nvidia", "brand: Nvidia, productName: NVIDIA B300 SXM6 AC, memoryMiB: 275040", 1)
	catalogue, err = LoadFS(withModel(t, "names-only", whole))
	if err != nil {
		t.Fatal(err)
	}
	_, err = table(t, catalogue, "names-only", "").Partitions()
	want := "model names-only cannot be partitioned with driver version 580.95.05, nobody sourced: all figures of 7g.269gb"
	if err == nil || err.Error() != want {
		t.Errorf("partitions: got error %v, want %s", err, want)
	}
}

func TestPartitionNames(t *testing.T) {
	for name, test := range map[string]struct {
		catalogue *Catalogue
		model     string
		count     int
		some      []string
	}{
		"eight slices": {builtIn(t), "h100-sxm5-80gb", 25, []string{
			"gpu-3-mig-1g10gb-19-0", "gpu-3-mig-1g10gb-19-6", "gpu-3-mig-1g10gb-me-20-3", "gpu-3-mig-1g20gb-15-6",
			"gpu-3-mig-2g20gb-14-4", "gpu-3-mig-3g40gb-9-0", "gpu-3-mig-3g40gb-9-4", "gpu-3-mig-4g40gb-5-0", "gpu-3-mig-7g80gb-0-0",
		}},
		"twelve slices and every suffix": {builtIn(t), "rtx-pro-6000-96gb", 30, []string{
			"gpu-3-mig-1g24gb-14-9", "gpu-3-mig-1g24gb-gfx-47-0", "gpu-3-mig-1g24gb-me-21-0", "gpu-3-mig-1g24gb-me-67-0",
			"gpu-3-mig-1g24gb-meall-65-0", "gpu-3-mig-2g48gb-5-6", "gpu-3-mig-4g96gb-gfx-32-0",
		}},
		"four slices": {builtIn(t), "a30-24gb", 13, []string{"gpu-3-mig-1g6gb-14-3", "gpu-3-mig-2g12gb-me-6-2", "gpu-3-mig-4g24gb-0-0"}},
	} {
		t.Run(name, func(t *testing.T) {
			table := table(t, test.catalogue, test.model, "")
			partitions, err := table.Partitions()
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, partition := range partitions {
				names = append(names, table.Model.Vendor.PartitionName(3, partition))
			}
			if len(names) != test.count {
				t.Errorf("got %d partitions, want %d: %v", len(names), test.count, names)
			}
			for _, want := range test.some {
				if !slices.Contains(names, want) {
					t.Errorf("%s is missing in %v", want, names)
				}
			}
			slices.Sort(names)
			if distinct := slices.Compact(slices.Clone(names)); len(distinct) != len(names) {
				t.Errorf("names are not unique: %v", names)
			}
		})
	}
}

func TestInstanceIDs(t *testing.T) {
	for name, test := range map[string]struct {
		catalogue *Catalogue
		model     string
		want      map[string]int // profile@start
	}{
		"A100 numbers from left to right": {builtIn(t), "a100-40gb", map[string]int{
			"7g.40gb@0": 0, "3g.20gb@0": 1, "4g.20gb@0": 1, "3g.20gb@4": 2, "2g.10gb@0": 3, "1g.10gb@6": 6, "1g.5gb@0": 7, "1g.5gb+me@6": 13,
		}},
		"Hopper rotates by half": {builtIn(t), "h100-sxm5-80gb", map[string]int{
			"7g.80gb@0": 0, "3g.40gb@4": 1, "3g.40gb@0": 2, "2g.20gb@4": 3, "1g.20gb@6": 4,
			"1g.10gb@4": 7, "1g.10gb@5": 8, "1g.10gb@6": 9, "1g.10gb@0": 11, "1g.10gb@1": 12, "1g.10gb@2": 13, "1g.10gb@3": 14,
		}},
		"nobody sourced those of the B200": {builtIn(t), "b200-180gb", map[string]int{
			"7g.180gb@0": 0, "3g.90gb@0": 1, "4g.90gb@0": 1, "3g.90gb@4": 2, "2g.45gb@4": 5, "1g.45gb@6": 6, "1g.23gb@0": 7, "1g.23gb+me@6": 13,
		}},
		"RTX PRO 6000 counts in twelfths": {builtIn(t), "rtx-pro-6000-96gb", map[string]int{
			"4g.96gb@0": 0, "2g.48gb@6": 2, "1g.24gb-me@3": 4, "1g.24gb@9": 6,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			partitions, err := table(t, test.catalogue, test.model, "").Partitions()
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]int{}
			for _, p := range partitions {
				got[p.Profile.Name+"@"+string(rune('0'+p.Start))] = p.InstanceID
			}
			for placement, id := range test.want {
				if got[placement] != id {
					t.Errorf("%s: got GPU instance id %d, want %d", placement, got[placement], id)
				}
			}
		})
	}
}

func TestPartitionable(t *testing.T) {
	got, err := table(t, builtIn(t), "h100-sxm5-80gb", "").Partitionable()
	if err != nil {
		t.Fatal(err)
	}
	want := Figures{Multiprocessors: 132, CopyEngines: 8, Decoders: 7, Encoders: 0, JPEGEngines: 7, OFAEngines: 1, MemoryMiB: 81152}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("figures (-want +got):\n%s", diff)
	}
}

func TestVendorWords(t *testing.T) {
	nvidia := builtIn(t).Vendors()[0]
	for what, test := range map[string]struct{ got, want any }{
		"driver name":                       {nvidia.DriverName, "gpu.nvidia.com"},
		"GPU":                               {nvidia.GPUName(11), "gpu-11"},
		"counter set":                       {nvidia.CounterSetName(0), "gpu-0-counter-set"},
		"memory slice":                      {nvidia.MemorySliceCounter(7), "memory-slice-7"},
		"GPU file":                          {nvidia.GPUFile(2), "/dev/nvidia2"},
		"capability file":                   {nvidia.CapFile(439), "/dev/nvidia-caps/nvidia-cap439"},
		"minor of gpu3/gi3/ci3":             {nvidia.ComputeInstanceMinor(3, 3, 3), 439},
		"minor of gpu6/gi11/ci5":            {nvidia.ComputeInstanceMinor(6, 11, 5), 918},
		"minor of gpu0/gi0":                 {nvidia.InstanceMinor(0, 0), 3},
		"largest id with a file of its own": {nvidia.maxInstanceID(), 14},
		"class of partitions":               {nvidia.DeviceClasses[1].Name, "mig.nvidia.com"},
		"selector under another driver name": {nvidia.DeviceClasses[1].Selector("gpu.example.com"),
			"device.driver == 'gpu.example.com' && device.attributes['gpu.example.com'].type == 'mig'"},
	} {
		if diff := cmp.Diff(test.want, test.got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
}

func TestSemanticVersion(t *testing.T) {
	for version, want := range map[string]string{"580.95.05": "580.95.5", "570.169": "570.169.0", "13.0": "13.0.0"} {
		if got := SemanticVersion(version); got != want {
			t.Errorf("%s: got %s, want %s", version, got, want)
		}
	}
}

// TestProfileNames holds the naming formula against names seen on hardware whose files are not here.
func TestProfileNames(t *testing.T) {
	nvidia := builtIn(t).Vendors()[0]
	for want, figures := range map[string]struct {
		slices           int
		memory, totalMiB int64
	}{
		"1g.23gb":  {1, 20992, 183359},
		"3g.90gb":  {3, 91136, 183359},
		"7g.180gb": {7, 182784, 183359},
		"2g.47gb":  {2, 46592, 189471},
		"1g.12gb":  {1, 11008, 95830},
		"3g.47gb":  {3, 47488, 95830},
	} {
		if got := nvidia.profileName(figures.slices, figures.memory, figures.totalMiB); got != want {
			t.Errorf("%d slices with %d of %d MiB: got %s, want %s", figures.slices, figures.memory, figures.totalMiB, got, want)
		}
	}
}

// withModel is the built-in vendor with one model.
func withModel(t *testing.T, id, content string) fs.FS {
	t.Helper()
	vendor, err := fs.ReadFile(embedded, "catalogue/nvidia/vendor.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return fstest.MapFS{
		"nvidia/vendor.yaml":                   {Data: vendor},
		path.Join("nvidia", id+".yaml"):        {Data: []byte(content)},
		"README.md":                            {Data: []byte("not a vendor")},
		path.Join("nvidia", "notes-of-us.txt"): {Data: []byte("not a model")},
	}
}
