package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

func registrationChecks() []Check {
	const watcher = "k8s.io/kubernetes pkg/kubelet/pluginmanager: a plugin registers with a socket below the registry folder, is asked for its PluginInfo and told the outcome"
	return []Check{
		{
			Name: "registration/get-info", Level: Must,
			Asserts: "GetInfo answers within one second with type DRAPlugin and a driver name.",
			Source:  watcher + "; operationexecutor: GetInfo has a timeout of one second",
			Fix:     "Answer GetInfo from memory. k8s.io/dynamic-resource-allocation/kubeletplugin does.",
			run:     checkGetInfo,
		},
		{
			Name: "registration/driver-name", Level: Must,
			Asserts: "The driver name is a DNS subdomain of at most 63 characters and the one under which devices are published.",
			Source:  "k8s.io/api/resource/v1 ResourceSliceSpec.Driver",
			Fix:     "Register and publish under one name.",
			run:     checkDriverName,
		},
		{
			Name: "registration/endpoint", Level: Must,
			Asserts: "The endpoint in the PluginInfo is the absolute path of a socket that accepts connections.",
			Source:  "k8s.io/kubernetes pkg/kubelet/cm/dra/plugin DRAPluginManager.RegisterPlugin",
			Fix:     "Give the path as the kubelet sees it: the plugin folder has the same path in the pod and on the host.",
			run:     checkEndpoint,
		},
		{
			Name: "registration/supported-versions", Level: Must,
			Asserts: "supported_versions has v1.DRAPlugin, and before any older version of the service: the kubelet takes the first one it knows.",
			Source:  "k8s.io/kubernetes pkg/kubelet/cm/dra/plugin validateSupportedServices",
			Fix:     "List gRPC services newest first.",
			run:     checkSupportedVersions,
		},
		{
			Name: "registration/known-services-only", Level: Should,
			Asserts: "supported_versions names DRA services only, each once.",
			Source:  "k8s.io/kubelet/pkg/apis/dra, dra-health: the names of the services",
			Fix:     "Leave out what no kubelet asks for.",
			run:     checkKnownServices,
		},
		{
			Name: "registration/registers-again-after-restart", Level: Must,
			Asserts: "A driver that was stopped and started is registered again.",
			Source:  watcher,
			Fix:     "Replace the sockets that an earlier process has left.",
			run:     func(t *T) { t.restartDriver(false) },
		},
		{
			Name: "registration/registers-again-after-kill", Level: Must,
			Asserts: "A driver that was killed, and so left its sockets behind, is registered again once it is started.",
			Source:  "kubernetes/kubernetes#128696, #132660: stale sockets",
			Fix:     "Remove the own stale sockets before listening.",
			run:     func(t *T) { t.restartDriver(true) },
		},
		{
			Name: "registration/kubelet-restart", Level: Must,
			Asserts: "A driver is registered with a kubelet that was restarted, without a restart of its own.",
			Source:  watcher + "; a kubelet that starts looks for the sockets that are there",
			Fix:     "Keep the registration socket for as long as the driver runs.",
			run:     checkKubeletRestart,
		},
		{
			Name: "registration/deregisters", Level: Must,
			Asserts: "A driver that is stopped with SIGTERM removes its registration socket, so that the kubelet knows at once.",
			Source:  "k8s.io/kubernetes pkg/kubelet/pluginmanager/pluginwatcher: removal of the socket is the deregistration",
			Fix:     "Handle SIGTERM; stop the kubeletplugin helper.",
			run:     checkDeregisters,
		},
		{
			Name: "registration/stops-in-time", Level: Should,
			Asserts: "SIGTERM ends the driver within the 30 seconds that a pod has by default, with exit code 0.",
			Source:  "k8s.io/api/core/v1 PodSpec.TerminationGracePeriodSeconds",
			Fix:     "Cancel what runs on SIGTERM.",
			run:     checkStopsInTime,
		},
		{
			Name: "registration/stays-registered", Level: Must,
			Asserts: "The driver goes on to run when the kubelet tells it that the registration succeeded, and when it tells it again.",
			Source:  "k8s.io/kubelet/pkg/apis/pluginregistration/v1 NotifyRegistrationStatus",
			Fix:     "Take NotifyRegistrationStatus as information.",
			run:     checkNotify,
		},
		{
			Name: "registration/foreign-sockets", Level: Must,
			Asserts: "Sockets of other plugins in the registry folder are left alone.",
			Source:  watcher,
			Fix:     "Remove sockets by the own name only.",
			run:     checkForeignSockets,
		},
		{
			Name: "registration/socket-paths", Level: Must,
			Asserts: "The sockets have paths that fit into the 107 bytes that the kernel allows in the folders of a real node, /var/lib/kubelet/plugins_registry and /var/lib/kubelet/plugins.",
			Source:  "unix(7); k8s.io/kubernetes pkg/kubelet/pluginmanager: a socket that cannot be connected to is retried for ever",
			Fix:     "Use shorter names of files. With RollingUpdate the pod's UID is in them, and the name of the driver has to be shorter.",
			run:     checkSocketPaths,
		},
		{
			Name: "registration/long-driver-name", Level: Should,
			Asserts: "A driver whose name can be chosen ({{.DriverName}} is in its command) works with the longest that the API allows, 63 characters, when it does not run beside another instance.",
			Source:  "k8s.io/api/resource/v1 ResourceSliceSpec.Driver; DriverNameMaxLength",
			Fix:     "Do not repeat the name in paths of sockets.",
			run:     checkLongDriverName,
		},
		{
			Name: "registration/rolling-update", Level: Should,
			Asserts: "A driver that can run beside another instance of itself hands over to it without a call that fails; what the one has prepared the other unprepares.",
			Source:  "k8s.io/dynamic-resource-allocation/kubeletplugin RollingUpdate; k8s.io/kubernetes pkg/kubelet/cm/dra/plugin: the instance that registered last is called",
			Fix:     "Share the checkpoint and lock it; name the sockets after the pod's UID.",
			takes:   10 * time.Second,
			run:     checkRollingUpdate,
		},
	}
}

