// Package lock serialises processes of simgpu by files with an advisory lock. The kernel gives a lock up when its
// process ends, however it ends, so there are no stale ones.
package lock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// poll is how often a waiting process tries again. The system call that waits by itself cannot be cancelled.
const poll = 100 * time.Millisecond

// Lock is a held lock.
type Lock struct{ file *os.File }

// Acquire takes the lock of path, creating the file and its folder. Where somebody else holds it, waiting is called
// once, and Acquire waits until the lock is free or ctx ends.
func Acquire(ctx context.Context, path string, waiting func()) (*Lock, error) {
	for told := false; ; {
		held, err := try(path)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if held != nil {
			return held, nil
		}
		if !told && waiting != nil {
			waiting()
			told = true
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("lock %s, which another process holds: %w", path, context.Cause(ctx))
		case <-time.After(poll):
		}
	}
}

// try returns nil without an error while another process holds the lock.
func try(path string) (*Lock, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // the folder was removed between the two calls
	} else if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		file.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, nil
		}
		return nil, err
	}
	// The file may have been removed by the previous holder between the two calls: then this lock protects nothing.
	mine, err := file.Stat()
	if err != nil {
		file.Close()
		return nil, err
	}
	now, err := os.Stat(path)
	if err == nil && os.SameFile(mine, now) {
		return &Lock{file: file}, nil
	}
	file.Close()
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return nil, err
}

// Release gives the lock up and leaves its file for the next one.
func (l *Lock) Release() { _ = l.file.Close() } // nothing was written to it

// Remove gives the lock up and removes its file.
func (l *Lock) Remove() error {
	defer l.Release()
	return os.Remove(l.file.Name())
}
