package conformance

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/simgpu/simgpu/conformance/internal/apiproxy"
)

func recoveryChecks() []Check {
	return []Check{
		{
			Name: "recovery/restart-with-prepared-claim", Level: Must,
			Asserts: "A driver that was restarted gives the same answer for a claim that was prepared before.",
			Source:  keptInSpec + "; containers that are restarted meanwhile use the CDI devices of the first answer",
			Fix:     "Keep prepared claims in a checkpoint.",
			run:     func(t *T) { checkRestartPrepared(t, false) },
		},
		{
			Name: "recovery/kill-with-prepared-claim", Level: Must,
			Asserts: "A driver that was killed and started gives the same answer for a claim that was prepared before.",
			Source:  keptInSpec,
			Fix:     "Write the checkpoint before answering.",
			run:     func(t *T) { checkRestartPrepared(t, true) },
		},
		{
			Name: "recovery/cdi-specs-outlive-restart", Level: Must,
			Asserts: "The CDI specs of prepared claims stay while the driver is down: containers are restarted without it.",
			Source:  "k8s.io/kubernetes pkg/kubelet/cm/dra/manager.go GetResources: ids come from the kubelet's checkpoint",
			Fix:     "Remove specs in unprepare only.",
			run:     checkSpecsOutliveRestart,
		},
		{
			Name: "recovery/unprepare-after-restart", Level: Must,
			Asserts: "A claim that was prepared before a restart is unprepared after it, and nothing is left.",
			Source:  unprepareDoc,
			Fix:     "Keep prepared claims in a checkpoint.",
			run:     checkUnprepareAfterRestart,
		},
		{
			Name: "recovery/no-device-twice-after-restart", Level: Must,
			Asserts: "After a restart a device that a claim has is not given to another claim.",
			Source:  "kubernetes/kubernetes#141471",
			Fix:     "Restore who has what before serving.",
			run:     checkNoDeviceTwiceAfterRestart,
		},
		{
			Name: "recovery/reboot", Level: Must,
			Asserts: "After a reboot, which empties the CDI folder, a prepared claim that is prepared again has its spec.",
			Source:  "kubernetes/kubernetes#141433",
			Fix:     "Check on every prepare that the spec is there.",
			takes:   30 * time.Second,
			run:     checkReboot,
		},
		{
			Name: "recovery/kubelet-restart-prepares-again", Level: Must,
			Asserts: "A kubelet that was restarted can prepare the claim of a running pod again and unprepare it.",
			Source:  "k8s.io/kubernetes pkg/kubelet/cm/dra: that a claim is prepared is not in the checkpoint",
			Fix:     "Make prepare idempotent.",
			run:     checkKubeletRestartPrepares,
		},
		{
			Name: "recovery/killed-before-prepare", Level: Must,
			Asserts: "A driver that is killed before a call reaches it answers the first call once it is registered again.",
			Source:  kubeletDRA + ": a call that fails is repeated a minute later",
			Fix:     "Restore what was prepared before registering.",
			run:     checkKilledBeforePrepare,
		},
		{
			Name: "recovery/killed-while-preparing", Level: Must,
			Asserts: "A driver that is killed in the middle of prepare - while it reads the claim, when it has written the first file, and at other times - can prepare and unprepare the claim once it is back.",
			Source:  keptInSpec,
			Fix:     "Undo or finish at the start what was begun.",
			takes:   15 * time.Second,
			run:     checkKilledWhilePreparing,
		},
		{
			Name: "recovery/killed-while-unpreparing", Level: Must,
			Asserts: "A driver that is killed in the middle of unprepare - when it has removed or written the first file, and at other times - can unprepare the claim once it is back, and nothing is left.",
			Source:  unprepareDoc,
			Fix:     "Undo or finish at the start what was begun.",
			takes:   15 * time.Second,
			run:     checkKilledWhileUnpreparing,
		},
		{
			Name: "recovery/killed-after-unprepare", Level: Must,
			Asserts: "A driver that is killed as soon as it has answered an unprepare has left nothing, and the device can be given to another claim once it is back.",
			Source:  unprepareDoc + ": the kubelet forgets the claim with the answer",
			Fix:     "Answer when everything is done.",
			run:     checkKilledAfterUnprepare,
		},
		{
			Name: "recovery/claim-deleted-while-down", Level: Should,
			Asserts: "A claim that was deleted while the driver was down can be unprepared, and its device given to another.",
			Source:  "a pod that was force-deleted leaves its claim prepared",
			Fix:     "Compare prepared claims with the API by UID.",
			run:     checkClaimDeletedWhileDown,
		},
		{
			Name: "recovery/state-lost", Level: Should,
			Asserts: "A driver whose folder was emptied while it was down starts, and prepares again what the kubelet asks for.",
			Source:  "k8s.io/kubernetes pkg/kubelet: the plugin folder is on the node's disk, which people clean",
			Fix:     "An empty folder is a first start.",
			run:     checkStateLost,
		},
		{
			Name: "recovery/state-truncated", Level: May,
			Asserts: "A driver whose files were cut in half while it was down, as a full disk or a power failure leaves them, starts, and prepares again what the kubelet asks for.",
			Source:  "k8s.io/kubernetes pkg/kubelet: the plugin folder is on the node's disk",
			Fix:     "Treat what cannot be read like what is not there, and say so.",
			run:     checkStateTruncated,
		},
		{
			Name: "recovery/state-read-only", Level: Should,
			Asserts: "While its folder cannot be written to, the driver refuses new claims with an error and leaves nothing of them, or prepares them so that a restart does not forget who has the device. What was prepared before is unharmed.",
			Source:  "a disk with errors is mounted read-only by the kernel",
			Fix:     "Write the checkpoint before answering, and fail if that fails.",
			run:     checkStateReadOnly,
		},
		{
			Name: "recovery/clock-jumped", Level: Should,
			Asserts: "A driver that is started after a jump of the clock, so that its files are of next year or of last year, has its claims.",
			Source:  "nodes start before the time is set; kubernetes/kubernetes checks no file for its age either",
			Fix:     "Do not infer from times whether what is on disk counts.",
			run:     checkClockJumped,
		},
		{
			Name: "recovery/api-server-away", Level: Must,
			Asserts: "The driver stays up while the API server is away, and works once it is back.",
			Source:  "k8s.io/client-go: watches are cut at any time",
			Fix:     "Try again; never exit because of the API server.",
			run:     checkAPIServerAway,
		},
		{
			Name: "recovery/started-without-api-server", Level: Should,
			Asserts: "A driver that is started while the API server is away works once it is back, restarted by whoever runs it if need be.",
			Source:  "nodes start in any order",
			Fix:     "Wait for the API server, or exit with an error.",
			run:     checkStartedWithoutAPI,
		},
		{
			Name: "recovery/registry-emptied", Level: Should,
			Asserts: "A driver is registered again after the registry folder was emptied, by itself or after a restart.",
			Source:  "k8s.io/kubernetes pkg/kubelet/pluginmanager",
			Fix:     "Make the registration socket at every start.",
			takes:   10 * time.Second,
			run:     checkRegistryEmptied,
		},
	}
}

