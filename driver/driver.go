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
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/simgpu/simgpu/cdi"
	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/tools"
)

const (
	// toolsInContainer is where containers find the tools: on everybody's PATH.
	toolsInContainer = "/usr/bin"
	// stopWithin is how long a stop waits for operations that run.
	stopWithin = 10 * time.Second
	// reconcileRetry is how soon a round of comparing claims with the API is repeated that failed.
	reconcileRetry = 5 * time.Second
)

// Driver is the node driver of one node.
type Driver struct {
	opts       Options
	paths      paths
	registered atomic.Bool
	started    atomic.Bool
	httpAddr   atomic.Pointer[string]
	dcgmAddr   atomic.Pointer[string]
	publisher  atomic.Pointer[publisher]
}

// New checks the options. It touches nothing.
func New(opts Options) (*Driver, error) {
	if err := opts.complete(); err != nil {
		return nil, fmt.Errorf("node driver: %w", err)
	}
	if opts.Waypoints == nil {
		opts.Waypoints = noWaypoints{}
	}
	return &Driver{opts: opts, paths: opts.paths()}, nil
}

// Run works until the context ends, and returns nil then, or until something fails that only a new
// process can put right. Prepared claims and published slices stay.
func (d *Driver) Run(ctx context.Context) (err error) {
	if trace := findRealGPU(d.opts.HostRoot); trace != "" && !d.opts.ForceBesideRealGPU {
		return fmt.Errorf("%s on this node belongs to a driver of real GPUs, which simulated ones would hide: keep the driver off this node, or force it", trace)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := os.MkdirAll(d.paths.plugin, 0o755); err != nil {
		return err
	}
	unlock, err := lockFolder(ctx, d.paths.lock)
	if err != nil {
		return err
	}
	defer unlock()

	// Everything ends in the reverse order of its start, so the signal to stop must not reach it directly.
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()

	sockets := deviceapi.NewServer(deviceapi.ServerOptions{Logger: slog.New(logr.ToSlogHandler(klog.FromContext(ctx)))})
	defer sockets.Stop()
	reporter, stopReporter := startReporter(running, d.opts.KubeClient, d.opts.DriverName, d.opts.NodeName)
	defer stopReporter()

	claims, err := d.openClaims(sockets)
	if err != nil {
		return err
	}
	metrics := newMetrics(claims.preparedCount)
	if d.opts.APIRequests != nil {
		metrics.registry.MustRegister(d.opts.APIRequests)
	}
	view := &nodeView{server: sockets, dir: d.paths.node, claims: claims}
	publisher := newPublisher(&publisher{
		nodeName: d.opts.NodeName, driverName: d.opts.DriverName, client: d.opts.KubeClient,
		fleet: claims.fleet, resync: d.opts.Resync, reporter: reporter, metrics: metrics,
		order: d.opts.DeviceOrder, orderInterval: d.opts.DeviceOrderInterval,
	})
	d.publisher.Store(publisher)
	claims.changed = func() {
		publisher.changed()
		view.update(running)
	}
	metadata, err := openMetadata(d.paths.metadata, d.opts.CDIDir, d.opts.DriverName, claims.has)
	if err != nil {
		return err
	}
	var status *deviceStatus
	if d.opts.DeviceStatus {
		status = newDeviceStatus(claims, d.opts.KubeClient, metrics)
	}
	reconciler := &reconciler{claims: claims, metadata: metadata, client: d.opts.KubeClient, reporter: reporter, metrics: metrics, status: status}
	plugin := &plugin{claims: claims, reconciler: reconciler, publisher: publisher, reporter: reporter, metrics: metrics, status: status, fatal: func(err error) { cancel(err) }}

	http, err := startHTTP(d.opts.HTTPEndpoint, metrics.registry, d.Healthy, d.Ready, plugin.fatal)
	if err != nil {
		return err
	}
	defer http.stop()
	addr := http.addr()
	d.httpAddr.Store(&addr)
	dcgm, err := d.startDCGM(running, sockets, claims, metrics, plugin.fatal)
	if err != nil {
		return err
	}
	defer dcgm.stop()

	if err := d.restore(running, claims, reporter, metrics); err != nil {
		return err
	}
	if err := reconciler.removeOrphans(); err != nil {
		klog.FromContext(ctx).Error(err, "Files of claims that are gone remain")
	}
	view.update(running)

	var background sync.WaitGroup
	defer background.Wait()
	defer stop()
	helper, err := d.startHelper(running, plugin, metadata)
	if err != nil {
		return err
	}
	defer helper.Stop()
	// Ends before the helper, whose end is no failure to publish.
	publishing, stopPublishing := context.WithCancel(running)
	defer stopPublishing()
	defer plugin.stop(stopWithin)
	publisher.publish = helper.PublishResources
	d.started.Store(true)
	defer d.started.Store(false)

	labels := make(chan map[string]string)
	source := &inventorySource{factory: claims.factory, file: d.opts.InventoryFile, apply: claims.apply, reporter: reporter, metrics: metrics}
	background.Go(func() { source.run(running, labels) })
	background.Go(func() {
		watchNodeLabels(running, d.opts.KubeClient, d.opts.NodeName, func(l map[string]string) {
			select {
			case labels <- l:
			case <-running.Done():
			}
		})
	})
	background.Go(func() { publisher.run(publishing) })
	background.Go(func() { status.run(running) })
	background.Go(func() { reconciler.loop(running, d.opts.Resync, reconcileRetry) })

	klog.FromContext(ctx).Info("Node driver started", "driver", d.opts.DriverName, "node", d.opts.NodeName)
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
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
		bootID: bootID, waypoints: d.opts.Waypoints,
	}), nil
}

