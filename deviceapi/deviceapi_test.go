package deviceapi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/simgpu/simgpu/deviceapi/v1alpha1"
)

func TestTwoClaimsOnOneGPU(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	gpu := h100(0)
	if err := s.OpenNode(filepath.Join(root, "node"), []GPU{gpu, h100(1)}); err != nil {
		t.Fatal(err)
	}
	left, right := slice3g(gpu, 0), slice3g(gpu, 4)
	open(t, s, filepath.Join(root, "a", "dev"), left)
	open(t, s, filepath.Join(root, "b", "dev"), right)
	a := discover(t, filepath.Join(root, "a"), nil)
	b := discover(t, filepath.Join(root, "b"), nil)
	mustHold(t, a, HoldOptions{MemoryBytes: 15023 * MiB, PID: 12345, ProcessName: "python3", Utilization: 60})
	mustHold(t, b, HoldOptions{MemoryBytes: 15000 * MiB, PID: 12389, ProcessName: "python3"})

	enabled := gpu
	enabled.MIGMode = MIGEnabled
	want := Snapshot{GPUs: []GPUStatus{{
		GPU: enabled,
		Partitions: []PartitionStatus{{
			Partition:   *left.Partition,
			MemoryUsed:  15023 * MiB,
			Utilization: 60,
			Processes:   []Process{{PID: 12345, Name: "python3", Memory: 15023 * MiB}},
		}},
	}}}
	if diff := cmp.Diff(want, snapshot(t, a)); diff != "" {
		t.Errorf("a container must see its own partition and nothing else (-want +got):\n%s", diff)
	}

	node := snapshot(t, discover(t, root, nil))
	if len(node.GPUs) != 2 || !node.GPUs[0].Whole || len(node.GPUs[0].Partitions) != 2 || len(node.GPUs[1].Partitions) != 0 {
		t.Fatalf("the node view must show both GPUs and both partitions, got %+v", node)
	}
	if got := node.GPUs[0].MemoryUsed; got != 30023*MiB {
		t.Errorf("the GPU shows %d MiB used, want the sum of its partitions, 30023", got/MiB)
	}
	if node.GPUs[0].MIGMode != MIGEnabled || node.GPUs[1].MIGMode != MIGDisabled {
		t.Errorf("MIG modes are %v and %v, want enabled where there is a partition", node.GPUs[0].MIGMode, node.GPUs[1].MIGMode)
	}
	first, second := node.GPUs[0].Partitions[0].Processes[0], node.GPUs[0].Partitions[1].Processes[0]
	if first.PID == second.PID || first.PID == 12345 {
		t.Errorf("node view pids are %d and %d, want two different made-up ones", first.PID, second.PID)
	}
}