func (t *T) resolves(ids []string) {
	for _, id := range ids {
		if _, err := t.resolve(id); err != nil {
			t.Errorf("%v", err)
		}
	}
}

func checkRestartPrepared(t *T, kill bool) {
	claim := t.newWorkload().claim()
	before := t.prepareOne(claim)
	t.restartDriver(kill)
	after := t.prepareOne(claim)
	t.compareAnswers(before, after)
	for _, device := range after {
		t.resolves(device.CdiDeviceIds)
	}
}

func checkSpecsOutliveRestart(t *T) {
	_, ids := t.prepared()
	t.stopDriver(false)
	t.resolves(ids)
	t.must(t.startDriver())
	t.awaitReady()
	t.resolves(ids)
}

// nothingLeft asserts that the CDI folder has no more specs than before.
func (t *T) nothingLeft(before map[string]string) {
	for name := range t.cdiFiles() {
		// Others are none that a container runtime reads: a file that was being written when the driver was killed.
		if ext := filepath.Ext(name); ext != ".json" && ext != ".yaml" {
			continue
		}
		if _, was := before[name]; !was {
			t.Errorf("%s is still there", name)
		}
	}
}

func checkUnprepareAfterRestart(t *T) {
	before := t.cdiFiles()
	w, _ := t.prepared()
	t.restartDriver(false)
	t.unprepare(w.claim())
	t.nothingLeft(before)
}

