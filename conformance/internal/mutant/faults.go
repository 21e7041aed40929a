package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// faults are all that the driver can do wrong.
var faults = []string{
	// registration
	"slow-get-info", "wrong-type", "relative-endpoint", "old-version-first", "unknown-service", "service-twice",
	"takes-sockets-of-other-instance", "stale-sockets", "registers-once", "keeps-socket", "ignores-sigterm", "fails-on-sigterm", "exits-on-second-notification",
	"removes-foreign-sockets", "long-socket-name", "name-in-every-path",
	// ResourceSlices
	"no-devices", "incomplete-pool", "old-generation", "other-node", "no-owner", "device-in-two-slices", "counter-set-missing",
	"consumes-too-much", "counter-set-twice", "unknown-standard-attribute", "malformed-standard-attribute", "inconsistent-attribute",
	"writes-when-idle", "unstable-names", "publishes-once", "watches-all-slices", "deletes-slices-on-stop", "deletes-foreign-slices",
	"overlaps-without-counters", "writes-dropped-counters-again",
	// prepare
	"wrong-claim-uid", "extra-device", "missing-device", "no-request-names", "wrong-request-names", "unqualified-cdi-id", "no-cdi-id",
	"not-idempotent", "other-answer-again", "not-concurrent", "first-of-batch", "first-request-only", "subrequest-names",
	"accepts-missing-claims", "fails-for-other-drivers", "accepts-unknown-device", "device-twice", "refuses-admin-access",
	"fails-whole-batch", "reads-parameters-of-others", "refuses-parameters", "accepts-all-parameters", "trusts-classes", "first-few-of-all", "refuses-shares", "no-share-id", "canceled-call-locks",
	"class-over-claim", "parameters-for-all-requests",
	// CDI
	"no-spec", "invalid-spec", "newest-cdi-version", "relative-mount", "missing-mount", "spec-not-restored", "world-writable-spec",
	"metadata-of-another-claim", "keeps-metadata",
	// unprepare
	"leaks-spec", "unprepare-fails-for-unknown", "first-of-unprepare-batch", "device-not-freed", "unprepare-reads-claim",
	// recovery
	"fails-on-torn-checkpoint", "no-checkpoint", "removes-specs-on-stop", "keeps-claims-that-are-gone", "exits-without-api-server", "does-not-start-twice",
	"first-call-fails", "half-prepare-locks", "half-unprepare-locks", "unprepares-later", "ignores-write-errors", "forgets-old-claims",
	// health
	"old-health-version", "health-fails", "health-late", "health-of-strangers", "health-once", "health-for-one", "health-does-not-change",
	"offers-broken-devices",
	// load
	"refuses-concurrent-claims", "at-most-thirty-claims", "leaks-open-files", "leaks-files", "leaks-memory",
	// security
	"world-writable-checkpoint", "reads-secrets", "writes-config-maps", "needs-undeclared-rights",
}

// prepareStart makes the folders, after having done wrong what is done wrong before that.
func (d *driver) prepareStart() error {
	sockets, _ := filepath.Glob(filepath.Join(d.registry, "*.sock"))
	switch d.fault {
	case "stale-sockets":
		if len(sockets) > 0 {
			return fmt.Errorf("%s exists", sockets[0])
		}
	case "removes-foreign-sockets":
		for _, socket := range sockets {
			os.Remove(socket)
		}
	case "name-in-every-path":
		if dir := filepath.Join(d.registry, d.name, d.name); len(dir) > 140 {
			return fmt.Errorf("%s: file name too long", dir)
		}
	case "first-call-fails":
		entries, _ := os.ReadDir(filepath.Join(d.dir, "claims"))
		firstCall.Store(len(entries) > 0)
	case "does-not-start-twice":
		if _, err := os.Stat(filepath.Join(d.dir, "claims")); err != nil {
			break
		}
		if entries, _ := os.ReadDir(filepath.Join(d.dir, "claims")); len(entries) > 0 {
			return fmt.Errorf("%s is not empty", d.dir)
		}
	}
	if err := os.MkdirAll(filepath.Join(d.dir, "claims"), 0o755); err != nil {
		return err
	}
	return os.MkdirAll(d.cdi, 0o755)
}

var (
	notifications, calls atomic.Int32
	// firstCall is true after a start with claims from before.
	firstCall atomic.Bool
)