func TestHoldOutOfMemory(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	d := slice3g(h100(0), 0)
	open(t, s, filepath.Join(root, "dev"), d)
	c := discover(t, root, nil)
	first := mustHold(t, c, HoldOptions{MemoryBytes: 15023 * MiB})

	_, err := c.Hold(bounded(t), HoldOptions{MemoryBytes: 25426 * MiB})
	want := OutOfMemoryError{DeviceUUID: d.UUID(), Requested: 25426 * MiB, Free: 25425 * MiB, Total: 40448 * MiB}
	wantOutOfMemory(t, err, want)
	const message = "CUDA out of memory. Tried to allocate 24.83 GiB. GPU 0 has a total capacity of 39.50 GiB of which 24.83 GiB is free."
	if got := want.CUDAMessage(0); got != message {
		t.Errorf("CUDAMessage is\n%s, want\n%s", got, message)
	}

	second := mustHold(t, c, HoldOptions{MemoryBytes: 25425 * MiB})
	_, err = c.Hold(bounded(t), HoldOptions{MemoryBytes: 1})
	wantOutOfMemory(t, err, OutOfMemoryError{DeviceUUID: d.UUID(), Requested: 1, Free: 0, Total: 40448 * MiB})

	for _, l := range []*Lease{first, second, second} {
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if got := usedMiB(s.Snapshot(), d.UUID()); got != 0 {
		t.Errorf("%d MiB are held after both leases were closed", got)
	}
}

func TestSharedDeviceHasOneLedger(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	gpu := Device{GPU: h100(0)}
	open(t, s, filepath.Join(root, "a", "dev"), gpu)
	open(t, s, filepath.Join(root, "b", "dev"), gpu)
	a := discover(t, filepath.Join(root, "a"), nil)
	b := discover(t, filepath.Join(root, "b"), nil)
	mustHold(t, a, HoldOptions{MemoryBytes: 80000 * MiB, Utilization: 70})
	mustHold(t, b, HoldOptions{MemoryBytes: 1000 * MiB, Utilization: 50})

	_, err := b.Hold(bounded(t), HoldOptions{MemoryBytes: 560 * MiB})
	wantOutOfMemory(t, err, OutOfMemoryError{DeviceUUID: gpu.UUID(), Requested: 560 * MiB, Free: 559 * MiB, Total: 81559 * MiB})
	if got := snapshot(t, b).GPUs[0]; got.MemoryUsed != 81000*MiB || got.Utilization != 100 || len(got.Processes) != 2 {
		t.Errorf("the second claim sees %d MiB used at %d %% by %d processes, want 81000 at 100 by 2",
			got.MemoryUsed/MiB, got.Utilization, len(got.Processes))
	}

	if err := s.Close(filepath.Join(root, "a", "dev")); err != nil {
		t.Fatal(err)
	}
	if got := usedMiB(s.Snapshot(), gpu.UUID()); got != 1000 {
		t.Errorf("%d MiB are held after one of two claims is gone, want the other's 1000", got)
	}
	if _, err := os.Stat(filepath.Join(root, "a", "dev")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder of a closed device is still there (%v)", err)
	}
}

func TestWholeGPUSeesWhatItsPartitionsHold(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	gpu := h100(0)
	open(t, s, filepath.Join(root, "claim", "dev"), slice3g(gpu, 0))
	open(t, s, filepath.Join(root, "admin", "dev"), Device{GPU: gpu})
	mustHold(t, discover(t, filepath.Join(root, "claim"), nil), HoldOptions{MemoryBytes: 40000 * MiB})

	admin := discover(t, filepath.Join(root, "admin"), nil)
	got := snapshot(t, admin).GPUs[0]
	if got.MemoryUsed != 40000*MiB || got.MIGMode != MIGEnabled || len(got.Processes) != 0 || len(got.Partitions) != 0 {
		t.Errorf("admin access sees %+v, want 40000 MiB used, MIG on, and nothing of the other claim's processes", got)
	}
	_, err := admin.Hold(bounded(t), HoldOptions{MemoryBytes: 41560 * MiB})
	wantOutOfMemory(t, err, OutOfMemoryError{DeviceUUID: gpu.UUID, Requested: 41560 * MiB, Free: 41559 * MiB, Total: 81559 * MiB})
}

func TestLeaseSurvivesServerRestart(t *testing.T) {
	root := tempDir(t)
	dir := filepath.Join(root, "dev")
	d := slice3g(h100(0), 0)
	before := startServer(t, -1)
	open(t, before, dir, d)
	logs := newLogCounter()
	old := discover(t, root, slog.New(logs))
	var leases []*Lease
	for range 3 {
		leases = append(leases, mustHold(t, old, HoldOptions{MemoryBytes: 5000 * MiB, Utilization: 10, ProcessName: "python3"}))
	}
	pids := fmt.Sprint(before.Snapshot().GPUs[0].Partitions[0].Processes)
	before.Stop()
	if _, err := os.Stat(socketPath(dir)); err != nil {
		t.Fatalf("a stopped server must leave the socket for its successor: %v", err)
	}

	// Even one who asks first and for everything must find the old holders back.
	after := startServer(t, DefaultGrace)
	open(t, after, dir, d)
	_, err := discover(t, root, nil).Hold(bounded(t), HoldOptions{MemoryBytes: 40448 * MiB})
	wantOutOfMemory(t, err, OutOfMemoryError{DeviceUUID: d.UUID(), Requested: 40448 * MiB, Free: 25448 * MiB, Total: 40448 * MiB})

	if got := fmt.Sprint(after.Snapshot().GPUs[0].Partitions[0].Processes); got != pids {
		t.Errorf("processes changed over the restart:\nbefore %s\nafter  %s", pids, got)
	}
	for _, l := range leases {
		select {
		case <-l.Done():
			t.Errorf("a lease ended with the restart: %v", l.Err())
		default:
		}
	}
	for _, message := range []string{"Lost the node driver, reconnecting", "The node driver is back, memory is held again"} {
		eventually(t, "the client logs "+message, func() bool { return logs.count(message) > 0 })
		if got := logs.count(message); got != 1 {
			t.Errorf("%q was logged %d times for 3 leases, want once", message, got)
		}
	}
}

func TestNewDeviceHasNoGracePeriod(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, time.Hour)
	open(t, s, filepath.Join(root, "dev"), Device{GPU: h100(0)})
	mustHold(t, discover(t, root, nil), HoldOptions{MemoryBytes: MiB})
}

