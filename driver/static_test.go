package driver

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/simgpu/simgpu/driver/inventory"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// static is an H100 with a layout such as "3g.40gb@4 1g.10gb@0".
func static(layout string) inventory.GPUGroup {
	group := inventory.GPUGroup{Model: "h100-sxm5-80gb", Count: 1, MIGMode: inventory.MIGStatic}
	for field := range strings.FieldsSeq(layout) {
		profile, at, _ := strings.Cut(field, "@")
		start, err := strconv.Atoi(at)
		if err != nil {
			panic(err)
		}
		group.Partitions = append(group.Partitions, inventory.Partition{Profile: profile, Start: start})
	}
	return group
}

// state is the GPUs of a node in short: mode, and whether they are on their way out.
func (p *process) state() []string {
	var all []string
	for _, gpu := range p.currentStock().gpus {
		text := fmt.Sprintf("%d %s %d", gpu.Index, gpu.MIGMode, len(gpu.Devices))
		if gpu.retiring {
			text += " retiring"
		}
		all = append(all, text)
	}
	return all
}

func expectState(t *testing.T, when string, p *process, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, p.state()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", when, diff)
	}
}

func TestFixedPartitionsArePreparedSideBySide(t *testing.T) {
	n := newTestNode(t)
	p := n.start(static("1g.10gb@0 1g.10gb@1 3g.40gb@4"))
	for _, device := range []string{"gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1", "gpu-0-mig-3g40gb-9-4"} {
		c := n.inject(p.mustPrepare(t, claimOf(device, []string{device}))...)
		uuid := p.stock.device(device).UUID
		if env := "SIMGPU_DEVICE_" + envSuffix(device) + "=" + uuid; !slices.Contains(c.env, env) {
			t.Errorf("%s: no %s in %v", device, env, c.env)
		}
		published := p.stock.device(device).Published.Attributes["uuid"]
		if published.StringValue == nil || *published.StringValue != uuid {
			t.Errorf("%s is published as %v, and is %s in the container", device, published, uuid)
		}
		if served := servedDevice(p.stock.device(device)); served.Partition.UUID != uuid || len(served.GPU.FixedPartitions) != 3 {
			t.Errorf("%s is served as %+v", device, served)
		}
	}
	_, err := p.prepare(t.Context(), claimOf("again", []string{"gpu-0-mig-3g40gb-9-4"}))
	expectError(t, err, "gpu-0-mig-3g40gb-9-4", "is prepared for claim")
	for _, absent := range []string{whole0, "gpu-0-mig-1g10gb-19-2"} {
		_, err := p.prepare(t.Context(), claimOf("absent", []string{absent}))
		expectError(t, err, "has no device "+absent)
	}
}

// TestFixedPartitionsNeedNoCounters publishes them where the API server drops counters.
func TestFixedPartitionsNeedNoCounters(t *testing.T) {
	p := newTestNode(t).start(static("1g.10gb@0 3g.40gb@4"), inventory.GPUGroup{Model: "h100-sxm5-80gb", Count: 1, MIGMode: inventory.MIGDynamic})
	resources, err := resourcesOf(nodeName, driverName, fleet{stock: p.stock}, deviceslices.Split, apiLimits{noPartitions: true}, deviceslices.Resources)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"gpu-0-mig-1g10gb-19-0", "gpu-0-mig-3g40gb-9-4", whole1}, namesIn(resources)); diff != "" {
		t.Error(diff)
	}
}

