package deviceapi

import (
	"errors"
	"path/filepath"
	"testing"
)

func TestHealthShowsWhereTheDeviceDoes(t *testing.T) {
	dir := tempDir(t)
	s := startServer(t, -1)
	gpu, part := h100(0), slice3g(h100(1), 0)
	if err := s.OpenNode(filepath.Join(dir, "node"), []GPU{gpu, part.GPU}); err != nil {
		t.Fatal(err)
	}
	open(t, s, filepath.Join(dir, "claim", "0"), Device{GPU: gpu})
	open(t, s, filepath.Join(dir, "claim", "1"), part)
	broken := Health{XID: 48, ECCCorrected: 7, ECCUncorrected: 2}
	ofPartition, ofParent := Health{XID: 94, ECCUncorrected: 1}, Health{Lost: true, XID: 79, ECCUncorrected: 3}
	s.SetHealth(map[string]Health{gpu.UUID: broken, part.Partition.UUID: ofPartition, part.GPU.UUID: ofParent})

	claim := snapshot(t, discover(t, filepath.Join(dir, "claim"), nil))
	if got := claim.GPUs[0].Health; got != broken {
		t.Errorf("a whole GPU shows %+v, want %+v", got, broken)
	}
	if got, want := claim.GPUs[1].Health, (Health{Lost: true}); got != want {
		t.Errorf("the GPU of a partition shows %+v, want %+v", got, want)
	}
	if got := claim.GPUs[1].Partitions[0].Health; got != ofPartition {
		t.Errorf("a partition shows %+v, want %+v", got, ofPartition)
	}
	if got := s.Snapshot().GPUs[1]; got.Health != ofParent || got.Partitions[0].Health != ofPartition {
		t.Errorf("the node view shows %+v and %+v", got.Health, got.Partitions[0].Health)
	}

	s.SetHealth(nil)
	for _, g := range snapshot(t, discover(t, filepath.Join(dir, "claim"), nil)).GPUs {
		if g.Health != (Health{}) {
			t.Errorf("%s is healthy again and shows %+v", g.UUID, g.Health)
		}
	}
}

func TestLostGPUEndsItsLeasesAndNoOthers(t *testing.T) {
	dir := tempDir(t)
	s := startServer(t, -1)
	part, other := slice3g(h100(0), 4), Device{GPU: h100(1)}
	open(t, s, filepath.Join(dir, "0"), part)
	open(t, s, filepath.Join(dir, "1"), other)
	c := discover(t, dir, nil)
	doomed := mustHold(t, c, HoldOptions{Device: part.UUID(), MemoryBytes: MiB})
	spared := mustHold(t, c, HoldOptions{Device: other.UUID(), MemoryBytes: MiB})

	s.SetHealth(map[string]Health{part.GPU.UUID: {Lost: true}, other.UUID(): {XID: 31}})
	select {
	case <-doomed.Done():
	case <-bounded(t).Done():
		t.Fatal("the lease goes on")
	}
	if !errors.Is(doomed.Err(), ErrDeviceLost) {
		t.Errorf("the lease ended with %v", doomed.Err())
	}
	if used := usedMiB(s.Snapshot(), part.UUID()); used != 0 {
		t.Errorf("%d MiB of the lost GPU are held", used)
	}
	if _, err := c.Hold(bounded(t), HoldOptions{Device: part.UUID(), MemoryBytes: MiB}); !errors.Is(err, ErrDeviceLost) {
		t.Errorf("a new lease fails with %v", err)
	}
	if spared.Err() != nil || usedMiB(s.Snapshot(), other.UUID()) != 1 {
		t.Errorf("the lease on the other GPU: %v", spared.Err())
	}

	s.SetHealth(nil)
	mustHold(t, c, HoldOptions{Device: part.UUID(), MemoryBytes: MiB})
}