func TestReholdReplacesTheOlderStream(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	d := slice3g(h100(0), 0)
	open(t, s, filepath.Join(root, "dev"), d)
	api := discover(t, root, nil).sockets[0].api
	request := &v1alpha1.HoldRequest{LeaseId: "lease", MemoryBytes: uint64(30000 * MiB), Pid: 1, Rehold: true}
	grant := func() holdStream {
		stream, err := api.Hold(bounded(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(request); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			t.Fatalf("the same lease a second time: %v", err)
		}
		return stream
	}
	older := grant()
	grant()
	if _, err := older.Recv(); status.Code(err) != codes.Aborted {
		t.Errorf("the older stream ended with %v, want Aborted", err)
	}
	if got := usedMiB(s.Snapshot(), d.UUID()); got != 30000 {
		t.Errorf("%d MiB are held, want 30000 once", got)
	}
}

func TestOpenAgainKeepsLeases(t *testing.T) {
	root := tempDir(t)
	dir := filepath.Join(root, "dev")
	s := startServer(t, -1)
	d := Device{GPU: h100(0)}
	open(t, s, dir, d)
	mustHold(t, discover(t, root, nil), HoldOptions{MemoryBytes: 100 * MiB})
	d.GPU.DriverVersion = "590.1"
	open(t, s, dir, d)
	got := s.Snapshot().GPUs[0]
	if got.MemoryUsed != 100*MiB || got.DriverVersion != "590.1" {
		t.Errorf("after a second Open: %d MiB used, driver %s, want 100 and the new description", got.MemoryUsed/MiB, got.DriverVersion)
	}

	if err := os.Remove(socketPath(dir)); err != nil {
		t.Fatal(err)
	}
	open(t, s, dir, d)
	if _, err := discover(t, root, nil).Snapshot(bounded(t)); err != nil {
		t.Errorf("Open must bring back a socket that somebody removed: %v", err)
	}
}

// TestLongPaths: folders whose path is too long for the address of a socket serve like others.
func TestLongPaths(t *testing.T) {
	root := filepath.Join(tempDir(t), strings.Repeat("x", 100))
	dir := filepath.Join(root, strings.Repeat("y", 30))
	s := startServer(t, -1)
	open(t, s, dir, Device{GPU: h100(0)})
	info, err := os.Stat(socketPath(dir))
	if err != nil || info.Mode() != fs.ModeSocket|deviceSocketMode {
		t.Errorf("the socket has mode %v (%v)", info, err)
	}
	got, err := discover(t, root, nil).Snapshot(bounded(t))
	if err != nil || len(got.GPUs) != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestOpenRefuses(t *testing.T) {
	root := tempDir(t)
	noMemory := h100(0)
	noMemory.MemoryBytes = 0
	tests := map[string]struct {
		dir    string
		device Device
		want   string
	}{
		"a GPU without UUID":          {dir: root + "/a", device: Device{GPU: GPU{MemoryBytes: 1}}, want: "has no UUID"},
		"a GPU without memory":        {dir: root + "/b", device: Device{GPU: noMemory}, want: "has 0 bytes of memory"},
		"a partition without UUID":    {dir: root + "/c", device: Device{GPU: h100(0), Partition: &Partition{Profile: "1g.10gb"}}, want: "1g.10gb"},
		"a partition without memory":  {dir: root + "/d", device: Device{GPU: h100(0), Partition: &Partition{UUID: "MIG-x"}}, want: "MIG-x"},
		"a folder that is not one":    {dir: "/dev/null/x", device: Device{GPU: h100(0)}, want: "not a directory"},
		"a GPU with a negative minor": {dir: root + "/e", device: Device{GPU: h100(-1)}, want: "minor -1"},
	}
	s := startServer(t, -1)
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := s.Open(test.dir, test.device)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want one that says %q", err, test.want)
			}
		})
	}
	if got := s.Snapshot(); len(got.GPUs) != 0 {
		t.Errorf("a refused device shows in the node view: %+v", got)
	}
	if err := s.Close(filepath.Join(root, "never-opened")); err != nil {
		t.Errorf("Close of an unknown folder: %v", err)
	}

	// What a crash in the middle of Open leaves behind.
	left := filepath.Join(root, ".crashed")
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(filepath.Join(root, "crashed")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Close leaves the remains of an interrupted Open (%v)", err)
	}
}

