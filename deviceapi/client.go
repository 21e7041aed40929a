package deviceapi

import (
	"context"
	"errors"
	"log/slog"
)

// ErrNoDevices is returned by Discover where no device is visible.
var ErrNoDevices = errors.New("no devices")

// Client speaks to every socket of a container.
type Client struct{}

// Discover returns a client of every <dir>/*/device.sock; dir is DefaultDir unless
// a person says otherwise. It fails with ErrNoDevices where there is none. It does
// not wait for the driver. The logger (nil: none) is told once when the driver goes
// away and once when it is back.
func Discover(dir string, logger *slog.Logger) (*Client, error) { return nil, ErrNoDevices }

// Snapshot merges what all sockets show.
func (c *Client) Snapshot(ctx context.Context) (Snapshot, error) {
	return Snapshot{}, errors.New("not implemented")
}

// HoldOptions is a request for device memory.
type HoldOptions struct {
	// Device is the UUID of a GPU or partition; may be empty where exactly one
	// device is visible.
	Device string
	// MemoryBytes may be 0: the process is then listed without holding memory.
	MemoryBytes int64
	// PID and ProcessName show in the process table; 0 is the calling process,
	// and the empty name is that of its executable.
	PID         int
	ProcessName string
	// Utilization of the device by this process in percent.
	Utilization int
}

// Hold takes a lease of memory and returns once it is granted. It waits while the
// driver is unreachable, until ctx ends; ctx does not bound the lease itself. The
// lease lasts until Lease.Close or the end of the process. Where the memory does
// not fit the error is an *OutOfMemoryError.
func (c *Client) Hold(ctx context.Context, opts HoldOptions) (*Lease, error) {
	return nil, errors.New("not implemented")
}

// Close ends all leases and connections of the client.
func (c *Client) Close() error { return nil }

// Lease is held memory. It comes back by itself after a restart of the driver.
type Lease struct{}

// DeviceUUID is the device the lease is on.
func (l *Lease) DeviceUUID() string { return "" }

// SetUtilization reports a new utilization in percent.
func (l *Lease) SetUtilization(percent int) {}

// Close gives the memory back and waits until the driver knows it or is
// unreachable. More than one call is fine.
func (l *Lease) Close() error { return nil }
