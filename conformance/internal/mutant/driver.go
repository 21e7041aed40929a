package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// driver is the node driver. Its checkpoint is one file per claim.
type driver struct {
	config
	client kubernetes.Interface
	dir    string

	published            *resourceslice.Controller
	noCounters, noTaints atomic.Bool // the API server drops them

	mu    sync.Mutex
	known map[types.UID]claim
}

// claim is a prepared claim.
type claim struct {
	Namespace, Name string
	UID             types.UID
	Devices         []device
}

type device struct {
	Request, Pool, Device, Share string
	Admin                        bool
	Speed                        int // 0 is none in particular
}

func (d *driver) run(ctx context.Context) error {
	if err := d.prepareStart(); err != nil {
		return err
	}
	if err := d.restore(ctx); err != nil {
		return err
	}
	opts := []kubeletplugin.Option{
		kubeletplugin.DriverName(d.name),
		kubeletplugin.KubeClient(d.client),
		kubeletplugin.NodeName(d.node),
		kubeletplugin.RegistrarDirectoryPath(d.registry),
		kubeletplugin.PluginDataDirectoryPath(d.dir),
		kubeletplugin.GRPCInterceptor(d.intercept),
		kubeletplugin.Serialize(false), // the driver has a lock of its own
		kubeletplugin.HealthV1(d.fault != "old-health-version"),
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(d.cdi),
	}
	if name := d.socketName(); name != "" {
		opts = append(opts, kubeletplugin.RegistrarSocketFilename(name))
	} else if uid := os.Getenv("POD_UID"); uid != "" {
		opts = append(opts, kubeletplugin.RollingUpdate(types.UID(uid)))
	}
	running := ctx
	if d.fault == "keeps-socket" {
		running = context.WithoutCancel(ctx) // the helper ends with its context
	}
	helper, err := kubeletplugin.Start(running, d, opts...)
	if err != nil {
		return err
	}
	if err := d.publish(running); err != nil {
		return err
	}
	d.afterStart(ctx)
	<-ctx.Done()
	if d.fault != "keeps-socket" {
		helper.Stop()
	}
	d.atEnd()
	return nil
}

// --- prepare and unprepare ---