// own returns the registration of the driver. On a busy machine an answer may come late once; the kubelet asks again too.
func (t *T) own() registration {
	var own registration
	t.await("the driver is not registered", func() error {
		found := t.registrations(t.ctx)
		at := slices.IndexFunc(found, func(r registration) bool { return r.info.Name == t.vars.DriverName })
		if at < 0 {
			return fmt.Errorf("no socket in %s answers for driver %s", t.vars.RegistryDir, t.vars.DriverName)
		}
		own = found[at]
		return nil
	})
	t.show("PluginInfo at "+own.socket, "%s", text(own.info))
	return own
}

func checkGetInfo(t *T) {
	info := t.own().info // asked with the kubelet's timeout
	if info.Type != registerapi.DRAPlugin {
		t.Errorf("type is %q, not %q", info.Type, registerapi.DRAPlugin)
	}
	if info.Name == "" {
		t.Errorf("name is empty")
	}
}

func checkDriverName(t *T) {
	name := t.own().info.Name
	if len(name) > 63 {
		t.Errorf("the name %s has %d characters; 63 are allowed", name, len(name))
	}
	if lower := strings.ToLower(name); lower != name {
		t.Errorf("the name %s has upper case letters", name)
	}
	published, err := t.slices(t.ctx)
	t.must(err)
	if len(published) == 0 {
		t.Errorf("nothing is published under the name %s", name)
	}
}

func checkEndpoint(t *T) {
	endpoint := t.own().info.Endpoint
	if !filepath.IsAbs(endpoint) {
		t.Fatalf("the endpoint %q is no absolute path", endpoint)
	}
	info, err := os.Stat(endpoint)
	if err != nil {
		t.Fatalf("the endpoint: %v", err)
	}
	if info.Mode()&os.ModeSocket == 0 {
		t.Fatalf("the endpoint %s is no socket but %s", endpoint, info.Mode())
	}
	if _, err := t.tryPrepare(t.plugin()); err != nil {
		t.Errorf("a call without claims fails: %v", err)
	}
}

func checkSocketPaths(t *T) {
	const most = 107
	own := t.own()
	for _, s := range []struct{ path, here, there string }{
		{own.socket, t.vars.RegistryDir, "/var/lib/kubelet/plugins_registry"},
		{own.info.Endpoint, t.vars.PluginsDir, "/var/lib/kubelet/plugins"},
	} {
		name, err := filepath.Rel(s.here, s.path)
		if err != nil || strings.HasPrefix(name, "..") {
			continue // wherever it is, here it works
		}
		if path := filepath.Join(s.there, name); len(path) > most {
			t.Errorf("%s has %d bytes; a socket can have %d", path, len(path), most)
		}
	}
}

func checkLongDriverName(t *T) {
	if !t.command.Uses("DriverName") {
		t.Skipf("the name of the driver cannot be chosen: {{.DriverName}} is not in its command")
	}
	t.stopDriver(false)
	t.fresh = true
	vars := t.vars
	t.deferred(func() { t.vars = vars })
	const suffix = ".example.com"
	t.vars.DriverName = strings.Repeat("x", resourceapi.DriverNameMaxLength-len(suffix)) + suffix
	t.vars.PluginDir = filepath.Join(t.vars.PluginsDir, t.vars.DriverName)
	t.vars.PodUID = ""
	t.must(os.MkdirAll(t.vars.PluginDir, 0o755))
	t.must(t.startDriver())
	t.awaitReady()
	class, err := t.admin.ResourceV1().DeviceClasses().Create(t.ctx, &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: uniqueName("long-name")},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == %q", t.vars.DriverName),
		}}}},
	}, metav1.CreateOptions{})
	t.must(err)
	w := t.newWorkload(ofClass(class.Name))
	if err := t.kubelet.Prepare(t.ctx, w.pod); err != nil {
		t.Fatalf("%v", err)
	}
	ids, err := t.kubelet.CDIDevices(w.pod, &w.pod.Spec.Containers[0])
	t.must(err)
	t.resolves(ids)
	if err := t.kubelet.Unprepare(t.ctx, w.pod); err != nil {
		t.Errorf("%v", err)
	}
	t.stopDriver(false)
	t.must(t.deleteSlices(t.ctx, resourceapi.ResourceSliceSelectorDriver+"="+t.vars.DriverName))
}

