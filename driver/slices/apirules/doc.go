// Package apirules has the API server's own code judge what a node publishes: slices as `simgpuctl render` prints them go
// through the strategy and the validation of ResourceSlices of every Kubernetes version that simgpu supports, with the
// feature gates on and off, and the scheduler's allocator of that version allocates from what is stored then.
//
// Each version needs a build of its own. So this folder is a module beside that of the driver, with one set of
// requirements per version: go.mod is for the newest, kubernetes-1.NN.mod for the others (go test -modfile). The
// driver is not imported, which would tie all versions to its own. `make apirules` runs all of them.
package apirules
