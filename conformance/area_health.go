package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	healthpb "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthpbv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"

	"github.com/simgpu/simgpu/conformance/internal/process"
)

const (
	healthDoc    = "k8s.io/kubelet/pkg/apis/dra-health/v1/api.proto"
	healthKept   = "k8s.io/kubernetes pkg/kubelet/cm/dra/healthinfo.go"
	healthPicked = "k8s.io/kubernetes pkg/kubelet/cm/dra/plugin pickHealthService"
)

// defaultHealthTimeout is after how long without a report the kubelet no longer believes in the last one, unless the report
// names another time.
const defaultHealthTimeout = 30 * time.Second

func healthChecks() []Check {
	return []Check{
		{
			Name: "health/as-declared", Level: Must,
			Asserts: "A health service in supported_versions is served, or says that it is not implemented; one that is not in the list is not served.",
			Source:  healthPicked + "; k8s.io/dynamic-resource-allocation/kubeletplugin ErrHealthNotSupported",
			Fix:     "Declare what is served.",
			run:     checkHealthAsDeclared,
		},
		{
			Name: "health/newest-version", Level: Should,
			Asserts: "A driver that reports health serves v1.DRAResourceHealth, not v1alpha1 alone.",
			Source:  healthPicked,
			Fix:     "Update k8s.io/dynamic-resource-allocation/kubeletplugin; it serves both.",
			run:     checkHealthNewest,
		},
		{
			Name: "health/first-report", Level: Should,
			Asserts: "A report comes as soon as somebody watches: until then the health of all devices is Unknown.",
			Source:  healthKept + " getHealthInfo",
			Fix:     "Send a report of all devices when a watch begins.",
			run:     func(t *T) { t.watchHealth().first() },
		},
		{
			Name: "health/known-devices", Level: Should,
			Asserts: "Reports are about devices that are published, each once, with a time that is not in the future.",
			Source:  healthDoc + ": DeviceIdentifier, last_updated_time",
			Fix:     "Name pool and device as in the ResourceSlices.",
			run:     checkHealthKnownDevices,
		},
		{
			Name: "health/repeated-in-time", Level: Must,
			Asserts: "A device that was reported is reported again before its timeout (30 seconds by default): its health becomes Unknown otherwise.",
			Source:  healthDoc + ": health_check_timeout_seconds; " + healthKept,
			Fix:     "Repeat the report several times within the timeout, changed or not.",
			takes:   10 * time.Second,
			run:     checkHealthRepeated,
		},
		{
			Name: "health/watched-again", Level: Must,
			Asserts: "A watch that begins after another has ended, or beside it, gets reports like the first: kubelets are restarted.",
			Source:  "k8s.io/kubernetes pkg/kubelet/cm/dra/plugin: every registration begins a watch",
			Fix:     "Give every watch a state of its own.",
			run:     checkHealthWatchedAgain,
		},
		{
			Name: "health/reaches-kubelet", Level: Must,
			Asserts: "The kubelet knows the health of a prepared device as the driver reports it.",
			Source:  "KEP-4680; k8s.io/kubernetes pkg/kubelet/cm/dra UpdateAllocatedResourcesStatus",
			Fix:     "Start with health/first-report and health/known-devices.",
			run:     checkHealthReachesKubelet,
		},
		{
			Name: "health/change", Level: Should,
			Asserts: "A device that breaks is reported as Unhealthy, and as Healthy once it is repaired.",
			Source:  "KEP-4680; the profile says how to break a device",
			Fix:     "Report changes at once.",
			run:     checkHealthChange,
		},
		{
			Name: "health/dropped-taints", Level: Should,
			Asserts: "A driver that taints devices that break takes them back where the API server drops taints (no DRADeviceTaints): without a taint they are handed out.",
			Source:  "KEP-5055; k8s.io/dynamic-resource-allocation/resourceslice DroppedFieldsError",
			Fix:     "Leave broken devices out when HandleError is given a DroppedFieldsError.",
			takes:   20 * time.Second,
			run:     checkDroppedTaints,
		},
	}
}

