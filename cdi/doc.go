// Package cdi keeps the Container Device Interface specs of prepared claims: one file per claim in
// the folder that the container runtime reads.
//
// The package owns the names (kind, device, file), the content of a spec made from plain values, its
// validation, and the writing and removing that survives a crash. It reads no environment, knows no
// Kubernetes object and does not decide what a device is.
//
// A spec holds one CDI device per allocated device, with nothing but that device's own edits, so that
// a container which references one request of a claim gets the devices of that request alone. What
// every container gets that has any device of the claim stands once, at the level of the spec.
//
// Other writers use the same folder. The package touches only files that carry its own prefix.
package cdi
