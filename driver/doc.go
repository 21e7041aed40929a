// Package driver is the node driver: it publishes the simulated GPUs of one node as ResourceSlices and
// prepares the claims that are allocated from them. It owns the order of things: what is on disk when,
// who holds which device, what is published when. What a GPU is, how a checkpoint, a CDI spec or a
// device socket looks like is the business of the packages below it.
//
// # Files
//
// In <kubelet plugins folder>/<driver name>, which must have the same path on the host and in the
// driver's container:
//
//	checkpoint/           one file per prepared claim (package checkpoint)
//	dev/<id>/device.sock  one socket per prepared device, its folder mounted into containers
//	node/device.sock      the view of the whole node
//	tools/<hash>/         programs mounted into containers (package tools)
//	dra-device-metadata/  device metadata for containers, written by the kubeletplugin helper
//	faults.json           how often the faults on the node have struck
//	dra-<pod uid>.sock    the service socket of the driver in that pod (dra.sock outside of pods)
//	lock, successor       who works, and who takes over from it
//
// In the CDI folder: k8s.<driver>-claim_<uid>.yaml per prepared claim (package cdi), and the helper's
// specs for device metadata.
//
// # Life of a claim
//
// Prepare writes the intent, opens the sockets, writes the CDI spec and writes the completion, in this
// order, and unprepare goes back the same way. Whatever moment a crash hits, the next start finds
// either a completed claim, whose spec and sockets it renews, or an intent, which it undoes. A claim
// whose checkpoint cannot be read is rebuilt from the API; until then its devices are not given out.
// So is one whose checkpoint is lost, which its CDI spec tells; a spec of which nothing on the node tells
// the claim's name is removed. At the start and every few minutes claims that are gone from the API are
// released, specs, sockets and metadata of no claim are removed, and what somebody has removed of a
// prepared claim is renewed. A prepare succeeds only with all of it in place, device metadata included.
//
// A device, or a partition that overlaps with it, is given to one claim at a time, unless the access
// is administrative, or the inventory lets claims share the device: then its shares together take no more
// than its capacity, and a container sees a device of the size of its share. Before a conflict is reported the driver asks the API whether the claim that has
// the device still exists and, where the kubelet is told not to unprepare claims (skipNodeOperations), whether it still has
// the device.
//
// # Inventory
//
// The inventory file and the node's labels are watched, and changes are applied at once. A GPU that the
// inventory changed or dropped stays as it was while a claim uses it: its devices in use are published
// with a taint, its other devices are withdrawn, and the change follows with the release of the last
// claim. An inventory with a fault changes nothing. If there is no good one yet, nothing is published,
// and the driver stays up to unprepare claims.
//
// # Status of claims
//
// Once a claim is prepared its status.devices has an entry for each device of the driver, with the condition
// Ready and, as data, uuid, memory, and parentUUID and profile of a partition; once it is unprepared it has
// none. This is written in the background with server-side apply, so that entries of other drivers stay as
// they are. A write that fails fails no prepare: it is tried again a few times, and later by the rounds that
// compare claims with the API. Where the API says what it should there is no write.
//
// # Health and faults
//
// Faults are put on simulated devices with an annotation on the Node (package faults; simgpuctl writes it), and on
// the preparation of one claim with a FaultConfig in its configuration. They show as device taints in the
// ResourceSlices, as device health that the kubelet puts into the status of pods, in nvidia-smi and in what holds
// memory, in metrics, and in Events on the Node; all of that goes when the fault is cleared. A fault costs one write
// per slice that has a device it is on.
//
//	XID      <driver>/xid=<number>:NoSchedule, Unhealthy; of the errors that the vendor's driver blames on the
//	         application None, Healthy
//	GPULost  <driver>/gpu-lost:NoSchedule, Unhealthy; what held memory ends, nvidia-smi fails
//	ECC      counted in nvidia-smi; no taint, as with the vendor's driver, unless an effect is given
//	         (simgpu.dev/ecc), and then Unhealthy
//
// Faults of prepare and unprepare make the call take its time, hang until the fault is cleared or the kubelet gives
// up, or fail; other claims are not held up, save those of the same pod. A Crash ends the process with exit code 70
// at a waypoint, once per fault. How often a fault has struck is on disk before it strikes. A list of faults that
// has a fault of its own changes nothing.
//
// # Binding conditions
//
// With an attach delay all devices are published with binding conditions (Kubernetes 1.36 and later): the
// scheduler binds a pod once the status of its claim has the condition simgpu.dev/attached for each device,
// which the driver writes so long after the allocation, and allocates anew at simgpu.dev/attach-failed, which
// it writes for claims with the annotation simgpu.dev/fail-attach.
//
// # Publishing
//
// The layout follows the version of the API server. In a dry run the driver asks the API server which
// fields it keeps: at the start, every few minutes, and when the connection to it was lost. Where it
// drops counters, partitions are withdrawn and whole GPUs without a partition in use stay; where it
// drops taints, devices that would get one are withdrawn; where it drops what lets claims share a device, a
// device is for one claim at a time. The order of the devices (package order)
// decides which one the scheduler takes; where it depends on what is in use, a prepare or unprepare may
// lead to one slice being rewritten, and others follow at intervals, each a single write that keeps the
// pool complete and its generation. Ready means that the kubelet has registered the driver and that the
// slices have been seen in the API.
//
// # Metrics
//
//	simgpu_claims_prepared                   claims prepared on this node
//	simgpu_devices_prepared                  devices that they have
//	simgpu_claim_operation_duration_seconds  histogram by operation: prepare, unprepare
//	simgpu_claim_operation_errors_total      by operation and reason: conflict, not_found, config, unsettled, io,
//	                                         api, fault, timeout, stopping, other
//	simgpu_claim_conflicts_total             by outcome: refused; resolved, where the other claim was gone
//	simgpu_orphans_removed_total             by kind: claim, cdi_spec, device_socket, device_metadata
//	simgpu_published_slices                  ResourceSlices last seen in the API
//	simgpu_published_devices                 devices last seen in the API
//	simgpu_publish_errors_total              refused, failed or altered writes of slices
//	simgpu_slice_reorders_total              slices written only to list their devices in another order
//	simgpu_dropped_fields_total              slices stored without the fields of a feature, by feature
//	simgpu_api_feature_missing               1 while the API server drops fields of ResourceSlices, by feature
//	simgpu_inventory_valid                   1 while the inventory as it is now is in force
//	simgpu_faults                            faults on the node, by type and device
//	simgpu_checkpoint_unreadable_total       checkpoints that a start could not read
//	simgpu_checkpoint_unsettled              of those, claims not rebuilt yet
//	simgpu_pod_attribution_errors_total      scrapes of the GPUs' metrics without the pods, since the kubelet did not tell
//	simgpu_device_status_errors_total        claims whose status was given up after several attempts to write it
//	simgpu_api_requests_total                by verb, resource and code; verb dryrun stores nothing
//
// All label values are known beforehand, but for the devices that faults are on; none names a claim or a
// pod. The metrics of the simulated GPUs themselves are those of package dcgm, at an endpoint of their own.
//
// # Events
//
// On the Node:
//
//	InvalidInventory, InventoryApplied       the inventory was refused; one after that, or a change, is in force
//	PartitionsWithdrawn, PartitionsPublished  the API server drops, or keeps again, what tells partitions apart
//	TaintsDropped, TaintsKept                the same of device taints
//	SharesDropped, SharesKept                the same of what lets claims share a device
//	FieldsDropped                            the API server dropped other fields of a slice
//	PublishFailed                            slices could not be written; told once per cause
//	CheckpointUnreadable, CheckpointRebuilt  a claim's checkpoint was set aside; it was rebuilt from the API
//	ClaimReleased                            a prepared claim was gone from the API and was unprepared
//	OrphansRemoved                           files of no claim were removed
//	FaultAdded, FaultCleared                 somebody broke a device, or mended it
//	InvalidFaults                            the faults in the Node's annotation cannot be read; those before stay
//
// On the ResourceClaim:
//
//	PrepareFailed, UnprepareFailed           with the reason; the kubelet tries again
//	DeviceConflict                           another claim, which still exists, has the device
//
// # Permissions
//
//	resource.k8s.io resourceclaims  get; with an attach delay list, watch
//	resource.k8s.io resourceclaims/status  patch
//	resource.k8s.io resourceclaims/driver  associated-node:patch, for the driver's name (Kubernetes 1.36 and later)
//	resource.k8s.io resourceslices  list, watch, create, update, delete
//	nodes                           get, list, watch (always with the name of the own node)
//	events                          create, patch (in the namespaces of claims, and in "default" for the node)
//
// # Stopping and updating
//
// On stop the driver finishes what it is doing, closes its sockets and leaves everything else: prepared
// claims stay prepared, containers keep running and reach the next driver, and the ResourceSlices stay
// until the kubelet removes them half a minute after the driver has gone.
//
// Two drivers of one name may run on a node, as they do in a rolling update with maxSurge, but only one
// works: the one that owns the node's state, which is everything in the folders above and the node's
// ResourceSlices. Both are registered with the kubelet, each with sockets of its own, and whichever the
// kubelet calls, the call gets to the one that works, or waits for the moment in which none does. So no
// pod notices an update:
//
//  1. The new driver registers, and asks the old one to hand over. It is not ready yet.
//  2. The old one ends the calls that run, stops to publish, closes the devices' sockets and gives up the
//     lock. It stays registered, and stays ready: it takes over again if the new one ends.
//  3. The new one opens the sockets, to which containers reconnect by themselves, publishes, and is ready.
//  4. The DaemonSet ends the old one.
//
// A driver of a release that cannot hand over is passed the calls until the DaemonSet ends it, for which
// the new one has to be ready before it works. A driver that does not know the UID of its pod waits for
// the lock before it registers.
package driver
