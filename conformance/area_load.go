package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
)

func loadChecks() []Check {
	return []Check{
		{
			Name: "load/concurrent-claims", Level: Must,
			Asserts: "Claims that are prepared and unprepared at the same time, in a call each, do not disturb each other.",
			Source:  "k8s.io/kubernetes pkg/kubelet: every pod is started by a worker of its own",
			Fix:     "Guard what claims share; wait instead of refusing.",
			run:     checkConcurrentClaims,
		},
		{
			Name: "load/many-claims", Level: Should,
			Asserts: "256 claims can be prepared at the same time, most of them with admin access if there are not enough devices.",
			Source:  "a node may have 110 pods and more, with several claims each",
			Fix:     "Look for what grows with the square of the number of claims.",
			takes:   20 * time.Second,
			run:     checkManyClaims,
		},
		{
			Name: "load/cycles", Level: Should,
			Asserts: "Preparing and unpreparing claims again and again leaves no file, open file, thread or memory behind. How long calls take is reported.",
			Source:  "node drivers run for months",
			Fix:     "Close what is opened, and forget claims that are unprepared.",
			takes:   30 * time.Second,
			run:     checkCycles,
		},
	}
}

// fitting allocates as many claims as fit, at most so many.
func (t *T) fitting(most int) []*resourceapi.ResourceClaim {
	var claims []*resourceapi.ResourceClaim
	for len(claims) < most {
		w, err := t.tryWorkload()
		if err != nil {
			break
		}
		claims = append(claims, w.claim())
	}
	if len(claims) == 0 {
		t.Fatalf("the driver publishes no device that a claim can be given")
	}
	return claims
}

func checkConcurrentClaims(t *T) {
	claims := t.fitting(16)
	if len(claims) < 2 {
		t.Skipf("the driver does not publish enough devices that fit together")
	}
	plugin := t.plugin()
	devices := make([][]*drapb.Device, len(claims))
	errs := make([]error, len(claims))
	each := func(call func(ctx context.Context, i int, claim *drapb.Claim)) {
		var all sync.WaitGroup
		for i, claim := range claims {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(t.ctx, kubeletCallTimeout)
				defer cancel()
				call(ctx, i, reference(claim))
			})
		}
		all.Wait()
		for i, err := range errs {
			if err != nil {
				t.Errorf("claim %s, one of %d at the same time: %v", claims[i].Name, len(claims), err)
			}
		}
	}
	each(func(ctx context.Context, i int, claim *drapb.Claim) {
		response, err := plugin.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
		if result := response.GetClaims()[claim.Uid]; err == nil {
			devices[i], err = result.GetDevices(), errorOf(result)
		}
		errs[i] = err
	})
	if len(t.messages) > 0 {
		return
	}
	for i, claim := range claims {
		t.compareDevices(claim, devices[i])
		for _, device := range devices[i] {
			t.resolves(device.CdiDeviceIds)
		}
	}
	each(func(ctx context.Context, i int, claim *drapb.Claim) {
		response, err := plugin.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
		if err == nil && response.GetClaims()[claim.Uid].GetError() != "" {
			err = errors.New(response.Claims[claim.Uid].Error)
		}
		errs[i] = err
	})
}

func checkManyClaims(t *T) {
	before := t.cdiFiles()
	claims := t.fitting(t.times.claims)
	own := len(claims)
	for len(claims) < t.times.claims {
		claim := t.newClaim(withAdminAccess())
		claim.Status.Allocation = claims[len(claims)%own].Status.Allocation.DeepCopy()
		for i := range claim.Status.Allocation.Devices.Results {
			claim.Status.Allocation.Devices.Results[i].AdminAccess = ptr.To(true)
		}
		claim, err := t.admin.ResourceV1().ResourceClaims(t.namespace).UpdateStatus(t.ctx, claim, metav1.UpdateOptions{})
		t.must(err)
		claims = append(claims, claim)
	}
	plugin := t.plugin()
	var taken []time.Duration
	for i, claim := range claims {
		start := time.Now()
		response, err := plugin.NodePrepareResources(t.ctx, &drapb.NodePrepareResourcesRequest{Claims: references(claims[i : i+1])})
		taken = append(taken, time.Since(start))
		if err == nil {
			err = errorOf(response.GetClaims()[string(claim.UID)])
		}
		if err != nil {
			t.Fatalf("claim %d of %d (%d with devices of their own): %v", i+1, len(claims), own, err)
		}
	}
	t.notef("%d claims at the same time, %d with devices of their own: prepare takes %s", len(claims), own, percentiles(taken))
	for _, batch := range slices.Collect(slices.Chunk(claims, 16)) {
		t.unprepare(batch...)
	}
	t.nothingLeft(before)
}