// deviceHealth is what a driver reports about a device, in any version of the service.
type deviceHealth struct {
	pool, device, health string
	updated              time.Time
	timeout              time.Duration
}

type healthWatch struct {
	t       *T
	receive func() ([]deviceHealth, error)
	stop    func()
}

// healthServices are the versions of the service, newest first, and how to watch.
var healthServices = []struct {
	name  string
	watch func(context.Context, *grpc.ClientConn) (func() ([]deviceHealth, error), error)
}{
	{healthpb.DRAResourceHealthService, func(ctx context.Context, conn *grpc.ClientConn) (func() ([]deviceHealth, error), error) {
		stream, err := healthpb.NewDRAResourceHealthClient(conn).NodeWatchResources(ctx, &healthpb.NodeWatchResourcesRequest{})
		if err != nil {
			return nil, err
		}
		return func() (all []deviceHealth, err error) {
			response, err := stream.Recv()
			for _, d := range response.GetDevices() {
				all = append(all, reported(d.GetDevice().GetPoolName(), d.GetDevice().GetDeviceName(), d.Health.String(), d.LastUpdatedTime, d.HealthCheckTimeoutSeconds))
			}
			return all, err
		}, nil
	}},
	{healthpbv1alpha1.DRAResourceHealthService, func(ctx context.Context, conn *grpc.ClientConn) (func() ([]deviceHealth, error), error) {
		stream, err := healthpbv1alpha1.NewDRAResourceHealthClient(conn).NodeWatchResources(ctx, &healthpbv1alpha1.NodeWatchResourcesRequest{})
		if err != nil {
			return nil, err
		}
		return func() (all []deviceHealth, err error) {
			response, err := stream.Recv()
			for _, d := range response.GetDevices() {
				all = append(all, reported(d.GetDevice().GetPoolName(), d.GetDevice().GetDeviceName(), d.Health.String(), d.LastUpdatedTime, d.HealthCheckTimeoutSeconds))
			}
			return all, err
		}, nil
	}},
}

func reported(pool, device, health string, updated, timeout int64) deviceHealth {
	d := deviceHealth{pool: pool, device: device, health: health, timeout: time.Duration(timeout) * time.Second}
	if timeout <= 0 {
		d.timeout = defaultHealthTimeout
	}
	if updated > 0 {
		d.updated = time.Unix(updated, 0)
	}
	return d
}

// watchHealth begins a watch with the newest version of the service that the driver declares.
func (t *T) watchHealth() *healthWatch {
	own := t.own()
	for _, service := range healthServices {
		if !slices.Contains(own.info.SupportedVersions, service.name) {
			continue
		}
		conn, err := dial(own.info.Endpoint)
		t.must(err)
		ctx, cancel := context.WithCancel(t.ctx)
		stop := func() {
			cancel()
			conn.Close()
		}
		t.deferred(stop)
		receive, err := service.watch(ctx, conn)
		if err != nil {
			t.Fatalf("%s: %v", service.name, err)
		}
		return &healthWatch{t, receive, stop}
	}
	t.Skipf("the driver does not report health")
	return nil
}

// next waits for a report.
func (w *healthWatch) next(within time.Duration) ([]deviceHealth, error) {
	expired := time.AfterFunc(within, w.stop)
	defer expired.Stop()
	report, err := w.receive()
	if status.Code(err) == codes.Unimplemented {
		w.t.Skipf("the driver does not report health: %v", err)
	}
	if err == nil {
		var lines []string
		for _, d := range report {
			lines = append(lines, fmt.Sprintf("%s/%s %s", d.pool, d.device, d.health))
		}
		w.t.show("health report", "%s", strings.Join(lines, "\n"))
	}
	return report, err
}

