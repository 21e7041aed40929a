package deviceapi

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"github.com/simgpu/simgpu/deviceapi/v1alpha1"
)

// DefaultGrace is how long a device that was served before waits for its old
// holders before it grants memory to new ones. It is longer than the longest pause
// between two attempts of a client to reconnect.
const DefaultGrace = 3 * time.Second

const (
	deviceSocketMode = 0o666 // workloads run as any user
	nodeSocketMode   = 0o600 // for people who exec into the driver's pod
)

// ServerOptions configures a Server. The zero value is usable.
type ServerOptions struct {
	// Logger receives what the server cannot return; nil: nothing is logged.
	// A klog logger fits in with slog.New(logr.ToSlogHandler(logger)).
	Logger *slog.Logger
	// Grace replaces DefaultGrace; negative: none.
	Grace time.Duration
}

// Server serves prepared devices and the node view. Safe for concurrent use.
type Server struct {
	logger *slog.Logger
	grace  time.Duration
	ledger *ledger

	mu        sync.Mutex
	endpoints map[string]*endpoint // by folder
	stopped   bool
}

// endpoint is one served socket.
type endpoint struct {
	dir      string
	uuid     string // of the device; empty: the node view
	listener *listener
	server   *grpc.Server
	done     chan struct{} // closed when serving has ended
}

// NewServer returns a server without any socket.
func NewServer(opts ServerOptions) *Server {
	s := &Server{
		logger:    opts.Logger,
		grace:     opts.Grace,
		ledger:    newLedger(),
		endpoints: map[string]*endpoint{},
	}
	if s.logger == nil {
		s.logger = slog.New(slog.DiscardHandler)
	}
	if s.grace == 0 {
		s.grace = DefaultGrace
	}
	return s
}

// Open serves d at dir/device.sock and returns once clients can connect. It
// creates dir and replaces a socket file left by an earlier process. Where dir
// already serves the same device only its description is updated.
//
// The folder belongs to this package. Containers should see it mounted read-only,
// which does not keep them from connecting. The path of the socket must be at most
// 107 bytes long.
func (s *Server) Open(dir string, d Device) error {
	if err := d.check(); err != nil {
		return fmt.Errorf("serve device in %s: %w", dir, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	dir = filepath.Clean(dir)
	if e := s.endpoints[dir]; e != nil {
		if e.uuid == d.UUID() && e.reachable() {
			s.ledger.update(dir, d)
			return nil
		}
		s.end(e)
	}
	s.ledger.open(dir, d)
	if err := s.serve(dir, d.UUID(), deviceSocketMode); err != nil {
		s.ledger.close(d.UUID(), dir)
		return fmt.Errorf("serve device %s: %w", d.UUID(), err)
	}
	return nil
}

// Close ends what dir serves, releases what was held through it, and removes dir.
// An unknown or absent dir is no error.
func (s *Server) Close(dir string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	dir = filepath.Clean(dir)
	if e := s.endpoints[dir]; e != nil {
		s.end(e)
	}
	if err := errors.Join(os.RemoveAll(temporary(dir)), os.RemoveAll(dir)); err != nil {
		return fmt.Errorf("remove device folder: %w", err)
	}
	return nil
}

// OpenNode serves the node view at dir/device.sock: gpus and every partition that
// is open, read only. Calling it again replaces the list of GPUs.
func (s *Server) OpenNode(dir string, gpus []GPU) error {
	for _, g := range gpus {
		if err := g.check(); err != nil {
			return fmt.Errorf("serve node view: %w", err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	dir = filepath.Clean(dir)
	s.ledger.setGPUs(gpus)
	if e := s.endpoints[dir]; e != nil {
		if e.uuid == "" && e.reachable() {
			return nil
		}
		s.end(e)
	}
	if err := s.serve(dir, "", nodeSocketMode); err != nil {
		return fmt.Errorf("serve node view: %w", err)
	}
	return nil
}

// SetHealth replaces what is broken, by UUID of GPUs and partitions; others are
// healthy. Everything held of a GPU that is lost ends, and nothing can be held of it
// until it is back.
func (s *Server) SetHealth(health map[string]Health) { s.ledger.setHealth(maps.Clone(health)) }

// Snapshot is the node view.
func (s *Server) Snapshot() Snapshot { return s.ledger.node() }

// Stop ends all serving and waits for it. The folders stay, so that the next
// process can serve the same devices and clients come back. Stop works on a nil
// Server and more than once.
func (s *Server) Stop() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	for _, e := range s.endpoints {
		s.end(e)
	}
}

// serve starts an endpoint. The caller holds the lock.
func (s *Server) serve(dir, uuid string, mode os.FileMode) error {
	if s.stopped {
		return errors.New("the server is stopped")
	}
	socket, servedBefore, err := listen(dir, mode)
	if err != nil {
		return err
	}
	e := &endpoint{dir: dir, uuid: uuid, listener: newListener(socket), done: make(chan struct{})}
	limit := &limiter{rate.NewLimiter(callsPerSecond, callsBurst)}
	e.server = grpc.NewServer(
		grpc.MaxRecvMsgSize(maxMessageBytes),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(5*time.Second),
		// Small buffers: what a client can make the driver keep is bounded by
		// the number of its connections.
		grpc.ReadBufferSize(4096),
		grpc.WriteBufferSize(4096),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Minute, PermitWithoutStream: false}),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: time.Minute}),
		grpc.UnaryInterceptor(limit.unary),
		grpc.StreamInterceptor(limit.stream),
		grpc.WaitForHandlers(true),
	)
	svc := &service{ledger: s.ledger, logger: s.logger, dir: dir, uuid: uuid, limit: limit}
	if servedBefore && s.grace > 0 {
		svc.graceEnds = time.Now().Add(s.grace)
	}
	v1alpha1.RegisterDeviceServer(e.server, svc)
	s.endpoints[dir] = e
	go func() {
		defer close(e.done)
		// Both errors: closed by end, before or after serving began.
		err := e.server.Serve(e.listener)
		if err != nil && !errors.Is(err, grpc.ErrServerStopped) && !errors.Is(err, net.ErrClosed) {
			s.logger.Error("Device socket failed", "dir", dir, "device", uuid, "err", err)
		}
	}()
	return nil
}

