package driver

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
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/faults"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// annotation is a list of faults as it stands on the Node.
func annotation(t *testing.T, list ...faults.Fault) string {
	t.Helper()
	text, err := faults.Encode(list)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// faultyProcess is one run of the driver on a node with faults.
type faultyProcess struct {
	*process
	*plugin
	node    *nodeFaults
	events  *events
	crashes int
	showed  []*conditions
}

func (n *testNode) startFaulty() *faultyProcess {
	n.t.Helper()
	p := &faultyProcess{process: n.start(), events: newEvents()}
	node, err := newNodeFaults(&nodeFaults{
		nodeName: nodeName, driverName: driverName, claims: p.process.claims, file: filepath.Join(n.root, "faults.json"),
		waypoints: noWaypoints{}, reporter: p.events.reporter(), metrics: newMetrics(func() (int, int) { return 0, 0 }),
		show: func(c *conditions) { p.showed = append(p.showed, c) },
	})
	if err != nil {
		n.t.Fatal(err)
	}
	node.crash = func() { p.crashes++ }
	p.node, p.waypoints = node, node
	p.plugin = &plugin{claims: p.process.claims, faults: node, reporter: p.events.reporter(), metrics: node.metrics}
	return p
}

func (p *faultyProcess) tryPrepare(t *testing.T, claim *resourceapi.ResourceClaim) error {
	t.Helper()
	results, err := p.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{claim})
	if err != nil {
		t.Fatal(err)
	}
	return results[claim.UID].Err
}

func (p *faultyProcess) tryUnprepare(t *testing.T, claim *resourceapi.ResourceClaim) error {
	t.Helper()
	results, err := p.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{UID: claim.UID}})
	if err != nil {
		t.Fatal(err)
	}
	return results[claim.UID]
}

func TestStepsOfCrashesAreTheWaypoints(t *testing.T) {
	var waypoints []string
	for _, at := range slices.Concat(PrepareWaypoints(), UnprepareWaypoints()) {
		waypoints = append(waypoints, string(at))
	}
	if diff := cmp.Diff(waypoints, faults.Steps()); diff != "" {
		t.Error(diff)
	}
}

