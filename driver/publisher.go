package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/driver/order"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

const (
	// seeWithin is how long slices may take to show up in the API before that counts as a failure.
	seeWithin = 30 * time.Second
	// remindAfter is how long missing slices are waited for before their writer is told about them again.
	// By itself it looks for slices that somebody deleted, as the kubelet does when it starts, half a
	// minute later.
	remindAfter = time.Second
)

var errChangedMeanwhile = errors.New("there is something newer to publish")

// publisher keeps the ResourceSlices of the node in step with its fleet, and knows whether they are
// in the API.
type publisher struct {
	nodeName, driverName string
	client               kubernetes.Interface
	// attaching gives all devices binding conditions.
	attaching bool
	alphas    alphas
	// publish hands slices over to whoever writes them: a sliceWriter.
	publish func(context.Context, resourceslice.DriverResources) error
	fleet   func() fleet
	resync  time.Duration
	// order is that of the devices, "" the vendor's; it changes with what is in use at such an interval.
	order         order.Order
	orderInterval time.Duration
	reporter      *reporter
	metrics       *metrics

	wake chan struct{}

	mu sync.Mutex
	// lacks are features that the API server lacks.
	lacks apiLimits
	// dropped is when stored slices last lacked the fields of a feature gate.
	dropped map[string]time.Time
	// again says that the API server is to be asked for its features once more.
	again     bool
	version   *version.Info // of the API server, nil until it was asked
	lastError string
	visible   bool

	// Used by run alone.
	asked     bool            // the API server has said which features it has
	told      map[string]bool // feature gates whose lack people have been told of
	published *resourceslice.DriverResources
	of        fleet
	with      apiLimits
	ordering  *ordering
	// reordering is true from when another order is handed over until it is seen. What is visible serves
	// meanwhile.
	reordering bool
}

// newPublisher completes a publisher whose dependencies are set.
func newPublisher(p *publisher) *publisher {
	p.wake = make(chan struct{}, 1)
	p.ordering = newOrdering(p.order, p.orderInterval, p.changed)
	p.dropped, p.told = map[string]time.Time{}, map[string]bool{}
	return p
}

// changed says that the fleet, or what of it is in use, has changed.
func (p *publisher) changed() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// recheck says that somebody may have deleted the slices.
func (p *publisher) recheck() {
	p.mu.Lock()
	p.visible = false
	p.mu.Unlock()
	p.lookAgain()
}

// lookAgain says that the API server may be another one, or another version, or have other feature gates.
func (p *publisher) lookAgain() {
	p.mu.Lock()
	p.again = true
	p.mu.Unlock()
	p.changed()
}

// takeAgain tells whether somebody wants the API server to be asked again, once.
func (p *publisher) takeAgain() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	again := p.again
	p.again = false
	return again
}

// ready is nil once what should be published has been seen in the API.
func (p *publisher) ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.visible:
		return nil
	case p.lastError != "":
		return fmt.Errorf("ResourceSlices are not published: %s", p.lastError)
	}
	return errors.New("ResourceSlices are not published yet")
}

// run publishes until the context ends.
func (p *publisher) run(ctx context.Context) {
	newBackoff := func() wait.Backoff {
		return wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Steps: 100, Cap: time.Minute}
	}
	backoff := newBackoff()
	defer p.ordering.stop()
	thorough := true
	var due time.Time // when to be thorough again, however often there is something new before that
	for {
		thorough = p.takeAgain() || thorough
		err := p.sync(ctx, thorough)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errChangedMeanwhile):
			continue
		case err != nil:
			p.failed(ctx, err, "Cannot publish ResourceSlices")
			due = time.Now().Add(backoff.Step())
		case thorough:
			due = time.Now().Add(wait.Jitter(p.resync, 0.2))
			backoff = newBackoff()
		}
		timer := time.NewTimer(time.Until(due))
		select {
		case <-ctx.Done():
		case <-p.wake:
			thorough = err != nil
		case <-timer.C:
			thorough = true
		}
		timer.Stop()
	}
}

// sync publishes what the node has now. A thorough one asks the API server again what it can, and
// looks at its slices even if there is nothing new.
func (p *publisher) sync(ctx context.Context, thorough bool) error {
	f := p.fleet()
	if f.stock == nil {
		// An empty set of pools makes the writer remove what an earlier driver has published.
		p.setVisible(false, 0, 0)
		p.mu.Lock()
		p.lastError = "the inventory has not been read yet"
		if f.fault != nil {
			p.lastError = f.fault.Error()
		}
		p.mu.Unlock()
		return p.hand(ctx, &resourceslice.DriverResources{}, f, apiLimits{})
	}
	server, err := p.serverVersion(thorough)
	if err != nil {
		return err
	}
	layout, err := deviceslices.LayoutFor(server)
	if err != nil {
		return err
	}

	if thorough || !p.asked {
		if err := p.askFeatures(ctx, layout); err != nil {
			return err
		}
		p.asked = true
	}
	api := p.limits()
	p.tellFeatures(ctx, f, api)
	// One change of the order at a time: two that are written together look like another pool.
	due := p.ordering.due(f.taken)
	reorder := due && !p.reordering
	if !thorough && p.published != nil && f.stock == p.of.stock && f.broken == p.of.broken && api == p.with && !f.usageMatters(api) && !p.of.usageMatters(api) && !reorder && !p.reordering && p.ready() == nil {
		return nil
	}
	arrange := p.ordering.unchanged(f.taken)
	if reorder {
		arrange = p.ordering.reordered(f.taken)
	}
	resources, err := resourcesOf(p.nodeName, p.driverName, f, layout, api, arrange)
	if err != nil {
		return err
	}
	if p.attaching {
		requireAttaching(resources)
	}
	p.alphas.declare(resources)
	if !thorough && p.shows(resources) {
		p.of, p.with = f, api
		return nil
	}
	if err := p.hand(ctx, &resources, f, api); err != nil {
		return err
	}
	if err := p.see(ctx, resources); err != nil {
		return err
	}
	if due && !reorder {
		p.changed() // now it may
	}
	return nil
}

