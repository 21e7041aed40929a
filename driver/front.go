package driver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcmetadata "google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	// answerWithin is how long a call may wait for a driver that works. The kubelet gives up after 45
	// seconds, and tells nothing then; for a pod that is a minute lost in either case.
	answerWithin = 40 * time.Second
	// passAgain is how soon a call is passed on again that reached nobody.
	passAgain = 50 * time.Millisecond
	// lingerFor is how long a driver that ends stays for calls that wait.
	lingerFor = time.Second
	// passedOn marks calls that come from another driver: they are not passed on again.
	passedOn = "simgpu-passed-on"
	// longestSocketPath is the limit of the kernel, without the terminating zero.
	longestSocketPath = 107
	// staleAfter is the age at which a socket that refuses connections belongs to no driver that starts.
	staleAfter = time.Minute
)

// front is the driver as the kubelet sees it. It is there for as long as the process runs, also while
// another process owns the node's state: an older one that has not handed over yet, or a newer one that
// has taken over. Calls go on to that one then, and wait while nobody works, so that it makes no
// difference which of them the kubelet turns to.
type front struct {
	opts       Options
	paths      paths
	owners     *ownership
	metadata   *metadataFiles
	metrics    *metrics
	fatal      func(error)
	registered <-chan struct{} // closed by the first registration
	stopping   chan struct{}   // closed when calls cannot wait any longer
	calls      atomic.Int64    // that run

	register func() // closes registered, once
	helper   *kubeletplugin.Helper

	mu      sync.Mutex
	plugin  *plugin       // takes the calls; nil while another process does
	changed chan struct{} // closed with the next change of plugin
}

var _ kubeletplugin.DRAPlugin = &front{}

func newFront(opts Options, metadata *metadataFiles, metrics *metrics, fatal func(error)) *front {
	registered := make(chan struct{})
	return &front{
		opts: opts, paths: opts.paths(), metadata: metadata, metrics: metrics, fatal: fatal, stopping: make(chan struct{}),
		owners:     newOwnership(opts.paths().plugin, opts.serviceSocket(), registered),
		registered: registered, register: sync.OnceFunc(func() { close(registered) }),
		changed: make(chan struct{}),
	}
}

// serviceSocket is the name of the socket that calls come to: with the UID of the pod, so that the driver
// of another pod has another one, or with a digest of it where a path with the UID would be too long.
func (o *Options) serviceSocket() string {
	if o.PodUID == "" {
		return soleSocket
	}
	name := "dra-" + o.PodUID + ".sock"
	if len(filepath.Join(o.paths().plugin, name)) > longestSocketPath {
		digest := sha256.Sum256([]byte(o.PodUID))
		name = "dra-" + hex.EncodeToString(digest[:8]) + ".sock"
	}
	return name
}

// registrationSocket is the path of the socket by which the kubelet finds the driver.
func (o *Options) registrationSocket() string {
	name := o.DriverName + "-reg.sock"
	if o.PodUID != "" {
		name = kubeletplugin.RollingUpdateRegistrarSocketFile(o.KubeletRegistrarDir, o.DriverName, types.UID(o.PodUID))
	}
	return filepath.Join(o.KubeletRegistrarDir, name)
}

// start lets the kubelet in.
func (f *front) start(ctx context.Context) (err error) {
	f.helper, err = f.startHelper(ctx, f)
	return err
}

func (f *front) startHelper(ctx context.Context, plugin kubeletplugin.DRAPlugin) (*kubeletplugin.Helper, error) {
	helper, err := kubeletplugin.Start(ctx, plugin,
		kubeletplugin.DriverName(f.opts.DriverName),
		kubeletplugin.NodeName(f.opts.NodeName),
		kubeletplugin.KubeClient(f.opts.KubeClient),
		kubeletplugin.PluginDataDirectoryPath(f.paths.plugin),
		kubeletplugin.RegistrarDirectoryPath(f.opts.KubeletRegistrarDir),
		kubeletplugin.RollingUpdate(types.UID(f.opts.PodUID)),
		kubeletplugin.PluginSocket(f.opts.serviceSocket()),
		kubeletplugin.CDIDirectory(f.opts.CDIDir),
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion}),
		kubeletplugin.MetadataFileOps(f.metadata.operations()),
		// Claims are serialized one by one, so that a slow one does not hold up the others.
		kubeletplugin.Serialize(false),
		kubeletplugin.GRPCInterceptor(f.intercept),
		kubeletplugin.GRPCInterceptor(f.metadata.checkAnswers),
	)
	if err != nil {
		return nil, fmt.Errorf("start the kubelet plugin: %w", err)
	}
	return helper, nil
}

