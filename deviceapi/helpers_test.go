package deviceapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience bounds every wait of a test for something that must happen.
const patience = 20 * time.Second

// h100 is a GPU with the figures of the catalogue.
func h100(minor int) GPU {
	return GPU{
		UUID:              fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", minor),
		ProductName:       "NVIDIA H100 80GB HBM3",
		Minor:             minor,
		PCIBusID:          fmt.Sprintf("0000:%02x:00.0", minor+1),
		Serial:            fmt.Sprintf("165%09d", minor),
		DriverVersion:     "580.95.05",
		CUDAVersion:       "13.0",
		ComputeCapability: "9.0.0",
		Brand:             "Nvidia",
		Architecture:      "Hopper",
		MIGMode:           MIGDisabled,
		MemoryBytes:       81559 * MiB,
		PowerLimitWatts:   700,
		Profiles: []Profile{{
			Name: "3g.40gb", ID: 9, Slices: 3, MaxInstances: 2, MemoryBytes: 40448 * MiB, Multiprocessors: 60,
			CopyEngines: 3, Encoders: 1, Decoders: 3, JPEGEngines: 4, OFAEngines: 2, PlacementSize: 4, PlacementStarts: []int{0, 4},
			Compute: []ComputeProfile{{ID: 0, Slices: 1, MaxInstances: 3}, {ID: 2, Slices: 3, MaxInstances: 1}},
		}},
	}
}

// slice3g is one of the two 3g.40gb partitions of an H100.
func slice3g(gpu GPU, start int) Device {
	return Device{GPU: gpu, Partition: &Partition{
		UUID:            fmt.Sprintf("MIG-%s-%d", strings.TrimPrefix(gpu.UUID, "GPU-"), start),
		Profile:         "3g.40gb",
		GPUInstanceID:   1 + start/4,
		ProfileID:       9,
		PlacementStart:  start,
		PlacementSize:   4,
		MemoryBytes:     40448 * MiB,
		Multiprocessors: 60,
		CopyEngines:     3,
		Decoders:        3,
		JPEGEngines:     3,
	}}
}

// tempDir is like t.TempDir with a path short enough for sockets.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sg") //nolint:usetesting // the path of t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func startServer(t *testing.T, grace time.Duration) *Server {
	t.Helper()
	s := NewServer(ServerOptions{Grace: grace})
	t.Cleanup(s.Stop)
	return s
}

func open(t *testing.T, s *Server, dir string, d Device) {
	t.Helper()
	if err := s.Open(dir, d); err != nil {
		t.Fatalf("Open(%s): %v", dir, err)
	}
}

func discover(t *testing.T, dir string, logger *slog.Logger) *Client {
	t.Helper()
	c, err := Discover(dir, logger)
	if err != nil {
		t.Fatalf("Discover(%s): %v", dir, err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close of the client: %v", err)
		}
	})
	return c
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func mustHold(t *testing.T, c *Client, opts HoldOptions) *Lease {
	t.Helper()
	l, err := c.Hold(bounded(t), opts)
	if err != nil {
		t.Fatalf("Hold(%+v): %v", opts, err)
	}
	return l
}

func snapshot(t *testing.T, c *Client) Snapshot {
	t.Helper()
	s, err := c.Snapshot(bounded(t))
	if err != nil {
		t.Fatalf("Snapshot: %v", err)
	}
	return s
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx := bounded(t)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("waited %s in vain: %s", patience, what)
		}
	}
}

// usedMiB is what the node view says is held on a device, -1 where it does not
// show the device.
func usedMiB(s Snapshot, uuid string) int64 {
	for _, g := range s.GPUs {
		if g.UUID == uuid {
			return g.MemoryUsed / MiB
		}
		for _, p := range g.Partitions {
			if p.UUID == uuid {
				return p.MemoryUsed / MiB
			}
		}
	}
	return -1
}

func wantOutOfMemory(t *testing.T, err error, want OutOfMemoryError) {
	t.Helper()
	var oom *OutOfMemoryError
	if !errors.As(err, &oom) {
		t.Fatalf("got error %v, want an OutOfMemoryError", err)
	}
	if *oom != want {
		t.Errorf("got %+v, want %+v", *oom, want)
	}
}

// logCounter counts log messages by their text.
type logCounter struct {
	slog.Handler
	mu     sync.Mutex
	counts map[string]int
}

func newLogCounter() *logCounter {
	return &logCounter{Handler: slog.DiscardHandler, counts: map[string]int{}}
}

func (l *logCounter) Enabled(context.Context, slog.Level) bool { return true }

func (l *logCounter) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[r.Message]++
	return nil
}

func (l *logCounter) count(message string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts[message]
}

func socketPath(dir string) string { return filepath.Join(dir, SocketName) }
