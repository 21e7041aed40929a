package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

const (
	// toolsInContainer is where containers find the tools: on everybody's PATH.
	toolsInContainer = "/usr/bin"
	// stopWithin is how long a stop waits for calls that run.
	stopWithin = 10 * time.Second
	// reconcileRetry is how soon a round of comparing claims with the API is repeated that failed.
	reconcileRetry = 5 * time.Second
)

// Driver is the node driver of one node.
type Driver struct {
	opts     Options
	paths    paths
	skip     []resourceapi.SkipNodeOperation
	httpAddr atomic.Pointer[string]
	dcgmAddr atomic.Pointer[string]

	// Set by Run.
	reporter *reporter
	metrics  *metrics
	front    *front

	// started: the kubelet can reach the driver.
	started atomic.Bool
	// session is nil while another process works.
	session atomic.Pointer[session]
	// wasReady is whether the driver was ready when it handed over; nil before that.
	wasReady atomic.Pointer[error]
}

// New checks the options. It touches nothing.
func New(opts Options) (*Driver, error) {
	skip, err := checkSkip(opts.SkipNodeOperations)
	if err := errors.Join(opts.complete(), err); err != nil {
		return nil, fmt.Errorf("node driver: %w", err)
	}
	if opts.Waypoints == nil {
		opts.Waypoints = noWaypoints{}
	}
	return &Driver{opts: opts, paths: opts.paths(), skip: skip}, nil
}

// Run works until the context ends, and returns nil then, or until something fails that only a new
// process can put right. Prepared claims and published slices stay.
func (d *Driver) Run(ctx context.Context) error {
	if trace := findRealGPU(d.opts.HostRoot); trace != "" && !d.opts.ForceBesideRealGPU {
		return fmt.Errorf("%s on this node belongs to a driver of real GPUs, which simulated ones would hide: keep the driver off this node, or force it", trace)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	fatal := func(err error) { cancel(err) }
	if err := os.MkdirAll(d.paths.plugin, 0o755); err != nil {
		return err
	}
	// Everything ends in the reverse order of its start, so the signal to stop must not reach it directly.
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()

	var stopReporter func()
	d.reporter, stopReporter = startReporter(running, d.opts.KubeClient, d.opts.DriverName, d.opts.NodeName)
	defer stopReporter()
	d.metrics = newMetrics(d.preparedCount)
	if d.opts.APIRequests != nil {
		d.metrics.registry.MustRegister(d.opts.APIRequests)
	}
	http, err := startHTTP(d.opts.HTTPEndpoint, d.metrics.registry, d.Healthy, d.Ready, fatal)
	if err != nil {
		return err
	}
	defer http.stop()
	addr := http.addr()
	d.httpAddr.Store(&addr)
	dcgm, err := d.startDCGM(running, fatal)
	if err != nil {
		return err
	}
	defer dcgm.stop()

	metadata := newMetadata(d.paths.metadata, d.opts.CDIDir, d.opts.DriverName, d.has)
	d.front = newFront(d.opts, metadata, d.metrics, fatal)
	err = d.serve(ctx, running)
	cause := context.Cause(ctx)
	switch {
	case errors.Is(cause, context.Canceled):
		return nil
	case err == nil:
		return cause
	}
	return err
}

// serve takes the calls of the kubelet and works whenever this process owns the node's state.
func (d *Driver) serve(ctx, running context.Context) error {
	var release func()
	var err error
	if d.opts.PodUID == "" {
		// Its sockets have the same names as those of another one: it must not be there beside it.
		if release, err = d.front.owners.acquire(ctx); err != nil {
			return err
		}
	}
	if err := d.front.start(running); err != nil {
		return err
	}
	defer d.front.stop()
	d.started.Store(true)
	defer d.started.Store(false)
	for {
		if release == nil {
			if release, err = d.front.owners.acquire(ctx); err != nil {
				return err
			}
		}
		err = d.own(ctx)
		release()
		release = nil
		if err != nil || ctx.Err() != nil {
			return err
		}
		klog.FromContext(ctx).Info("Handed over to another driver of this name; this one stands by")
	}
}

// own works until the driver ends or another one wants to take over.
func (d *Driver) own(ctx context.Context) error {
	until, end := context.WithCancel(ctx)
	defer end()
	go func() {
		if d.front.owners.asked(until) {
			err := d.Ready()
			d.wasReady.Store(&err)
			end()
		}
	}()
	// Who takes over waits for what runs; who ends the process does not wait for ever.
	gone := make(chan time.Time, 1)
	forget := context.AfterFunc(ctx, func() { time.AfterFunc(stopWithin, func() { gone <- time.Now() }) })
	defer forget()
	return d.work(until, gone)
}

// Ready is nil while the kubelet has registered the driver, its calls are answered, and the slices of the
// node are in the API. A driver that waits for another one to hand over is not ready; one that has handed
// over stays what it was, since it would take over again.
func (d *Driver) Ready() error {
	switch {
	case !d.started.Load():
		return errors.New("starting or stopping")
	case !closed(d.front.registered):
		return errors.New("not registered by the kubelet yet")
	}
	if s := d.session.Load(); s != nil {
		return s.publisher.ready()
	}
	if was := d.wasReady.Load(); was != nil {
		return *was
	}
	if d.front.owners.behindEarlier.Load() {
		// It hands over only by ending. A DaemonSet ends it once this one is ready, which passes calls on to
		// it until then.
		return nil
	}
	return fmt.Errorf("waiting for the state of the node, which the driver at %q has", d.front.owners.owner())
}

// Healthy is nil while the kubelet can reach the driver.
func (d *Driver) Healthy() error {
	if !d.started.Load() {
		return nil
	}
	for _, socket := range []string{filepath.Join(d.paths.plugin, d.opts.serviceSocket()), d.opts.registrationSocket()} {
		if _, err := os.Stat(socket); err != nil {
			return fmt.Errorf("the kubelet cannot reach the driver: %w", err)
		}
	}
	return nil
}

// HTTPAddr is the address that metrics and probes are served on, "" before that and without it.
func (d *Driver) HTTPAddr() string {
	if addr := d.httpAddr.Load(); addr != nil {
		return *addr
	}
	return ""
}

// has tells whether the node has a claim. Nothing is known of that while another process works.
func (d *Driver) has(uid types.UID) bool {
	s := d.session.Load()
	return s == nil || s.claims.has(uid)
}

func (d *Driver) preparedCount() (claims, devices int) {
	if s := d.session.Load(); s != nil {
		return s.claims.preparedCount()
	}
	return 0, 0
}
