// Package deviceapi carries what a container sees and does with its simulated
// devices: the node driver serves every prepared device on a unix socket of its
// own, and the programs inside the container look at it (nvidia-smi) and hold
// memory of it (simgpu-run, a model server).
//
// The package owns the sockets, the ledger of held memory and the client that
// survives a restart of the driver. It does not know claims, checkpoints or CDI:
// the driver says which device is served in which folder. Which folder a
// container can see is decided by its mounts, and that is the whole of the access
// control: who reaches a socket may use its device and nothing else.
//
//	<plugin dir>/dev/<id>/device.sock   one prepared device; the folder is mounted
//	                                    into containers as /run/simgpu/<id>
//	<plugin dir>/node/device.sock       the node view: every GPU, every prepared
//	                                    partition, read only
//
// The client is an untrusted program. Message sizes, name lengths, connections,
// streams and leases per socket are bounded, every amount is checked, and one
// socket's clients can neither see nor change what belongs to another's.
//
// Types here are plain; package v1alpha1 is the wire format and is converted at
// the edge. Memory is in bytes throughout.
package deviceapi