// TestModeChangesWait keeps a GPU as it is while one of its partitions is in use, whatever its mode becomes.
func TestModeChangesWait(t *testing.T) {
	dynamic, disabled := h100s(1)[0], inventory.GPUGroup{Model: "h100-sxm5-80gb", Count: 1, MIGMode: inventory.MIGDisabled}
	layout, other := static("1g.10gb@0 3g.40gb@4"), static("2g.20gb@0 3g.40gb@4")
	states := map[string]string{}
	for name, group := range map[string]inventory.GPUGroup{"dynamic": dynamic, "disabled": disabled, "static": layout, "other layout": other} {
		states[name] = newTestNode(t).start(group).state()[0]
	}
	for name, test := range map[string]struct {
		from     inventory.GPUGroup
		device   string
		to       inventory.GPUGroup
		then     string // of states
		keptName string
	}{
		"static to dynamic":       {layout, "gpu-0-mig-3g40gb-9-4", dynamic, "dynamic", "static"},
		"dynamic to static":       {dynamic, "gpu-0-mig-3g40gb-9-4", layout, "static", "dynamic"},
		"static to disabled":      {layout, "gpu-0-mig-1g10gb-19-0", disabled, "disabled", "static"},
		"disabled to static":      {disabled, whole0, layout, "static", "disabled"},
		"another layout":          {layout, "gpu-0-mig-1g10gb-19-0", other, "other layout", "static"},
		"another, device in both": {layout, "gpu-0-mig-3g40gb-9-4", other, "other layout", "static"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newTestNode(t)
			p := n.start(test.from)
			claim := claimOf("a", []string{test.device})
			before := n.inject(p.mustPrepare(t, claim)...)

			p.inventory(t, test.to)
			expectState(t, "while in use", p, states[test.keptName]+" retiring")
			p = n.start(test.to)
			expectState(t, "after a restart", p, states[test.keptName]+" retiring")
			if diff := cmp.Diff(before, n.inject(p.mustPrepare(t, claim)...), cmp.AllowUnexported(container{})); diff != "" {
				t.Errorf("container: %s", diff)
			}
			p.inventory(t, test.from)
			expectState(t, "back before the release", p, states[test.keptName])
			p.inventory(t, test.to)
			p.mustUnprepare(t, claim)
			expectState(t, "after the release", p, states[test.then])
			n.expectFiles("after the release")
		})
	}
}

// TestSeveralModelsOnANode changes one of several groups while the others are in use.
func TestSeveralModelsOnANode(t *testing.T) {
	groups := []inventory.GPUGroup{
		{Model: "a30-24gb", Count: 1, MIGMode: inventory.MIGDynamic},
		{Model: "rtx-pro-6000-96gb", Count: 1, MIGMode: inventory.MIGDynamic},
		static("7g.80gb@0"),
		{Model: "l4-24gb", Count: 1, MIGMode: inventory.MIGDisabled},
	}
	n := newTestNode(t)
	p := n.start(groups...)
	a30, rtx, h100, l4 := claimOf("a30", []string{"gpu-0-mig-2g12gb-5-2"}), claimOf("rtx", []string{"gpu-1-mig-1g24gb-meall-65-9"}),
		claimOf("h100", []string{"gpu-2-mig-7g80gb-0-0"}), claimOf("l4", []string{"gpu-3"})
	p.mustPrepare(t, a30)
	p.mustPrepare(t, rtx)
	p.mustPrepare(t, h100)
	p.mustPrepare(t, l4)
	_, err := p.prepare(t.Context(), claimOf("whole", []string{"gpu-1"}))
	expectError(t, err, "gpu-1-mig-1g24gb-meall-65-9")

	groups[1].MIGMode = inventory.MIGDisabled
	p.inventory(t, groups...)
	expectState(t, "one group changed", p, "0 dynamic 13", "1 dynamic 31 retiring", "2 static 1", "3 disabled 1")
	p.mustUnprepare(t, rtx)
	expectState(t, "it is released", p, "0 dynamic 13", "1 disabled 1", "2 static 1", "3 disabled 1")
	// The GPUs move up: each keeps what it was as long as it is in use.
	p.inventory(t, groups[1:]...)
	expectState(t, "the first group is gone", p, "0 dynamic 13 retiring", "1 static 1", "2 static 1 retiring", "3 disabled 1 retiring")
	p.mustUnprepare(t, a30)
	p.mustUnprepare(t, h100)
	p.mustUnprepare(t, l4)
	expectState(t, "all released", p, "0 disabled 1", "1 static 1", "2 disabled 1")
}
