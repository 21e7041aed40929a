// Package dcgm exports the simulated GPUs of a node as NVIDIA's dcgm-exporter 4.8 exports real ones with
// its default counters: the same metric names, types, help texts and labels, so that dashboards, alerts
// and autoscalers written for it work unchanged.
//
// # Rows
//
// A GPU has one row in each metric. Once partitions of it are in use, each of them has a row instead,
// with the labels GPU_I_PROFILE and GPU_I_ID, as in the exporter's default mode. A row repeats for each
// container that uses the device, with the labels container, namespace, pod and dra_*; without a
// container these labels are absent.
//
// # Values
//
//	DCGM_FI_DEV_FB_USED, _FREE               memory held through the device API, and what is left
//	DCGM_FI_DEV_FB_RESERVED                  0
//	DCGM_FI_DEV_GPU_UTIL                     the load that holders report, no more than 100
//	DCGM_FI_DEV_MEM_COPY_UTIL                half of it
//	DCGM_FI_DEV_ENC_UTIL, _DEC_UTIL          0
//	DCGM_FI_DEV_GPU_TEMP, _POWER_USAGE       package sensors
//	DCGM_FI_DEV_XID_ERRORS                   the last XID that was injected, of the partition or else of its GPU
//	DCGM_FI_DEV_PCIE_REPLAY_COUNTER          0
//	DCGM_FI_DEV_VGPU_LICENSE_STATUS          0
//	DCGM_FI_DEV_*_REMAPPED_ROWS, _ROW_REMAP_FAILURE   0, from compute capability 8.0 on
//	DCGM_FI_PROF_GR_ENGINE_ACTIVE            the load of the GPU or the partition, from 0 to 1
//	DCGM_FI_PROF_DRAM_ACTIVE                 half of it
//
// The *_UTIL metrics do not exist for GPUs in MIG mode, as on real hardware. Clocks, memory temperature,
// energy, NVLink, tensor pipe and PCIe traffic are absent: nothing in the simulation says what they
// would be. So is the power draw of a model without a sourced power limit, and of a GPU that is lost
// everything but its XID.
//
// Everything is computed when it is asked for; nothing is sampled.
package dcgm
