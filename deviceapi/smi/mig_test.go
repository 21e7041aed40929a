package smi

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/simgpu/simgpu/deviceapi"
)

// h100Profiles are those of an H100 80GB HBM3.
func h100Profiles() []deviceapi.Profile {
	profile := func(name string, id, slices, max int, mib int64, sm, ce, dec, jpg, ofa, size int, starts ...int) deviceapi.Profile {
		p := deviceapi.Profile{
			Name: name, ID: id, Slices: slices, MaxInstances: max, MemoryBytes: mib * mebibyte, Multiprocessors: sm,
			CopyEngines: ce, Decoders: dec, JPEGEngines: jpg, OFAEngines: ofa, PlacementSize: size, PlacementStarts: starts,
		}
		for id, slices := range []int{1, 2, 3, 4, 7} {
			if slices <= p.Slices && (slices != 3 || p.Slices != 4) {
				p.Compute = append(p.Compute, deviceapi.ComputeProfile{ID: id, Slices: slices, MaxInstances: p.Slices / slices})
			}
		}
		return p
	}
	return []deviceapi.Profile{
		profile("1g.10gb", 19, 1, 7, 9984, 16, 1, 1, 1, 0, 1, 0, 1, 2, 3, 4, 5, 6),
		profile("1g.10gb+me", 20, 1, 1, 9984, 16, 1, 1, 1, 1, 1, 0, 1, 2, 3, 4, 5, 6),
		profile("1g.20gb", 15, 1, 4, 20096, 26, 1, 1, 1, 0, 2, 0, 2, 4, 6),
		profile("2g.20gb", 14, 2, 3, 20096, 32, 2, 2, 2, 0, 2, 0, 2, 4),
		profile("3g.40gb", 9, 3, 2, 40448, 60, 3, 3, 3, 0, 4, 0, 4),
		profile("4g.40gb", 5, 4, 1, 40448, 64, 4, 4, 4, 0, 4, 0),
		profile("7g.80gb", 0, 7, 1, 81152, 132, 8, 7, 7, 1, 8, 0),
	}
}

func TestMIGTables(t *testing.T) {
	tables := map[string]func(*Report) (string, error){
		"lgi": (*Report).Instances, "lgip": (*Report).Profiles, "lgipp": (*Report).Placements,
		"lci": (*Report).ComputeInstances, "lcip": (*Report).ComputeProfiles,
	}
	for suffix, table := range tables {
		got, err := table(report(t, snapshots()["two-slices-node"]))
		if err != nil {
			t.Fatalf("%s: %v", suffix, err)
		}
		golden(t, "two-slices-node."+suffix, got)
		if suffix == "lgipp" {
			continue
		}
		lines := strings.Split(strings.TrimSuffix(got, "\n"), "\n")
		for i, line := range lines {
			if len(line) != len(lines[0]) {
				t.Errorf("%s, line %d has %d characters, want %d: %s", suffix, i+1, len(line), len(lines[0]), line)
			}
		}
	}
}

// Lines of real hardware.
func TestMIGLinesAreThoseOfTheRealTool(t *testing.T) {
	empty := snapshots()["no-slice"]
	wide := h100("580.95.05", "13.0")
	wide.MIGMode = deviceapi.MIGEnabled
	wide.Profiles = []deviceapi.Profile{{Name: "1g.24gb", ID: 14, Slices: 1, MaxInstances: 4, MemoryBytes: 23675 * mebibyte, Multiprocessors: 46,
		CopyEngines: 1, Encoders: 1, Decoders: 1, JPEGEngines: 1, PlacementSize: 3, PlacementStarts: []int{0, 3, 6, 9}}, {Name: "4g.96gb", ID: 0, Slices: 4, MaxInstances: 1, Multiprocessors: 188,
		CopyEngines: 4, Encoders: 4, Decoders: 4, JPEGEngines: 4, PlacementSize: 12, PlacementStarts: []int{0}}}
	a100 := h100("535.54.03", "12.2")
	a100.MIGMode = deviceapi.MIGEnabled
	a100.Profiles = []deviceapi.Profile{{Name: "3g.20gb", ID: 9, Slices: 3, Compute: []deviceapi.ComputeProfile{
		{ID: 0, Slices: 1, MaxInstances: 3}, {ID: 1, Slices: 2, MaxInstances: 1}, {ID: 2, Slices: 3, MaxInstances: 1}}}}
	half := deviceapi.PartitionStatus{Partition: deviceapi.Partition{UUID: "MIG-1", Profile: "3g.20gb", ProfileID: 9, GPUInstanceID: 1,
		Multiprocessors: 42, CopyEngines: 3, Decoders: 2}}
	node := func(g deviceapi.GPU, partitions ...deviceapi.PartitionStatus) deviceapi.Snapshot {
		return deviceapi.Snapshot{GPUs: []deviceapi.GPUStatus{{GPU: g, Whole: true, Partitions: partitions}}}
	}
	for name, test := range map[string]struct {
		snapshot deviceapi.Snapshot
		table    func(*Report) (string, error)
		lines    []string
	}{
		"profiles of an RTX PRO 6000": {node(wide), (*Report).Profiles, []string{
			"|   0  MIG 1g.24gb         14     4/4        23.12      No     46     1     1   |",
			"|                                                               1     1     0   |",
		}},
		"placements of an H100": {empty, (*Report).Placements, []string{
			"GPU  0 Profile ID 19 Placements: {0,1,2,3,4,5,6}:1",
			"GPU  0 Profile ID  9 Placements: {0,4}:4",
			"GPU  0 Profile ID  5 Placement : {0}:4",
		}},
		"compute profiles of an A100": {node(a100, half), (*Report).ComputeProfiles, []string{
			"|   0      1       MIG 3g.20gb          2*     0/1           42        2     0     0   |",
			"|                                                                      3     0         |",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := test.table(report(t, test.snapshot))
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range test.lines {
				if !strings.Contains(got, line+"\n") {
					t.Errorf("missing: %s\nin\n%s", line, got)
				}
			}
		})
	}
}

