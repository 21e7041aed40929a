package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

const (
	// lookForLock is how often a process looks whether it can have what another one has.
	lookForLock = 50 * time.Millisecond
	// lookForSuccessor is how often an owner looks whether another one wants to take over.
	lookForSuccessor = 200 * time.Millisecond
	// takenWithin is how long a former owner lets a successor take what it has given up.
	takenWithin = 10 * time.Second

	// soleSocket is the service socket of a driver that does not know the UID of its pod.
	soleSocket = "dra.sock"
)

// ownership says which of the drivers of one name on a node works: the one that holds the file "lock".
// All others wait for it. One that holds the file "successor" is the next one, and the owner gives up in
// its favour. The kernel gives locks back however a process ends, so that nothing of this is ever stale.
//
// The file "lock" names the service socket of its holder. It is empty if the holder is of a release that
// hands over only by ending.
type ownership struct {
	lock, successor string
	// socket is the name of the service socket of this driver.
	socket string
	// claimed is closed once this driver may ask the owner to hand over.
	claimed <-chan struct{}
	// gaveUp: it has handed over, and does not ask to have it back.
	gaveUp bool
	// behindEarlier: the owner is of a release that hands over only by ending.
	behindEarlier atomic.Bool
}

func newOwnership(dir, socket string, claimed <-chan struct{}) *ownership {
	return &ownership{
		lock: filepath.Join(dir, "lock"), successor: filepath.Join(dir, "successor"),
		socket: socket, claimed: claimed,
	}
}

// acquire waits until this driver is the owner, and returns what ends that.
func (o *ownership) acquire(ctx context.Context) (release func(), err error) {
	lock, err := openLock(o.lock)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	successor, err := openLock(o.successor)
	if err != nil {
		return nil, err
	}
	defer successor.Close()

	if o.gaveUp {
		// The successor lets go of its file when it has taken over.
		if err := o.letSuccessorTake(ctx, successor); err != nil {
			return nil, err
		}
	}
	told, asking := false, false
	for {
		owned, err := tryLock(lock, unix.LOCK_EX)
		if err != nil {
			return nil, err
		}
		if owned {
			o.behindEarlier.Store(false)
			o.sign(ctx, lock)
			return func() { lock.Close() }, nil
		}
		// Who has taken the lock a moment ago may not have signed it yet.
		o.behindEarlier.Store(told && o.owner() == "")
		if !told {
			told = true
			klog.FromContext(ctx).Info("Waiting for another driver of this name", "socket", o.owner(), "handedOverToIt", o.gaveUp)
		}
		if !asking && !o.gaveUp && closed(o.claimed) {
			if asking, err = tryLock(successor, unix.LOCK_EX); err != nil {
				return nil, err
			}
		}
		if err := pause(ctx, lookForLock); err != nil {
			return nil, fmt.Errorf("another driver of this name holds %s: %w", o.lock, err)
		}
	}
}

func (o *ownership) letSuccessorTake(ctx context.Context, successor *os.File) error {
	for deadline := time.Now().Add(takenWithin); time.Now().Before(deadline); {
		free, err := tryLock(successor, unix.LOCK_SH)
		if err != nil {
			return err
		}
		if free {
			return unix.Flock(int(successor.Fd()), unix.LOCK_UN)
		}
		if err := pause(ctx, lookForLock); err != nil {
			return err
		}
	}
	return nil
}

// asked waits until another driver wants to take over; false says that the context ended before.
func (o *ownership) asked(ctx context.Context) bool {
	successor, err := openLock(o.successor)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Nobody can take over from this driver before it ends")
		<-ctx.Done()
		return false
	}
	defer successor.Close()
	for pause(ctx, lookForSuccessor) == nil {
		free, err := tryLock(successor, unix.LOCK_SH)
		if err == nil && !free {
			o.gaveUp = true
			return true
		}
		if free {
			err = unix.Flock(int(successor.Fd()), unix.LOCK_UN)
		}
		if err != nil {
			klog.FromContext(ctx).V(2).Info("Cannot see whether another driver wants to take over", "err", err)
		}
	}
	return false
}

// sign notes on the lock how to reach its holder. It never makes the file shorter than it has to be, so
// that a full disk is no obstacle.
func (o *ownership) sign(ctx context.Context, lock *os.File) {
	_, err := lock.WriteAt([]byte(o.socket), 0)
	if err == nil {
		err = lock.Truncate(int64(len(o.socket)))
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Other drivers of this name cannot pass calls on to this one")
	}
}

// owner returns the service socket of whoever works or worked last, "" where it has not told.
func (o *ownership) owner() string {
	name, err := os.ReadFile(o.lock)
	if err != nil || strings.ContainsRune(string(name), filepath.Separator) {
		return ""
	}
	return string(name)
}

// openLock opens a file to lock it. Locks belong to the open file: whoever closes it gives them back.
func openLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	return f, nil
}

func tryLock(f *os.File, how int) (bool, error) {
	err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return true, nil
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// pause returns why the context ended, if it did.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}