// first waits for the first report and ends the check if there is none.
func (w *healthWatch) first() []deviceHealth {
	report, err := w.next(min(w.t.times.patience, 5*time.Second))
	if err != nil {
		w.t.Fatalf("no report comes at the beginning of a watch: %v", err)
	}
	return report
}

func checkHealthAsDeclared(t *T) {
	own := t.own()
	conn, err := dial(own.info.Endpoint)
	t.must(err)
	defer conn.Close()
	for _, service := range healthServices {
		declared := slices.Contains(own.info.SupportedVersions, service.name)
		ctx, cancel := context.WithTimeout(t.ctx, 5*time.Second)
		receive, err := service.watch(ctx, conn)
		if err == nil {
			_, err = receive()
		}
		cancel()
		switch code := status.Code(err); {
		case declared && code != codes.OK && code != codes.Unimplemented && code != codes.DeadlineExceeded:
			t.Errorf("%s is declared, and a watch ends with: %v", service.name, err)
		case !declared && code != codes.Unimplemented:
			t.Errorf("%s is not declared, and a watch ends with: %v", service.name, err)
		}
	}
}

func checkHealthNewest(t *T) {
	t.watchHealth().first() // for skipping
	if versions := t.own().info.SupportedVersions; !slices.Contains(versions, healthpb.DRAResourceHealthService) {
		t.Errorf("%s is not among %v", healthpb.DRAResourceHealthService, versions)
	}
}

func checkHealthKnownDevices(t *T) {
	published := map[string]bool{}
	for _, device := range devicesOf(t.published()) {
		published[key(device.pool, device.Name)] = true
	}
	seen := map[string]bool{}
	for _, d := range t.watchHealth().first() {
		name := key(d.pool, d.device)
		if !published[name] {
			t.Errorf("a report is about device %s, which is not published", name)
		}
		if seen[name] {
			t.Errorf("a report is about device %s twice", name)
		}
		seen[name] = true
		if d.updated.After(time.Now().Add(time.Minute)) {
			t.Errorf("the health of device %s was determined at %s, which is in the future", name, d.updated)
		}
	}
}

func checkHealthRepeated(t *T) {
	watch := t.watchHealth()
	report := watch.first()
	if len(report) == 0 {
		t.Skipf("the driver reports on no device")
	}
	begin := time.Now()
	open := map[string]time.Time{} // when the health becomes unknown
	var last time.Time
	for _, d := range report {
		at := begin.Add(d.timeout)
		open[key(d.pool, d.device)] = at
		if at.After(last) {
			last = at
		}
	}
	for len(open) > 0 {
		report, err := watch.next(time.Until(last))
		if err != nil {
			for name, at := range open {
				t.Errorf("device %s is not reported again within %v: %v", name, at.Sub(begin).Round(time.Second), err)
			}
			return
		}
		for _, d := range report {
			if at, is := open[key(d.pool, d.device)]; is && time.Now().After(at) {
				t.Errorf("device %s is reported again after %v; its health is Unknown after %v", key(d.pool, d.device), time.Since(begin).Round(time.Second), at.Sub(begin))
			}
			delete(open, key(d.pool, d.device))
		}
	}
}

func checkHealthWatchedAgain(t *T) {
	first := t.watchHealth()
	first.first()
	t.watchHealth().first() // beside it
	first.stop()
	t.watchHealth().first() // after it
}

// healthInKubelet is what the kubelet knows about the device of a prepared pod.
func (t *T) healthInKubelet(pod *corev1.Pod) string {
	var all []string
	for _, resource := range t.kubelet.Health(t.ctx, pod) {
		all = append(all, string(resource.Health))
	}
	slices.Sort(all)
	return strings.Join(slices.Compact(all), ",")
}

