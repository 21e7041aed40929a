package driver

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// claimLocks lets one operation at a time work on a claim, and any number on different claims.
type claimLocks struct {
	mu    sync.Mutex
	locks map[types.UID]*claimLock
}

type claimLock struct {
	held  chan struct{} // holds one value while the claim is worked on
	users int
}

// lock waits for its turn or for the end of the context, and returns what gives the turn back.
func (c *claimLocks) lock(ctx context.Context, uid types.UID) (unlock func(), err error) {
	l := c.enter(uid)
	select {
	case l.held <- struct{}{}:
		return func() { <-l.held; c.leave(uid, l) }, nil
	case <-ctx.Done():
		c.leave(uid, l)
		return nil, context.Cause(ctx)
	}
}

// tryLock is a lock that does not wait; ok is false while another operation works on the claim.
func (c *claimLocks) tryLock(uid types.UID) (unlock func(), ok bool) {
	l := c.enter(uid)
	select {
	case l.held <- struct{}{}:
		return func() { <-l.held; c.leave(uid, l) }, true
	default:
		c.leave(uid, l)
		return nil, false
	}
}

func (c *claimLocks) enter(uid types.UID) *claimLock {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.locks == nil {
		c.locks = map[types.UID]*claimLock{}
	}
	l := c.locks[uid]
	if l == nil {
		l = &claimLock{held: make(chan struct{}, 1)}
		c.locks[uid] = l
	}
	l.users++
	return l
}

func (c *claimLocks) leave(uid types.UID, l *claimLock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(c.locks, uid)
	}
}