func checkSupportedVersions(t *T) {
	versions := t.own().info.SupportedVersions
	v1 := slices.Index(versions, drapb.DRAPluginService)
	if v1 < 0 {
		t.Fatalf("%s is not among %v", drapb.DRAPluginService, versions)
	}
	if older := slices.Index(versions, drapbv1beta1.DRAPluginService); older >= 0 && older < v1 {
		t.Errorf("%s is before %s in %v: the kubelet uses the older one", drapbv1beta1.DRAPluginService, drapb.DRAPluginService, versions)
	}
}

func checkKnownServices(t *T) {
	versions := t.own().info.SupportedVersions
	known := []string{drapb.DRAPluginService, drapbv1beta1.DRAPluginService, "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"}
	for i, version := range versions {
		if !slices.Contains(known, version) {
			t.Errorf("%q is no DRA service; known: %s", version, strings.Join(known, ", "))
		}
		if slices.Contains(versions[:i], version) {
			t.Errorf("%q is listed twice", version)
		}
	}
}

func checkKubeletRestart(t *T) {
	pid := t.driver.PID()
	t.restartKubelet()
	t.holds(time.Second, "the driver does not stay registered with a kubelet that was restarted", func() error { return t.registered(t.ctx) })
	if t.driver.PID() != pid {
		t.Errorf("the driver was restarted")
	}
}

func checkDeregisters(t *T) {
	socket := t.own().socket
	t.stopDriver(false)
	if _, err := os.Lstat(socket); err == nil {
		t.Errorf("%s is still there after the driver has ended", socket)
	}
	t.await("the kubelet still has the driver", func() error {
		if t.kubelet.Registered(t.vars.DriverName) {
			return errors.New("registered")
		}
		return nil
	})
}

func checkStopsInTime(t *T) {
	driver := t.driver
	t.stopDriver(false)
	if err := driver.Exit(); err != nil {
		t.Errorf("after SIGTERM the driver ends with: %v", err)
	}
}

func checkRollingUpdate(t *T) {
	before := t.cdiFiles()
	kept, _ := t.prepared()
	answer := t.prepareOne(kept.claim())
	busy := t.newWorkload()
	first := t.driver
	vars := t.vars
	vars.PodUID = string(uuid.NewUUID())
	second, err := t.command.Start(vars, t.log)
	t.must(err)
	t.deferred(func() {
		if t.driver != second {
			second.Kill()
		}
	})
	err = eventually(t.ctx, min(t.times.patience, 15*time.Second), func() error {
		select {
		case <-second.Done():
			t.Skipf("a second instance ends: %v", second.Exit())
		default:
		}
		if registered := t.kubelet.Endpoints(t.vars.DriverName); len(registered) < 2 {
			return fmt.Errorf("registered is %v", registered)
		}
		return nil
	})
	if err != nil {
		second.Kill()
		t.fresh = true // the second may have taken the sockets of the first
		t.Skipf("the driver does not run beside another instance of itself with another POD_UID: %v", err)
	}

	ctx, cancel := context.WithCancel(t.ctx)
	calls, failed := 0, map[string]bool{}
	var load sync.WaitGroup
	load.Go(func() {
		for ctx.Err() == nil {
			for _, call := range []func(context.Context, *corev1.Pod) error{t.kubelet.Prepare, t.kubelet.Unprepare} {
				calls++
				if err := call(t.ctx, busy.pod); err != nil {
					failed[err.Error()] = true
				}
			}
		}
	})
	t.pause(time.Second)
	t.stopDriver(false)
	if err := first.Exit(); err != nil {
		t.Errorf("the first instance ends with: %v", err)
	}
	t.driver, t.vars.PodUID = second, vars.PodUID
	t.pause(time.Second)
	cancel()
	load.Wait()
	t.notef("%d calls during the update", calls)
	for _, message := range slices.Sorted(maps.Keys(failed)) {
		t.Errorf("of %d calls during the update one failed: %s", calls, message)
	}
	t.awaitReady()
	t.compareAnswers(answer, t.prepareOne(kept.claim()))
	t.unprepare(kept.claim(), busy.claim())
	t.nothingLeft(before)
}

func checkNotify(t *T) {
	conn, err := dial(t.own().socket)
	t.must(err)
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	for range 2 {
		if _, err := client.NotifyRegistrationStatus(t.ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
			t.Fatalf("NotifyRegistrationStatus: %v", err)
		}
	}
	select {
	case <-t.driver.Done():
		t.Errorf("the driver has ended: %v", t.driver.Exit())
	case <-time.After(time.Second):
	}
}

func checkForeignSockets(t *T) {
	foreign := filepath.Join(t.vars.RegistryDir, "other.example.com-reg.sock")
	listener, err := listenUnix(foreign)
	t.must(err)
	t.deferred(func() { listener.Close() })
	t.restartDriver(true)
	if _, err := os.Lstat(foreign); err != nil {
		t.Errorf("the socket of another plugin is gone after a restart of the driver: %v", err)
	}
}
