package conformance

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/conformance/internal/scheduler"
)

// kubeletCallTimeout is how long the kubelet waits for a call (pkg/kubelet/cm/dra/plugin, defaultClientCallTimeout).
const kubeletCallTimeout = 45 * time.Second

// T is what a check works with: the node, and ways to say what is wrong. A check starts with a driver that is registered,
// has published its devices and has prepared nothing.
type T struct {
	*testbed
	ctx     context.Context
	profile Profile
	started time.Time

	messages []string
	evidence []Evidence
	notes    []string
	skipped  bool
	cleanup  []func()
	// fresh has the next check begin with an empty node.
	fresh bool
}

// stopped ends a check early.
type stopped struct{}

// Errorf notes what is wrong and goes on.
func (t *T) Errorf(format string, args ...any) {
	t.messages = append(t.messages, fmt.Sprintf(format, args...))
}

// Fatalf notes what is wrong and ends the check.
func (t *T) Fatalf(format string, args ...any) {
	t.Errorf(format, args...)
	panic(stopped{})
}

// Skipf ends the check because it does not apply to the driver.
func (t *T) Skipf(format string, args ...any) {
	t.messages, t.skipped = []string{fmt.Sprintf(format, args...)}, true
	panic(stopped{})
}

// notef keeps something to report that is no judgement, such as how long something takes.
func (t *T) notef(format string, args ...any) {
	t.notes = append(t.notes, fmt.Sprintf(format, args...))
}

// must ends the check if the kit itself cannot do something.
func (t *T) must(err error) {
	if err != nil {
		t.Fatalf("the check could not be made: %v", err)
	}
}

// show keeps evidence.
func (t *T) show(title, format string, args ...any) {
	t.evidence = append(t.evidence, Evidence{time.Now().Format("15:04:05.000") + " " + title, fmt.Sprintf(format, args...)})
}

// deferred is called when the check ends, last first.
func (t *T) deferred(f func()) { t.cleanup = append(t.cleanup, f) }

// await waits until there is no error any more, and ends the check if that takes too long.
func (t *T) await(what string, check func() error) {
	if err := eventually(t.ctx, t.times.patience, check); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// holds asserts that there is no error for that long: what has just come about may be about to end.
func (t *T) holds(d time.Duration, what string, check func() error) {
	for end := time.Now().Add(d); time.Now().Before(end); t.pause(50 * time.Millisecond) {
		if err := check(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
}

// --- the driver and its registration ---

// registration is a registered instance of the driver.
type registration struct {
	socket string // by which it registered
	info   *registerapi.PluginInfo
}

// registrations asks every socket in the registry who it is. Sockets that do not answer are left out.
func (b *testbed) registrations(ctx context.Context) []registration {
	var found []registration
	_ = filepath.WalkDir(b.vars.RegistryDir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Type()&fs.ModeSocket == 0 || strings.HasPrefix(entry.Name(), ".") {
			return nil //nolint:nilerr // what cannot be read is no registration
		}
		if info, err := getInfo(ctx, path); err == nil {
			found = append(found, registration{path, info})
		}
		return nil
	})
	return found
}

// getInfo asks as the kubelet does, which waits a second.
func getInfo(ctx context.Context, socket string) (*registerapi.PluginInfo, error) {
	conn, err := dial(socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{})
}

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// ready is nil while the driver is registered with the kubelet and has a complete pool of devices in the API.
func (b *testbed) ready(ctx context.Context) error {
	if err := b.registered(ctx); err != nil {
		return err
	}
	published, err := b.slices(ctx)
	if err != nil {
		return err
	}
	if len(published) == 0 {
		return fmt.Errorf("driver %s has published no ResourceSlice", b.vars.DriverName)
	}
	return complete(published)
}

// registered is nil while the driver runs and the kubelet can call it.
func (b *testbed) registered(ctx context.Context) error {
	if b.driver == nil {
		return errors.New("the driver is not running")
	}
	select {
	case <-b.driver.Done():
		return fmt.Errorf("the driver has ended: %w", cmp.Or(b.driver.Exit(), errors.New("exit code 0")))
	default:
	}
	if b.vars.DriverName == "" {
		if found := b.registrations(ctx); len(found) > 0 {
			b.vars.DriverName = found[0].info.Name
		} else {
			return errors.New("no driver answers on a socket in the registration folder")
		}
	}
	// A registration may be that of an earlier process.
	if !slices.ContainsFunc(b.registrations(ctx), func(r registration) bool { return r.info.Name == b.vars.DriverName }) {
		return fmt.Errorf("no socket in the registration folder answers for driver %s", b.vars.DriverName)
	}
	return b.kubelet.Reach(ctx, b.vars.DriverName)
}

// slices are the ResourceSlices of the driver in the API, by name.
func (b *testbed) slices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := b.admin.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + b.vars.DriverName})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(slice resourceapi.ResourceSlice) bool { return !b.concerns(&slice) }), nil
}

