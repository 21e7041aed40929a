// Package profiles is the catalogue of GPU models: one YAML file per model with the figures of the
// whole GPU and its partition profiles per driver version, and one file per vendor with every
// vendor-specific word. It owns the file format, its validation and the enumeration of partitions.
// It knows nothing of nodes, ResourceSlices or a Kubernetes client.
package profiles
