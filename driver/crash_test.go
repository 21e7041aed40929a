package driver

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// disturbance is an operation of the driver that something happens to.
type disturbance struct {
	name string
	// prepared claims are there before.
	prepared []*resourceapi.ResourceClaim
	// meanwhile happens to the node while no driver is running.
	meanwhile func(*wholeNode) error
	// What is disturbed: one of the two, or else the start itself.
	prepare, unprepare *resourceapi.ResourceClaim
}

// disturbances leave claim a, which they are about, and claim b, which they must not touch.
func disturbances() []disturbance {
	a, b := uuidClaim("a", left0, whole1), uuidClaim("b", right0)
	none := func(*wholeNode) error { return nil }
	reboot := func(n *wholeNode) error {
		return errors.Join(os.RemoveAll(n.opts.CDIDir),
			os.WriteFile(filepath.Join(n.opts.HostRoot, "proc/sys/kernel/random/boot_id"), []byte("boot-2\n"), 0o600))
	}
	return []disturbance{
		{name: "prepare", prepared: claimList(b), meanwhile: none, prepare: a},
		{name: "unprepare", prepared: claimList(a, b), meanwhile: none, unprepare: a},
		{name: "prepare after a reboot", prepared: claimList(a, b), meanwhile: reboot, prepare: a},
		{name: "start after a reboot", prepared: claimList(a, b), meanwhile: reboot},
		{name: "start with a checkpoint that cannot be read", prepared: claimList(a, b), meanwhile: func(n *wholeNode) error {
			return os.Truncate(filepath.Join(n.pluginDir(), "checkpoint", string(a.UID)+".json"), 10)
		}},
	}
}

func claimList(claims ...*resourceapi.ResourceClaim) []*resourceapi.ResourceClaim { return claims }

// uuidClaim is a claim with a UID as the API server makes them.
func uuidClaim(name string, devices ...string) *resourceapi.ResourceClaim {
	claim := claimOf(name, devices)
	claim.UID = types.UID(fmt.Sprintf("%.8s-6c0e-4a55-9a37-0d1d4b1f6f11", fmt.Sprintf("%08x", name)))
	return claim
}

func (d disturbance) objects() (a, b *resourceapi.ResourceClaim) {
	b = d.prepared[len(d.prepared)-1]
	switch {
	case d.prepare != nil:
		return d.prepare, b
	case d.unprepare != nil:
		return d.unprepare, b
	}
	return d.prepared[0], b
}

// arrange brings the node to where the operation begins, and returns what was answered about b.
func (d disturbance) arrange(t *testing.T, n *wholeNode) (answerB []string) {
	t.Helper()
	m := n.startMachinery()
	for _, claim := range d.prepared {
		answerB = m.mustPrepare(t, claim)
	}
	m.stop()
	if err := d.meanwhile(n); err != nil {
		t.Fatal(err)
	}
	return answerB
}

// expectRecovered checks that a driver that starts now finds or makes everything in order.
func (d disturbance) expectRecovered(t *testing.T, n *wholeNode, answerB []string) {
	t.Helper()
	m := n.startMachinery()
	if len(m.found.failed) > 0 {
		t.Errorf("restored: %v", m.found.failed)
	}
	m.reconciler.run(n.quiet())
	d.expectInOrder(t, m, answerB)
	m.stop()
}

// expectInOrder checks that all is well with the claims, and that nothing is left in the end.
func (d disturbance) expectInOrder(t *testing.T, m *machinery, answerB []string) {
	t.Helper()
	a, b := d.objects()
	m.expectConsistent(t, "after the disturbance")
	m.expectAnswers(t, answerB, b)
	want := []string{
		fmt.Sprintf("%s [r0] [k8s.%s/claim=%s-%s %s/metadata=%s_r0]", left0, driverName, a.UID, left0, driverName, a.UID),
		fmt.Sprintf("%s [r1] [k8s.%s/claim=%s-%s %s/metadata=%s_r1]", whole1, driverName, a.UID, whole1, driverName, a.UID),
	}
	m.expectAnswers(t, want, a)
	m.expectConsistent(t, "after preparing again")
	m.mustUnprepare(t, a)
	m.mustUnprepare(t, b)
	all := uuidClaim("all", whole0, whole1)
	if err := m.node.api.Tracker().Add(all); err != nil {
		t.Fatal(err)
	}
	m.mustPrepare(t, all)
	m.mustUnprepare(t, all)
	if left := m.node.contents(); len(left) > 0 {
		t.Errorf("left in the end: %v", left)
	}
}

// victimEnv makes a test process the victim of a crash: <root folder>;<disturbance>;<waypoint or number of
// the system call>.
const victimEnv = "SIMGPU_TEST_VICTIM"

// TestKilledAnywhere kills a driver process before each change that an operation makes to a file system, in turn, and at
// each waypoint, and checks what the next process makes of it.
func TestKilledAnywhere(t *testing.T) {
	if os.Getenv(victimEnv) != "" {
		runVictim(t)
		return
	}
	t.Parallel()
	for index, d := range disturbances() {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			moments := []string{}
			switch {
			case d.prepare != nil && len(d.prepared) == 1:
				moments = waypointNames(PrepareWaypoints())
			case d.unprepare != nil:
				moments = waypointNames(UnprepareWaypoints())
			}
			kill := func(t *testing.T, moment string) (killed bool, calls int) {
				a, b := d.objects()
				n := newWholeNode(t, a.DeepCopy(), b.DeepCopy())
				answerB := d.arrange(t, n)
				killed, calls = startVictim(t, n.root, index, moment)
				d.expectRecovered(t, n, answerB)
				return killed, calls
			}
			_, calls := kill(t, "0")
			if calls < 5 {
				t.Fatalf("%d system calls: not all of them are seen", calls)
			}
			for number := 1; number <= calls; number += stride {
				moments = append(moments, strconv.Itoa(number))
			}
			for _, moment := range moments {
				t.Run("at "+moment, func(t *testing.T) {
					t.Parallel()
					if killed, _ := kill(t, moment); !killed {
						t.Error("did not come this far")
					}
				})
			}
		})
	}
}