func TestStop(t *testing.T) {
	var none *Server
	none.Stop()
	s := NewServer(ServerOptions{})
	open(t, s, filepath.Join(tempDir(t), "dev"), Device{GPU: h100(0)})
	s.Stop()
	s.Stop()
	if err := s.Open(filepath.Join(tempDir(t), "dev"), Device{GPU: h100(0)}); err == nil {
		t.Error("a stopped server opened a device")
	}
}

func TestSocketsAreOpenToAnyUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("changing the user needs root")
	}
	root := tempDir(t)
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	s := startServer(t, -1)
	open(t, s, filepath.Join(root, "dev"), Device{GPU: h100(0)})
	if err := s.OpenNode(filepath.Join(root, "node"), []GPU{h100(0)}); err != nil {
		t.Fatal(err)
	}
	connect := func(dir string) error {
		// The file system's user is a property of the thread. Without UnlockOSThread
		// the thread ends with the goroutine.
		result := make(chan error)
		go func() {
			runtime.LockOSThread()
			if err := syscall.Setfsuid(65534); err != nil {
				result <- err
				return
			}
			conn, err := net.Dial("unix", socketPath(filepath.Join(root, dir)))
			if err == nil {
				err = conn.Close()
			}
			result <- err
		}()
		return <-result
	}
	if err := connect("dev"); err != nil {
		t.Errorf("user 65534 cannot reach its device: %v", err)
	}
	if err := connect("node"); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("user 65534 reaching the node view: got %v, want permission denied", err)
	}
}

// TestHolderProcess is not a test: TestLeaseEndsWithTheProcess runs it in a process
// of its own.
func TestHolderProcess(t *testing.T) {
	dir := os.Getenv("TEST_HOLD_IN")
	if dir == "" {
		t.Skip("run by TestLeaseEndsWithTheProcess")
	}
	c, err := Discover(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Hold(t.Context(), HoldOptions{MemoryBytes: 1234 * MiB}); err != nil {
		t.Fatal(err)
	}
	select {}
}

func TestLeaseEndsWithTheProcess(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	d := Device{GPU: h100(0)}
	open(t, s, filepath.Join(root, "dev"), d)
	command := exec.Command(os.Args[0], "-test.run=^TestHolderProcess$")
	command.Env = append(os.Environ(), "TEST_HOLD_IN="+root)
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = command.Process.Kill(); _ = command.Wait() })
	eventually(t, "the process holds memory", func() bool { return usedMiB(s.Snapshot(), d.UUID()) == 1234 })
	process := s.Snapshot().GPUs[0].Processes[0]
	if want := filepath.Base(os.Args[0]); process.Name != want {
		t.Errorf("the process shows as %q, want the name of its executable, %q", process.Name, want)
	}
	if err := command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a killed process holds nothing", func() bool { return usedMiB(s.Snapshot(), d.UUID()) == 0 })
}