func checkNoDeviceTwiceAfterRestart(t *T) {
	first := t.newWorkload().claim()
	if first.Status.Allocation.Devices.Results[0].ShareID != nil {
		t.Skipf("the device may be shared")
	}
	t.prepareOne(first)
	t.restartDriver(true)
	second := t.newClaim()
	second.Status.Allocation = first.Status.Allocation.DeepCopy()
	second = t.rewriteAllocation(second)
	t.refused("a second claim for the device", reference(second))
}

func checkReboot(t *T) {
	w, ids := t.prepared()
	t.stopDriver(true)
	t.kubelet.Stop()
	t.emptyCDI()
	t.must(t.startKubelet(t.ctx))
	t.must(t.startDriver())
	t.awaitReadyLate()
	t.prepareOne(w.claim())
	t.resolves(ids)
}

func checkKubeletRestartPrepares(t *T) {
	w := t.newWorkload()
	if err := t.kubelet.Prepare(t.ctx, w.pod); err != nil {
		t.Fatalf("%v", err)
	}
	t.restartKubelet(w.pod)
	// The kubelet registers the driver and calls it at the same time, and repeats calls that fail.
	t.await("after a restart of the kubelet", func() error { return t.kubelet.Prepare(t.ctx, w.pod) })
	ids, err := t.kubelet.CDIDevices(w.pod, &w.pod.Spec.Containers[0])
	t.must(err)
	t.resolves(ids)
	if err := t.kubelet.Unprepare(t.ctx, w.pod); err != nil {
		t.Errorf("%v", err)
	}
}

// moment is a point in a call at which the driver is killed.
type moment struct {
	name string
	// reached returns a channel that is closed at that point, and what is to be done when it is no longer waited for.
	reached func() (<-chan struct{}, func())
}

// moments are points in a call. A call may end without reaching all of them.
func (t *T) moments() []moment {
	var all []moment
	for _, after := range []time.Duration{0, time.Millisecond, 3 * time.Millisecond, 8 * time.Millisecond, 20 * time.Millisecond} {
		all = append(all, moment{after.String() + " after its start", func() (<-chan struct{}, func()) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(t.ctx), after)
			return ctx.Done(), cancel
		}})
	}
	all = append(all, moment{"while it reads a claim", func() (<-chan struct{}, func()) {
		hold := t.proxy.Hold(func(r apiproxy.Request) bool { return r.Resource == "resourceclaims" })
		return hold.Held, hold.Release
	}})
	for _, dir := range []string{t.vars.CDIDir, t.vars.PluginDir, t.vars.StateDir} {
		all = append(all, moment{"at the first change in " + dir, func() (<-chan struct{}, func()) { return t.firstChange(dir) }})
	}
	return all
}

// firstChange returns a channel that is closed when something changes in the folder or in those in it.
func (t *T) firstChange(dir string) (<-chan struct{}, func()) {
	changed := make(chan struct{})
	watcher, err := fsnotify.NewWatcher()
	t.must(err)
	t.must(filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return nil //nolint:nilerr // it has gone meanwhile
		}
		return watcher.Add(path)
	}))
	go func() {
		if _, open := <-watcher.Events; open {
			close(changed)
		}
	}()
	return changed, func() { watcher.Close() }
}

// killDuring starts a call, kills the driver at that point, or when the call has ended before, and starts it again.
func (t *T) killDuring(at moment, call func(context.Context)) {
	ctx, cancel := context.WithTimeout(t.ctx, t.times.patience)
	defer cancel()
	reached, stop := at.reached()
	done := make(chan struct{})
	go func() {
		defer close(done)
		call(ctx)
	}()
	early := false
	select {
	case <-reached:
	case <-done:
		early = true
	}
	t.stopDriver(true)
	cancel()
	stop()
	<-done
	t.show("driver killed", "%s (the call had ended: %v)", at.name, early)
	t.must(t.startDriver())
	t.awaitReady()
}

func checkKilledBeforePrepare(t *T) {
	w, _ := t.prepared()
	another := t.newWorkload().claim()
	plugin := t.plugin()
	t.stopDriver(true)
	if _, err := t.tryPrepare(plugin, reference(another)); err == nil {
		t.Errorf("a driver that was killed answers")
	}
	t.must(t.startDriver())
	t.awaitReady()
	for _, claim := range []*resourceapi.ResourceClaim{another, w.claim()} {
		for _, device := range t.prepareOne(claim) {
			t.resolves(device.CdiDeviceIds)
		}
	}
}

