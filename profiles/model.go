package profiles

import (
	"fmt"
	"strings"
)

// Model is one GPU model: what the whole GPU is and how it can be partitioned. Strings are "" and
// numbers 0 where the figure is not sourced.
type Model struct {
	// ID names the model in an inventory, e.g. h100-sxm5-80gb.
	ID     string
	Vendor *Vendor
	// Confidence says how far the figures can be trusted: high, good, partial or names-only.
	Confidence string
	Sources    []string

	ProductName       string // as nvidia-smi -L prints it
	Brand             string
	Architecture      string
	ComputeCapability string // semantic version, e.g. 9.0.0
	PCIVendorID       string // e.g. 0x10de
	PCIDeviceID       string // e.g. 0x2330
	PCISubsystemID    string // e.g. 0x16c110de
	AddressingMode    string
	MemoryMiB         int64 // total that the vendor's device library reports, before partitioning
	MemoryReservedMiB int64 // of that, what the device library reports as reserved
	Multiprocessors   int64
	PowerLimitWatts   int64 // default power limit; 0 where not sourced

	// Partitioning is nil for a model that cannot be partitioned.
	Partitioning *Partitioning
	// DefaultDriverVersion is the newest version with sourced figures that was seen on real hardware.
	DefaultDriverVersion string

	ranges []driverRange // newest first; empty for a model that cannot be partitioned
}

// Partitioning says how the hardware of a model divides.
type Partitioning struct {
	MemorySlices int // units that placements count in
	MaxInstances int // partitions that can exist at once
	// Exclusive is true where a GPU that offers partitions does not offer itself as a whole (Ampere).
	Exclusive bool

	// InstanceIDSource says where the GPU instance ids are from. It is "" where nobody sourced them: a number is
	// needed all the same, and they number the placements from the largest size to the smallest, from left to
	// right, as those of the A100 do.
	InstanceIDSource string

	instanceIDs map[int]map[int]int // placement size -> start -> id
}

// driverRange is the profiles as the driver versions of one range see them.
type driverRange struct {
	from, through string // both inclusive; "" is open
	profiles      []*Profile
}

func (r driverRange) contains(version string) bool {
	return (r.from == "" || compareVersions(version, r.from) >= 0) &&
		(r.through == "" || compareVersions(version, r.through) <= 0)
}

func (r driverRange) String() string {
	switch {
	case r.from == "" && r.through == "":
		return "any"
	case r.from == "":
		return "through " + r.through
	case r.through == "":
		return "from " + r.from
	case r.from == r.through:
		return r.from
	}
	return r.from + " through " + r.through
}

// Table is a model as one driver version sees it.
type Table struct {
	Model         *Model
	DriverVersion string // as nvidia-smi prints it, e.g. 580.95.05
	CUDAVersion   string // as nvidia-smi prints it, e.g. 13.0
	// Profiles are in the order of the catalogue file; empty for a model that cannot be partitioned.
	Profiles []*Profile
}

// DriverVersions returns the ranges of driver versions with figures, newest first, each in words: "from 580",
// "470 through 525". It is empty for a model that cannot be partitioned, which has the same figures with all of
// them.
func (m *Model) DriverVersions() []string {
	var ranges []string
	for _, r := range m.ranges {
		ranges = append(ranges, r.String())
	}
	return ranges
}

// Absent returns the figures of the whole GPU that nobody sourced, by their names in the catalogue file. Without
// its product name and its memory a model cannot be simulated.
func (m *Model) Absent() []string {
	var absent []string
	for _, figure := range []struct {
		name  string
		known bool
	}{
		{"product name", m.ProductName != ""},
		{"memory", m.MemoryMiB != 0},
		{"multiprocessors", m.Multiprocessors != 0},
		{"power limit", m.PowerLimitWatts != 0},
	} {
		if !figure.known {
			absent = append(absent, figure.name)
		}
	}
	return absent
}