func TestFreeInstances(t *testing.T) {
	existing := func(profile string, start int) deviceapi.PartitionStatus {
		for _, p := range h100Profiles() {
			if p.Name == profile {
				return deviceapi.PartitionStatus{Partition: deviceapi.Partition{
					UUID: fmt.Sprint(profile, start), Profile: p.Name, ProfileID: p.ID, PlacementStart: start, PlacementSize: p.PlacementSize}}
			}
		}
		t.Fatal(profile)
		return deviceapi.PartitionStatus{}
	}
	for name, test := range map[string]struct {
		partitions []deviceapi.PartitionStatus
		want       []int // in the order of the profiles: 1g, 1g+me, 1g double, 2g, 3g, 4g, 7g
	}{
		"empty":              {nil, []int{7, 1, 4, 3, 2, 1, 1}},
		"half on the left":   {[]deviceapi.PartitionStatus{existing("3g.40gb", 0)}, []int{3, 1, 2, 1, 1, 0, 0}},
		"half on the right":  {[]deviceapi.PartitionStatus{existing("3g.40gb", 4)}, []int{4, 1, 2, 2, 1, 1, 0}},
		"both halves":        {[]deviceapi.PartitionStatus{existing("3g.40gb", 0), existing("3g.40gb", 4)}, []int{0, 0, 0, 0, 0, 0, 0}},
		"the whole":          {[]deviceapi.PartitionStatus{existing("7g.80gb", 0)}, []int{0, 0, 0, 0, 0, 0, 0}},
		"the media engines":  {[]deviceapi.PartitionStatus{existing("1g.10gb+me", 6)}, []int{6, 0, 3, 3, 1, 1, 0}},
		"one in the way":     {[]deviceapi.PartitionStatus{existing("1g.10gb", 0)}, []int{6, 1, 3, 2, 1, 0, 0}},
		"slices but no room": {[]deviceapi.PartitionStatus{existing("1g.10gb", 0), existing("1g.10gb", 4)}, []int{5, 1, 2, 1, 0, 0, 0}},
	} {
		g := gpu{GPUStatus: deviceapi.GPUStatus{GPU: h100("580.95.05", "13.0"), Partitions: test.partitions}}
		var got []int
		for _, p := range g.Profiles {
			got = append(got, g.free(p))
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestOthersPartitionsAreNotTold(t *testing.T) {
	r := report(t, snapshots()["two-slices-container"])
	for name, table := range map[string]func() (string, error){"lgip": r.Profiles, "lgipp": r.Placements} {
		if text, err := table(); !errors.Is(err, ErrNoPermission) {
			t.Errorf("%s in a container gives %v, want ErrNoPermission:\n%s", name, err, text)
		}
	}
	for name, table := range map[string]func() (string, error){"lci": r.ComputeInstances, "lcip": r.ComputeProfiles} {
		if text, err := table(); err != nil || !strings.Contains(text, " 2       MIG 3g.40gb ") || strings.Contains(text, " 1       MIG ") {
			t.Errorf("%s in a container: %v\n%s", name, err, text)
		}
	}
}

func TestSelectInstances(t *testing.T) {
	r := report(t, snapshots()["two-slices-node"])
	one, err := r.SelectInstances("2")
	if err != nil {
		t.Fatal(err)
	}
	if text, err := one.ComputeInstances(); err != nil || strings.Count(text, "3g.40gb") != 1 || !strings.Contains(text, "|   0      2 ") {
		t.Errorf("instance 2: %v\n%s", err, text)
	}
	if len(r.gpus[0].Partitions) != 2 {
		t.Error("the selection has changed the report")
	}
	if _, err := r.SelectInstances("2,7"); !errors.Is(err, ErrNoInstances) {
		t.Errorf("an unknown instance gives %v, want ErrNoInstances", err)
	}
}
