package conformance

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
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
			Name: "recovery/killed-while-preparing", Level: Must,
			Asserts: "A driver that is killed in the middle of prepare can prepare and unprepare the claim once it is back.",
			Source:  keptInSpec,
			Fix:     "Undo or finish at the start what was begun.",
			run:     checkKilledWhilePreparing,
		},
		{
			Name: "recovery/killed-while-unpreparing", Level: Must,
			Asserts: "A driver that is killed in the middle of unprepare can unprepare the claim once it is back, and nothing is left.",
			Source:  unprepareDoc,
			Fix:     "Undo or finish at the start what was begun.",
			run:     checkKilledWhileUnpreparing,
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

// nothingLeft asserts that the CDI folder has no more files than before.
func (t *T) nothingLeft(before map[string]string) {
	for name := range t.cdiFiles() {
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

// killDuring starts a call, kills the driver after the time and starts it again.
func (t *T) killDuring(after time.Duration, call func(context.Context)) {
	ctx, cancel := context.WithTimeout(t.ctx, t.times.patience)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		call(ctx)
	}()
	<-time.After(after)
	t.stopDriver(true)
	cancel()
	<-done
	t.must(t.startDriver())
	t.awaitReady()
}

// moments are times after the start of a call at which a driver is killed.
func moments() []time.Duration {
	return []time.Duration{0, time.Millisecond, 3 * time.Millisecond, 8 * time.Millisecond, 20 * time.Millisecond}
}

func checkKilledWhilePreparing(t *T) {
	before := t.cdiFiles()
	claim := t.newWorkload().claim()
	for _, moment := range moments() {
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
	for _, moment := range moments() {
		t.prepareOne(claim)
		plugin := t.plugin()
		t.killDuring(moment, func(ctx context.Context) {
			_, _ = plugin.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{reference(claim)}})
		})
		t.unprepare(claim)
		t.nothingLeft(before)
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