func TestWhatFaultsDoToDevices(t *testing.T) {
	s := newTestNode(t).start().stock
	const (
		healthy   = "Healthy"
		unhealthy = "Unhealthy"
	)
	xid := func(device string, number int, effect resourceapi.DeviceTaintEffect) faults.Fault {
		return faults.Fault{Type: faults.XID, Device: device, XID: number, Effect: effect}
	}
	for name, test := range map[string]struct {
		faults []faults.Fault
		device string
		want   string // taints, health, message
	}{
		"none":                       {nil, whole0, " Healthy "},
		"an XID":                     {[]faults.Fault{xid(whole0, 79, "")}, whole0, "gpu.nvidia.com/xid=79:NoSchedule Unhealthy XID 79: GPU has fallen off the bus (restart the node)"},
		"of the GPU of a partition":  {[]faults.Fault{xid(whole0, 79, "")}, left0, "gpu.nvidia.com/xid=79:NoSchedule Unhealthy XID 79: GPU has fallen off the bus (restart the node)"},
		"of another GPU":             {[]faults.Fault{xid(whole0, 79, "")}, left1, " Healthy "},
		"of a partition":             {[]faults.Fault{xid(left0, 79, "")}, left0, "gpu.nvidia.com/xid=79:NoSchedule Unhealthy XID 79: GPU has fallen off the bus (restart the node)"},
		"of another partition":       {[]faults.Fault{xid(left0, 79, "")}, whole0, " Healthy "},
		"of the node":                {[]faults.Fault{xid("", 79, "")}, left1, "gpu.nvidia.com/xid=79:NoSchedule Unhealthy XID 79: GPU has fallen off the bus (restart the node)"},
		"of the application":         {[]faults.Fault{xid(whole0, 31, "")}, whole0, "gpu.nvidia.com/xid=31:None Healthy XID 31: GPU memory page fault (an error of the application)"},
		"of the application, strict": {[]faults.Fault{xid(whole0, 31, "NoExecute")}, whole0, "gpu.nvidia.com/xid=31:NoExecute Unhealthy XID 31: GPU memory page fault (an error of the application)"},
		"without effect":             {[]faults.Fault{xid(whole0, 79, "None")}, whole0, "gpu.nvidia.com/xid=79:None Unhealthy XID 79: GPU has fallen off the bus (restart the node)"},
		"of no known meaning":        {[]faults.Fault{xid(whole0, 999, "")}, whole0, "gpu.nvidia.com/xid=999:NoSchedule Unhealthy XID 999"},
		"one taint per key, the strongest": {[]faults.Fault{xid(whole0, 31, ""), xid(whole0, 79, ""), xid(whole0, 48, "")}, whole0,
			"gpu.nvidia.com/xid=79:NoSchedule Unhealthy XID 31: GPU memory page fault (an error of the application); XID 79: GPU has fallen off the bus (restart the node); XID 48: Double Bit ECC Error (reset the GPU or reboot the node)"},
		"lost":            {[]faults.Fault{{Type: faults.GPULost, Device: whole0}}, left0, "gpu.nvidia.com/gpu-lost=:NoSchedule Unhealthy GPU is lost"},
		"lost as a whole": {[]faults.Fault{{Type: faults.GPULost, Device: left0}}, right0, "gpu.nvidia.com/gpu-lost=:NoSchedule Unhealthy GPU is lost"},
		"several taints":  {[]faults.Fault{xid(whole0, 79, ""), {Type: faults.GPULost, Effect: "NoExecute"}}, whole0, "gpu.nvidia.com/gpu-lost=:NoExecute,gpu.nvidia.com/xid=79:NoSchedule Unhealthy XID 79: GPU has fallen off the bus (restart the node); GPU is lost"},
		"ECC":             {[]faults.Fault{{Type: faults.ECC, Correctable: 3}}, whole0, " Healthy ECC errors: 3 corrected, 0 uncorrected"},
		"ECC, strict":     {[]faults.Fault{{Type: faults.ECC, Uncorrectable: 1, Effect: "NoSchedule"}}, whole0, "simgpu.dev/ecc=:NoSchedule Unhealthy ECC errors: 0 corrected, 1 uncorrected"},
		"of operations":   {[]faults.Fault{{Type: faults.FailPrepare}, {Type: faults.Crash, At: "SpecWritten"}}, whole0, " Healthy "},
	} {
		t.Run(name, func(t *testing.T) {
			c := conditionsOf(s, test.faults, driverName).devices[test.device]
			var taints []string
			for _, taint := range c.taints {
				taints = append(taints, fmt.Sprintf("%s=%s:%s", taint.Key, taint.Value, taint.Effect))
			}
			health := map[bool]string{true: unhealthy, false: healthy}[c.unhealthy]
			if got := strings.Join(taints, ",") + " " + health + " " + c.message; got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

func TestLongMessagesAreCut(t *testing.T) {
	var list []faults.Fault
	for xid := range 100 {
		list = append(list, faults.Fault{Type: faults.XID, XID: 40 + xid})
	}
	c := conditionsOf(newTestNode(t).start().stock, list, driverName).devices[whole0]
	if len(c.message) > 1024 || !strings.HasSuffix(c.message, "...") {
		t.Errorf("%d bytes: %s", len(c.message), c.message)
	}
}

func TestWhatTheDeviceAPIShowsOfFaults(t *testing.T) {
	s := newTestNode(t).start().stock
	list := []faults.Fault{
		{Type: faults.ECC, Device: whole0, Correctable: 1, Uncorrectable: 2},
		{Type: faults.ECC, Device: left0, Uncorrectable: 5},
		{Type: faults.XID, Device: left0, XID: 94},
		{Type: faults.GPULost, Device: left1},
	}
	got := conditionsOf(s, list, driverName).served
	for device, want := range map[string]deviceapi.Health{
		whole0: {XID: 94, ECCCorrected: 1, ECCUncorrected: 7},
		left0:  {XID: 94, ECCCorrected: 1, ECCUncorrected: 7},
		right0: {ECCCorrected: 1, ECCUncorrected: 2},
		whole1: {Lost: true},
		left1:  {},
	} {
		if health := got[s.device(device).UUID]; health != want {
			t.Errorf("%s shows %+v, want %+v", device, health, want)
		}
	}
}

func TestTaintsOfFaultsInSlices(t *testing.T) {
	s := newTestNode(t).start().stock
	list := []faults.Fault{
		{Type: faults.XID, Device: left0, XID: 79}, {Type: faults.XID, Device: right0, XID: 31}, {Type: faults.ECC, Device: whole0, Correctable: 1},
	}
	broken := fleet{stock: s, broken: conditionsOf(s, list, driverName)}
	find := func(layout deviceslices.Layout, api apiLimits) map[string][]string {
		t.Helper()
		resources, err := resourcesOf(nodeName, driverName, broken, layout, api, deviceslices.Resources)
		if err != nil {
			t.Fatal(err)
		}
		found := map[string][]string{}
		for _, slice := range resources.Pools[nodeName].Slices {
			for _, d := range slice.Devices {
				found[d.Name] = []string{}
				for _, taint := range d.Taints {
					found[d.Name] = append(found[d.Name], string(taint.Effect))
					if taint.TimeAdded != nil {
						t.Error("the time is for the API server to say")
					}
				}
			}
		}
		return found
	}
	got := find(deviceslices.Split, apiLimits{})
	if diff := cmp.Diff(map[string][]string{left0: {"NoSchedule"}, right0: {"None"}, whole0: {}}, map[string][]string{left0: got[left0], right0: got[right0], whole0: got[whole0]}); diff != "" {
		t.Error(diff)
	}
	got = find(deviceslices.Combined, apiLimits{})
	if len(got[left0]) != 1 || len(got[right0]) != 0 {
		t.Errorf("Kubernetes 1.34 gets %v and %v, and refuses None", got[left0], got[right0])
	}
	got = find(deviceslices.Split, apiLimits{noTaints: true})
	if _, offered := got[left0]; offered || got[right0] == nil || len(got[right0]) != 0 {
		t.Errorf("where taints are dropped a broken device is offered (%t), and one with an application's error has %v", offered, got[right0])
	}
}

func TestOneFaultIsOneWrite(t *testing.T) {
	s := newTestNode(t).start().stock
	api := newFakeAPI()
	// The fake API has no resource versions, so that the controller may repeat a write that it has not seen
	// yet: counted is what was written how.
	var mu sync.Mutex
	written := map[string]bool{}
	api.PrependReactor("*", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if slices.Contains([]string{"create", "update", "patch", "delete"}, action.GetVerb()) {
			what := action.GetVerb()
			if update, ok := action.(clienttesting.UpdateActionImpl); ok {
				slice := update.Object.(*resourceapi.ResourceSlice)
				what += fmt.Sprintf(" %s, first device with %d taints", slice.Name, len(slice.Spec.Devices[0].Taints))
			}
			mu.Lock()
			defer mu.Unlock()
			written[what] = true
		}
		return false, nil, nil
	})
	writes := func() []string {
		mu.Lock()
		defer mu.Unlock()
		defer clear(written)
		return slices.Sorted(maps.Keys(written))
	}
	p := startPublishing(t, api, fleet{stock: s, broken: conditionsOf(s, nil, driverName)})
	p.expect(t, allOf(s))
	writes()
	generation := func() int64 {
		list, err := api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return list.Items[0].Spec.Pool.Generation
	}
	was := generation()

	p.set(fleet{stock: s, broken: conditionsOf(s, []faults.Fault{{Type: faults.XID, Device: whole1, XID: 79}}, driverName)})
	tainted := slices.Clone(allOf(s))
	for i, name := range tainted {
		if s.device(name).GPU.Index == 1 {
			tainted[i] += "!"
		}
	}
	p.expect(t, tainted)
	if w := writes(); len(w) != 1 || !strings.Contains(w[0], "with 1 taints") {
		t.Errorf("writes for one fault: %q", w)
	}
	p.set(fleet{stock: s, broken: conditionsOf(s, nil, driverName)})
	p.expect(t, allOf(s))
	if w := writes(); len(w) != 1 || !strings.Contains(w[0], "with 0 taints") || generation() != was {
		t.Errorf("writes for the end of a fault: %q; generation %d, was %d", w, generation(), was)
	}
}

func TestFailingPrepareRecovers(t *testing.T) {
	n := newTestNode(t)
	claim := claimOf("a", []string{left0})
	twice := faults.Fault{ID: "f", Device: whole0, Type: faults.FailPrepare, Times: 2}

	p := n.startFaulty()
	p.node.look(t.Context(), annotation(t, twice))
	err := p.tryPrepare(t, claim)
	if err == nil || !strings.Contains(err.Error(), "f: FailPrepare 2 times on gpu-0") || reasonOf(err) != failedFault {
		t.Errorf("first: %v", err)
	}
	if err := p.tryPrepare(t, claimOf("b", []string{left1})); err != nil {
		t.Errorf("another GPU: %v", err)
	}

	p = n.startFaulty() // the count is remembered
	p.node.look(t.Context(), annotation(t, twice, faults.Fault{ID: "g", Type: faults.GPULost}))
	if err := p.tryPrepare(t, claim); err == nil {
		t.Error("second: prepared")
	}
	p.node.look(t.Context(), annotation(t, twice))
	for range 2 {
		if err := p.tryPrepare(t, claim); err != nil {
			t.Errorf("third: %v", err)
		}
	}
	p.node.look(t.Context(), "")
	p.node.look(t.Context(), annotation(t, twice))
	if err := p.tryPrepare(t, claim); err == nil {
		t.Error("a fault that was cleared and added again does not strike")
	}
}

func TestFailingUnprepareKeepsTheClaim(t *testing.T) {
	p := newTestNode(t).startFaulty()
	claim := claimOf("a", []string{left0})
	p.node.look(t.Context(), annotation(t, faults.Fault{ID: "f", Type: faults.FailUnprepare}))
	if err := p.tryUnprepare(t, claim); err != nil {
		t.Errorf("a claim that is not prepared: %v", err)
	}
	if err := p.tryPrepare(t, claim); err != nil {
		t.Fatal(err)
	}
	if err := p.tryUnprepare(t, claim); err == nil || p.preparedClaims() != 1 {
		t.Errorf("got %v with %d claims prepared", err, p.preparedClaims())
	}
	p.node.look(t.Context(), "")
	if err := p.tryUnprepare(t, claim); err != nil || p.preparedClaims() != 0 {
		t.Errorf("got %v with %d claims prepared", err, p.preparedClaims())
	}
}

func (p *faultyProcess) preparedClaims() int { return len(p.preparedKeys()) }

func TestHangingPrepare(t *testing.T) {
	hang := faults.Fault{ID: "f", Device: left0, Type: faults.HangPrepare}
	start := func(t *testing.T) (p *faultyProcess, ctx context.Context, cancel context.CancelFunc, ended chan error) {
		p = newTestNode(t).startFaulty()
		p.node.look(t.Context(), annotation(t, hang))
		ctx, cancel = context.WithCancel(t.Context())
		ended = make(chan error, 1)
		go func() {
			claim := claimOf("a", []string{left0})
			results, err := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{claim})
			ended <- errors.Join(err, results[claim.UID].Err)
		}()
		// Others are not held up.
		if err := p.tryPrepare(t, claimOf("b", []string{right0})); err != nil {
			t.Error(err)
		}
		p.node.look(t.Context(), annotation(t, hang, faults.Fault{ID: "g", Type: faults.FailUnprepare}))
		select {
		case err := <-ended:
			t.Fatalf("does not hang: %v", err)
		default:
		}
		return p, ctx, cancel, ended
	}
	t.Run("until the fault is cleared", func(t *testing.T) {
		p, _, cancel, ended := start(t)
		defer cancel()
		p.node.look(t.Context(), "")
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Run("until the kubelet gives up", func(t *testing.T) {
		_, _, cancel, ended := start(t)
		cancel()
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "hangs because of fault f: HangPrepare on "+left0) {
			t.Error(err)
		}
	})
	t.Run("until the driver stops", func(t *testing.T) {
		p, _, cancel, ended := start(t)
		defer cancel()
		p.stop()
		if err := <-ended; !errors.Is(err, errStopping) {
			t.Error(err)
		}
	})
}

func TestSlowPrepareTakesItsTimeUnlessCleared(t *testing.T) {
	p := newTestNode(t).startFaulty()
	p.node.look(t.Context(), annotation(t, faults.Fault{ID: "f", Type: faults.SlowPrepare, Delay: time.Millisecond}, faults.Fault{ID: "g", Type: faults.SlowPrepare, Delay: time.Hour}))
	ended := make(chan error, 1)
	go func() { ended <- p.tryPrepare(t, claimOf("a", []string{left0})) }()
	p.node.look(t.Context(), annotation(t, faults.Fault{ID: "f", Type: faults.SlowPrepare, Delay: time.Millisecond}))
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestClaimBreaksItsOwnPrepare(t *testing.T) {
	n := newTestNode(t)
	broken := func(name string) *resourceapi.ResourceClaim {
		return claimOf(name, []string{left0}, config(`{"apiVersion":"simgpu.dev/v1alpha1","kind":"FaultConfig","faults":[{"type":"FailPrepare","times":1}]}`))
	}
	p := n.startFaulty()
	if err := p.tryPrepare(t, broken("a")); err == nil || !strings.Contains(err.Error(), "config[0].faults[0]") {
		t.Errorf("first: %v", err)
	}
	p.node.look(t.Context(), annotation(t, faults.Fault{ID: "f", Type: faults.GPULost}))
	p = n.startFaulty()
	if err := p.tryPrepare(t, broken("a")); err != nil {
		t.Errorf("second, after a restart: %v", err)
	}
	if err := p.tryUnprepare(t, broken("a")); err != nil {
		t.Fatal(err)
	}
	if err := p.tryPrepare(t, broken("b")); err == nil {
		t.Error("another claim with the same configuration is prepared")
	}
	bad := claimOf("c", []string{right0}, config(`{"apiVersion":"simgpu.dev/v1alpha1","kind":"FaultConfig","faults":[{"type":"Crash","at":"SpecWritten"}]}`))
	if err := p.tryPrepare(t, bad); err == nil || reasonOf(err) != failedConfig {
		t.Errorf("a claim that would harm others: %v", err)
	}
}

func TestCrashHappensOnce(t *testing.T) {
	for _, at := range faults.Steps() {
		t.Run(at, func(t *testing.T) {
			n := newTestNode(t)
			crash := annotation(t, faults.Fault{ID: "f", Device: whole0, Type: faults.Crash, At: at})
			p := n.startFaulty()
			p.node.look(t.Context(), crash)
			run := func(p *faultyProcess, device string) {
				t.Helper()
				claim := claimOf("of-"+device, []string{device})
				if err := errors.Join(p.tryPrepare(t, claim), p.tryUnprepare(t, claim)); err != nil {
					t.Fatal(err)
				}
			}
			run(p, whole1)
			if p.crashes != 0 {
				t.Error("crashed over another GPU")
			}
			run(p, left0)
			run(p, left0)
			if p.crashes != 1 {
				t.Errorf("%d crashes", p.crashes)
			}
			p = n.startFaulty()
			p.node.look(t.Context(), crash)
			run(p, left0)
			if p.crashes != 0 {
				t.Error("crashed again after the restart")
			}
		})
	}
}

func TestNoCrashThatWouldBeForgotten(t *testing.T) {
	n := newTestNode(t)
	crash := annotation(t, faults.Fault{ID: "f", Type: faults.Crash, At: "SpecWritten"})
	p := n.startFaulty()
	p.node.file = filepath.Join(n.root, "absent", "faults.json")
	p.node.look(t.Context(), crash)
	if err := p.tryPrepare(t, claimOf("a", []string{left0})); err != nil || p.crashes != 0 {
		t.Errorf("%d crashes, %v", p.crashes, err)
	}

	if err := os.WriteFile(filepath.Join(n.root, "faults.json"), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	p = n.startFaulty()
	p.node.look(t.Context(), crash)
	if err := p.tryPrepare(t, claimOf("b", []string{right0})); err != nil || p.crashes != 0 {
		t.Errorf("after the file was damaged: %d crashes, %v", p.crashes, err)
	}
}

func TestFaultyListChangesNothing(t *testing.T) {
	n := newTestNode(t)
	p := n.startFaulty()
	p.node.look(t.Context(), annotation(t, faults.Fault{ID: "f", Device: whole0, Type: faults.XID, XID: 79}))
	for range 2 {
		p.node.look(t.Context(), `{"kind":"NodeFaults","faults":[{"id":"f","type":"Melt"}]}`)
	}
	if c := p.node.fleet().broken.devices[whole0]; !c.unhealthy {
		t.Error("the faults before are not in force")
	}
	p.events.expect(t, reasonInvalidFaults, "faults[0].type", "kubectl annotate node node-1 simgpu.dev/faults-")
	if n := len(p.showed); n != 1 {
		t.Errorf("shown %d times", n)
	}
}

func TestPeopleAreToldOfFaultsOnce(t *testing.T) {
	n := newTestNode(t)
	xid, lost := faults.Fault{ID: "f", Device: whole0, Type: faults.XID, XID: 79}, faults.Fault{ID: "g", Type: faults.GPULost, Effect: "NoExecute"}
	p := n.startFaulty()
	p.node.look(t.Context(), annotation(t, xid))
	p.events.expect(t, reasonFaultAdded, "f: XID 79 on gpu-0")

	p = n.startFaulty()
	p.node.look(t.Context(), annotation(t, xid, lost))
	p.events.expect(t, reasonFaultAdded, "g: GPULost on all devices (NoExecute)")
	if got := p.node.metrics.value(t, "simgpu_faults"); got != 2 {
		t.Errorf("simgpu_faults is %v", got)
	}

	p = n.startFaulty()
	p.node.look(t.Context(), annotation(t, xid))
	p.events.expect(t, reasonFaultCleared, "g: GPULost on all devices")
	p.node.look(t.Context(), "")
	if got := p.node.metrics.value(t, "simgpu_faults"); got != 0 {
		t.Errorf("simgpu_faults is %v without faults", got)
	}
	if got := len(p.node.fleet().broken.devices); got != 0 {
		t.Errorf("%d devices are broken without faults", got)
	}
}

func TestHealthIsReportedAtOnceAndOnChange(t *testing.T) {
	p := newTestNode(t).startFaulty()
	ctx, cancel := context.WithCancel(t.Context())
	reports := make(chan kubeletplugin.DeviceHealthReport)
	ended := make(chan error, 1)
	go func() { ended <- p.WatchHealthStatus(ctx, reports) }()
	find := func(r kubeletplugin.DeviceHealthReport, name string) kubeletplugin.DeviceHealth {
		i := slices.IndexFunc(r.Devices, func(d kubeletplugin.DeviceHealth) bool { return d.DeviceName == name })
		return r.Devices[i]
	}
	report := <-reports
	if len(report.Devices) != len(p.stock.devices) {
		t.Errorf("%d of %d devices are reported", len(report.Devices), len(p.stock.devices))
	}
	if d := find(report, left0); d.Health != kubeletplugin.HealthStatusHealthy || d.PoolName != nodeName || d.HealthCheckTimeout <= healthRenewal {
		t.Errorf("healthy: %+v", d)
	}
	p.node.look(t.Context(), annotation(t, faults.Fault{ID: "f", Device: whole0, Type: faults.XID, XID: 79}))
	for d := find(<-reports, left0); d.Health != kubeletplugin.HealthStatusUnhealthy; d = find(<-reports, left0) {
	}
	p.node.look(t.Context(), "")
	for d := find(<-reports, left0); d.Health != kubeletplugin.HealthStatusHealthy || d.Message != ""; d = find(<-reports, left0) {
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestSilentHealthStreamEndsNothing(t *testing.T) {
	var fatal error
	f := &front{fatal: func(err error) { fatal = err }}
	f.HandleError(t.Context(), fmt.Errorf("nothing was sent: %w", kubeletplugin.ErrRecoverable), "health")
	if fatal != nil {
		t.Errorf("the driver ends over %v", fatal)
	}
	f.HandleError(t.Context(), errors.New("socket"), "serve")
	if fatal == nil {
		t.Error("a driver that cannot be reached goes on")
	}
}

func TestFaultsAreToldOfWhereTaintsAreDropped(t *testing.T) {
	s := newTestNode(t).start().stock
	api := newFakeAPI()
	api.setDrops(func(slice *resourceapi.ResourceSlice) {
		for i := range slice.Spec.Devices {
			slice.Spec.Devices[i].Taints = nil
		}
	})
	p := startPublishing(t, api, fleet{stock: s, broken: conditionsOf(s, nil, driverName)})
	p.expect(t, allOf(s))
	p.set(fleet{stock: s, broken: conditionsOf(s, []faults.Fault{{Type: faults.XID, Device: left0, XID: 79}}, driverName)})
	p.expect(t, slices.DeleteFunc(allOf(s), func(name string) bool { return name == left0 }))
	p.events.expect(t, reasonTaintsDropped)
	p.set(fleet{stock: s, broken: conditionsOf(s, nil, driverName)})
	p.expect(t, allOf(s))
}
