package driver

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"
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
	ctx        context.Context // of the controller
	node       types.UID       // "" until it is known
	resources  resourceslice.DriverResources
}

// write makes the slices in the API those of the resources, in the background, from the first call until
// stop or until the context of the first call ends.
func (w *sliceWriter) write(ctx context.Context, resources resourceslice.DriverResources) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.resources = resources
	if w.controller != nil {
		w.controller.Update(&resources)
		return nil
	}
	w.ctx = ctx
	return w.start()
}

// start a controller. The caller holds the mutex.
func (w *sliceWriter) start() (err error) {
	w.controller, err = resourceslice.StartController(w.ctx, resourceslice.Options{
		DriverName:   w.driverName,
		KubeClient:   w.client,
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: w.nodeName, UID: w.node},
		Resources:    w.resources.DeepCopy(),
		ErrorHandler: w.failed,
	})
	return err
}

// ownedBy says which Node object owns the slices. One that is made anew under its old name is another owner: slices that name
// the old one are garbage to the API server, now and whenever they are written again.
func (w *sliceWriter) ownedBy(node types.UID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	was := w.node
	w.node = node
	if was == "" || was == node || w.controller == nil {
		return
	}
	w.controller.Stop()
	if err := w.start(); err != nil {
		w.failed(w.ctx, err, "writing ResourceSlices for a Node that was made anew")
	}
}

// stop returns when nothing is written any more. The slices stay.
func (w *sliceWriter) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.controller.Stop()
}
