package driver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/cdi"
	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/deviceplugin"
	"github.com/simgpu/simgpu/driver/podresources"
	"github.com/simgpu/simgpu/driver/tools"
)

// session is what there is while this process owns the node's state. A process that hands over and gets
// the state back later has two of them.
type session struct {
	claims    *claims
	publisher *publisher
	sockets   *deviceapi.Server
}

// work is a session from begin to end: it takes up what the last owner of the node's state left, works
// until the context ends, and leaves everything as the next owner expects it. Calls that run then come to
// their end first; it waits for them until gone says that there is no time for that.
func (d *Driver) work(until context.Context, gone <-chan time.Time) (err error) {
	// Everything ends in the reverse order of its start, so the signal to stop must not reach it directly.
	running, stop := context.WithCancel(context.WithoutCancel(until))
	defer stop()
	logger := klog.FromContext(until)

	sockets := deviceapi.NewServer(deviceapi.ServerOptions{Logger: slog.New(logr.ToSlogHandler(logger))})
	defer sockets.Stop()
	defer func() { err = errors.Join(err, sockets.Close(d.paths.node)) }()
	claims, err := d.openClaims(sockets)
	if err != nil {
		return err
	}
	metadata := d.front.metadata
	if err := metadata.open(); err != nil {
		return err
	}
	nodeFaults, err := newNodeFaults(&nodeFaults{
		nodeName: d.opts.NodeName, driverName: d.opts.DriverName, claims: claims, file: d.paths.faults,
		waypoints: d.opts.Waypoints, reporter: d.reporter, metrics: d.metrics, crash: crashNow,
	})
	if err != nil {
		return err
	}
	claims.waypoints = nodeFaults
	view := &nodeView{server: sockets, dir: d.paths.node, claims: claims}
	publisher := newPublisher(&publisher{
		nodeName: d.opts.NodeName, driverName: d.opts.DriverName, client: d.opts.KubeClient,
		fleet: nodeFaults.fleet, resync: d.opts.Resync, reporter: d.reporter, metrics: d.metrics,
		order: d.opts.DeviceOrder, orderInterval: d.opts.DeviceOrderInterval,
		attaching: d.opts.AttachDelay > 0,
		alphas:    alphas{partitionTypes: d.opts.PartitionTypes, skip: d.skip},
	})
	lending := &lending{claims: claims, conditions: nodeFaults.conditions, now: time.Now}
	if socket := d.opts.PodResourcesSocket; socket != "" {
		lending.used = func(ctx context.Context) (map[string]bool, error) {
			return podresources.InUse(ctx, socket, d.opts.DevicePluginResource)
		}
	}
	lender := &deviceplugin.Plugin{Resource: d.opts.DevicePluginResource, Dir: d.opts.DevicePluginDir, Devices: lending.devices, Allocate: lending.allocate}
	slices := &sliceWriter{client: d.opts.KubeClient, driverName: d.opts.DriverName, nodeName: d.opts.NodeName, failed: publisher.writeFailed}
	publisher.publish = slices.write
	claims.changed = func() {
		publisher.changed()
		view.update(running)
		nodeFaults.refresh()
		lender.Changed()
	}
	nodeFaults.show = func(c *conditions) {
		sockets.SetHealth(c.served)
		lender.Changed()
		publisher.changed()
	}
	var status *deviceStatus
	if d.opts.DeviceStatus {
		status = newDeviceStatus(claims, d.opts.KubeClient, d.metrics)
	}
	var attacher *attacher
	if d.opts.AttachDelay > 0 {
		attacher = newAttacher(d.opts.KubeClient, d.opts.DriverName, d.opts.NodeName, d.opts.AttachDelay)
	}
	reconciler := &reconciler{claims: claims, metadata: metadata, client: d.opts.KubeClient, reporter: d.reporter, metrics: d.metrics, status: status}
	plugin := &plugin{claims: claims, reconciler: reconciler, publisher: publisher, reporter: d.reporter, metrics: d.metrics, status: status, faults: nodeFaults}

	if err := d.restore(running, claims); err != nil {
		return err
	}
	if err := reconciler.removeOrphans(); err != nil {
		logger.Error(err, "Files of claims that are gone remain")
	}
	d.front.removeStaleSockets(running)
	view.update(running)

	d.session.Store(&session{claims: claims, publisher: publisher, sockets: sockets})
	defer d.metrics.idle()
	defer d.session.Store(nil)

	var background sync.WaitGroup
	labels := make(chan map[string]string)
	source := &inventorySource{factory: claims.factory, file: d.opts.InventoryFile, apply: claims.apply, reporter: d.reporter, metrics: d.metrics}
	background.Go(func() { source.run(running, labels) })
	background.Go(func() {
		faults := func(annotation string) { nodeFaults.look(running, annotation) }
		watchNode(running, d.opts.KubeClient, d.opts.NodeName, publisher.lookAgain, slices.ownedBy, faults, func(l map[string]string) {
			select {
			case labels <- l:
			case <-running.Done():
			}
		})
	})
	background.Go(func() { publisher.run(running) })
	background.Go(func() { status.run(running) })
	background.Go(func() { attacher.run(running) })
	background.Go(func() { lending.run(running) })
	if d.opts.DevicePluginDir != "" {
		background.Go(func() { lender.Run(running) })
	}
	background.Go(func() { reconciler.loop(running, d.opts.Resync, reconcileRetry) })
	d.front.open(plugin)

	logger.Info("Node driver started", "driver", d.opts.DriverName, "node", d.opts.NodeName)
	<-until.Done()

	// Calls that come from now on go to the next owner.
	d.front.open(nil)
	select {
	case <-plugin.stop():
	case <-gone:
	}
	stop()
	background.Wait()
	slices.stop()
	return nil
}

