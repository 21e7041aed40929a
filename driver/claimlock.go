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
	c.mu.Lock()
	if c.locks == nil {
		c.locks = map[types.UID]*claimLock{}
	}
	l := c.locks[uid]
	if l == nil {
		l = &claimLock{held: make(chan struct{}, 1)}
		c.locks[uid] = l
	}
	l.users++
	c.mu.Unlock()

	leave := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(c.locks, uid)
		}
	}
	select {
	case l.held <- struct{}{}:
		return func() { <-l.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
}
