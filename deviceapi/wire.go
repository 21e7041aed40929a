package deviceapi

import (
	"crypto/rand"
	"fmt"
	"math"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/simgpu/simgpu/deviceapi/v1alpha1"
)

// Limits on what one client may send. They bound what a container can make the
// driver keep and are far above what a workload needs.
const (
	maxConnections  = 64   // per socket; more wait to be accepted
	maxStreams      = 8    // concurrent calls per connection
	maxLeases       = 64   // per socket
	maxMessageBytes = 4096 // of a request
	maxHeaderBytes  = 8192 // of a request's metadata
	maxLeaseID      = 64   // characters
	maxProcessName  = 256  // bytes; longer names are cut
	maxPID          = 1 << 22
	callsPerSecond  = 50 // per socket; faster clients are slowed down
	callsBurst      = 200
)

// checkHold converts the first message of a Hold, refusing what is out of range.
func checkHold(dir string, req *v1alpha1.HoldRequest) (*hold, error) {
	invalid := func(format string, args ...any) (*hold, error) {
		return nil, status.Errorf(codes.InvalidArgument, format, args...)
	}
	if id := req.GetLeaseId(); id == "" || len(id) > maxLeaseID {
		return invalid("lease_id must have 1 to %d characters, not %d", maxLeaseID, len(id))
	}
	if req.GetMemoryBytes() > math.MaxInt64 {
		return invalid("memory_bytes %d is out of range", req.GetMemoryBytes())
	}
	if pid := req.GetPid(); pid == 0 || pid > maxPID {
		return invalid("pid must be from 1 to %d, not %d", maxPID, pid)
	}
	if req.GetUtilizationPercent() > 100 {
		return invalid("utilization_percent must be at most 100, not %d", req.GetUtilizationPercent())
	}
	return &hold{
		Process: Process{
			PID:    int(req.GetPid()),
			Name:   cleanProcessName(req.GetProcessName()),
			Memory: int64(req.GetMemoryBytes()),
		},
		key:         holdKey{dir: dir, leaseID: req.GetLeaseId()},
		utilization: int(req.GetUtilizationPercent()),
		replaced:    make(chan struct{}),
		lost:        make(chan struct{}),
	}, nil
}

// cleanProcessName makes a name fit for other people's terminals and tables.
func cleanProcessName(name string) string {
	if len(name) > maxProcessName {
		name = name[:maxProcessName]
		for !utf8.ValidString(name) {
			name = name[:len(name)-1]
		}
	}
	name = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return '?'
		}
		return r
	}, name)
	if strings.TrimSpace(name) == "" {
		return "[unknown]"
	}
	return name
}

func outOfMemoryStatus(e *OutOfMemoryError) error {
	st, err := status.New(codes.ResourceExhausted, e.Error()).WithDetails(&v1alpha1.OutOfMemory{
		DeviceUuid:     e.DeviceUUID,
		RequestedBytes: uint64(e.Requested),
		FreeBytes:      uint64(e.Free),
		TotalBytes:     uint64(e.Total),
	})
	if err != nil {
		return status.Error(codes.ResourceExhausted, e.Error())
	}
	return st.Err()
}

// outOfMemory finds the detail of a refused Hold in a gRPC error.
func outOfMemory(err error) (*OutOfMemoryError, bool) {
	for _, detail := range status.Convert(err).Details() {
		if d, ok := detail.(*v1alpha1.OutOfMemory); ok {
			return &OutOfMemoryError{
				DeviceUUID: d.GetDeviceUuid(),
				Requested:  int64(d.GetRequestedBytes()),
				Free:       int64(d.GetFreeBytes()),
				Total:      int64(d.GetTotalBytes()),
			}, true
		}
	}
	return nil, false
}

// lostStatus has the code that clients of every release take for the end of a device.
func lostStatus(uuid string) error {
	st, err := status.New(codes.NotFound, uuid+": "+ErrDeviceLost.Error()).WithDetails(&v1alpha1.DeviceLost{DeviceUuid: uuid})
	if err != nil {
		return status.Error(codes.NotFound, uuid+": "+ErrDeviceLost.Error())
	}
	return st.Err()
}

// deviceLost finds the detail of a lost device in a gRPC error.
func deviceLost(err error) (uuid string, lost bool) {
	for _, detail := range status.Convert(err).Details() {
		if d, ok := detail.(*v1alpha1.DeviceLost); ok {
			return d.GetDeviceUuid(), true
		}
	}
	return "", false
}

func healthToWire(h Health) *v1alpha1.Health {
	if h == (Health{}) {
		return nil
	}
	return &v1alpha1.Health{
		Lost:           h.Lost,
		Xid:            uint32(h.XID),
		EccCorrected:   uint64(h.ECCCorrected),
		EccUncorrected: uint64(h.ECCUncorrected),
	}
}

func healthFromWire(h *v1alpha1.Health) Health {
	return Health{
		Lost:           h.GetLost(),
		XID:            int(h.GetXid()),
		ECCCorrected:   int64(h.GetEccCorrected()),
		ECCUncorrected: int64(h.GetEccUncorrected()),
	}
}

