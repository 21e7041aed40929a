package dcgm

import (
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/deviceapi/sensors"
)

// row is a GPU or a partition in use.
type row struct {
	gpu       deviceapi.GPUStatus
	index     int                        // of the GPU on the node
	partition *deviceapi.PartitionStatus // nil: the whole GPU
}

// xidErrors is the only field that a GPU has a value for after it was lost.
const xidErrors = "DCGM_FI_DEV_XID_ERRORS"

// field is a metric. Its value may be unknown for a row.
type field struct {
	name, help string
	kind       prometheus.ValueType
	value      func(row) (float64, bool)
}

// fields are those of the exporter's default counters that the simulation has values for, in its order.
func fields() []field {
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	return []field{
		{"DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", gauge, func(r row) (float64, bool) {
			return float64(sensors.Temperature(r.gpu)), true
		}},
		{"DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", gauge, func(r row) (float64, bool) {
			milliwatts, known := sensors.Power(r.gpu)
			return float64(milliwatts) / 1000, known
		}},
		{"DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "Total number of PCIe retries.", counter, none},
		{"DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", gauge, utilization(func(load int) int { return load })},
		{"DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %).", gauge, utilization(sensors.MemoryTraffic)},
		{"DCGM_FI_DEV_ENC_UTIL", "Encoder utilization (in %).", gauge, utilization(func(int) int { return 0 })},
		{"DCGM_FI_DEV_DEC_UTIL", "Decoder utilization (in %).", gauge, utilization(func(int) int { return 0 })},
		{xidErrors, "Value of the last XID error encountered.", gauge, func(r row) (float64, bool) {
			return float64(r.xid()), true
		}},
		{"DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", gauge, func(r row) (float64, bool) {
			total, used := r.memory()
			return mebibytes(max(total-used, 0)), true
		}},
		{"DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", gauge, func(r row) (float64, bool) {
			_, used := r.memory()
			return mebibytes(used), true
		}},
		{"DCGM_FI_DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB).", gauge, none},
		{"DCGM_FI_DEV_VGPU_LICENSE_STATUS", "vGPU License status", gauge, none},
		{"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for uncorrectable errors", counter, remapped},
		{"DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "Number of remapped rows for correctable errors", counter, remapped},
		{"DCGM_FI_DEV_ROW_REMAP_FAILURE", "Whether remapping of rows has failed", gauge, remapped},
		{"DCGM_FI_PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", gauge, func(r row) (float64, bool) {
			return float64(r.load()) / 100, true
		}},
		{"DCGM_FI_PROF_DRAM_ACTIVE", "Ratio of cycles the device memory interface is active sending or receiving data.", gauge, func(r row) (float64, bool) {
			return float64(sensors.MemoryTraffic(r.load())) / 100, true
		}},
	}
}

func none(row) (float64, bool) { return 0, true }

// remapped is the state of row remapping, which came with compute capability 8.0.
func remapped(r row) (float64, bool) {
	major, _, _ := strings.Cut(r.gpu.ComputeCapability, ".")
	n, err := strconv.Atoi(major)
	return 0, err == nil && n >= 8
}

// utilization is unknown for whatever is in MIG mode.
func utilization(of func(load int) int) func(row) (float64, bool) {
	return func(r row) (float64, bool) {
		load, known := sensors.Load(r.gpu)
		return float64(of(load)), known
	}
}

// xid is the partition's own, or else that of its GPU.
func (r row) xid() int {
	if r.partition != nil && r.partition.Health.XID != 0 {
		return r.partition.Health.XID
	}
	return r.gpu.Health.XID
}

// load of the GPU or the partition in percent.
func (r row) load() int {
	if r.partition != nil {
		return r.partition.Utilization
	}
	return r.gpu.Utilization
}

func (r row) memory() (total, used int64) {
	if r.partition != nil {
		return r.partition.MemoryBytes, r.partition.MemoryUsed
	}
	return r.gpu.MemoryBytes, r.gpu.MemoryUsed
}

func mebibytes(bytes int64) float64 { return float64(bytes / deviceapi.MiB) }