// end stops an endpoint and waits until its clients are gone. The folder and the
// socket file stay. The caller holds the lock.
func (s *Server) end(e *endpoint) {
	e.listener.cutOff()
	e.server.Stop()
	<-e.done
	delete(s.endpoints, e.dir)
	if e.uuid != "" {
		s.ledger.close(e.uuid, e.dir)
	}
}

// reachable is false once serving has failed or the socket file is gone.
func (e *endpoint) reachable() bool {
	select {
	case <-e.done:
		return false
	default:
	}
	_, err := os.Lstat(filepath.Join(e.dir, SocketName))
	return err == nil
}

// temporary is where the socket of dir is until it is moved into place.
func temporary(dir string) string {
	return filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir))
}

// listen creates dir and listens on its socket. servedBefore says that there was a
// socket already.
//
// The socket is made beside dir and moved into place: it never shows with the wrong
// mode, it replaces an old one in one step, and nothing inside dir, which a
// container may be able to write to, is followed or changed by name.
func listen(dir string, mode os.FileMode) (socket net.Listener, servedBefore bool, err error) {
	path := filepath.Join(dir, SocketName)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, false, err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, false, err
	}
	if _, err := os.Lstat(path); err == nil {
		servedBefore = true
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, false, err
	}
	temporary := temporary(dir)
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, false, err
	}
	var unix *net.UnixListener
	err = withAddress(temporary, func(address string) error {
		unix, err = net.ListenUnix("unix", &net.UnixAddr{Name: address, Net: "unix"})
		return err
	})
	if err != nil {
		return nil, false, err
	}
	unix.SetUnlinkOnClose(false)
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(), os.Remove(temporary))
		}
	}()
	if err := os.Chmod(temporary, mode); err != nil {
		return nil, false, err
	}
	if err := os.Rename(temporary, path); err != nil {
		return nil, false, err
	}
	return unix, servedBefore, nil
}
