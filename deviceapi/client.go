package deviceapi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/simgpu/simgpu/deviceapi/v1alpha1"
)

var (
	// ErrNoDevices is returned by Discover where no device is visible.
	ErrNoDevices = errors.New("no devices")
	// ErrUnreachable is in the error of a call that the node driver did not
	// answer in time.
	ErrUnreachable = errors.New("the node driver does not answer")
	// ErrDeviceGone is in the error of a lease whose device is not served any more.
	ErrDeviceGone = errors.New("the device is gone")
	// ErrDeviceLost is in the error of a lease on a GPU that is lost, and of a call that
	// asks for one. The text is that of the real library.
	ErrDeviceLost = errors.New("GPU is lost")
)

// Pauses between two attempts to reach the driver. The longest is well below
// DefaultGrace, so that a holder is back before new ones are served.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = time.Second
)

// maxSnapshotBytes is far above the node view with every limit exhausted.
const maxSnapshotBytes = 32 << 20

// Client speaks to every socket of a container. Safe for concurrent use.
type Client struct {
	logger  *slog.Logger
	sockets []*socket // sorted by path

	mu     sync.Mutex
	leases map[*Lease]struct{}
	closed bool
	lost   int  // leases that wait for the driver to come back
	outage bool // the loss was logged and the return was not
}

// socket is one connection.
type socket struct {
	path string
	conn *grpc.ClientConn
	api  v1alpha1.DeviceClient
}

// Discover returns a client of every <dir>/*/device.sock; dir is DefaultDir unless
// a person says otherwise. It fails with ErrNoDevices where there is none. It does
// not wait for the driver. The logger (nil: none) is told once when the driver goes
// away and once when it is back.
func Discover(dir string, logger *slog.Logger) (*Client, error) {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir) // sorted
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look for devices: %w", err)
	}
	c := &Client{logger: logger, leases: map[*Lease]struct{}{}}
	for _, entry := range entries {
		path := filepath.Join(dir, entry.Name(), SocketName)
		info, err := os.Stat(path)
		if err != nil || info.Mode().Type() != fs.ModeSocket {
			continue
		}
		s, err := dial(path)
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		c.sockets = append(c.sockets, s)
	}
	if len(c.sockets) == 0 {
		return nil, fmt.Errorf("%w: no %s in a folder of %s", ErrNoDevices, SocketName, dir)
	}
	return c, nil
}

// dial prepares a connection; it is made by the first call.
func dial(path string) (*socket, error) {
	conn, err := grpc.NewClient("unix://"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDisableServiceConfig(),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return connect(ctx, path) }),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: firstPause, Multiplier: 1.6, Jitter: 0.2, MaxDelay: lastPause},
			MinConnectTimeout: 5 * time.Second,
		}),
		// The driver may be restarting: calls wait for it until their context ends.
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(maxSnapshotBytes)),
	)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", path, err)
	}
	return &socket{path: path, conn: conn, api: v1alpha1.NewDeviceClient(conn)}, nil
}

// removed says that the folder of the socket is gone. The driver keeps it over its
// restarts and removes it with the device. In a container it is a mount, which stays
// and has no links any more.
func (s *socket) removed() bool {
	info, err := os.Stat(filepath.Dir(s.path))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && stat.Nlink == 0
}

// Snapshot merges what all sockets show. It waits for a driver that is restarting
// until ctx ends, and then fails with ErrUnreachable.
func (c *Client) Snapshot(ctx context.Context) (Snapshot, error) {
	defer c.sayIfSlow()()
	all, err := c.snapshots(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	return merge(all), nil
}

// sayIfSlow logs that somebody waits, unless the function it returns is called soon.
func (c *Client) sayIfSlow() func() bool {
	return time.AfterFunc(lastPause, func() {
		c.logger.Info("Waiting for the node driver", "socket", c.sockets[0].path)
	}).Stop
}

// snapshots asks every socket, in the order of c.sockets.
func (c *Client) snapshots(ctx context.Context) ([]Snapshot, error) {
	all := make([]Snapshot, len(c.sockets))
	errs := make([]error, len(c.sockets))
	var wait sync.WaitGroup
	for i, s := range c.sockets {
		wait.Go(func() {
			response, err := s.api.Snapshot(ctx, &v1alpha1.SnapshotRequest{})
			if err != nil {
				errs[i] = callError(s, err)
				return
			}
			all[i] = fromWire(response)
		})
	}
	wait.Wait()
	return all, errors.Join(errs...)
}

// callError says which socket failed and what that means.
func callError(s *socket, err error) error {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded:
		return fmt.Errorf("%w on %s: %s", ErrUnreachable, s.path, status.Convert(err).Message())
	case codes.Canceled:
		return fmt.Errorf("call on %s: %w", s.path, context.Canceled)
	default:
		return fmt.Errorf("call on %s: %w", s.path, err)
	}
}