func waypointNames(waypoints []Waypoint) []string {
	var names []string
	for _, w := range waypoints {
		names = append(names, string(w))
	}
	return names
}

func startVictim(t *testing.T, root string, index int, moment string) (killed bool, calls int) {
	t.Helper()
	victim := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledAnywhere$", "-test.count=1", "-test.v")
	victim.Env = append(os.Environ(), fmt.Sprintf("%s=%s;%d;%s", victimEnv, root, index, moment))
	var output bytes.Buffer
	victim.Stdout, victim.Stderr = &output, &output
	err := victim.Run()
	if status := victim.ProcessState.Sys().(syscall.WaitStatus); status.Signaled() && status.Signal() == syscall.SIGKILL {
		return true, 0
	}
	found := regexp.MustCompile(`made (\d+) file system calls`).FindStringSubmatch(output.String())
	if err != nil || found == nil {
		t.Fatalf("the victim ended by itself: %v\n%s", err, output.String())
	}
	calls, _ = strconv.Atoi(found[1])
	return false, calls
}

func runVictim(t *testing.T) {
	parts := strings.Split(os.Getenv(victimEnv), ";")
	index, err := strconv.Atoi(parts[1])
	if err != nil {
		t.Fatal(err)
	}
	d := disturbances()[index]
	a, b := d.objects()
	n := wholeNodeIn(t, parts[0], a, b)
	n.opts.Waypoints = killAt(parts[2])
	killAtCall, _ := strconv.Atoi(parts[2])
	var calls atomic.Int64
	count := func(call fileSyscall) unix.Errno {
		// Between two changes the moment makes no difference.
		if call.changes && calls.Add(1) == int64(killAtCall) {
			dieNow()
		}
		return 0
	}

	if d.prepare == nil && d.unprepare == nil {
		err := atFileSyscall(count, func() {
			m, err := n.open()
			if err != nil {
				t.Error(err)
				return
			}
			m.reconciler.run(n.quiet())
		})
		if err != nil {
			t.Fatal(err)
		}
	} else {
		m := n.startMachinery()
		failed := m.lockedWatch(count)
		if d.prepare != nil {
			_, err = m.prepareAll(t.Context(), d.prepare)
		} else {
			err = m.unprepareAll(t.Context(), d.unprepare)
		}
		if err := errors.Join(err, failed()); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("made %d file system calls", calls.Load())
}

type killAt Waypoint

func (k killAt) Reached(at Waypoint, _ types.UID) {
	if Waypoint(k) == at {
		dieNow()
	}
}

// dieNow ends the process as the kernel would end it when memory runs out: nothing else happens.
func dieNow() {
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	select {}
}

// failures are errors that the kernel answers file system calls with.
var failures = []unix.Errno{unix.EIO, unix.ENOSPC, unix.EROFS}

// TestEverySystemCallMayFail lets each file system call of an operation fail in turn, and checks that the
// driver goes on from there without a restart.
func TestEverySystemCallMayFail(t *testing.T) {
	t.Parallel()
	for _, d := range disturbances() {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			for number := 1; failAt(t, d, failures[number%len(failures)], number); number += stride {
			}
		})
	}
}

func failAt(t *testing.T, d disturbance, failure unix.Errno, number int) (came bool) {
	a, b := d.objects()
	n := newWholeNode(t, a.DeepCopy(), b.DeepCopy())
	answerB := d.arrange(t, n)
	var failed atomic.Pointer[string]
	decide := func(call fileSyscall) unix.Errno {
		if call.number != number {
			return 0
		}
		failed.Store(&call.name)
		return failure
	}
	var m *machinery
	var err error
	if d.prepare == nil && d.unprepare == nil {
		watchErr := atFileSyscall(decide, func() {
			if m, err = n.open(); err == nil {
				m.reconciler.run(n.quiet())
			}
		})
		if watchErr != nil {
			t.Fatal(watchErr)
		}
		if err != nil {
			// The kubelet starts the container again.
			m = n.startMachinery()
		} else {
			m.serve()
			defer m.stop()
		}
		m.reconciler.run(n.quiet())
	} else {
		m = n.startMachinery()
		watched := m.lockedWatch(decide)
		if d.prepare != nil {
			_, err = m.prepareAll(t.Context(), d.prepare)
		} else {
			err = m.unprepareAll(t.Context(), d.unprepare)
		}
		if watchErr := watched(); watchErr != nil {
			t.Fatal(watchErr)
		}
		if err != nil {
			// The kubelet calls again.
			m.watch = nil
			if d.prepare != nil {
				_, err = m.prepareAll(t.Context(), d.prepare)
			} else {
				err = m.unprepareAll(t.Context(), d.unprepare)
			}
			if err != nil {
				t.Errorf("fails for good: %v", err)
			}
		}
	}
	d.expectInOrder(t, m, answerB)
	m.stop()
	name := failed.Load()
	if t.Failed() && name != nil {
		t.Fatalf("when system call %d (%s) failed with %v", number, *name, failure)
	}
	return name != nil
}
