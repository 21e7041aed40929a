// Package profiles is the catalogue of GPU models: what a whole GPU is, how it can be partitioned, and
// how its vendor names all of that.
//
// A catalogue is a folder per vendor. In it, vendor.yaml is the vendor's vocabulary (driver name,
// naming patterns, attribute and capacity names, device files), so that a second vendor is a change of
// data and not of Go code, and every other YAML file is one GPU model under its own id: figures of
// the whole GPU, partition profiles and their placements, and per range of driver versions the names
// and memory sizes of the profiles. The files name where their figures come from. A figure that nobody
// could source is absent, and what needs it fails with an error that names it; it is never guessed. A model works as
// far as its figures go: profiles without all of theirs are left out. The one number that is made up where
// nobody sourced it is the id of a GPU instance, and Partitioning.InstanceIDSource says so.
//
// The package owns the file format, its strict validation and the enumeration of partitions. It knows
// nothing of nodes, ResourceSlices or a Kubernetes client; package hardware builds on it.
package profiles