// complete is nil if every pool has all slices of its newest generation.
func complete(published []resourceapi.ResourceSlice) error {
	type pool struct{ generation, want, have int64 }
	pools := map[string]pool{}
	for _, slice := range published {
		p := pools[slice.Spec.Pool.Name]
		if slice.Spec.Pool.Generation > p.generation || p.want == 0 {
			p = pool{generation: slice.Spec.Pool.Generation, want: slice.Spec.Pool.ResourceSliceCount}
		}
		if slice.Spec.Pool.Generation == p.generation {
			p.have++
		}
		pools[slice.Spec.Pool.Name] = p
	}
	for name, p := range pools {
		if p.have != p.want {
			return fmt.Errorf("pool %s has %d of %d slices of generation %d", name, p.have, p.want, p.generation)
		}
	}
	return nil
}

// awaitReady waits until the driver is ready.
func (t *T) awaitReady() {
	t.await("the driver does not become ready", func() error { return t.ready(t.ctx) })
}

// awaitReadyLate waits until the driver is ready after the kubelet has deleted its slices, as every kubelet that starts does.
func (t *T) awaitReadyLate() {
	if err := eventually(t.ctx, t.times.late, func() error { return t.ready(t.ctx) }); err != nil {
		t.Fatalf("the driver does not become ready: %v", err)
	}
}

// restartDriver stops the driver (SIGTERM) or kills it, starts it again and waits until it is ready.
func (t *T) restartDriver(kill bool) {
	t.stopDriver(kill)
	t.must(t.startDriver())
	t.awaitReady()
}

func (t *T) stopDriver(kill bool) {
	if kill {
		t.driver.Kill()
	} else {
		ctx, cancel := context.WithTimeout(t.ctx, t.times.patience)
		defer cancel()
		if err := t.driver.Stop(ctx); err != nil {
			t.Errorf("%v", err)
		}
	}
	t.driver = nil
}

// restartKubelet stops the kubelet and starts it again, which takes the slices of the node away, and waits until the driver
// is registered. Pods keep running meanwhile.
func (t *T) restartKubelet(pods ...*corev1.Pod) {
	t.kubelet.Stop()
	t.must(t.startKubelet(t.ctx, pods...))
	t.await("the driver is not registered with a kubelet that was restarted", func() error { return t.registered(t.ctx) })
}

// plugin returns a client for the driver's service, as the kubelet would call it.
func (t *T) plugin() drapb.DRAPluginClient {
	own := t.own()
	if !slices.Contains(own.info.SupportedVersions, drapb.DRAPluginService) {
		t.Skipf("the driver does not serve %s", drapb.DRAPluginService)
	}
	conn, err := dial(own.info.Endpoint)
	t.must(err)
	t.deferred(func() { conn.Close() })
	return drapb.NewDRAPluginClient(conn)
}

// --- claims ---

// workload is a pod with its claims, all of them allocated.
type workload struct {
	pod    *corev1.Pod
	claims []*resourceapi.ResourceClaim
}

func (w workload) claim() *resourceapi.ResourceClaim { return w.claims[0] }