// Table returns the figures for one driver version, the model's default version when it is "". It
// fails, saying what is sourced, for a version or a whole-GPU figure that nobody sourced.
func (m *Model) Table(driverVersion string) (*Table, error) {
	if driverVersion == "" {
		driverVersion = m.DefaultDriverVersion
	}
	var needed []string
	if m.ProductName == "" {
		needed = append(needed, "product name")
	}
	if m.MemoryMiB == 0 {
		needed = append(needed, "memory")
	}
	if len(needed) > 0 {
		return nil, fmt.Errorf("model %s cannot be simulated, nobody sourced its %s", m.ID, strings.Join(needed, " and its "))
	}
	return m.tableFor(driverVersion)
}

// Known is Table for a model to be looked at: it does not need the figures of the whole GPU.
func (m *Model) Known(driverVersion string) (*Table, error) {
	if driverVersion == "" {
		driverVersion = m.DefaultDriverVersion
	}
	return m.tableFor(driverVersion)
}

func (m *Model) tableFor(driverVersion string) (*Table, error) {
	if !dotted.MatchString(driverVersion) || !strings.Contains(driverVersion, ".") {
		return nil, fmt.Errorf("driver version %q of model %s is not a version like %s", driverVersion, m.ID, m.DefaultDriverVersion)
	}
	cuda, err := m.Vendor.cudaVersion(driverVersion)
	if err != nil {
		return nil, err
	}
	table := &Table{Model: m, DriverVersion: driverVersion, CUDAVersion: cuda}
	if m.Partitioning == nil {
		return table, nil
	}
	for _, r := range m.ranges {
		if r.contains(driverVersion) {
			table.Profiles = r.profiles
			return table, nil
		}
	}
	return nil, fmt.Errorf("no figures of model %s are sourced for driver version %s; sourced: %s (default %s)",
		m.ID, driverVersion, strings.Join(m.DriverVersions(), "; "), m.DefaultDriverVersion)
}

// Absent returns what nobody sourced of the profiles, as in "memory of 1g.12gb, 1g.12gb+me".
func (t *Table) Absent() []string {
	var order []string
	profiles := map[string][]string{}
	for _, p := range t.Profiles {
		if len(p.Absent) == 0 {
			continue
		}
		figures := "all figures"
		if len(p.Absent) < len(AllFigures()) {
			figures = list(p.Absent)
		}
		if profiles[figures] == nil {
			order = append(order, figures)
		}
		profiles[figures] = append(profiles[figures], p.Name)
	}
	var absent []string
	for _, figures := range order {
		absent = append(absent, figures+" of "+strings.Join(profiles[figures], ", "))
	}
	return absent
}

// Profile returns the profile of that name with all its figures. It fails for a model that cannot be partitioned,
// for an unknown name, saying which there are, and for figures nobody sourced, naming them.
func (t *Table) Profile(name string) (*Profile, error) {
	if t.Model.Partitioning == nil {
		return nil, fmt.Errorf("model %s cannot be partitioned", t.Model.ID)
	}
	var known []string
	for _, p := range t.Profiles {
		if p.Name != name {
			known = append(known, p.Name)
			continue
		}
		if len(p.Absent) > 0 {
			return nil, fmt.Errorf("model %s cannot have %s with driver version %s, nobody sourced its %s", t.Model.ID, name, t.DriverVersion, list(p.Absent))
		}
		return p, nil
	}
	return nil, fmt.Errorf("model %s has no profile %q with driver version %s; it has: %s", t.Model.ID, name, t.DriverVersion, strings.Join(known, ", "))
}

// Partition returns a profile at one of its placements.
func (t *Table) Partition(profile *Profile, start int) *Partition {
	return &Partition{Profile: profile, Start: start, InstanceID: t.Model.Partitioning.instanceIDs[profile.Size][start]}
}

// Partitions returns every partition the GPU can be divided into: profiles in the order of the
// catalogue file, each at all its placements in ascending order. Profiles with a figure that nobody sourced are left
// out. It fails as Partitionable does.
func (t *Table) Partitions() ([]*Partition, error) {
	if _, err := t.Partitionable(); err != nil {
		return nil, err
	}
	var partitions []*Partition
	for _, profile := range t.Profiles {
		if len(profile.Absent) > 0 {
			continue
		}
		for _, start := range profile.Starts {
			partitions = append(partitions, t.Partition(profile, start))
		}
	}
	return partitions, nil
}

