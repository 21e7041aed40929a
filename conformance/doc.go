// Package conformance tests DRA drivers against the real API server and the real kubelet code, without a cluster.
//
// [Run] starts etcd, the API server, a Node and the part of the kubelet that deals with drivers in this process, starts the
// driver under test as any executable, and runs checks: each asserts one rule of the contract between a driver and
// Kubernetes, and knows where that rule is written. Claims are made from what the driver itself publishes and allocated
// with the scheduler's own allocator, so a driver gets nothing that it would not get in a cluster. The kit knows nothing of
// any particular driver; what it cannot find out from the ResourceSlices is in a [Profile].
//
// # Parts
//
//	check.go   what a check is, and the list of them
//	t.go       what a check works with
//	cluster.go what the nodes of a run have in common: the API server, and what drivers may do there
//	testbed.go a node that the driver is on: folders, kubelet, the driver's process
//	run.go     which checks run, in which order, and what is put right between them
//	rights.go  what the driver may do at the API server, and what it has done
//	report.go  results as a table, JSON and JUnit XML
//	profile.go what to know about a driver
//	area_*.go  the checks, by area
//
// Below internal/ are the real API server (controlplane), the way of the driver to it (apiproxy), the kubelet (kubelet),
// the driver's process (process) and the scheduler (scheduler).
package conformance