// claimOption changes a claim before it is created.
type claimOption func(*resourceapi.ResourceClaim)

// withRequests asks for a device in each request.
func (t *T) withRequests(names ...string) claimOption {
	return func(claim *resourceapi.ResourceClaim) {
		claim.Spec.Devices.Requests = nil
		for _, name := range names {
			claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{Name: name, Exactly: t.request()})
		}
	}
}

// withParameters adds opaque parameters for the driver.
func (t *T) withParameters(driver string, parameters json.RawMessage) claimOption {
	return func(claim *resourceapi.ResourceClaim) {
		claim.Spec.Devices.Config = append(claim.Spec.Devices.Config, resourceapi.DeviceClaimConfiguration{
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: driver, Parameters: runtime.RawExtension{Raw: parameters},
			}},
		})
	}
}

// withAdminAccess asks for access beside whoever uses the devices.
func withAdminAccess() claimOption {
	return func(claim *resourceapi.ResourceClaim) {
		for i := range claim.Spec.Devices.Requests {
			claim.Spec.Devices.Requests[i].Exactly.AdminAccess = ptr.To(true)
		}
	}
}

// request asks for one device that the profile selects.
func (t *T) request() *resourceapi.ExactDeviceRequest {
	t.makeClass()
	return &resourceapi.ExactDeviceRequest{
		DeviceClassName: className, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
	}
}

// className is the class for the devices that the profile selects.
const className = "dra-conformance"

// makeClass makes sure that it exists.
func (t *T) makeClass() {
	selector := fmt.Sprintf("device.driver == %q", t.vars.DriverName)
	if t.profile.Selector != "" {
		selector += " && (" + t.profile.Selector + ")"
	}
	classes := t.admin.ResourceV1().DeviceClasses()
	if _, err := classes.Get(t.ctx, className, metav1.GetOptions{}); err == nil {
		return
	}
	_, err := classes.Create(t.ctx, &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: className},
		Spec: resourceapi.DeviceClassSpec{
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: selector}}},
		},
	}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) { // made for another node meanwhile
		t.must(err)
	}
}

// newClaim creates a claim for one device, or what the options make of it.
func (t *T) newClaim(options ...claimOption) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: t.namespace, Name: uniqueName("claim")},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "device", Exactly: t.request()}}}},
	}
	for _, option := range options {
		option(claim)
	}
	created, err := t.admin.ResourceV1().ResourceClaims(t.namespace).Create(t.ctx, claim, metav1.CreateOptions{})
	t.must(err)
	return created
}

// newWorkload creates a pod with one claim and allocates it. The check is skipped if the driver has no device left for it.
func (t *T) newWorkload(options ...claimOption) workload {
	w, err := t.tryWorkload(options...)
	if errors.Is(err, scheduler.ErrDoesNotFit) {
		t.Skipf("the driver does not publish enough devices that fit together: %v", err)
	}
	t.must(err)
	return w
}

func (t *T) tryWorkload(options ...claimOption) (workload, error) {
	return t.schedule(t.newClaim(options...))
}

// schedule makes a pod for claims and allocates those that have no allocation.
func (t *T) schedule(claims ...*resourceapi.ResourceClaim) (workload, error) {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: t.namespace, Name: uniqueName("pod"), UID: uuid.NewUUID()},
		Spec:       corev1.PodSpec{NodeName: t.nodeName, Containers: []corev1.Container{{Name: "main"}}},
	}
	for _, claim := range claims {
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: claim.Name, ResourceClaimName: &claim.Name})
		pod.Spec.Containers[0].Resources.Claims = append(pod.Spec.Containers[0].Resources.Claims, corev1.ResourceClaim{Name: claim.Name})
	}
	scheduled, err := t.scheduler.Schedule(t.ctx, pod, claims...)
	return workload{pod, scheduled}, err
}

// --- calls ---

// reference is a claim as the kubelet names it to the driver.
func reference(claim *resourceapi.ResourceClaim) *drapb.Claim {
	return &drapb.Claim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}
}