func TestSetUtilization(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	open(t, s, filepath.Join(root, "dev"), Device{GPU: h100(0)})
	l := mustHold(t, discover(t, root, nil), HoldOptions{MemoryBytes: MiB})
	for _, percent := range []int{10, 20, 400} {
		l.SetUtilization(percent)
	}
	eventually(t, "the last value shows, cut to 100", func() bool { return s.Snapshot().GPUs[0].Utilization == 100 })
}

func TestLeasesPerSocketAreLimited(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	open(t, s, filepath.Join(root, "dev"), Device{GPU: h100(0)})
	var c *Client
	granted := 0
	for ; granted <= maxLeases; granted++ {
		if granted%(maxStreams/2) == 0 {
			c = discover(t, root, nil)
		}
		_, err := c.Hold(bounded(t), HoldOptions{})
		if status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), errTooManyLeases.Error()) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if granted != maxLeases {
		t.Errorf("%d leases were granted, want %d", granted, maxLeases)
	}
}

func TestHoldRefusesBadRequests(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	d := Device{GPU: h100(0)}
	open(t, s, filepath.Join(root, "x", "dev"), d)
	if err := s.OpenNode(filepath.Join(root, "node", "node"), []GPU{h100(0)}); err != nil {
		t.Fatal(err)
	}
	device := discover(t, filepath.Join(root, "x"), nil).sockets[0].api
	node := discover(t, filepath.Join(root, "node"), nil).sockets[0].api
	tests := map[string]struct {
		api     v1alpha1.DeviceClient
		request *v1alpha1.HoldRequest
		want    codes.Code
	}{
		"no lease id":             {device, &v1alpha1.HoldRequest{Pid: 1}, codes.InvalidArgument},
		"a long lease id":         {device, &v1alpha1.HoldRequest{Pid: 1, LeaseId: strings.Repeat("x", 65)}, codes.InvalidArgument},
		"no pid":                  {device, &v1alpha1.HoldRequest{LeaseId: "x"}, codes.InvalidArgument},
		"a pid out of range":      {device, &v1alpha1.HoldRequest{LeaseId: "x", Pid: 1 << 23}, codes.InvalidArgument},
		"memory that overflows":   {device, &v1alpha1.HoldRequest{LeaseId: "x", Pid: 1, MemoryBytes: 1 << 63}, codes.InvalidArgument},
		"more memory than exists": {device, &v1alpha1.HoldRequest{LeaseId: "x", Pid: 1, MemoryBytes: 1<<63 - 1}, codes.ResourceExhausted},
		"101 percent":             {device, &v1alpha1.HoldRequest{LeaseId: "x", Pid: 1, UtilizationPercent: 101}, codes.InvalidArgument},
		"another device":          {device, &v1alpha1.HoldRequest{LeaseId: "x", Pid: 1, DeviceUuid: "GPU-other"}, codes.NotFound},
		"a large message":         {device, &v1alpha1.HoldRequest{LeaseId: "x", Pid: 1, ProcessName: strings.Repeat("x", maxMessageBytes)}, codes.ResourceExhausted},
		"the node view":           {node, &v1alpha1.HoldRequest{LeaseId: "x", Pid: 1}, codes.PermissionDenied},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			stream, err := test.api.Hold(bounded(t))
			if err != nil {
				t.Fatal(err)
			}
			_ = stream.Send(test.request) // the reason of a failure shows in Recv
			if _, err := stream.Recv(); status.Code(err) != test.want {
				t.Errorf("got %v, want %v", err, test.want)
			}
		})
	}
	if got := len(s.Snapshot().GPUs[0].Processes); got != 0 {
		t.Errorf("%d refused requests show as processes", got)
	}
}

