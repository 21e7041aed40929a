package profiles

import (
	"io/fs"
	"path"
	"strings"
	"testing"
	"testing/fstest"
)

// edit is one replacement in a file.
type edit struct{ old, new string }

func TestModelFaults(t *testing.T) {
	for name, test := range map[string]struct {
		edits []edit
		want  []string // the whole error, a line each
	}{
		"no YAML": {
			[]edit{{"kind:", "kind: ["}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: not valid YAML: yaml: line 2: did not find expected ',' or ']'"},
		},
		"another version": {
			[]edit{{"v1alpha1", "v2"}},
			[]string{`nvidia/h100-sxm5-80gb.yaml: apiVersion: "simgpu.dev/v2" is not supported; known: simgpu.dev/v1alpha1`},
		},
		"another kind": {
			[]edit{{"kind: GPUModel", "kind: GPU"}},
			[]string{`nvidia/h100-sxm5-80gb.yaml: kind: "GPU" is not GPUModel`},
		},
		"id is not the file's": {
			[]edit{{"id: h100-sxm5-80gb", "id: h100"}},
			[]string{`nvidia/h100-sxm5-80gb.yaml: id: "h100" must be a DNS label and the name of the file without .yaml, "h100-sxm5-80gb"`},
		},
		"unknown field": {
			[]edit{{"brand: Nvidia", "brand: Nvidia\n  colour: green"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: gpu.colour: unknown field; known here: addressingMode, architecture, brand, computeCapability, memoryMiB, memoryReservedMiB, multiprocessors, pciDeviceID, pciSubsystemID, pciVendorID, powerLimitWatts, productName"},
		},
		"no power": {
			[]edit{{"powerLimitWatts: 700", "powerLimitWatts: 0"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: gpu.powerLimitWatts: must be from 1 to 1099511627776; leave it out where it is not sourced"},
		},
		"placement outside": {
			[]edit{{"{size: 4, starts: [0, 4]}", "{size: 4, starts: [0, 5]}"}},
			[]string{
				"nvidia/h100-sxm5-80gb.yaml: 3 faults:",
				"- partitioning.profiles[4].placements.starts[1]: a placement of 4 memory slices at 5 is outside the 8 of the GPU",
				"- partitioning.instanceIDs.bySize: the placement of 4 memory slices at 5 has no id",
				"- partitioning.instanceIDs.bySize.4.4: no profile has a placement of 4 memory slices at 4",
			},
		},
		"placement larger than the GPU": {
			[]edit{{"{size: 8, starts: [0]}", "{size: 9, starts: [0]}"}, {"8: {0: 0}", "9: {0: 0}"}},
			[]string{
				"nvidia/h100-sxm5-80gb.yaml: 3 faults:",
				"- partitioning.profiles[6].placements.size: must be from 1 to the number of memory slices, 8",
				"- partitioning.profiles[6].placements.starts[0]: a placement of 9 memory slices at 0 is outside the 8 of the GPU",
				"- partitioning.memorySlices: is 8, but the largest profile has 9 memory slices",
			},
		},
		"starts out of order": {
			[]edit{{"{size: 2, starts: [0, 2, 4]}", "{size: 2, starts: [2, 0, 4]}"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: partitioning.profiles[3].placements.starts[1]: 0 must come after 2 in ascending order"},
		},
		"more instances than placements": {
			[]edit{{"maxInstances: 2\n", "maxInstances: 3\n"}},
			[]string{
				"nvidia/h100-sxm5-80gb.yaml: 6 faults:",
				"- partitioning.profiles[4].maxInstances: must be from 1 to the number of placements that fit at once, 2",
				"- partitioning.profiles[4].figures.multiprocessors: 3 instances of 60 are more than the 132 that partitions share",
				"- partitioning.profiles[4].figures.copyEngines: 3 instances of 3 are more than the 8 that partitions share",
				"...",
			},
		},
		"profile id taken": {
			[]edit{{"- id: 20", "- id: 19"}, {"20: {name", "21: {name"}},
			[]string{
				"nvidia/h100-sxm5-80gb.yaml: 3 faults:",
				"- partitioning.profiles[1].id: 19 is taken by another profile",
				"- drivers[0].profiles.21: no profile has this id",
				"- drivers[1].profiles.21: no profile has this id",
			},
		},
		"figures that do not add up": {
			[]edit{{"multiprocessors: 60", "multiprocessors: 67"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: partitioning.profiles[4].figures.multiprocessors: 2 instances of 67 are more than the 132 that partitions share"},
		},
		"more multiprocessors than the GPU": {
			[]edit{{"figures: {multiprocessors: 132", "figures: {multiprocessors: 133"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: partitioning.profiles[6].figures.multiprocessors: 133 is more than the 132 of the whole GPU"},
		},
		"negative figure": {
			[]edit{{"encoders: 0", "encoders: -1"}},
			[]string{
				"nvidia/h100-sxm5-80gb.yaml: 7 faults:",
				"- partitioning.profiles[0].figures.encoders: must not be negative",
				"...",
			},
		},
		"compute instances that do not fit": {
			[]edit{{"{id: 1, slices: 2, maxInstances: 3}", "{id: 1, slices: 2, maxInstances: 4}"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: partitioning.profiles[6].computeInstances[1]: 4 compute instances of 2 slices do not fit into 7 slices"},
		},
		"no compute instance takes all": {
			[]edit{{"    - {id: 4, slices: 7, maxInstances: 1}\n", ""}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: partitioning.profiles[6].computeInstances: must have one that takes all 7 slices"},
		},
		"instance id taken": {
			[]edit{{"4: {0: 2, 4: 1}", "4: {0: 2, 4: 2}"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: partitioning.instanceIDs.bySize.4.4: 2 is taken by partitioning.instanceIDs.bySize.4.0"},
		},
		"instance id without a device file": {
			[]edit{{"3: 14,", "3: 15,"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: partitioning.instanceIDs.bySize.1.3: 15 is not from 0 to 14, the ids that have a device file"},
		},
		"name contradicts the memory": {
			[]edit{{"9: {name: 3g.40gb, memoryMiB: 40448}", "9: {name: 3g.39gb, memoryMiB: 40448}"}},
			[]string{`nvidia/h100-sxm5-80gb.yaml: drivers[0].profiles.9.name: "3g.39gb" does not follow from 3 slices and 40448 of 81559 MiB, which make 3g.40gb with or without +me, +me.all, +gfx, -me`},
		},
		"unknown suffix": {
			[]edit{{"1g.10gb+me, memoryMiB: 9984", "1g.10gb+mx, memoryMiB: 9984"}},
			[]string{`nvidia/h100-sxm5-80gb.yaml: drivers[0].profiles.20.name: "1g.10gb+mx" does not follow from 1 slices and 9984 of 81559 MiB, which make 1g.10gb with or without +me, +me.all, +gfx, -me`},
		},
		"more memory than the GPU": {
			[]edit{{"memoryMiB: 81152", "memoryMiB: 81560"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: drivers[0].profiles.0.memoryMiB: 81560 is more than the 81559 of the whole GPU"},
		},
		"memory that does not add up": {
			[]edit{{"9: {name: 3g.40gb, memoryMiB: 40448}", "9: {name: 3g.40gb, memoryMiB: 40577}"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: drivers[0].profiles.9.memoryMiB: 2 instances of 40577 are more than the 81152 that partitions share"},
		},
		"name taken": {
			[]edit{{"5: {name: 4g.40gb, memoryMiB: 40192}", "5: {name: 3g.40gb}"}},
			[]string{`nvidia/h100-sxm5-80gb.yaml: drivers[1].profiles.9.name: "3g.40gb" is taken by another profile`},
		},
		"ranges overlap": {
			[]edit{{`through: "525.125"`, `through: "545.1"`}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: drivers[1]: must end before the range above it starts: newest first, no overlap"},
		},
		"range backwards": {
			[]edit{{`through: "525.125"`, `through: "470"`}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: drivers[1].through: 470 is before 525.125"},
		},
		"default in no range": {
			[]edit{{`"580.95.05"`, `"535.54.03"`}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: defaultDriverVersion: 535.54.03 is in none of the ranges of drivers"},
		},
		"no sources": {
			[]edit{{"sources:\n", "sources: []\nsource:\n"}},
			[]string{
				"nvidia/h100-sxm5-80gb.yaml: 2 faults:",
				"- source: unknown field; known here: apiVersion, confidence, defaultDriverVersion, drivers, gpu, id, kind, partitioning, sources",
				"- sources: is required: where do the figures come from?",
			},
		},
		"more memory slices than counters": {
			[]edit{{"memorySlices: 8", "memorySlices: 26"}, {"{size: 8, starts: [0]}", "{size: 26, starts: [0]}"}, {"8: {0: 0}", "26: {0: 0}"}},
			[]string{"nvidia/h100-sxm5-80gb.yaml: partitioning.memorySlices: must be from 1 to 25: the API allows 32 counters in a set, and 7 count other things"},
		},
		"many at once": {
			[]edit{{"confidence: high", "confidence: sure"}, {"9.0.0", "9.0"}, {`"0x2330"`, `"2330"`}, {"wholeGPU: always", "wholeGPU: yes"}},
			[]string{
				"nvidia/h100-sxm5-80gb.yaml: 4 faults:",
				"- gpu.computeCapability: must be a string, not the number 9 (put it in quotes)",
				"- partitioning.wholeGPU: must be a string, not the boolean true (put it in quotes)",
				`- confidence: "sure" is unknown; known: high, good, partial, names-only`,
				`- gpu.pciDeviceID: "2330" is not a hexadecimal id like "0x2330"`,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			content := edited(t, "h100-sxm5-80gb.yaml", test.edits)
			_, err := LoadFS(withModel(t, "h100-sxm5-80gb", content))
			checkError(t, err, test.want)
		})
	}
}

func TestVendorFaults(t *testing.T) {
	for name, test := range map[string]struct {
		edits []edit
		want  []string
	}{
		"driver name": {
			[]edit{{"driverName: gpu.nvidia.com", "driverName: GPU"}},
			[]string{`nvidia/vendor.yaml: driverName: "GPU" is not a DNS name of at most 63 characters`},
		},
		"pattern without its placeholder": {
			[]edit{{"gpu: gpu-{minor}\n", "gpu: gpu\n"}},
			[]string{`nvidia/vendor.yaml: names.gpu: "gpu" must contain {minor}`},
		},
		"unknown placeholder": {
			[]edit{{"{minor}-counter-set", "{minor}-{uuid}"}},
			[]string{`nvidia/vendor.yaml: names.counterSet: "gpu-{minor}-{uuid}" contains {uuid}; known here: {minor}`},
		},
		"unknown fact": {
			[]edit{{"from: brand", "from: maker"}},
			[]string{
				"nvidia/vendor.yaml: 2 faults:",
				`- attributes.gpu[3].from: unknown fact "maker"; known facts: uuid, parentUUID, profile, productName, brand, architecture, computeCapability, driverVersion, cudaVersion, addressingMode, pciBusID, pcieRoot, numaNode`,
				"...",
			},
		},
		"attribute name": {
			[]edit{{"name: cudaDriverVersion", "name: cuda-driver-version"}},
			[]string{"nvidia/vendor.yaml: 2 faults:", `- attributes.gpu[7].name: "cuda-driver-version" is not a C identifier of at most 32 characters, with or without a domain before a slash`, "..."},
		},
		"figure left out": {
			[]edit{{"- {figure: decoders, capacity: decoders, counter: decoders}\n", ""}},
			[]string{`nvidia/vendor.yaml: countables: figure "decoders" is missing`},
		},
		"counter name": {
			[]edit{{"counter: copy-engines", "counter: copyEngines"}},
			[]string{`nvidia/vendor.yaml: countables[1].counter: "copyEngines" is not a DNS label`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			fsys := fstest.MapFS{"nvidia/vendor.yaml": {Data: []byte(edited(t, "vendor.yaml", test.edits))}}
			_, err := LoadFS(fsys)
			checkError(t, err, test.want)
		})
	}
}

func TestFaultsOfSeveralFiles(t *testing.T) {
	fsys := fstest.MapFS{
		"nvidia/vendor.yaml": {Data: []byte(edited(t, "vendor.yaml", nil))},
		"nvidia/a.yaml":      {Data: []byte(edited(t, "a100-40gb.yaml", []edit{{"id: a100-40gb", "id: a"}, {"brand: Nvidia", `brand: ""`}}))},
		"nvidia/b.yaml":      {Data: []byte(edited(t, "a100-80gb.yaml", []edit{{"id: a100-80gb", "id: b"}, {"kind: GPUModel", "kind: GPU"}}))},
		"other/c.yaml":       {Data: []byte("")},
	}
	_, err := LoadFS(fsys)
	checkError(t, err, []string{
		"nvidia/a.yaml: gpu.brand: is required",
		`nvidia/b.yaml: kind: "GPU" is not GPUModel`,
		"read vendor: open other/vendor.yaml: file does not exist",
	})
}

func TestSameModelOfTwoVendors(t *testing.T) {
	vendor := edited(t, "vendor.yaml", nil)
	model := edited(t, "h100-sxm5-80gb.yaml", nil)
	_, err := LoadFS(fstest.MapFS{
		"acme/vendor.yaml": {Data: []byte(vendor)}, "acme/h100-sxm5-80gb.yaml": {Data: []byte(model)},
		"nvidia/vendor.yaml": {Data: []byte(vendor)}, "nvidia/h100-sxm5-80gb.yaml": {Data: []byte(model)},
	})
	checkError(t, err, []string{`nvidia/h100-sxm5-80gb.yaml: id: "h100-sxm5-80gb" is also a model of vendor acme`})
}

func FuzzLoadFS(f *testing.F) {
	vendor, err := fs.ReadFile(embedded, "catalogue/nvidia/vendor.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range []string{"h100-sxm5-80gb.yaml", "a100-40gb.yaml"} {
		model, err := fs.ReadFile(embedded, path.Join("catalogue/nvidia", file))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(vendor, model)
	}
	f.Add(vendor, []byte("partitioning: {memorySlices: 9223372036854775807, profiles: [{placements: {size: -1, starts: [9223372036854775807]}}]}"))
	f.Fuzz(func(t *testing.T, vendor, model []byte) {
		catalogue, err := LoadFS(fstest.MapFS{"v/vendor.yaml": {Data: vendor}, "v/h100-sxm5-80gb.yaml": {Data: model}})
		if err != nil {
			return
		}
		for _, model := range catalogue.Models() {
			table, err := model.Table("")
			if err != nil {
				continue
			}
			partitions, err := table.Partitions()
			if err != nil {
				continue
			}
			shared, err := table.Partitionable()
			if err != nil {
				t.Fatalf("partitions without anything to share: %v", err)
			}
			for _, p := range partitions {
				if p.Start < 0 || p.Start+p.Profile.Size > model.Partitioning.MemorySlices {
					t.Errorf("%s at %d is outside of the GPU", p.Profile.Name, p.Start)
				}
				for _, figure := range AllFigures() {
					if p.Profile.Figures.Get(figure) > shared.Get(figure) {
						t.Errorf("%s has more %s than there are", p.Profile.Name, figure)
					}
				}
			}
		}
	})
}

// edited is a file of the built-in catalogue with each edit applied everywhere.
func edited(t *testing.T, file string, edits []edit) string {
	t.Helper()
	data, err := fs.ReadFile(embedded, path.Join("catalogue/nvidia", file))
	if err != nil {
		t.Fatal(err)
	}
	content := string(data)
	for _, e := range edits {
		if !strings.Contains(content, e.old) {
			t.Fatalf("%s does not contain %q", file, e.old)
		}
		content = strings.ReplaceAll(content, e.old, e.new)
	}
	return content
}

// checkError compares an error line by line; a last line of "..." stands for any further lines.
func checkError(t *testing.T, err error, want []string) {
	t.Helper()
	if err == nil {
		t.Fatalf("got no error, want %q", want)
	}
	got := strings.Split(err.Error(), "\n")
	if open := want[len(want)-1] == "..."; open && len(got) >= len(want) {
		want = want[:len(want)-1]
		got = got[:len(want)]
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got error\n%v\nwant\n%s", err, strings.Join(want, "\n"))
	}
}