// stop ends the registration. Calls that are waiting get the chance to go on to another driver, which may
// just have become the owner.
func (f *front) stop() {
	linger, cancel := context.WithTimeout(context.Background(), lingerFor)
	defer cancel()
	for f.calls.Load() > 0 && pause(linger, passAgain) == nil {
	}
	close(f.stopping)
	f.helper.Stop()
}

// open sends calls to a plugin from now on; nil: to whoever else works.
func (f *front) open(p *plugin) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.plugin = p
	close(f.changed)
	f.changed = make(chan struct{})
}

// enter begins a call if there is a plugin to take it. Otherwise it returns what tells of one.
func (f *front) enter() (p *plugin, done func(), changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.plugin != nil {
		if done, err := f.plugin.begin(); err == nil {
			return f.plugin, done, nil
		}
	}
	return nil, nil, f.changed
}

// claimCall is a call that needs the node's state.
type claimCall struct {
	operation string
	newAnswer func() any
	claims    func(request any) []sentClaim
}

// sentClaim is how the kubelet names a claim, whatever the version.
type sentClaim interface {
	GetNamespace() string
	GetName() string
	GetUid() string //nolint:revive // so in the generated code
}

// claimCalls are all of them, in the versions that kubelets use.
var claimCalls = map[string]claimCall{
	drapbv1.DRAPlugin_NodePrepareResources_FullMethodName:        callOf[drapbv1.NodePrepareResourcesResponse](opPrepare, (*drapbv1.NodePrepareResourcesRequest).GetClaims),
	drapbv1.DRAPlugin_NodeUnprepareResources_FullMethodName:      callOf[drapbv1.NodeUnprepareResourcesResponse](opUnprepare, (*drapbv1.NodeUnprepareResourcesRequest).GetClaims),
	drapbv1beta1.DRAPlugin_NodePrepareResources_FullMethodName:   callOf[drapbv1beta1.NodePrepareResourcesResponse](opPrepare, (*drapbv1beta1.NodePrepareResourcesRequest).GetClaims),
	drapbv1beta1.DRAPlugin_NodeUnprepareResources_FullMethodName: callOf[drapbv1beta1.NodeUnprepareResourcesResponse](opUnprepare, (*drapbv1beta1.NodeUnprepareResourcesRequest).GetClaims),
}

func callOf[Answer, Request any, Claim sentClaim](operation string, claims func(*Request) []Claim) claimCall {
	return claimCall{
		operation: operation,
		newAnswer: func() any { return new(Answer) },
		claims: func(request any) []sentClaim {
			var sent []sentClaim
			for _, claim := range claims(request.(*Request)) {
				sent = append(sent, claim)
			}
			return sent
		},
	}
}

type pluginKey struct{}

// intercept sees what the kubelet sends before anything else does.
func (f *front) intercept(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	call, isClaimCall := claimCalls[info.FullMethod]
	if !isClaimCall {
		answer, err := handle(ctx, request)
		if status, ok := request.(*registerapi.RegistrationStatus); ok && status.PluginRegistered && err == nil {
			f.noteRegistration()
		}
		return answer, err
	}
	sent := call.claims(request)
	for _, claim := range sent {
		if err := checkClaimName(claim.GetNamespace(), claim.GetName(), types.UID(claim.GetUid())); err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
	}
	f.calls.Add(1)
	defer f.calls.Add(-1)
	refuse := func(err error) (any, error) {
		f.metrics.refused(call.operation, len(sent), err)
		return nil, err
	}
	waiting, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	for {
		p, done, changed := f.enter()
		if p != nil {
			defer done()
			return handle(context.WithValue(ctx, pluginKey{}, p), request)
		}
		if len(grpcmetadata.ValueFromIncomingContext(ctx, passedOn)) > 0 {
			return nil, status.Error(codes.Unavailable, "this driver does not own the state of the node")
		}
		answer := call.newAnswer()
		err := f.pass(waiting, info.FullMethod, request, answer)
		if err == nil {
			return answer, nil
		}
		if status.Code(err) != codes.Unavailable {
			return nil, err
		}
		select {
		case <-waiting.Done():
			return refuse(fmt.Errorf("no driver on this node has taken the call within %v (%w): %w", answerWithin, waiting.Err(), err))
		case <-f.stopping:
			return refuse(errStopping)
		case <-changed:
		case <-time.After(passAgain):
		}
	}
}

