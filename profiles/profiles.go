package profiles

import (
	"errors"
	"io/fs"
)

// Catalogue is a validated set of GPU models and the vendors they belong to.
type Catalogue struct {
	models  map[string]*Model
	vendors map[string]*Vendor
}

// Load returns the catalogue built into the binary, strictly decoded and validated.
func Load() (*Catalogue, error) { return nil, errors.New("not built yet") }

// LoadFS reads a catalogue laid out as <vendor>/vendor.yaml and <vendor>/<model id>.yaml.
// It reports every fault of every file at once, each with its file and field path.
func LoadFS(fsys fs.FS) (*Catalogue, error) { return nil, errors.New("not built yet") }

// Model returns the model with the given id, or an error that lists the known ids.
func (c *Catalogue) Model(id string) (*Model, error) { return nil, errors.New("not built yet") }

// Models returns all models, sorted by id.
func (c *Catalogue) Models() []*Model { return nil }

// Vendors returns all vendors, sorted by name.
func (c *Catalogue) Vendors() []*Vendor { return nil }

// Model is one GPU model: what the whole GPU is and how it can be partitioned.
type Model struct {
	// ID names the model in an inventory, e.g. "h100-sxm5-80gb".
	ID string
	// Vendor holds every vendor-specific word.
	Vendor *Vendor
	// Confidence says how far the figures can be trusted: high, good, partial or names-only.
	Confidence string
	// Sources names where the figures come from.
	Sources []string

	ProductName       string // as nvidia-smi -L prints it
	Brand             string
	Architecture      string
	ComputeCapability string // semantic version, e.g. 9.0.0
	PCIVendorID       string // four hex digits, e.g. 10de
	PCIDeviceID       string // four hex digits, e.g. 2330
	PCISubsystemID    string // eight hex digits; "" where not sourced
	AddressingMode    string // "" where the device has none or it is not sourced
	MemoryMiB         int64  // what the device library reports as total, before partitioning
	Multiprocessors   *int64 // nil where not sourced

	// Partitioning is nil for a model that cannot be partitioned.
	Partitioning *Partitioning
}

// Partitioning says how the hardware of a model divides.
type Partitioning struct {
	MemorySlices int // units that placements count in
	MaxInstances int // partitions that can exist at once
	// Exclusive is true where switching partitioning on takes the whole GPU away (Ampere).
	Exclusive bool
}

// Table returns the figures for one driver version, the model's default version when it is "".
// A version nobody sourced figures for is an error that lists the sourced ones.
func (m *Model) Table(driverVersion string) (*Table, error) { return nil, errors.New("not built yet") }

// Table is what a model is under one driver version.
type Table struct {
	Model         *Model
	DriverVersion string // as nvidia-smi prints it, e.g. 580.95.05
	CUDAVersion   string // as nvidia-smi prints it, e.g. 13.0
	Source        string
}

// Profiles returns the partition profiles in the order of the catalogue file. It fails, naming
// every absent figure, for a table that is not fully sourced and for a model that cannot be partitioned.
func (t *Table) Profiles() ([]*Profile, error) { return nil, errors.New("not built yet") }

// Partitions returns every partition the GPU can be divided into, profiles x placements,
// in the order of the profiles and then of the start. It fails as Profiles does.
func (t *Table) Partitions() ([]*Partition, error) { return nil, errors.New("not built yet") }

// Figures are the countable resources of a partition or of a whole partitionable GPU.
type Figures struct {
	Multiprocessors int64
	CopyEngines     int64
	Decoders        int64
	Encoders        int64
	JPEGEngines     int64
	OFAEngines      int64
	MemoryMiB       int64
}

// Profile is one kind of partition.
type Profile struct {
	Name         string // e.g. 1g.10gb+me
	ID           int    // as nvidia-smi mig -lgip shows it
	Slices       int    // compute slices
	MaxInstances int    // instances of this profile on an otherwise empty GPU
	Figures      Figures
	Size         int   // memory slices of one placement
	Starts       []int // first memory slice of each placement, ascending
	// ComputeInstances lists the compute instance profiles, smallest first.
	ComputeInstances []ComputeInstanceProfile
}

// ComputeInstanceProfile is one way to divide the compute slices of a partition.
type ComputeInstanceProfile struct {
	Slices       int
	ID           int
	MaxInstances int
}

// Partition is one profile at one placement.
type Partition struct {
	Profile *Profile
	Start   int // first memory slice
	// InstanceID is the id of the GPU instance that the device library gives this placement.
	InstanceID int
	// ComputeInstanceID is the id of the one compute instance that fills it.
	ComputeInstanceID int
}