// footprint is what a driver takes up.
type footprint struct {
	files            map[string]bool // that it has made
	open, threads    int
	residentKilobyte int
}

func (t *T) footprint() footprint {
	now := footprint{files: map[string]bool{}}
	for _, dir := range []string{t.vars.PluginsDir, t.vars.RegistryDir, t.vars.CDIDir, t.vars.StateDir} {
		t.must(filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && !entry.IsDir() {
				now.files[path] = true
			}
			return nil
		}))
	}
	process := filepath.Join("/proc", strconv.Itoa(t.driver.PID()))
	open, err := os.ReadDir(filepath.Join(process, "fd"))
	t.must(err)
	now.open = len(open)
	status, err := os.ReadFile(filepath.Join(process, "status"))
	t.must(err)
	for line := range strings.Lines(string(status)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		switch n, _ := strconv.Atoi(fields[1]); fields[0] {
		case "VmRSS:":
			now.residentKilobyte = n
		case "Threads:":
			now.threads = n
		}
	}
	return now
}

func checkCycles(t *T) {
	const mebibyte = 1 << 10 // in kilobytes
	plugin := t.plugin()
	var preparing, unpreparing []time.Duration
	cycles := func(n int) {
		for range n {
			claim := t.newWorkload().claim()
			ref := []*drapb.Claim{reference(claim)}
			start := time.Now()
			prepared, err := plugin.NodePrepareResources(t.ctx, &drapb.NodePrepareResourcesRequest{Claims: ref})
			preparing = append(preparing, time.Since(start))
			if err == nil {
				err = errorOf(prepared.GetClaims()[string(claim.UID)])
			}
			if err != nil {
				t.Fatalf("prepare number %d: %v", len(preparing), err)
			}
			start = time.Now()
			unprepared, err := plugin.NodeUnprepareResources(t.ctx, &drapb.NodeUnprepareResourcesRequest{Claims: ref})
			unpreparing = append(unpreparing, time.Since(start))
			if message := unprepared.GetClaims()[string(claim.UID)].GetError(); err != nil || message != "" {
				t.Fatalf("unprepare number %d: %v %s", len(unpreparing), err, message)
			}
			t.must(t.deleteClaim(t.ctx, claim.Name))
		}
	}
	cycles(t.times.cycles / 5) // until everything is loaded that is loaded once
	preparing, unpreparing = nil, nil
	before := t.footprint()
	cycles(t.times.cycles)
	t.pause(time.Second) // what is closed a little later
	after := t.footprint()

	t.notef("%d cycles: prepare takes %s, unprepare %s", t.times.cycles, percentiles(preparing), percentiles(unpreparing))
	t.notef("before and after: %d and %d open files, %d and %d threads, %d and %d MiB resident, %d and %d files", before.open, after.open,
		before.threads, after.threads, before.residentKilobyte/mebibyte, after.residentKilobyte/mebibyte, len(before.files), len(after.files))
	var left []string
	for _, file := range slices.Sorted(maps.Keys(after.files)) {
		if !before.files[file] {
			left = append(left, file)
		}
	}
	if len(left) > t.times.cycles/10 {
		t.Errorf("%d files are left, such as %s", len(left), left[0])
	}
	if grown := after.open - before.open; grown > t.times.cycles/10 {
		t.Errorf("the driver has %d more open files", grown)
	}
	if grown := after.threads - before.threads; grown > max(16, t.times.cycles/10) {
		t.Errorf("the driver has %d more threads", grown)
	}
	if grown := after.residentKilobyte - before.residentKilobyte; grown > 64*mebibyte {
		t.Errorf("the driver has %d MiB more memory", grown/mebibyte)
	}
}

func percentiles(taken []time.Duration) string {
	slices.Sort(taken)
	at := func(p int) time.Duration { return taken[(len(taken)-1)*p/100].Round(100 * time.Microsecond) }
	return fmt.Sprintf("%v (50%%), %v (90%%), %v (99%%), %v at most", at(50), at(90), at(99), at(100))
}