func TestGarbageHarmsNobody(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	open(t, s, filepath.Join(root, "bad", "dev"), slice3g(h100(0), 0))
	victim := slice3g(h100(0), 4)
	open(t, s, filepath.Join(root, "good", "dev"), victim)
	mustHold(t, discover(t, filepath.Join(root, "good"), nil), HoldOptions{MemoryBytes: 100 * MiB})

	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	random := rand.New(rand.NewPCG(1, 2))
	for i := range 300 {
		conn, err := net.Dial("unix", socketPath(filepath.Join(root, "bad", "dev")))
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		junk := make([]byte, random.IntN(20_000))
		for j := range junk {
			junk[j] = byte(random.Uint32())
		}
		if i%2 == 0 {
			junk = append([]byte(preface), junk...)
		}
		// The server may hang up in the middle of it, and should.
		_ = conn.SetWriteDeadline(time.Now().Add(patience))
		_, _ = conn.Write(junk)
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	mustHold(t, discover(t, filepath.Join(root, "bad"), nil), HoldOptions{MemoryBytes: MiB})
	if got := usedMiB(s.Snapshot(), victim.UUID()); got != 100 {
		t.Errorf("the other claim holds %d MiB after the noise, want 100", got)
	}
}

// A client that takes every connection of its socket and says nothing must not keep
// anybody else from theirs.
func TestIdleConnectionsHarmNobody(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	open(t, s, filepath.Join(root, "bad", "dev"), slice3g(h100(0), 0))
	open(t, s, filepath.Join(root, "good", "dev"), slice3g(h100(0), 4))
	for range maxConnections + 5 {
		conn, err := net.Dial("unix", socketPath(filepath.Join(root, "bad", "dev")))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	mustHold(t, discover(t, filepath.Join(root, "good"), nil), HoldOptions{MemoryBytes: MiB})
	if err := s.Close(filepath.Join(root, "bad", "dev")); err != nil {
		t.Errorf("Close with idle connections: %v", err)
	}
}

func TestManyDevicesAtOnce(t *testing.T) {
	const devices = 200
	root := tempDir(t)
	s := startServer(t, -1)
	if err := s.OpenNode(filepath.Join(root, "node", "n"), nil); err != nil {
		t.Fatal(err)
	}
	watcher := discover(t, filepath.Join(root, "node"), nil)
	dir := func(i int) string { return filepath.Join(root, fmt.Sprint(i), "dev") }
	var wait sync.WaitGroup
	for i := range devices {
		wait.Go(func() {
			if err := s.Open(dir(i), Device{GPU: h100(i)}); err != nil {
				t.Error(err)
				return
			}
			c, err := Discover(filepath.Dir(dir(i)), nil)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 6*patience)
			defer cancel()
			if _, err := c.Hold(ctx, HoldOptions{MemoryBytes: int64(i+1) * MiB}); err != nil {
				t.Error(err)
				return
			}
			if i%20 == 0 {
				if _, err := watcher.Snapshot(ctx); err != nil {
					t.Error(err)
				}
			}
			if got, err := c.Snapshot(ctx); err != nil || got.GPUs[0].MemoryUsed != int64(i+1)*MiB {
				t.Errorf("device %d shows %+v, %v", i, got, err)
			}
			if i%2 == 0 {
				if err := s.Close(dir(i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
	if got := len(snapshot(t, watcher).GPUs); got != devices/2 {
		t.Errorf("the node view shows %d GPUs, want the %d that are still open", got, devices/2)
	}
}

func TestDiscover(t *testing.T) {
	root := tempDir(t)
	if _, err := Discover(filepath.Join(root, "absent"), nil); !errors.Is(err, ErrNoDevices) {
		t.Errorf("an absent folder gives %v, want ErrNoDevices", err)
	}
	for _, name := range []string{"empty", "file"} {
		if err := os.Mkdir(filepath.Join(root, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(socketPath(filepath.Join(root, "file")), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Discover(root, nil); !errors.Is(err, ErrNoDevices) {
		t.Errorf("a folder without sockets gives %v, want ErrNoDevices", err)
	}
	s := startServer(t, -1)
	open(t, s, filepath.Join(root, "1"), slice3g(h100(1), 4))
	open(t, s, filepath.Join(root, "2"), slice3g(h100(1), 0))
	open(t, s, filepath.Join(root, "3"), Device{GPU: h100(0)})
	c := discover(t, root, nil)
	var got []string
	for _, d := range snapshot(t, c).Devices() {
		got = append(got, d.UUID())
	}
	want := []string{h100(0).UUID, slice3g(h100(1), 0).UUID(), slice3g(h100(1), 4).UUID()}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices are numbered in the wrong order (-want +got):\n%s", diff)
	}

	all := strings.Join(want, ", ")
	for device, message := range map[string]string{
		"":           "3 devices are visible, say which one to use: " + all,
		"GPU-x":      "device GPU-x is not visible, these are: " + all,
		h100(1).UUID: "is not visible, these are: " + all, // only its partitions are
	} {
		if _, err := c.Hold(bounded(t), HoldOptions{Device: device}); err == nil || !strings.Contains(err.Error(), message) {
			t.Errorf("Hold on device %q gives %v, want %q", device, err, message)
		}
	}
	if got := mustHold(t, c, HoldOptions{Device: want[2]}).DeviceUUID(); got != want[2] {
		t.Errorf("lease is on %s, want %s", got, want[2])
	}
}

func TestUnreachableDriver(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, time.Hour)
	open(t, s, filepath.Join(root, "dev"), Device{GPU: h100(0)})
	c := discover(t, root, nil)
	s.Stop()
	short := func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	if _, err := c.Snapshot(short()); !errors.Is(err, ErrUnreachable) {
		t.Errorf("Snapshot gives %v, want ErrUnreachable", err)
	}
	if _, err := c.Hold(short(), HoldOptions{}); !errors.Is(err, ErrUnreachable) {
		t.Errorf("Hold gives %v, want ErrUnreachable", err)
	}

	// Back, but still waiting for old holders.
	open(t, startServer(t, time.Hour), filepath.Join(root, "dev"), Device{GPU: h100(0)})
	snapshot(t, c)
	if _, err := c.Hold(short(), HoldOptions{}); !errors.Is(err, ErrUnreachable) {
		t.Errorf("Hold in the grace period gives %v, want ErrUnreachable", err)
	}
	waiting := make(chan error)
	go func() {
		_, err := c.Hold(t.Context(), HoldOptions{})
		waiting <- err
	}()
	eventually(t, "the second Hold is under way", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.leases) == 1
	})
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := <-waiting; err == nil {
		t.Error("a Hold was granted after its client was closed")
	}
}

func TestCleanProcessName(t *testing.T) {
	tests := map[string]struct{ in, want string }{
		"plain":            {"python3", "python3"},
		"spaces and UTF-8": {"VLLM::EngineCore größe", "VLLM::EngineCore größe"},
		"terminal escapes": {"\x1b[2Jrm\n", "?[2Jrm?"},
		"invalid UTF-8":    {"a\xffb", "a?b"},
		"empty":            {" ", "[unknown]"},
		"too long":         {strings.Repeat("x", 255) + "ü", strings.Repeat("x", 255)},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got := cleanProcessName(test.in); got != test.want {
				t.Errorf("cleanProcessName(%q) = %q, want %q", test.in, got, test.want)
			}
		})
	}
}

// TestShares has two claims with a share each of one GPU: each sees a smaller GPU that nobody else uses, and the GPU has
// what is left.
func TestShares(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	gpu := h100(0)
	open(t, s, filepath.Join(root, "a", "dev"), Device{GPU: gpu, ShareBytes: 20 << 30})
	open(t, s, filepath.Join(root, "b", "dev"), Device{GPU: gpu, ShareBytes: 70 << 30})
	a := discover(t, filepath.Join(root, "a"), nil)
	b := discover(t, filepath.Join(root, "b"), nil)
	mustHold(t, a, HoldOptions{MemoryBytes: 15 << 30, PID: 1, ProcessName: "a"})

	small := gpu
	small.MemoryBytes = 20 << 30
	want := Snapshot{GPUs: []GPUStatus{{GPU: small, Whole: true, MemoryUsed: 15 << 30, Processes: []Process{{PID: 1, Name: "a", Memory: 15 << 30}}}}}
	if diff := cmp.Diff(want, snapshot(t, a)); diff != "" {
		t.Errorf("the first share (-want +got):\n%s", diff)
	}
	small.MemoryBytes = 70 << 30
	if diff := cmp.Diff(Snapshot{GPUs: []GPUStatus{{GPU: small, Whole: true}}}, snapshot(t, b)); diff != "" {
		t.Errorf("the second share (-want +got):\n%s", diff)
	}

	_, err := a.Hold(bounded(t), HoldOptions{MemoryBytes: 6 << 30})
	wantOutOfMemory(t, err, OutOfMemoryError{DeviceUUID: gpu.UUID, Requested: 6 << 30, Free: 5 << 30, Total: 20 << 30})
	_, err = b.Hold(bounded(t), HoldOptions{MemoryBytes: 66 << 30})
	wantOutOfMemory(t, err, OutOfMemoryError{DeviceUUID: gpu.UUID, Requested: 66 << 30, Free: gpu.MemoryBytes - 15<<30, Total: 70 << 30})

	node := s.Snapshot()
	if got := node.GPUs[0]; got.MemoryBytes != gpu.MemoryBytes || got.MemoryUsed != 15<<30 {
		t.Errorf("the node sees %d of %d bytes in use", got.MemoryUsed, got.MemoryBytes)
	}
	if err := s.Open(filepath.Join(root, "c"), Device{GPU: gpu, ShareBytes: gpu.MemoryBytes + 1}); err == nil {
		t.Error("a share larger than the GPU was served")
	}
}

func TestFixedPartitionsShowOnTheNode(t *testing.T) {
	root := tempDir(t)
	s := startServer(t, -1)
	gpu := h100(0)
	gpu.MIGMode = MIGEnabled
	left, right := slice3g(gpu, 0), slice3g(gpu, 4)
	gpu.FixedPartitions = []Partition{*left.Partition, *right.Partition}
	if err := s.OpenNode(filepath.Join(root, "node", "view"), []GPU{gpu}); err != nil {
		t.Fatal(err)
	}
	open(t, s, filepath.Join(root, "a", "dev"), right)
	mustHold(t, discover(t, filepath.Join(root, "a"), nil), HoldOptions{MemoryBytes: 100 * MiB, PID: 1, ProcessName: "python3"})
	node := snapshot(t, discover(t, filepath.Join(root, "node"), nil))
	var got []string
	for _, p := range node.GPUs[0].Partitions {
		got = append(got, fmt.Sprintf("%s %d", p.UUID, p.MemoryUsed/MiB))
	}
	slices.Sort(got)
	want := []string{left.Partition.UUID + " 0", right.Partition.UUID + " 100"}
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("partitions in the node view (-want +got):\n%s", diff)
	}
	if claim := snapshot(t, discover(t, filepath.Join(root, "a"), nil)); len(claim.GPUs[0].Partitions) != 1 {
		t.Errorf("a container sees %d partitions, want its own", len(claim.GPUs[0].Partitions))
	}
}
