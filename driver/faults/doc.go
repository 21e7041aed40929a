// Package faults is the list of faults that people and tests put on the simulated devices of a node, and
// the parameters with which a claim breaks its own preparation. It owns the vocabulary, the strict decoding
// and the encoding. It is pure: what a fault does to devices, claims and pods is for the driver.
//
// # On a node
//
// The list is one annotation on the Node, [Annotation]:
//
//	apiVersion: simgpu.dev/v1alpha1
//	kind: NodeFaults
//	faults:
//	- id: x7k2p                  # unique in the list
//	  device: gpu-0              # a GPU with all its partitions, or one partition; none: every device of the node
//	  type: XID
//	  xid: 79
//	  created: "2026-12-01T02:00:00Z"
//
// # Types
//
//	XID            xid (1 to 65535); effect
//	ECC            correctable, uncorrectable: counts of errors; effect
//	GPULost        effect; a partition stands for its GPU
//	FailPrepare    times
//	HangPrepare    times
//	SlowPrepare    delay, e.g. 5s (at most 1h); times
//	FailUnprepare, HangUnprepare, SlowUnprepare as for prepare
//	Crash          at: a step of prepare or unprepare; once
//
// An effect is that of the device taint: NoSchedule, NoExecute or None. Without it the taint is the one of the
// vendor's own driver, which for ECC errors is none. A fault with times strikes that often and no more; the
// driver counts by id, and other changes of the list do not change the count.
//
// # In a claim or a class
//
//	apiVersion: simgpu.dev/v1alpha1
//	kind: FaultConfig
//	faults:
//	- type: FailPrepare
//	  times: 2
//
// Only the three types for prepare are possible there: at an unprepare the content of a claim is unknown, and
// the others would harm other claims.
package faults