// Partitionable returns the figures that partitions share: of each the largest that any profile has.
// It may be less than the whole GPU has. It fails for a model that cannot be partitioned, and where nobody sourced the
// figures of a profile that takes all memory slices, since no other tells what there is to share.
func (t *Table) Partitionable() (Figures, error) {
	if t.Model.Partitioning == nil {
		return Figures{}, fmt.Errorf("model %s cannot be partitioned", t.Model.ID)
	}
	var largest Figures
	whole := false
	for _, profile := range t.Profiles {
		if len(profile.Absent) > 0 {
			continue
		}
		whole = whole || profile.Size == t.Model.Partitioning.MemorySlices
		for _, figure := range AllFigures() {
			*largest.at(figure) = max(largest.Get(figure), profile.Figures.Get(figure))
		}
	}
	if !whole {
		return Figures{}, fmt.Errorf("model %s cannot be partitioned with driver version %s, nobody sourced: %s",
			t.Model.ID, t.DriverVersion, strings.Join(t.Absent(), "; "))
	}
	return largest, nil
}

// Figure is a countable resource of a partition.
type Figure string

const (
	Multiprocessors Figure = "multiprocessors"
	CopyEngines     Figure = "copyEngines"
	Decoders        Figure = "decoders"
	Encoders        Figure = "encoders"
	JPEGEngines     Figure = "jpegEngines"
	OFAEngines      Figure = "ofaEngines"
	Memory          Figure = "memory" // MiB
)

// AllFigures returns the countable resources in the order they are listed in everywhere.
func AllFigures() []Figure {
	return []Figure{Multiprocessors, CopyEngines, Decoders, Encoders, JPEGEngines, OFAEngines, Memory}
}

// Figures are the countable resources of a partition, or what all partitions of a GPU share.
type Figures struct {
	Multiprocessors int64
	CopyEngines     int64
	Decoders        int64
	Encoders        int64
	JPEGEngines     int64
	OFAEngines      int64
	MemoryMiB       int64
}

// Get returns one figure.
func (f Figures) Get(figure Figure) int64 {
	return *f.at(figure)
}

func (f *Figures) at(figure Figure) *int64 {
	switch figure {
	case Multiprocessors:
		return &f.Multiprocessors
	case CopyEngines:
		return &f.CopyEngines
	case Decoders:
		return &f.Decoders
	case Encoders:
		return &f.Encoders
	case JPEGEngines:
		return &f.JPEGEngines
	case OFAEngines:
		return &f.OFAEngines
	case Memory:
		return &f.MemoryMiB
	}
	panic("profiles: unknown figure " + string(figure))
}

// Profile is one kind of partition.
type Profile struct {
	Name         string // e.g. 1g.10gb+me
	ID           int    // as nvidia-smi mig -lgip shows it
	Slices       int    // compute slices
	MaxInstances int    // of this profile on an otherwise empty GPU
	Figures      Figures
	Absent       []Figure // those that nobody sourced; 0 in Figures
	Size         int      // memory slices of one placement
	Starts       []int    // first memory slice of each placement, ascending
	// ComputeInstances lists the ways to divide the compute slices, smallest first.
	ComputeInstances []ComputeInstanceProfile
}

// ComputeInstanceProfile is one way to divide the compute slices of a partition.
type ComputeInstanceProfile struct {
	ID           int `json:"id"`
	Slices       int `json:"slices"`
	MaxInstances int `json:"maxInstances"`
}

// Partition is one profile at one placement.
type Partition struct {
	Profile *Profile
	Start   int // first memory slice
	// InstanceID is the id that the device library gives the GPU instance at this placement.
	InstanceID int
	// ComputeInstanceID is that of the one compute instance, which takes all of the GPU instance.
	ComputeInstanceID int
}
