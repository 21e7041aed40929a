package driver

import (
	"context"
	"sync"

	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// sliceWriter brings ResourceSlices into the API for as long as this driver owns the node's state. The
// kubeletplugin helper would do the same until the process ends, and two drivers that follow one another
// would undo each other's slices.
type sliceWriter struct {
	client               kubernetes.Interface
	driverName, nodeName string
	// failed is told what goes wrong in the background. The writer tries again by itself.
	failed func(ctx context.Context, err error, msg string)

	mu         sync.Mutex
	controller *resourceslice.Controller
}

// write makes the slices in the API those of the resources, in the background, from the first call until
// stop or until the context of the first call ends.
func (w *sliceWriter) write(ctx context.Context, resources resourceslice.DriverResources) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.controller != nil {
		w.controller.Update(&resources)
		return nil
	}
	var err error
	w.controller, err = resourceslice.StartController(ctx, resourceslice.Options{
		DriverName:   w.driverName,
		KubeClient:   w.client,
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: w.nodeName},
		Resources:    &resources,
		ErrorHandler: w.failed,
	})
	return err
}

// stop returns when nothing is written any more. The slices stay.
func (w *sliceWriter) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.controller.Stop()
}
