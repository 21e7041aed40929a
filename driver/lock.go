package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// lockFolder keeps a second driver away from the files of this one. It waits for an earlier one to end.
// The kernel gives the lock back however the process ends.
func lockFolder(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	told := false
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		if !told {
			told = true
			klog.FromContext(ctx).Info("Waiting for another driver of this name to end", "lock", path)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("another driver of this name holds %s: %w", path, context.Cause(ctx))
		case <-time.After(200 * time.Millisecond):
		}
	}
}