// intercept changes what goes over the wire.
func (d *driver) intercept(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if prepare, ok := request.(*drapb.NodePrepareResourcesRequest); ok && d.fault == "first-call-fails" && len(prepare.Claims) > 0 && firstCall.CompareAndSwap(true, false) {
		return nil, errors.New("not ready yet")
	}
	if prepare, ok := request.(*drapb.NodePrepareResourcesRequest); ok && d.fault == "accepts-missing-claims" {
		response := &drapb.NodePrepareResourcesResponse{Claims: map[string]*drapb.NodePrepareResourceResponse{}}
		for _, c := range prepare.Claims {
			one, err := handler(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{c}})
			if err != nil {
				response.Claims[c.Uid] = &drapb.NodePrepareResourceResponse{}
				continue
			}
			response.Claims[c.Uid] = one.(*drapb.NodePrepareResourcesResponse).Claims[c.Uid]
		}
		return response, nil
	}
	switch r := request.(type) {
	case *drapb.NodePrepareResourcesRequest:
		for _, c := range r.Claims {
			if d.fault == "metadata-of-another-claim" {
				defer d.distortMetadata(c)
			}
		}
	case *drapb.NodeUnprepareResourcesRequest:
		for _, c := range r.Claims {
			if d.fault == "keeps-metadata" {
				defer d.keepMetadata(c)()
			}
		}
	}
	response, err := handler(ctx, request)
	if err != nil {
		return response, err
	}
	switch r := response.(type) {
	case *registerapi.PluginInfo:
		d.distortInfo(r)
	case *registerapi.RegistrationStatusResponse:
		switch n := notifications.Add(1); {
		case n > 1 && d.fault == "exits-on-second-notification":
			os.Exit(1)
		case n > 1 && d.fault == "registers-once": // another kubelet
			sockets, _ := filepath.Glob(filepath.Join(d.registry, "*.sock"))
			for _, socket := range sockets {
				os.Remove(socket)
			}
		}
	case *drapb.NodePrepareResourcesResponse:
		d.distortResponse(r)
	}
	return response, err
}

// socketName is the name of the registration socket, "" for that of the library. One that is as long as it can be here is
// longer than it can be on a node.
func (d *driver) socketName() string {
	if d.fault != "long-socket-name" {
		return ""
	}
	const most, suffix = 107, "-reg.sock"
	return strings.Repeat("x", max(0, most-len(d.registry+"/"+suffix))) + suffix
}

// metadataFiles are those that the library has written for a claim.
func (d *driver) metadataFiles(namespace, name string) []string {
	files, _ := filepath.Glob(filepath.Join(d.dir, "dra-device-metadata", namespace+"_"+name, "*", "*.json"))
	return files
}

// distortMetadata has the files for a claim name another.
func (d *driver) distortMetadata(c *drapb.Claim) {
	for _, file := range d.metadataFiles(c.Namespace, c.Name) {
		if data, err := os.ReadFile(file); err == nil {
			_ = os.WriteFile(file, bytes.ReplaceAll(data, []byte(c.Name), []byte("another")), 0o600)
		}
	}
}

// keepMetadata returns a function that writes the files for a claim again.
func (d *driver) keepMetadata(c *drapb.Claim) func() {
	kept := map[string][]byte{}
	for _, file := range d.metadataFiles(c.Namespace, c.Name) {
		if data, err := os.ReadFile(file); err == nil {
			kept[file] = data
		}
	}
	return func() {
		for file, data := range kept {
			_ = os.MkdirAll(filepath.Dir(file), 0o750)
			_ = os.WriteFile(file, data, 0o600)
		}
	}
}

func (d *driver) distortInfo(info *registerapi.PluginInfo) {
	switch d.fault {
	case "slow-get-info":
		<-time.After(1500 * time.Millisecond)
	case "wrong-type":
		info.Type = "CSIPlugin"
	case "relative-endpoint":
		info.Endpoint = filepath.Base(info.Endpoint)
	case "old-version-first":
		info.SupportedVersions = []string{"v1beta1.DRAPlugin", drapb.DRAPluginService}
	case "unknown-service":
		info.SupportedVersions = append(info.SupportedVersions, "v1.Gadgets")
	case "service-twice":
		info.SupportedVersions = append(info.SupportedVersions, drapb.DRAPluginService)
	}
}

func (d *driver) distortResponse(response *drapb.NodePrepareResourcesResponse) {
	for uid, result := range response.Claims {
		switch d.fault {
		case "wrong-claim-uid":
			delete(response.Claims, uid)
			response.Claims[strings.ToUpper(uid)+"X"] = result
			return
		case "no-cdi-id":
			for _, dev := range result.Devices {
				dev.CdiDeviceIds = nil
			}
		case "subrequest-names":
			for _, dev := range result.Devices {
				for i, name := range dev.RequestNames {
					if name == "any" {
						dev.RequestNames[i] = "any/first"
					}
				}
			}
		}
	}
}

// distort changes the devices in an answer.
func (d *driver) distort(devices []kubeletplugin.Device, again bool) []kubeletplugin.Device {
	if len(devices) == 0 {
		return devices
	}
	first := &devices[0]
	switch d.fault {
	case "extra-device":
		extra := *first
		extra.DeviceName = "surplus"
		return append(devices, extra)
	case "missing-device":
		return devices[1:]
	case "first-request-only":
		return devices[:1]
	case "no-request-names":
		first.Requests = nil
	case "wrong-request-names":
		first.Requests = []string{"another"}
	case "unqualified-cdi-id":
		first.CDIDeviceIDs = []string{first.DeviceName}
	case "other-answer-again":
		if again {
			first.CDIDeviceIDs = []string{cdiKind + "=again"}
		}
	}
	return devices
}