// restore brings earlier claims back and says what was found.
func (d *Driver) restore(ctx context.Context, claims *claims, reporter *reporter, metrics *metrics) error {
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
		reporter.node(corev1.EventTypeWarning, reasonCheckpointUnreadable,
			"The checkpoint of claim %s cannot be read and was set aside as %s: %v. Its devices are not given out before it is rebuilt from the API", claimRef{u.Claim, u.UID}, u.Path, u.Err)
	}
	metrics.unreadableCheckpoint.Add(float64(unsettled))
	for _, uid := range found.lost {
		unsettled++
		logger.Error(errLost, "The checkpoint of a claim is lost; it is rebuilt from the API", "claimUID", uid)
		reporter.node(corev1.EventTypeWarning, reasonCheckpointUnreadable,
			"The checkpoint of the claim of UID %s is lost: %v. Its devices are not given out before it is rebuilt from the API", uid, errLost)
	}
	metrics.unsettledCheckpoints.Set(float64(unsettled))
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

func (d *Driver) startHelper(ctx context.Context, plugin kubeletplugin.DRAPlugin, metadata *metadataFiles) (*kubeletplugin.Helper, error) {
	helper, err := kubeletplugin.Start(ctx, plugin,
		kubeletplugin.DriverName(d.opts.DriverName),
		kubeletplugin.NodeName(d.opts.NodeName),
		kubeletplugin.KubeClient(d.opts.KubeClient),
		kubeletplugin.PluginDataDirectoryPath(d.paths.plugin),
		kubeletplugin.RegistrarDirectoryPath(d.opts.KubeletRegistrarDir),
		kubeletplugin.CDIDirectory(d.opts.CDIDir),
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion}),
		kubeletplugin.MetadataFileOps(metadata.operations()),
		// Claims are serialized one by one, so that a slow one does not hold up the others.
		kubeletplugin.Serialize(false),
		// Device health is not reported yet.
		kubeletplugin.HealthService(false),
		kubeletplugin.GRPCInterceptor(d.noteRegistration),
		kubeletplugin.GRPCInterceptor(metadata.checkAnswers),
	)
	if err != nil {
		return nil, fmt.Errorf("start the kubelet plugin: %w", err)
	}
	return helper, nil
}

// noteRegistration learns from the kubelet's own message whether it has accepted the driver.
func (d *Driver) noteRegistration(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	response, err := handle(ctx, request)
	if status, ok := request.(*registerapi.RegistrationStatus); ok {
		d.registered.Store(status.PluginRegistered && err == nil)
		// A kubelet that starts deletes the slices of all drivers on its node.
		d.publisher.Load().recheck()
	}
	return response, err
}

// Ready is nil while the kubelet has registered the driver and its slices are in the API.
func (d *Driver) Ready() error {
	if !d.started.Load() {
		return errors.New("starting or stopping")
	}
	if !d.registered.Load() {
		return errors.New("not registered by the kubelet yet")
	}
	return d.publisher.Load().ready()
}

// Healthy is nil while the kubelet can reach the driver.
func (d *Driver) Healthy() error {
	if !d.started.Load() {
		return nil
	}
	for _, socket := range []string{
		filepath.Join(d.paths.plugin, "dra.sock"),
		filepath.Join(d.opts.KubeletRegistrarDir, d.opts.DriverName+"-reg.sock"),
	} {
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