func checkKilledWhilePreparing(t *T) {
	before := t.cdiFiles()
	claim := t.newWorkload().claim()
	for _, moment := range t.moments() {
		plugin := t.plugin()
		t.killDuring(moment, func(ctx context.Context) {
			_, _ = plugin.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{reference(claim)}})
		})
		for _, device := range t.prepareOne(claim) {
			t.resolves(device.CdiDeviceIds)
		}
		t.unprepare(claim)
		t.nothingLeft(before)
	}
}

func checkKilledWhileUnpreparing(t *T) {
	before := t.cdiFiles()
	claim := t.newWorkload().claim()
	for _, moment := range t.moments() {
		t.prepareOne(claim)
		plugin := t.plugin()
		t.killDuring(moment, func(ctx context.Context) {
			_, _ = plugin.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{reference(claim)}})
		})
		t.unprepare(claim)
		t.nothingLeft(before)
	}
}

func checkKilledAfterUnprepare(t *T) {
	before := t.cdiFiles()
	first, _ := t.prepared()
	t.unprepare(first.claim())
	t.stopDriver(true)
	t.nothingLeft(before)
	second := t.newClaim()
	second.Status.Allocation = first.claim().Status.Allocation.DeepCopy()
	t.must(t.deleteClaim(t.ctx, first.claim().Name))
	t.must(t.startDriver())
	t.awaitReady()
	second = t.rewriteAllocation(second)
	t.compareDevices(second, t.prepareOne(second))
}

// eachOwn calls f for everything in the folders that a driver keeps its state in.
func (t *T) eachOwn(f func(path string, entry fs.DirEntry) error) {
	for _, dir := range []string{t.vars.PluginDir, t.vars.StateDir} {
		t.must(filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			return f(path, entry)
		}))
	}
}