// merge puts several views together: a GPU or partition that shows in more than
// one appears once.
func merge(views []Snapshot) Snapshot {
	var merged Snapshot
	byUUID := map[string]int{}
	for _, view := range views {
		for _, g := range view.GPUs {
			at, known := byUUID[g.UUID]
			if !known {
				byUUID[g.UUID] = len(merged.GPUs)
				merged.GPUs = append(merged.GPUs, g)
				continue
			}
			m := &merged.GPUs[at]
			m.MIGMode = max(m.MIGMode, g.MIGMode)
			if g.Whole && !m.Whole {
				m.Health = g.Health
				m.Whole, m.MemoryUsed, m.Utilization, m.Processes = true, g.MemoryUsed, g.Utilization, g.Processes
			}
			for _, p := range g.Partitions {
				if !slices.ContainsFunc(m.Partitions, func(o PartitionStatus) bool { return o.UUID == p.UUID }) {
					m.Partitions = append(m.Partitions, p)
				}
			}
		}
	}
	merged.sort()
	return merged
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
// driver is unreachable, until ctx ends, and then fails with ErrUnreachable; ctx
// does not bound the lease itself. The lease lasts until Lease.Close, Client.Close
// or the end of the process, or until it is lost for good (Lease.Done). Where the memory does not fit the error is an
// *OutOfMemoryError.
func (c *Client) Hold(ctx context.Context, opts HoldOptions) (*Lease, error) {
	if opts.MemoryBytes < 0 {
		return nil, fmt.Errorf("hold %d bytes of device memory: must not be negative", opts.MemoryBytes)
	}
	if opts.Utilization < 0 || opts.Utilization > 100 {
		return nil, fmt.Errorf("report a utilization of %d %%: must be from 0 to 100", opts.Utilization)
	}
	defer c.sayIfSlow()()
	s, uuid, err := c.find(ctx, opts.Device)
	if err != nil {
		return nil, err
	}
	if opts.PID == 0 {
		opts.PID = os.Getpid()
	}
	if opts.ProcessName == "" {
		opts.ProcessName = executableName()
	}
	l := newLease(c, s, uuid, opts)
	if err := c.add(l); err != nil {
		return nil, err
	}
	if err := l.start(ctx); err != nil {
		return nil, err
	}
	return l, nil
}

// find returns the socket that shows the device, and the UUID of the device.
func (c *Client) find(ctx context.Context, uuid string) (*socket, string, error) {
	views, err := c.snapshots(ctx)
	if err != nil {
		return nil, "", err
	}
	if uuid == "" {
		devices := merge(views).Devices()
		if len(devices) != 1 {
			return nil, "", fmt.Errorf("%d devices are visible, say which one to use: %s", len(devices), uuids(devices))
		}
		uuid = devices[0].UUID()
	}
	for i, view := range views {
		if slices.ContainsFunc(view.Devices(), func(d Device) bool { return d.UUID() == uuid }) {
			return c.sockets[i], uuid, nil
		}
	}
	return nil, "", fmt.Errorf("device %s is not visible, these are: %s", uuid, uuids(merge(views).Devices()))
}

func uuids(devices []Device) string {
	if len(devices) == 0 {
		return "none"
	}
	var names []string
	for _, d := range devices {
		names = append(names, d.UUID())
	}
	return strings.Join(names, ", ")
}

func executableName() string {
	if path, err := os.Executable(); err == nil {
		return filepath.Base(path)
	}
	return filepath.Base(os.Args[0])
}

// add registers a lease for Close.
func (c *Client) add(l *Lease) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errors.New("the device client is closed")
	}
	c.leases[l] = struct{}{}
	return nil
}

func (c *Client) remove(l *Lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.leases, l)
}

// driverLost is called by each lease that notices. The first one logs; the others,
// and those that notice while the first is back already, belong to the same outage.
func (c *Client) driverLost(s *socket, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost++
	if !c.outage {
		c.outage = true
		c.logger.Warn("Lost the node driver, reconnecting", "socket", s.path, "err", status.Convert(err).Message())
	}
}

// driverBack is called by each of these leases that is granted again or has ended
// meanwhile. An outage is over when no lease has been missing for a while.
func (c *Client) driverBack(granted bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost--
	if !granted {
		c.outage = c.outage && c.lost > 0
		return
	}
	time.AfterFunc(lastPause, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.outage && c.lost == 0 && !c.closed {
			c.outage = false
			c.logger.Info("The node driver is back, memory is held again")
		}
	})
}

// Close ends all leases and connections of the client. More than one call is fine.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	var leases []*Lease
	for l := range c.leases {
		leases = append(leases, l)
	}
	c.mu.Unlock()
	var wait sync.WaitGroup
	for _, l := range leases {
		wait.Go(func() { _ = l.Close() }) // always nil
	}
	wait.Wait()
	var errs []error
	for _, s := range c.sockets {
		if err := s.conn.Close(); err != nil && status.Code(err) != codes.Canceled {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