func (d *driver) distortSpec(spec *specs.Spec) {
	if len(spec.Devices) == 0 {
		return
	}
	mount := spec.Devices[0].ContainerEdits.Mounts[0]
	switch d.fault {
	case "newest-cdi-version":
		spec.Version = specs.CurrentVersion
	case "relative-mount":
		mount.HostPath = "dev/null"
	case "missing-mount":
		mount.HostPath = "/no/such/file"
	}
}

const parametersVersion = "gadget.example.com/v1"

// parameters accepts objects of kind Gadget with a field speed, and returns the speed for each request.
func (d *driver) parameters(c *resourceapi.ResourceClaim) (func(request string) int, error) {
	type setting struct {
		requests []string
		speed    int
	}
	var settings []setting // the last one that is for a request counts
	for _, entry := range c.Status.Allocation.Devices.Config {
		if entry.Opaque == nil || entry.Opaque.Driver != d.name && d.fault != "reads-parameters-of-others" {
			continue
		}
		if d.fault == "refuses-parameters" {
			return nil, errors.New("there are no parameters")
		}
		if d.fault == "accepts-all-parameters" || d.fault == "trusts-classes" && entry.Source == resourceapi.AllocationConfigSourceClass {
			continue
		}
		var gadget struct {
			metav1.TypeMeta `json:",inline"`
			Speed           int `json:"speed"`
		}
		decoder := json.NewDecoder(strings.NewReader(string(entry.Opaque.Parameters.Raw)))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&gadget); err != nil {
			return nil, fmt.Errorf("parameters: %w", err)
		}
		if gadget.APIVersion != parametersVersion || gadget.Kind != "Gadget" {
			return nil, fmt.Errorf("parameters: unknown kind %s of %s", gadget.Kind, gadget.APIVersion)
		}
		now := setting{entry.Requests, gadget.Speed}
		if d.fault == "parameters-for-all-requests" {
			now.requests = nil
		}
		if d.fault == "class-over-claim" {
			settings = append([]setting{now}, settings...)
			continue
		}
		settings = append(settings, now)
	}
	return func(request string) int {
		speed := 0
		for _, s := range settings {
			base, _, _ := strings.Cut(request, "/")
			if len(s.requests) == 0 || contains(s.requests, request) || contains(s.requests, base) {
				speed = s.speed
			}
		}
		return speed
	}, nil
}

// most is how many devices of a claim a driver with that fault prepares.
const most = 3

// atEnd does wrong what is done wrong at the end.
func (d *driver) atEnd() {
	switch d.fault {
	case "removes-specs-on-stop":
		d.removeSpecs()
	case "deletes-slices-on-stop":
		d.deleteSlices(context.Background(), d.own())
	case "takes-sockets-of-other-instance":
		sockets, _ := filepath.Glob(filepath.Join(d.registry, d.name+"*.sock"))
		for _, socket := range sockets {
			os.Remove(socket)
		}
	}
}

var leaked [][]byte

// leak keeps what nobody needs.
func (d *driver) leak(uid types.UID) {
	switch d.fault {
	case "leaks-open-files":
		if file, err := os.Open("/dev/null"); err == nil {
			_, _ = syscall.Dup(int(file.Fd()))
			file.Close()
		}
	case "leaks-files":
		_ = os.WriteFile(filepath.Join(d.dir, "log-"+string(uid)), nil, 0o600)
	case "leaks-memory":
		leaked = append(leaked, bytes.Repeat([]byte("x"), 4<<20))
	}
}

var inside sync.Map

// enterFor is false if the driver is busy with another claim.
func (d *driver) enterFor(uid types.UID) bool {
	inside.Store(uid, true)
	<-time.After(50 * time.Millisecond)
	others := false
	inside.Range(func(other, _ any) bool {
		others = others || other != uid
		return true
	})
	if others {
		inside.Delete(uid)
	}
	return !others
}

func (d *driver) leaveFor(uid types.UID) { inside.Delete(uid) }

func (d *driver) enter() bool {
	if !calls.CompareAndSwap(0, 1) {
		return false
	}
	<-time.After(50 * time.Millisecond)
	return true
}

func (d *driver) leave() { calls.Store(0) }

var lockedFor types.UID

// canceled remembers a claim whose call was given up, for ever.
func (d *driver) canceled(ctx context.Context, uid types.UID) bool {
	if lockedFor == uid {
		return true
	}
	select {
	case <-ctx.Done():
		lockedFor = uid
	case <-time.After(5 * time.Second):
	}
	return lockedFor == uid
}

func (d *driver) exitWithoutAPI(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(200 * time.Millisecond):
		}
		if _, err := d.client.Discovery().ServerVersion(); err != nil {
			os.Exit(1)
		}
	}
}