func checkStateReadOnly(t *T) {
	t.stopDriver(false)
	var err error
	if t.driver, err = t.command.StartBound(t.vars, t.log); err != nil {
		t.fresh = true
		t.Skipf("a folder cannot be made read-only for the driver here: %v", err)
	}
	t.awaitReady()
	kept := t.newWorkload().claim()
	answer := t.prepareOne(kept)
	before := t.cdiFiles()
	claim := t.newWorkload().claim()

	modes := map[string]fs.FileMode{}
	writable := func() {
		for path, mode := range modes {
			_ = os.Chmod(path, mode) // it may be gone
		}
		modes = nil
	}
	t.deferred(writable)
	t.eachOwn(func(path string, entry fs.DirEntry) error {
		if !entry.IsDir() && !entry.Type().IsRegular() {
			return nil
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		modes[path] = info.Mode().Perm()
		return os.Chmod(path, info.Mode().Perm()&^0o222)
	})
	err = t.tryOne(claim)
	select {
	case <-t.driver.Done():
		t.Fatalf("the driver has ended: %v", t.driver.Exit())
	default:
	}
	if err != nil {
		for name := range t.cdiFiles() {
			if _, was := before[name]; !was {
				t.Errorf("the claim is refused, and the CDI spec %s was written", name)
			}
		}
		t.notef("the driver says: %v", err)
	}
	writable()
	if err != nil {
		t.prepareOne(claim)
	}
	t.restartDriver(true)
	t.compareAnswers(answer, t.prepareOne(kept))
	if t.guards(kept) {
		t.refused("a second claim for the device of a claim that was prepared while nothing could be written", reference(t.rival(claim)))
	}
	t.unprepare(claim, kept)
}

// rival is another claim for what a claim has, as it should not exist.
func (t *T) rival(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	rival := t.newClaim()
	rival.Status.Allocation = claim.Status.Allocation.DeepCopy()
	return t.rewriteAllocation(rival)
}

// guards is true if the driver does not give what the prepared claim has to another. That it does is a check of its own.
func (t *T) guards(claim *resourceapi.ResourceClaim) bool {
	if claim.Status.Allocation.Devices.Results[0].ShareID != nil {
		return false
	}
	rival := t.rival(claim)
	defer func() {
		_, _ = t.tryUnprepare(t.plugin(), reference(rival))
		t.must(t.deleteClaim(t.ctx, rival.Name))
	}()
	return t.tryOne(rival) != nil
}

// tryOne prepares a claim, or says why that fails.
func (t *T) tryOne(claim *resourceapi.ResourceClaim) error {
	response, err := t.tryPrepare(t.plugin(), reference(claim))
	if err != nil {
		return err
	}
	return errorOf(response.GetClaims()[string(claim.UID)])
}

func checkClockJumped(t *T) {
	w, ids := t.prepared()
	answer := t.prepareOne(w.claim())
	guards := t.guards(w.claim())
	another := t.rival(w.claim())
	for _, jump := range []time.Duration{365 * 24 * time.Hour, -365 * 24 * time.Hour} {
		t.stopDriver(true)
		then := time.Now().Add(jump)
		t.eachOwn(func(path string, _ fs.DirEntry) error { return os.Chtimes(path, then, then) })
		for name := range t.cdiFiles() {
			t.must(os.Chtimes(filepath.Join(t.vars.CDIDir, name), then, then))
		}
		t.must(t.startDriver())
		t.awaitReady()
		t.resolves(ids)
		if guards {
			t.refused("a second claim for the device", reference(another))
		}
		t.compareAnswers(answer, t.prepareOne(w.claim()))
	}
}

func checkClaimDeletedWhileDown(t *T) {
	first := t.newWorkload().claim()
	t.prepareOne(first)
	t.stopDriver(false)
	t.must(t.deleteClaim(t.ctx, first.Name))
	t.must(t.startDriver())
	t.awaitReady()
	second := t.newClaim()
	second.Status.Allocation = first.Status.Allocation.DeepCopy()
	second = t.rewriteAllocation(second)
	t.await("the device of a claim that is gone is not given to another", func() error {
		response, err := t.tryPrepare(t.plugin(), reference(second))
		if err != nil {
			return err
		}
		return errorOf(response.GetClaims()[string(second.UID)])
	})
	t.unprepare(first)
}

func checkStateLost(t *T) {
	w, _ := t.prepared()
	t.stopDriver(false)
	for _, dir := range []string{t.vars.PluginDir, t.vars.StateDir} {
		entries, err := os.ReadDir(dir)
		t.must(err)
		for _, entry := range entries {
			t.must(os.RemoveAll(filepath.Join(dir, entry.Name())))
		}
	}
	t.must(t.startDriver())
	t.awaitReady()
	for _, device := range t.prepareOne(w.claim()) {
		t.resolves(device.CdiDeviceIds)
	}
	t.unprepare(w.claim())
}

func checkStateTruncated(t *T) {
	w, _ := t.prepared()
	t.stopDriver(true)
	cut := 0
	for _, dir := range []string{t.vars.PluginDir, t.vars.StateDir} {
		t.must(filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() {
				return err
			}
			info, err := entry.Info()
			if err != nil || info.Size() < 2 {
				return err
			}
			cut++
			return os.Truncate(path, info.Size()/2)
		}))
	}
	if cut == 0 {
		t.Skipf("the driver keeps no files in its folders")
	}
	t.must(t.startDriver())
	t.awaitReady()
	for _, device := range t.prepareOne(w.claim()) {
		t.resolves(device.CdiDeviceIds)
	}
	t.unprepare(w.claim())
}

func checkAPIServerAway(t *T) {
	t.proxy.Outage()
	t.pause(t.times.quiet)
	select {
	case <-t.driver.Done():
		t.Fatalf("the driver has ended: %v", t.driver.Exit())
	default:
	}
	t.proxy.Recover()
	w := t.newWorkload()
	t.await("the driver does not prepare claims after an outage of the API server", func() error {
		response, err := t.tryPrepare(t.plugin(), reference(w.claim()))
		if err != nil {
			return err
		}
		return errorOf(response.GetClaims()[string(w.claim().UID)])
	})
}

func checkStartedWithoutAPI(t *T) {
	t.stopDriver(false)
	t.proxy.Outage()
	t.must(t.startDriver())
	t.pause(t.times.quiet)
	t.proxy.Recover()
	t.await("the driver does not become ready", func() error {
		select {
		case <-t.driver.Done():
			t.driver = nil
			t.must(t.startDriver())
		default:
		}
		return t.ready(t.ctx)
	})
}

func checkRegistryEmptied(t *T) {
	entries, err := os.ReadDir(t.vars.RegistryDir)
	t.must(err)
	for _, entry := range entries {
		t.must(os.RemoveAll(filepath.Join(t.vars.RegistryDir, entry.Name())))
	}
	if eventually(t.ctx, 5*time.Second, func() error { return t.ready(t.ctx) }) == nil {
		return
	}
	t.restartDriver(false)
}