// openClaims opens what is on disk and installs the tools.
func (d *Driver) openClaims(sockets socketServer) (*claims, error) {
	bootID, err := readBootID(d.opts.HostRoot)
	if err != nil {
		return nil, err
	}
	store, err := checkpoint.Open(d.paths.checkpoint)
	if err != nil {
		return nil, err
	}
	specs, err := cdi.OpenDirectory(d.opts.CDIDir, d.opts.DriverName)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(d.paths.dev, 0o755); err != nil {
		return nil, err
	}
	var mounts []cdi.Mount
	if len(d.opts.Tools) > 0 {
		dir, err := tools.Install(d.opts.ToolsDir, d.paths.tools, d.opts.Tools)
		if err != nil {
			return nil, err
		}
		for _, name := range d.opts.Tools {
			mounts = append(mounts, cdi.Mount{HostPath: filepath.Join(dir, name), ContainerPath: filepath.Join(toolsInContainer, name)})
		}
	}
	return newClaims(&claims{
		factory: factory{nodeName: d.opts.NodeName, driverName: d.opts.DriverName, catalogue: d.opts.Catalogue},
		store:   store, specs: specs, sockets: sockets, devDir: d.paths.dev, tools: mounts,
		bootID: bootID, waypoints: d.opts.Waypoints, lending: d.opts.DevicePluginDir != "",
	}), nil
}

// restore brings earlier claims back and says what was found.
func (d *Driver) restore(ctx context.Context, claims *claims) error {
	logger := klog.FromContext(ctx)
	found, err := claims.restore(ctx)
	if err != nil {
		return err
	}
	unsettled := 0
	for _, u := range found.unreadable {
		if u.Stray {
			logger.Error(u.Err, "A file in the checkpoint folder is no claim's; it is left alone", "file", u.Path)
			continue
		}
		unsettled++
		logger.Error(u.Err, "Checkpoint set aside", "claim", claimRef{u.Claim, u.UID}, "file", u.Path)
		d.reporter.node(corev1.EventTypeWarning, reasonCheckpointUnreadable,
			"The checkpoint of claim %s cannot be read and was set aside as %s: %v. Its devices are not given out before it is rebuilt from the API", claimRef{u.Claim, u.UID}, u.Path, u.Err)
	}
	d.metrics.unreadableCheckpoint.Add(float64(unsettled))
	for _, uid := range found.lost {
		unsettled++
		logger.Error(errLost, "The checkpoint of a claim is lost; it is rebuilt from the API", "claimUID", uid)
		d.reporter.node(corev1.EventTypeWarning, reasonCheckpointUnreadable,
			"The checkpoint of the claim of UID %s is lost: %v. Its devices are not given out before it is rebuilt from the API", uid, errLost)
	}
	d.metrics.unsettledCheckpoints.Set(float64(unsettled))
	for _, err := range found.failed {
		logger.Error(err, "A claim of an earlier start is incomplete")
	}
	logger.Info("Claims of earlier starts restored", "prepared", found.prepared, "preparedBeforeReboot", found.earlierBoot, "undone", found.undone, "unsettled", unsettled)
	if len(d.opts.Tools) == 0 || len(found.failed)+unsettled > 0 {
		return nil
	}
	// All specs name the current tools now.
	return tools.Prune(d.paths.tools, filepath.Dir(claims.tools[0].HostPath))
}

// nodeView keeps the view of the whole node in step with its GPUs.
type nodeView struct {
	server interface {
		OpenNode(dir string, gpus []deviceapi.GPU) error
	}
	dir    string
	claims *claims

	mu    sync.Mutex
	shown *stock
}

func (v *nodeView) update(ctx context.Context) {
	v.mu.Lock()
	defer v.mu.Unlock()
	current := v.claims.currentStock()
	if current == v.shown {
		return
	}
	gpus := make([]deviceapi.GPU, len(current.gpus))
	for i, gpu := range current.gpus {
		gpus[i] = servedGPU(gpu.GPU)
	}
	if err := v.server.OpenNode(v.dir, gpus); err != nil {
		klog.FromContext(ctx).Error(err, "The view of the node is not up to date")
		return
	}
	v.shown = current
}

// readBootID identifies the boot of the node; "" where the kernel does not tell.
func readBootID(root string) (string, error) {
	data, err := os.ReadFile(filepath.Join(root, "proc/sys/kernel/random/boot_id"))
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