var migModes = map[MIGMode]v1alpha1.MIGMode{
	MIGUnsupported: v1alpha1.MIGMode_MIG_MODE_UNSUPPORTED,
	MIGDisabled:    v1alpha1.MIGMode_MIG_MODE_DISABLED,
	MIGEnabled:     v1alpha1.MIGMode_MIG_MODE_ENABLED,
}

func toWire(s Snapshot) *v1alpha1.SnapshotResponse {
	response := &v1alpha1.SnapshotResponse{}
	for _, g := range s.GPUs {
		gpu := &v1alpha1.GPU{
			Uuid:              g.UUID,
			ProductName:       g.ProductName,
			Minor:             uint32(g.Minor),
			PciBusId:          g.PCIBusID,
			Serial:            g.Serial,
			DriverVersion:     g.DriverVersion,
			CudaVersion:       g.CUDAVersion,
			ComputeCapability: g.ComputeCapability,
			Brand:             g.Brand,
			Architecture:      g.Architecture,
			MigMode:           migModes[g.MIGMode],
			MemoryBytes:       uint64(g.MemoryBytes),
			PowerLimitWatts:   uint32(g.PowerLimitWatts),
			Whole:             g.Whole,
			Processes:         processesToWire(g.Processes),
			Profiles:          profilesToWire(g.Profiles),
			Health:            healthToWire(g.Health),
		}
		if g.Whole {
			gpu.MemoryUsedBytes = uint64(g.MemoryUsed)
			gpu.UtilizationPercent = uint32(g.Utilization)
		}
		for _, p := range g.Partitions {
			gpu.Partitions = append(gpu.Partitions, &v1alpha1.Partition{
				Uuid:               p.UUID,
				Profile:            p.Profile,
				GpuInstanceId:      uint32(p.GPUInstanceID),
				ComputeInstanceId:  uint32(p.ComputeInstanceID),
				ProfileId:          uint32(p.ProfileID),
				PlacementStart:     uint32(p.PlacementStart),
				PlacementSize:      uint32(p.PlacementSize),
				MemoryBytes:        uint64(p.MemoryBytes),
				Multiprocessors:    uint32(p.Multiprocessors),
				CopyEngines:        uint32(p.CopyEngines),
				Encoders:           uint32(p.Encoders),
				Decoders:           uint32(p.Decoders),
				JpegEngines:        uint32(p.JPEGEngines),
				OfaEngines:         uint32(p.OFAEngines),
				MemoryUsedBytes:    uint64(p.MemoryUsed),
				UtilizationPercent: uint32(p.Utilization),
				Processes:          processesToWire(p.Processes),
				Health:             healthToWire(p.Health),
			})
		}
		response.Gpus = append(response.Gpus, gpu)
	}
	return response
}

func processesToWire(processes []Process) []*v1alpha1.Process {
	var wire []*v1alpha1.Process
	for _, p := range processes {
		wire = append(wire, &v1alpha1.Process{Pid: uint32(p.PID), Name: p.Name, MemoryBytes: uint64(p.Memory)})
	}
	return wire
}

func fromWire(response *v1alpha1.SnapshotResponse) Snapshot {
	var s Snapshot
	for _, g := range response.GetGpus() {
		gpu := GPUStatus{
			GPU: GPU{
				UUID:              g.GetUuid(),
				ProductName:       g.GetProductName(),
				Minor:             int(g.GetMinor()),
				PCIBusID:          g.GetPciBusId(),
				Serial:            g.GetSerial(),
				DriverVersion:     g.GetDriverVersion(),
				CUDAVersion:       g.GetCudaVersion(),
				ComputeCapability: g.GetComputeCapability(),
				Brand:             g.GetBrand(),
				Architecture:      g.GetArchitecture(),
				MIGMode:           migModeFromWire(g.GetMigMode()),
				MemoryBytes:       int64(g.GetMemoryBytes()),
				PowerLimitWatts:   int(g.GetPowerLimitWatts()),
				Profiles:          profilesFromWire(g.GetProfiles()),
			},
			Whole:       g.GetWhole(),
			MemoryUsed:  int64(g.GetMemoryUsedBytes()),
			Utilization: int(g.GetUtilizationPercent()),
			Processes:   processesFromWire(g.GetProcesses()),
			Health:      healthFromWire(g.GetHealth()),
		}
		for _, p := range g.GetPartitions() {
			gpu.Partitions = append(gpu.Partitions, PartitionStatus{
				Partition: Partition{
					UUID:              p.GetUuid(),
					Profile:           p.GetProfile(),
					GPUInstanceID:     int(p.GetGpuInstanceId()),
					ComputeInstanceID: int(p.GetComputeInstanceId()),
					ProfileID:         int(p.GetProfileId()),
					PlacementStart:    int(p.GetPlacementStart()),
					PlacementSize:     int(p.GetPlacementSize()),
					MemoryBytes:       int64(p.GetMemoryBytes()),
					Multiprocessors:   int(p.GetMultiprocessors()),
					CopyEngines:       int(p.GetCopyEngines()),
					Encoders:          int(p.GetEncoders()),
					Decoders:          int(p.GetDecoders()),
					JPEGEngines:       int(p.GetJpegEngines()),
					OFAEngines:        int(p.GetOfaEngines()),
				},
				MemoryUsed:  int64(p.GetMemoryUsedBytes()),
				Utilization: int(p.GetUtilizationPercent()),
				Processes:   processesFromWire(p.GetProcesses()),
				Health:      healthFromWire(p.GetHealth()),
			})
		}
		s.GPUs = append(s.GPUs, gpu)
	}
	return s
}

