package deviceapi

import (
	"errors"
	"log/slog"
	"time"
)

// DefaultGrace is how long a device that was served before waits for its old
// holders before it grants memory to new ones.
const DefaultGrace = 3 * time.Second

// ServerOptions configures a Server. The zero value is usable.
type ServerOptions struct {
	// Logger receives what the server cannot return; nil: nothing is logged.
	// A klog logger fits in with slog.New(logr.ToSlogHandler(logger)).
	Logger *slog.Logger
	// Grace replaces DefaultGrace; negative: none.
	Grace time.Duration
}

// Server serves prepared devices and the node view. Safe for concurrent use.
type Server struct{}

// NewServer returns a server without any socket.
func NewServer(opts ServerOptions) *Server { return &Server{} }

// Open serves d at dir/device.sock and returns once clients can connect. It
// creates dir, replaces a socket file left by an earlier process, and does nothing
// where dir already serves the same device.
func (s *Server) Open(dir string, d Device) error { return errors.New("not implemented") }

// Close ends what dir serves, releases what was held through it, and removes dir.
// An unknown or absent dir is no error.
func (s *Server) Close(dir string) error { return errors.New("not implemented") }

// OpenNode serves the node view at dir/device.sock: gpus and every partition that
// is open. Calling it again replaces the list of GPUs.
func (s *Server) OpenNode(dir string, gpus []GPU) error { return errors.New("not implemented") }

// Snapshot is the node view.
func (s *Server) Snapshot() Snapshot { return Snapshot{} }

// Stop ends all serving and waits for it. The folders stay, so that the next
// process can serve the same devices and clients come back. Stop works on a nil
// Server and more than once.
func (s *Server) Stop() {}