// shows is true if the resources have been seen in the API already.
func (p *publisher) shows(resources resourceslice.DriverResources) bool {
	return p.published != nil && !p.reordering && p.ready() == nil && equality.Semantic.DeepEqual(*p.published, resources)
}

func (p *publisher) serverVersion(fresh bool) (*version.Info, error) {
	p.mu.Lock()
	known := p.version
	p.mu.Unlock()
	if known != nil && !fresh {
		return known, nil
	}
	// The layout follows the version, and the API server may have been updated.
	current, err := p.client.Discovery().ServerVersion()
	if err != nil {
		return nil, fmt.Errorf("ask the API server for its version: %w", err)
	}
	p.mu.Lock()
	p.version = current
	p.mu.Unlock()
	return current, nil
}

// hand gives the resources to their writer unless it has them.
func (p *publisher) hand(ctx context.Context, resources *resourceslice.DriverResources, f fleet, api apiLimits) error {
	if p.published != nil && equality.Semantic.DeepEqual(*p.published, *resources) {
		p.of, p.with = f, api
		return nil
	}
	p.reordering = p.published != nil && p.ready() == nil && onlyReordered(p.published.Pools[p.nodeName], resources.Pools[p.nodeName])
	if p.reordering {
		p.metrics.sliceReorders.Inc()
	} else {
		p.setVisible(false, 0, 0)
	}
	if err := p.publish(ctx, *resources); err != nil {
		return err
	}
	p.published, p.of, p.with = resources, f, api
	return nil
}

// see waits until the slices are in the API.
func (p *publisher) see(ctx context.Context, resources resourceslice.DriverResources) error {
	pool := resources.Pools[p.nodeName]
	deadline := time.Now().Add(seeWithin)
	remind := time.Now().Add(remindAfter)
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		inAPI, err := p.list(ctx)
		if err != nil {
			return err
		}
		if stored(pool, inAPI) {
			devices := 0
			for _, slice := range inAPI {
				devices += len(slice.Spec.Devices)
			}
			p.setVisible(true, len(inAPI), devices)
			p.reordering = false
			return nil
		}
		late := time.Now().After(deadline)
		if p.reordering = p.reordering && !late; !p.reordering {
			p.setVisible(false, 0, 0)
		}
		if late {
			return errors.New("the API server does not show them as they should be")
		}
		if time.Now().After(remind) {
			remind = time.Now().Add(remindAfter)
			if err := p.publish(ctx, resources); err != nil {
				return err
			}
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-p.wake:
			timer.Stop()
			return errChangedMeanwhile
		case <-timer.C:
		}
	}
}

// list returns the slices of the node's pool.
func (p *publisher) list(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := p.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   p.driverName,
		resourceapi.ResourceSliceSelectorNodeName: p.nodeName,
	}.String()})
	if err != nil {
		return nil, fmt.Errorf("look for ResourceSlices in the API: %w", err)
	}
	return slices.DeleteFunc(list.Items, func(s resourceapi.ResourceSlice) bool {
		return s.Spec.Driver != p.driverName || s.Spec.Pool.Name != p.nodeName
	}), nil
}

// writeFailed is told what went wrong while slices were written in the background.
func (p *publisher) writeFailed(ctx context.Context, err error, msg string) {
	var dropped *resourceslice.DroppedFieldsError
	if errors.As(err, &dropped) {
		p.fieldsDropped(ctx, dropped)
		return
	}
	p.failed(ctx, err, msg)
}

// failed is told what went wrong in publishing. Whoever failed tries again by itself.
func (p *publisher) failed(ctx context.Context, err error, msg string) {
	p.metrics.publishErrors.Inc()
	klog.FromContext(ctx).Error(err, msg)
	p.mu.Lock()
	repeated := p.lastError == err.Error()
	p.lastError = err.Error()
	p.mu.Unlock()
	if !repeated {
		p.reporter.node(corev1.EventTypeWarning, reasonPublishFailed, "%s: %v", msg, err)
	}
}

func (p *publisher) limits() apiLimits {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lacks
}

func (p *publisher) setVisible(visible bool, slices, devices int) {
	p.metrics.publishedSlices.Set(float64(slices))
	p.metrics.publishedDevices.Set(float64(devices))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.visible = visible
	if visible {
		p.lastError = ""
	}
}