func migModeFromWire(wire v1alpha1.MIGMode) MIGMode {
	for mode, w := range migModes {
		if w == wire {
			return mode
		}
	}
	return MIGUnsupported
}

func processesFromWire(wire []*v1alpha1.Process) []Process {
	var processes []Process
	for _, p := range wire {
		processes = append(processes, Process{PID: int(p.GetPid()), Name: p.GetName(), Memory: int64(p.GetMemoryBytes())})
	}
	return processes
}

func profilesToWire(profiles []Profile) []*v1alpha1.Profile {
	var wire []*v1alpha1.Profile
	for _, p := range profiles {
		w := &v1alpha1.Profile{
			Name:            p.Name,
			Id:              uint32(p.ID),
			Slices:          uint32(p.Slices),
			MaxInstances:    uint32(p.MaxInstances),
			MemoryBytes:     uint64(p.MemoryBytes),
			Multiprocessors: uint32(p.Multiprocessors),
			CopyEngines:     uint32(p.CopyEngines),
			Encoders:        uint32(p.Encoders),
			Decoders:        uint32(p.Decoders),
			JpegEngines:     uint32(p.JPEGEngines),
			OfaEngines:      uint32(p.OFAEngines),
			PlacementSize:   uint32(p.PlacementSize),
		}
		for _, start := range p.PlacementStarts {
			w.PlacementStarts = append(w.PlacementStarts, uint32(start))
		}
		for _, c := range p.Compute {
			w.ComputeProfiles = append(w.ComputeProfiles, &v1alpha1.ComputeProfile{Id: uint32(c.ID), Slices: uint32(c.Slices), MaxInstances: uint32(c.MaxInstances)})
		}
		wire = append(wire, w)
	}
	return wire
}

func profilesFromWire(wire []*v1alpha1.Profile) []Profile {
	var profiles []Profile
	for _, w := range wire {
		p := Profile{
			Name:            w.GetName(),
			ID:              int(w.GetId()),
			Slices:          int(w.GetSlices()),
			MaxInstances:    int(w.GetMaxInstances()),
			MemoryBytes:     int64(w.GetMemoryBytes()),
			Multiprocessors: int(w.GetMultiprocessors()),
			CopyEngines:     int(w.GetCopyEngines()),
			Encoders:        int(w.GetEncoders()),
			Decoders:        int(w.GetDecoders()),
			JPEGEngines:     int(w.GetJpegEngines()),
			OFAEngines:      int(w.GetOfaEngines()),
			PlacementSize:   int(w.GetPlacementSize()),
		}
		for _, start := range w.GetPlacementStarts() {
			p.PlacementStarts = append(p.PlacementStarts, int(start))
		}
		for _, c := range w.GetComputeProfiles() {
			p.Compute = append(p.Compute, ComputeProfile{ID: int(c.GetId()), Slices: int(c.GetSlices()), MaxInstances: int(c.GetMaxInstances())})
		}
		profiles = append(profiles, p)
	}
	return profiles
}

// check refuses a description that could not be served or drawn.
func (d Device) check() error {
	if err := d.GPU.check(); err != nil {
		return err
	}
	if d.ShareBytes < 0 || d.ShareBytes > d.MemoryBytes() {
		return fmt.Errorf("share of %d bytes of %s, which has %d", d.ShareBytes, d.UUID(), d.MemoryBytes())
	}
	if d.Partition != nil {
		if d.Partition.UUID == "" {
			return fmt.Errorf("partition %s of GPU %s has no UUID", d.Partition.Profile, d.GPU.UUID)
		}
		if d.Partition.MemoryBytes <= 0 {
			return fmt.Errorf("partition %s has %d bytes of memory", d.Partition.UUID, d.Partition.MemoryBytes)
		}
	}
	return nil
}

func (g GPU) check() error {
	if g.UUID == "" {
		return fmt.Errorf("GPU with minor %d has no UUID", g.Minor)
	}
	if g.Minor < 0 {
		return fmt.Errorf("GPU %s has the minor %d", g.UUID, g.Minor)
	}
	if g.MemoryBytes <= 0 {
		return fmt.Errorf("GPU %s has %d bytes of memory", g.UUID, g.MemoryBytes)
	}
	return nil
}

// newLeaseID is unique among all clients of a socket.
func newLeaseID() string { return rand.Text() }