// awaitHealth waits until the kubelet knows the device of the pod to be so.
func (t *T) awaitHealth(pod *corev1.Pod, want string) {
	err := eventually(t.ctx, t.times.patience, func() error {
		if got := t.healthInKubelet(pod); !strings.EqualFold(got, want) {
			return fmt.Errorf("it is %q", got)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("the kubelet does not get to know that the device is %s: %v", want, err)
	}
}

// watchedWorkload is a prepared pod with a device of which the driver reports the health.
func (t *T) watchedWorkload() (workload, deviceHealth) {
	w := t.newWorkload()
	result := w.claim().Status.Allocation.Devices.Results[0]
	if err := t.kubelet.Prepare(t.ctx, w.pod); err != nil {
		t.Fatalf("%v", err)
	}
	t.deferred(func() {
		if err := t.kubelet.Unprepare(t.ctx, w.pod); err != nil {
			t.Errorf("%v", err)
		}
	})
	// Some devices come into being when they are prepared.
	report := t.watchHealth().first()
	at := slices.IndexFunc(report, func(d deviceHealth) bool { return d.pool == result.Pool && d.device == result.Device })
	if at < 0 {
		t.Skipf("the driver does not report on device %s", result.Device)
	}
	return w, report[at]
}

func checkHealthReachesKubelet(t *T) {
	w, reported := t.watchedWorkload()
	t.awaitHealth(w.pod, reported.health)
}

// runFor runs a command of the profile for a device.
func (t *T) runFor(device, command string) {
	vars := t.vars
	vars.Device = device
	parsed, err := process.Parse(command)
	t.must(err)
	if output, err := parsed.Run(t.ctx, vars); err != nil {
		t.Fatalf("the check could not be made: %v", errors.Join(err, errors.New(output)))
	}
}

// repairer repairs a device when it is called first, if the profile says how.
func (t *T) repairer(device string) func() {
	return sync.OnceFunc(func() {
		if t.profile.Health.Repair != "" {
			t.runFor(device, t.profile.Health.Repair)
		}
	})
}

// look returns a device as it is published, nil if it is not.
func (t *T) look(pool, name string) *poolDevice {
	for _, device := range devicesOf(t.published()) {
		if device.pool == pool && device.Name == name {
			return &device
		}
	}
	return nil
}

// keepsAway is true for taints with which nothing new gets the device.
func keepsAway(device *poolDevice) bool {
	return slices.ContainsFunc(device.Taints, func(taint resourceapi.DeviceTaint) bool { return taint.Effect != resourceapi.DeviceTaintEffectNone })
}

func checkDroppedTaints(t *T) {
	if t.profile.Health.Break == "" {
		t.Skipf("the profile does not say how to break a device")
	}
	claim := t.newWorkload().claim() // for a device that the profile selects
	result := claim.Status.Allocation.Devices.Results[0]
	t.must(t.deleteClaim(t.ctx, claim.Name))
	repair := t.repairer(result.Device)
	t.deferred(repair)
	t.runFor(result.Device, t.profile.Health.Break)
	tainted := func() error {
		if device := t.look(result.Pool, result.Device); device == nil || !keepsAway(device) {
			return errors.New("it has no taint")
		}
		return nil
	}
	if err := eventually(t.ctx, min(t.times.patience, 10*time.Second), tainted); err != nil {
		t.Skipf("the driver does not taint a device that is broken: %v", err)
	}
	t.startDropping(func(slice *resourceapi.ResourceSlice) {
		for i := range slice.Spec.Devices {
			slice.Spec.Devices[i].Taints = nil
		}
	})
	t.await("a device that would have a taint is still published, without it", func() error {
		if t.look(result.Pool, result.Device) != nil {
			return fmt.Errorf("device %s", result.Device)
		}
		return nil
	})
}

func checkHealthChange(t *T) {
	if t.profile.Health.Break == "" {
		t.Skipf("the profile does not say how to break a device")
	}
	w, reported := t.watchedWorkload()
	repair := t.repairer(reported.device)
	t.deferred(repair)
	t.runFor(reported.device, t.profile.Health.Break)
	t.awaitHealth(w.pod, "UNHEALTHY")
	if t.profile.Health.Repair != "" {
		repair()
		t.awaitHealth(w.pod, "HEALTHY")
	}
}
