package lock

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestSecondWaitsUntilFirstGivesUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "folder", "lock")
	first, err := Acquire(t.Context(), path, func() { t.Error("told to wait for a free lock") })
	if err != nil {
		t.Fatal(err)
	}
	waiting, got := make(chan struct{}), make(chan error, 1)
	go func() {
		second, err := Acquire(t.Context(), path, func() { close(waiting) })
		if err == nil {
			second.Release()
		}
		got <- err
	}()
	<-waiting
	select {
	case err := <-got:
		t.Fatalf("the second got the lock while the first held it (%v)", err)
	default:
	}
	first.Release()
	if err := <-got; err != nil {
		t.Fatal(err)
	}
}

func TestWaitingEndsWithContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	held, err := Acquire(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Release()
	reason := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	if _, err := Acquire(ctx, path, func() { cancel(reason) }); !errors.Is(err, reason) {
		t.Fatalf("got %v, want %v", err, reason)
	}
}

func TestRemovedLockProtectsTheNextFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "folder", "lock")
	first, err := Acquire(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	waiting, got := make(chan struct{}), make(chan *Lock, 1)
	go func() {
		second, err := Acquire(t.Context(), path, func() { close(waiting) })
		if err != nil {
			t.Error(err)
		}
		got <- second
	}()
	<-waiting
	if err := os.RemoveAll(filepath.Dir(path)); err != nil { // with its folder
		t.Fatal(err)
	}
	first.Release()
	second := <-got
	if second == nil {
		t.FailNow()
	}
	defer second.Release()
	// Were the second's lock one of the removed file, a third would get the new file's.
	if third, err := try(path); err != nil || third != nil {
		t.Fatalf("a third got the lock, too: %v, %v", third, err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
}
