package smi

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/simgpu/simgpu/deviceapi"
)

// ErrNoMIGDevices means that no visible GPU works through partitions.
var ErrNoMIGDevices = errors.New("No MIG-enabled devices found.") //nolint:staticcheck // the real tool's text

// ErrNoInstances means that no partition is visible.
var ErrNoInstances = errors.New("No GPU instances found: Not Found") //nolint:staticcheck // the real tool's text

// ErrNoPermission means that the answer would tell about partitions of others.
var ErrNoPermission = errors.New("Insufficient Permissions") //nolint:staticcheck // the real tool's text

// partitionedGPUs are those in MIG mode; none is ErrNoMIGDevices.
func (r *Report) partitionedGPUs() ([]gpu, error) {
	var found []gpu
	for _, g := range r.gpus {
		if g.MIGMode == deviceapi.MIGEnabled {
			found = append(found, g)
		}
	}
	if len(found) == 0 {
		return nil, ErrNoMIGDevices
	}
	return found, nil
}

// instances are the visible GPU instances in MIG mode; none is ErrNoInstances.
func (r *Report) instances(do func(gpu, deviceapi.PartitionStatus)) error {
	gpus, err := r.partitionedGPUs()
	if err != nil {
		return err
	}
	none := true
	for _, g := range gpus {
		for _, p := range g.Partitions {
			none = false
			do(g, p)
		}
	}
	if none {
		return ErrNoInstances
	}
	return nil
}

// Instances writes a table of the visible GPU instances: nvidia-smi mig -lgi. It
// fails with ErrNoMIGDevices or ErrNoInstances where there is none.
func (r *Report) Instances() (string, error) {
	const rule = "+---------------------------------------------------------+\n"
	b := strings.Builder{}
	b.WriteString(rule +
		"| GPU instances:                                          |\n" +
		"| GPU   Name               Profile  Instance   Placement  |\n" +
		"|                            ID       ID       Start:Size |\n" +
		"|=========================================================|\n")
	err := r.instances(func(g gpu, p deviceapi.PartitionStatus) {
		fmt.Fprintf(&b, "|%4d  MIG %-17s%3d%9d%11d:%-6d|\n", g.index, p.Profile, p.ProfileID, p.GPUInstanceID, p.PlacementStart, p.PlacementSize)
		b.WriteString(rule)
	})
	if err != nil {
		return "", err
	}
	return b.String(), nil
}

// Profiles writes a table of the GPU instances that can be made: nvidia-smi mig
// -lgip. It fails with ErrNoMIGDevices where no GPU is in MIG mode, and with
// ErrNoPermission where not all of a GPU's partitions are visible.
func (r *Report) Profiles() (string, error) {
	gpus, err := r.partitionedGPUs()
	if err != nil {
		return "", err
	}
	const rule = "+-------------------------------------------------------------------------------+\n"
	b := strings.Builder{}
	b.WriteString(rule +
		"| GPU instance profiles:                                                        |\n" +
		"| GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  |\n" +
		"|                                Free/Total   GiB              CE    JPEG  OFA  |\n" +
		"|===============================================================================|\n")
	for _, g := range gpus {
		if !g.Whole {
			return "", ErrNoPermission
		}
		for _, p := range g.Profiles {
			fmt.Fprintf(&b, "|%4d  MIG %-15s%3d%6d/%-4d     %-11sNo     %-7d%-6d%-4d|\n",
				g.index, p.Name, p.ID, g.free(p), p.MaxInstances, gibibytes(p.MemoryBytes), p.Multiprocessors, p.Decoders, p.Encoders)
			fmt.Fprintf(&b, "|%63s%-6d%-6d%-4d|\n", "", p.CopyEngines, p.JPEGEngines, p.OFAEngines)
			b.WriteString(rule)
		}
	}
	return b.String(), nil
}

// Placements writes where the GPU instances that can be made would go: nvidia-smi mig
// -lgipp. It fails as Profiles does.
func (r *Report) Placements() (string, error) {
	gpus, err := r.partitionedGPUs()
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, g := range gpus {
		if !g.Whole {
			return "", ErrNoPermission
		}
		for _, p := range g.Profiles {
			noun := "Placements"
			if len(p.PlacementStarts) == 1 {
				noun = "Placement "
			}
			var starts []string
			for _, start := range p.PlacementStarts {
				starts = append(starts, strconv.Itoa(start))
			}
			fmt.Fprintf(&b, "GPU %2d Profile ID %2d %s: {%s}:%d\n", g.index, p.ID, noun, strings.Join(starts, ","), p.PlacementSize)
		}
	}
	return b.String(), nil
}

