package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/simgpu/simgpu/e2e/internal/cgroup"
	"github.com/simgpu/simgpu/e2e/internal/inotify"
)

// downTimeout bounds the end of all processes of a cluster, which are killed.
const downTimeout = time.Minute

// Down ends everything that Up has started and removes everything that belongs to the cluster. It works on a cluster in
// any state. Built programs and images stay for the next one.
func (c *Cluster) Down(ctx context.Context) error {
	held, err := c.lock(ctx, nil)
	if err != nil {
		return err
	}
	if err := c.down(ctx); err != nil {
		held.Release()
		return err
	}
	return held.Remove()
}

func (c *Cluster) down(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, downTimeout, fmt.Errorf("not done within %s", downTimeout))
	defer cancel()
	var failed []error
	// With the first process of a node end all others, its mounts and its network.
	for _, n := range c.Nodes() {
		p, err := n.process()
		failed = append(failed, err, p.kill())
	}
	for _, n := range c.Nodes() {
		p, err := n.process()
		failed = append(failed, err, p.waitEnd(ctx))
	}
	if err := errors.Join(failed...); err != nil {
		return fmt.Errorf("take down cluster %s: %w", c.Name(), err)
	}
	groups, err := cgroup.Discover()
	if err == nil {
		err = groups.Remove(ctx, c.group())
	}
	if err == nil {
		err = inotify.OfMachine().Release(ctx, c.group())
	}
	if err == nil {
		err = os.RemoveAll(c.Dir())
	}
	if err != nil {
		return fmt.Errorf("take down cluster %s: %w", c.Name(), err)
	}
	return nil
}

// waitEnd waits until the process has ended. The kernel ends the other processes of its namespace first.
func (p process) waitEnd(ctx context.Context) error {
	for p.alive() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("process %d does not end: %w", p.PID, context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}
