// Package smi writes snapshots of devices in the layouts of the real nvidia-smi:
// the default table, the list, the full log, the CSV queries, the tables of GPU and
// compute instances, and the monitors. It is pure: the same snapshot and time give the same text. Fetching snapshots,
// arguments and exit codes belong to cmd/nvidia-smi.
//
// The layouts are those of drivers 550 to 570, and of 580 and later where that
// differs, read off public captures of real hardware. Values that only a physical
// device has (temperature, power) are those of package sensors.
package smi

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/simgpu/simgpu/deviceapi"
)

// ErrNoDevices means that there is nothing to show: no device is visible, or none
// that was selected. The text is that of the real tool.
var ErrNoDevices = errors.New("No devices were found") //nolint:staticcheck // the real tool's text

// LostError is a GPU that does not answer any more. The text is that of the real tool.
type LostError struct{ BusID string }

func (e *LostError) Error() string {
	return fmt.Sprintf("Unable to determine the device handle for GPU %s: GPU is lost.  Reboot the system to recover this GPU", e.BusID)
}

// Report is a snapshot about to be written.
type Report struct {
	gpus  []gpu
	total int // GPUs in the snapshot, selected or not
	now   time.Time
}

// gpu is a GPU with its index, which a selection does not change.
type gpu struct {
	deviceapi.GPUStatus
	index int
}

// NewReport takes a snapshot. It fails with ErrNoDevices where that is empty.
func NewReport(s deviceapi.Snapshot, now time.Time) (*Report, error) {
	if len(s.GPUs) == 0 {
		return nil, ErrNoDevices
	}
	r := &Report{total: len(s.GPUs), now: now}
	for i, g := range s.GPUs {
		r.gpus = append(r.gpus, gpu{GPUStatus: g, index: i})
	}
	return r, nil
}

// Select returns a report of the GPUs that ids names: a comma-separated list of
// indexes, UUIDs, serial numbers or PCI bus ids. It fails with ErrNoDevices where
// one of them is none.
func (r *Report) Select(ids string) (*Report, error) {
	wanted := make(map[int]bool)
	for id := range strings.SplitSeq(ids, ",") {
		found := false
		for _, g := range r.gpus {
			if g.is(strings.TrimSpace(id)) {
				wanted[g.index] = true
				found = true
			}
		}
		if !found {
			return nil, ErrNoDevices
		}
	}
	selected := &Report{total: r.total, now: r.now}
	for _, g := range r.gpus {
		if wanted[g.index] {
			selected.gpus = append(selected.gpus, g)
		}
	}
	return selected, nil
}

// SelectInstances returns a report of the GPU instances that ids names, a
// comma-separated list. It fails with ErrNoInstances where one of them is none.
func (r *Report) SelectInstances(ids string) (*Report, error) {
	selected := &Report{total: r.total, now: r.now, gpus: slices.Clone(r.gpus)}
	for i := range selected.gpus {
		selected.gpus[i].Partitions = nil
	}
	for id := range strings.SplitSeq(ids, ",") {
		found := false
		for i, g := range r.gpus {
			for _, p := range g.Partitions {
				if strconv.Itoa(p.GPUInstanceID) == strings.TrimSpace(id) {
					found = true
					selected.gpus[i].Partitions = append(selected.gpus[i].Partitions, p)
				}
			}
		}
		if !found {
			return nil, ErrNoInstances
		}
	}
	return selected, nil
}

func (g gpu) is(id string) bool {
	if id == "" {
		return false
	}
	return id == strconv.Itoa(g.index) || strings.EqualFold(id, g.UUID) || id == g.Serial ||
		strings.EqualFold(deviceapi.BusID(id), deviceapi.BusID(g.PCIBusID))
}

// Lost fails with a LostError if one of the GPUs of the report is lost: the real tool
// then shows none of them.
func (r *Report) Lost() error {
	for _, g := range r.gpus {
		if g.Health.Lost {
			return &LostError{BusID: deviceapi.BusID(g.PCIBusID)}
		}
	}
	return nil
}

// List writes one line for each GPU and partition: nvidia-smi -L.
func (r *Report) List() string {
	var b strings.Builder
	for _, g := range r.gpus {
		fmt.Fprintf(&b, "GPU %d: %s (UUID: %s)\n", g.index, g.ProductName, g.UUID)
		for i, p := range g.Partitions {
			fmt.Fprintf(&b, "  MIG %-10s  Device %2d: (UUID: %s)\n", p.Profile, i, p.UUID)
		}
	}
	return b.String()
}

// Version writes the versions of the tool and the driver: nvidia-smi --version.
func (r *Report) Version() string {
	driver := r.gpus[0].DriverVersion
	library := driver
	if parts := strings.SplitN(driver, ".", 3); len(parts) == 3 {
		library = parts[0] + "." + parts[1]
	}
	return fmt.Sprintf("NVIDIA-SMI version  : %s\nNVML version        : %s\nDRIVER version      : %s\nCUDA Version        : %s\n",
		driver, library, driver, r.gpus[0].CUDAVersion)
}