func references(claims []*resourceapi.ResourceClaim) []*drapb.Claim {
	var all []*drapb.Claim
	for _, claim := range claims {
		all = append(all, reference(claim))
	}
	return all
}

// prepare calls NodePrepareResources and ends the check if that fails as a whole.
func (t *T) prepare(claims ...*resourceapi.ResourceClaim) map[string]*drapb.NodePrepareResourceResponse {
	response, err := t.tryPrepare(t.plugin(), references(claims)...)
	if err != nil {
		t.Fatalf("NodePrepareResources failed: %v", err)
	}
	return response.GetClaims()
}

// prepareOne prepares a claim and ends the check if that fails.
func (t *T) prepareOne(claim *resourceapi.ResourceClaim) []*drapb.Device {
	response := t.prepare(claim)[string(claim.UID)]
	switch {
	case response == nil:
		t.Fatalf("NodePrepareResources says nothing about claim %s", claim.UID)
	case response.Error != "":
		t.Fatalf("NodePrepareResources failed for claim %s: %s", claim.Name, response.Error)
	}
	return response.Devices
}

func (t *T) tryPrepare(plugin drapb.DRAPluginClient, claims ...*drapb.Claim) (*drapb.NodePrepareResourcesResponse, error) {
	ctx, cancel := context.WithTimeout(t.ctx, kubeletCallTimeout)
	defer cancel()
	request := &drapb.NodePrepareResourcesRequest{Claims: claims}
	t.show("NodePrepareResources request", "%s", text(request))
	response, err := plugin.NodePrepareResources(ctx, request)
	t.show("NodePrepareResources response", "%s", answer(response, err))
	return response, err
}

// unprepare calls NodeUnprepareResources and ends the check if it fails for any of the claims.
func (t *T) unprepare(claims ...*resourceapi.ResourceClaim) {
	response, err := t.tryUnprepare(t.plugin(), references(claims)...)
	if err != nil {
		t.Fatalf("NodeUnprepareResources failed: %v", err)
	}
	for _, claim := range claims {
		switch result := response.GetClaims()[string(claim.UID)]; {
		case result == nil:
			t.Fatalf("NodeUnprepareResources says nothing about claim %s", claim.UID)
		case result.Error != "":
			t.Fatalf("NodeUnprepareResources failed for claim %s: %s", claim.Name, result.Error)
		}
	}
}

func (t *T) tryUnprepare(plugin drapb.DRAPluginClient, claims ...*drapb.Claim) (*drapb.NodeUnprepareResourcesResponse, error) {
	ctx, cancel := context.WithTimeout(t.ctx, kubeletCallTimeout)
	defer cancel()
	request := &drapb.NodeUnprepareResourcesRequest{Claims: claims}
	t.show("NodeUnprepareResources request", "%s", text(request))
	response, err := plugin.NodeUnprepareResources(ctx, request)
	t.show("NodeUnprepareResources response", "%s", answer(response, err))
	return response, err
}

func text(message proto.Message) string { return protojson.Format(message) }

func answer(message proto.Message, err error) string {
	if err != nil {
		return "error: " + err.Error()
	}
	return text(message)
}

// --- files ---

// cdiFiles are the CDI specs on disk, path to content.
func (t *T) cdiFiles() map[string]string {
	files := map[string]string{}
	entries, err := os.ReadDir(t.vars.CDIDir)
	t.must(err)
	for _, entry := range entries {
		data, err := os.ReadFile(filepath.Join(t.vars.CDIDir, entry.Name()))
		if err == nil {
			files[entry.Name()] = string(data)
		}
	}
	return files
}

func listenUnix(path string) (net.Listener, error) { return net.Listen("unix", path) }

// errorOf is the error in the response for a claim.
func errorOf(response *drapb.NodePrepareResourceResponse) error {
	switch {
	case response == nil:
		return errors.New("there is no entry for the claim in the response")
	case response.Error != "":
		return errors.New(response.Error)
	}
	return nil
}