// pass has the owner of the node's state answer a call. It is Unavailable if nobody is, or for now.
func (f *front) pass(ctx context.Context, method string, request, answer any) error {
	owner := f.owners.owner()
	switch owner {
	case "":
		owner = soleSocket // of an earlier release
	case f.opts.serviceSocket():
		return status.Error(codes.Unavailable, "this driver is starting or handing over")
	}
	conn, err := grpc.NewClient("unix:"+filepath.Join(f.paths.plugin, owner), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	return conn.Invoke(grpcmetadata.AppendToOutgoingContext(ctx, passedOn, f.opts.serviceSocket()), method, request, answer)
}

// noteRegistration is told that the kubelet knows the driver now, or again.
func (f *front) noteRegistration() {
	f.register()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.plugin != nil {
		// A kubelet that starts deletes the slices of all drivers on its node.
		f.plugin.publisher.recheck()
	}
}

// PrepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (f *front) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	return ctx.Value(pluginKey{}).(*plugin).PrepareResourceClaims(ctx, claims)
}

// UnprepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (f *front) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	return ctx.Value(pluginKey{}).(*plugin).UnprepareResourceClaims(ctx, claims)
}

// HandleError implements [kubeletplugin.DRAPlugin]: only its sockets can fail the helper. What is recoverable is
// that no health is reported, as while another process owns the node's state.
func (f *front) HandleError(ctx context.Context, err error, msg string) {
	if errors.Is(err, kubeletplugin.ErrRecoverable) {
		klog.FromContext(ctx).V(2).Info(msg, "err", err)
		return
	}
	f.fatal(fmt.Errorf("%s: %w", msg, err))
}

// WatchHealthStatus implements [kubeletplugin.DRAPlugin]. The stream stays open over handovers; who does
// not own the node's state has nothing to say in it.
func (f *front) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	for {
		f.mu.Lock()
		p, changed := f.plugin, f.changed
		f.mu.Unlock()
		watching, stop := context.WithCancel(ctx)
		ended := make(chan struct{})
		var watchErr error
		if p != nil {
			go func() {
				defer close(ended)
				watchErr = p.WatchHealthStatus(watching, reports)
			}()
		}
		select {
		case <-ended:
			stop()
			return watchErr
		case <-ctx.Done():
		case <-changed:
		}
		stop()
		if p != nil {
			<-ended
		}
		if closed(ctx.Done()) {
			return nil
		}
	}
}

// removeStaleSockets removes the sockets of drivers that did not live to do it: each pod has other names,
// and the kubelet would try to reach them for ever.
func (f *front) removeStaleSockets(ctx context.Context) {
	for _, pattern := range []string{
		filepath.Join(f.opts.KubeletRegistrarDir, f.opts.DriverName+"-reg.sock"),
		filepath.Join(f.opts.KubeletRegistrarDir, f.opts.DriverName+"-*-reg.sock"),
		filepath.Join(f.paths.plugin, soleSocket),
		filepath.Join(f.paths.plugin, "dra-*.sock"),
	} {
		sockets, err := filepath.Glob(pattern)
		for _, socket := range sockets {
			if stale(socket) {
				klog.FromContext(ctx).Info("Removing the socket of a driver that is gone", "socket", socket)
				err = errors.Join(err, os.Remove(socket))
			}
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "Sockets of drivers that are gone remain")
		}
	}
}

// stale is true for a socket that has refused connections for a while. One that was bound a moment ago
// may not be listened on yet.
func stale(socket string) bool {
	info, err := os.Lstat(socket)
	if err != nil || time.Since(info.ModTime()) < staleAfter {
		return false
	}
	conn, err := net.Dial("unix", socket)
	if err == nil {
		conn.Close()
	}
	return errors.Is(err, unix.ECONNREFUSED)
}
