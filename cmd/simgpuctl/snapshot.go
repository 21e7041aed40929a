package main

import (
	"context"
	"errors"
	"slices"

	"github.com/spf13/pflag"

	"github.com/simgpu/simgpu/placement"
)

// snapshotFlags adds the flags that say where slices, classes and claims come from, and returns what reads them once they are
// parsed, with the namespace that is meant: from files that of --namespace alone, "" without it.
func snapshotFlags(flags *pflag.FlagSet) func(context.Context) (*placement.Snapshot, string, error) {
	var fromSlices, fromClaims, fromClasses []string
	connect := inNamespace(flags)
	flags.StringSliceVar(&fromSlices, "slices", nil, "files with ResourceSlices, and Nodes if their labels count, instead of a cluster")
	flags.StringSliceVar(&fromClaims, "claims", nil, "files with ResourceClaims, templates and pods; with --slices")
	flags.StringSliceVar(&fromClasses, "classes", nil, "files with DeviceClasses; with --slices")
	return func(ctx context.Context) (*placement.Snapshot, string, error) {
		if len(fromSlices) > 0 {
			snapshot, err := placement.ReadFiles(slices.Concat(fromSlices, fromClasses, fromClaims)...)
			return snapshot, flags.Lookup("namespace").Value.String(), err
		}
		if len(fromClaims)+len(fromClasses) > 0 {
			return nil, "", errors.New("--claims and --classes need --slices: either all comes from files, or all from the cluster")
		}
		client, namespace, err := connect()
		if err != nil {
			return nil, "", err
		}
		snapshot, err := placement.ReadCluster(ctx, client)
		return snapshot, namespace, err
	}
}