func (d *driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for i, c := range claims {
		if d.fault == "first-of-batch" && i > 0 {
			break
		}
		devices, err := d.prepare(ctx, c)
		if err != nil && d.fault == "fails-whole-batch" {
			return nil, err
		}
		results[c.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

func (d *driver) prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	if d.fault == "not-concurrent" {
		if !d.enter() {
			return nil, errors.New("busy")
		}
		defer d.leave()
	}
	if d.fault == "refuses-concurrent-claims" {
		if !d.enterFor(c.UID) {
			return nil, errors.New("busy with another claim")
		}
		defer d.leaveFor(c.UID)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reload()
	d.leak(c.UID)
	if d.fault == "canceled-call-locks" && d.canceled(ctx, c.UID) {
		return nil, errors.New("locked by a call that was canceled")
	}
	speeds, err := d.parameters(c)
	if err != nil {
		return nil, err
	}
	now := claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver != d.name {
			if d.fault == "fails-for-other-drivers" {
				return nil, fmt.Errorf("device %s is of driver %s", r.Device, r.Driver)
			}
			continue
		}
		if !contains(deviceNames(), r.Device) && d.fault != "accepts-unknown-device" {
			return nil, fmt.Errorf("there is no device %s", r.Device)
		}
		if len(now.Devices) == most && d.fault == "first-few-of-all" {
			break
		}
		now.Devices = append(now.Devices, device{r.Request, r.Pool, r.Device, string(ptr.Deref(r.ShareID, "")), ptr.Deref(r.AdminAccess, false), speeds(r.Request)})
	}
	if d.fault == "refuses-admin-access" && slices.ContainsFunc(now.Devices, func(d device) bool { return d.Admin }) {
		return nil, errors.New("admin access is not supported")
	}
	if _, again := d.known[c.UID]; again && d.fault == "not-idempotent" {
		return nil, errors.New("the claim is prepared already")
	} else if !again {
		if err := d.conflict(now); err != nil {
			return nil, err
		}
	}
	if d.fault == "at-most-thirty-claims" && len(d.known) >= 30 {
		return nil, errors.New("too many claims")
	}
	if err := d.begin("prepare", c.UID); err != nil {
		return nil, err
	}
	defer d.end("prepare", c.UID)
	if err := d.write(now); err != nil {
		return nil, err
	}
	_, again := d.known[c.UID]
	if !again || d.fault != "spec-not-restored" {
		if err := d.writeSpec(now); err != nil {
			return nil, err
		}
	}
	d.known[c.UID] = now
	return d.answer(now, again), nil
}

// conflict is an error if another claim has one of the devices.
func (d *driver) conflict(now claim) error {
	if d.fault == "device-twice" {
		return nil
	}
	for _, other := range d.known {
		for _, theirs := range other.Devices {
			for _, ours := range now.Devices {
				if other.UID != now.UID && ours.Device == theirs.Device && (ours.Share == "" || d.fault == "refuses-shares") && !ours.Admin && !theirs.Admin {
					return fmt.Errorf("device %s is used by claim %s/%s", ours.Device, other.Namespace, other.Name)
				}
			}
		}
	}
	return nil
}

func (d *driver) answer(c claim, again bool) []kubeletplugin.Device {
	var devices []kubeletplugin.Device
	for _, dev := range c.Devices {
		id := cdiKind + "=" + string(c.UID) + "-" + dev.Device
		answered := kubeletplugin.Device{Requests: []string{dev.Request}, PoolName: dev.Pool, DeviceName: dev.Device, CDIDeviceIDs: []string{id}}
		if dev.Share != "" && d.fault != "no-share-id" {
			answered.ShareID = ptr.To(types.UID(dev.Share))
		}
		devices = append(devices, answered)
	}
	return d.distort(devices, again)
}

func (d *driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for i, c := range claims {
		if d.fault == "first-of-unprepare-batch" && i > 0 {
			break
		}
		results[c.UID] = d.unprepare(ctx, c)
	}
	return results, nil
}

func (d *driver) unprepare(ctx context.Context, c kubeletplugin.NamespacedObject) error {
	if d.fault == "unprepare-reads-claim" {
		if _, err := d.client.ResourceV1().ResourceClaims(c.Namespace).Get(ctx, c.Name, metav1.GetOptions{}); err != nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reload()
	if _, known := d.known[c.UID]; !known && d.fault == "unprepare-fails-for-unknown" {
		return fmt.Errorf("claim %s is not prepared", c.UID)
	}
	if err := d.begin("unprepare", c.UID); err != nil {
		return err
	}
	defer d.end("unprepare", c.UID)
	if d.fault == "unprepares-later" {
		go func() {
			<-time.After(time.Second)
			os.Remove(d.specFile(c.UID))
			os.Remove(d.checkpoint(c.UID))
		}()
		delete(d.known, c.UID)
		return nil
	}
	if d.fault != "leaks-spec" {
		if err := os.Remove(d.specFile(c.UID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := os.Remove(d.checkpoint(c.UID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if d.fault != "device-not-freed" {
		delete(d.known, c.UID)
	}
	return nil
}

func (d *driver) HandleError(ctx context.Context, err error, msg string) {
	fmt.Fprintln(os.Stderr, "mutant:", msg, err)
}

// --- checkpoint ---

func (d *driver) checkpoint(uid types.UID) string {
	return filepath.Join(d.dir, "claims", string(uid)+".json")
}

func (d *driver) write(c claim) error {
	if d.fault == "no-checkpoint" {
		return nil
	}
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	mode := os.FileMode(0o600)
	if d.fault == "world-writable-checkpoint" {
		mode = 0o666
	}
	err = replaceFile(d.checkpoint(c.UID), data, mode)
	if d.fault == "ignores-write-errors" {
		return nil
	}
	return err
}

// begin and end are around an operation of a driver that takes a torn one for one that still runs.
func (d *driver) begin(operation string, uid types.UID) error {
	if d.fault != "half-"+operation+"-locks" {
		return nil
	}
	mark := filepath.Join(d.dir, operation+"-"+string(uid))
	if _, err := os.Stat(mark); err == nil {
		return errors.New("the claim is busy")
	}
	return os.WriteFile(mark, nil, 0o600)
}

func (d *driver) end(operation string, uid types.UID) {
	if d.fault == "half-"+operation+"-locks" {
		<-time.After(100 * time.Millisecond)
		os.Remove(filepath.Join(d.dir, operation+"-"+string(uid)))
	}
}

func replaceFile(path string, data []byte, mode os.FileMode) error {
	temporary := filepath.Join(filepath.Dir(path), ".new-"+filepath.Base(path))
	if err := os.WriteFile(temporary, data, mode); err != nil {
		return err
	}
	if err := os.Chmod(temporary, mode); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

// restore reads the checkpoints. Claims that are gone from the API are forgotten, with their specs; if the API server does
// not answer they are kept.
func (d *driver) restore(ctx context.Context) error {
	d.known = map[types.UID]claim{}
	entries, err := os.ReadDir(filepath.Join(d.dir, "claims"))
	if err != nil {
		return err
	}
	for _, entry := range entries {
		path := filepath.Join(d.dir, "claims", entry.Name())
		if strings.HasPrefix(entry.Name(), ".") {
			os.Remove(path) // of a write that did not end
			continue
		}
		if info, err := entry.Info(); err == nil && d.fault == "forgets-old-claims" && time.Since(info.ModTime()).Abs() > 24*time.Hour {
			os.Remove(path)
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var c claim
		if err := json.Unmarshal(data, &c); err != nil {
			if d.fault == "fails-on-torn-checkpoint" {
				return fmt.Errorf("%s: %w", path, err)
			}
			os.Remove(path) // the kubelet asks again
			continue
		}
		get, cancel := context.WithTimeout(ctx, 2*time.Second)
		current, err := d.client.ResourceV1().ResourceClaims(c.Namespace).Get(get, c.Name, metav1.GetOptions{})
		cancel()
		if d.fault != "keeps-claims-that-are-gone" && (apierrors.IsNotFound(err) || err == nil && current.UID != c.UID) {
			os.Remove(d.specFile(c.UID))
			os.Remove(path)
			continue
		}
		d.known[c.UID] = c
	}
	return d.removeOrphans()
}

// reload follows what another instance of the driver, if there is one, has prepared and unprepared.
func (d *driver) reload() {
	if d.fault == "no-checkpoint" || d.fault == "device-not-freed" {
		return
	}
	entries, err := os.ReadDir(filepath.Join(d.dir, "claims"))
	if err != nil {
		return
	}
	there := map[types.UID]bool{}
	for _, entry := range entries {
		uid := types.UID(strings.TrimSuffix(entry.Name(), ".json"))
		there[uid] = true
		if _, known := d.known[uid]; known || strings.HasPrefix(entry.Name(), ".") {
			continue
		}
		var c claim
		if data, err := os.ReadFile(d.checkpoint(uid)); err == nil && json.Unmarshal(data, &c) == nil {
			d.known[uid] = c
		}
	}
	maps.DeleteFunc(d.known, func(uid types.UID, _ claim) bool { return !there[uid] })
}

// removeOrphans removes specs of claims that are not known: those of a prepare that did not get to its end.
func (d *driver) removeOrphans() error {
	entries, err := os.ReadDir(d.cdi)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		uid, ours := strings.CutPrefix(strings.TrimSuffix(entry.Name(), ".json"), cdiPrefix)
		if _, known := d.known[types.UID(uid)]; ours && !known && d.fault != "no-checkpoint" {
			os.Remove(filepath.Join(d.cdi, entry.Name()))
		}
	}
	return nil
}

// --- CDI ---

const (
	cdiKind   = "example.com/gadget"
	cdiPrefix = "example.com-gadget_"
)

func (d *driver) specFile(uid types.UID) string {
	return filepath.Join(d.cdi, cdiPrefix+string(uid)+".json")
}

func (d *driver) writeSpec(c claim) error {
	if d.fault == "no-spec" {
		return nil
	}
	spec := specs.Spec{Kind: cdiKind}
	for _, dev := range c.Devices {
		name := string(c.UID) + "-" + dev.Device
		if slices.ContainsFunc(spec.Devices, func(s specs.Device) bool { return s.Name == name }) {
			continue
		}
		spec.Devices = append(spec.Devices, specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{
			Env:    append(speed(dev), "GADGET_"+strings.ToUpper(strings.ReplaceAll(dev.Device, "-", "_"))+"=1"),
			Mounts: []*specs.Mount{{HostPath: "/dev/null", ContainerPath: "/dev/" + dev.Device, Options: []string{"bind"}}},
		}})
	}
	d.distortSpec(&spec)
	if spec.Version == "" {
		minimum, err := specs.MinimumRequiredVersion(&spec)
		if err != nil {
			return err
		}
		spec.Version = minimum
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	if d.fault == "invalid-spec" {
		data = append([]byte(`{"unknown": true, `), data[1:]...)
	}
	mode := os.FileMode(0o644)
	if d.fault == "world-writable-spec" {
		mode = 0o666
	}
	return replaceFile(d.specFile(c.UID), data, mode)
}

// speed tells the container how fast its device is to be.
func speed(dev device) []string {
	if dev.Speed == 0 {
		return nil
	}
	return []string{fmt.Sprintf("GADGET_SPEED=%d", dev.Speed)}
}

func (d *driver) removeSpecs() {
	entries, _ := os.ReadDir(d.cdi)
	for _, entry := range entries {
		os.Remove(filepath.Join(d.cdi, entry.Name()))
	}
}