// ComputeProfiles writes a table of the compute instances that the visible GPU
// instances divide into: nvidia-smi mig -lcip. Each of them has one that takes all of
// it, so that nothing is free. How many multiprocessors a part of it would have is not
// known. It fails as Instances does.
func (r *Report) ComputeProfiles() (string, error) {
	const rule = "+--------------------------------------------------------------------------------------+\n"
	b := strings.Builder{}
	b.WriteString(rule +
		"| Compute instance profiles:                                                           |\n" +
		"| GPU     GPU       Name             Profile  Instances   Exclusive       Shared       |\n" +
		"|       Instance                       ID     Free/Total     SM       DEC   ENC   OFA  |\n" +
		"|         ID                                                          CE    JPEG       |\n" +
		"|======================================================================================|\n")
	err := r.instances(func(g gpu, p deviceapi.PartitionStatus) {
		profile, _ := g.profile(p)
		for _, c := range profile.Compute {
			name, id, multiprocessors := fmt.Sprintf("%dc.%s", c.Slices, p.Profile), strconv.Itoa(c.ID), "N/A"
			if c.Slices == profile.Slices {
				name, id, multiprocessors = p.Profile, id+"*", strconv.Itoa(p.Multiprocessors)
			}
			fmt.Fprintf(&b, "|%4d%7d       MIG %-17s%-7s0/%d           %-10s%-6d%-6d%-4d|\n",
				g.index, p.GPUInstanceID, name, id, c.MaxInstances, multiprocessors, p.Decoders, p.Encoders, p.OFAEngines)
			fmt.Fprintf(&b, "|%70s%-6d%-10d|\n", "", p.CopyEngines, p.JPEGEngines)
			b.WriteString(rule)
		}
	})
	if err != nil {
		return "", err
	}
	return b.String(), nil
}

// ComputeInstances writes a table of the visible compute instances: nvidia-smi mig
// -lci. It fails as Instances does.
func (r *Report) ComputeInstances() (string, error) {
	const rule = "+--------------------------------------------------------------------+\n"
	b := strings.Builder{}
	b.WriteString(rule +
		"| Compute instances:                                                 |\n" +
		"| GPU     GPU       Name             Profile   Instance   Placement  |\n" +
		"|       Instance                       ID        ID       Start:Size |\n" +
		"|         ID                                                         |\n" +
		"|====================================================================|\n")
	err := r.instances(func(g gpu, p deviceapi.PartitionStatus) {
		profile, _ := g.profile(p)
		id := 0
		for _, c := range profile.Compute {
			if c.Slices == profile.Slices {
				id = c.ID
			}
		}
		fmt.Fprintf(&b, "|%4d%7d       MIG %-17s%d%10d%11d:%-6d|\n",
			g.index, p.GPUInstanceID, p.Profile, id, p.ComputeInstanceID, 0, profile.Slices)
		b.WriteString(rule)
	})
	if err != nil {
		return "", err
	}
	return b.String(), nil
}

// profile is what a partition was made from.
func (g gpu) profile(p deviceapi.PartitionStatus) (deviceapi.Profile, bool) {
	at := slices.IndexFunc(g.Profiles, func(profile deviceapi.Profile) bool { return profile.ID == p.ProfileID })
	if at < 0 {
		return deviceapi.Profile{}, false
	}
	return g.Profiles[at], true
}

// free is how many more instances of a profile fit beside those that exist.
func (g gpu) free(p deviceapi.Profile) int {
	// What all instances share is of each kind as much as the largest profile has.
	var left countables
	size := 0
	for _, profile := range g.Profiles {
		for i, n := range countablesOf(profile) {
			left[i] = max(left[i], n)
		}
		for _, start := range profile.PlacementStarts {
			size = max(size, start+profile.PlacementSize)
		}
	}
	taken := make([]bool, size)
	take := func(start, size int) {
		for i := start; i < min(start+size, len(taken)); i++ {
			taken[i] = true
		}
	}
	for _, existing := range g.Partitions {
		take(existing.PlacementStart, existing.PlacementSize)
		if profile, known := g.profile(existing); known {
			for i, n := range countablesOf(profile) {
				left[i] -= n
			}
		}
	}
	room := p.MaxInstances
	for i, n := range countablesOf(p) {
		if n > 0 {
			room = min(room, left[i]/n)
		}
	}
	fit := 0
	for _, start := range p.PlacementStarts {
		if fit < room && !slices.Contains(taken[start:start+p.PlacementSize], true) {
			fit++
			take(start, p.PlacementSize)
		}
	}
	return fit
}

// countables are what instances of a GPU have a limited number of in common, besides memory.
type countables [7]int

func countablesOf(p deviceapi.Profile) countables {
	return countables{p.Slices, p.Multiprocessors, p.CopyEngines, p.Encoders, p.Decoders, p.JPEGEngines, p.OFAEngines}
}

// gibibytes has two decimals.
func gibibytes(bytes int64) string { return fmt.Sprintf("%.2f", float64(bytes)/(1<<30)) }
