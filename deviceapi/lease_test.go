package deviceapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/simgpu/simgpu/deviceapi/v1alpha1"
)

// ended waits for the end of a lease and returns the reason.
func ended(t *testing.T, l *Lease) error {
	t.Helper()
	select {
	case <-l.Done():
		return l.Err()
	case <-time.After(patience):
		t.Fatal("the lease goes on")
		return nil
	}
}

func TestLeaseIsLostForGood(t *testing.T) {
	d := slice3g(h100(0), 0)
	another := slice3g(h100(0), 4)
	small := slice3g(h100(0), 0)
	small.Partition.MemoryBytes = 10 * MiB
	tests := map[string]struct {
		lose func(t *testing.T, s *Server, dir string, l *Lease)
		want func(error) bool
	}{
		"the device was unprepared": {
			lose: func(t *testing.T, s *Server, dir string, _ *Lease) {
				if err := s.Close(dir); err != nil {
					t.Fatal(err)
				}
			},
			want: isDeviceGone,
		},
		"the device was unprepared while the driver was away": {
			lose: func(t *testing.T, s *Server, dir string, _ *Lease) {
				s.Stop()
				if err := os.RemoveAll(dir); err != nil {
					t.Fatal(err)
				}
			},
			want: isDeviceGone,
		},
		"the socket serves another device": {
			lose: func(t *testing.T, s *Server, dir string, _ *Lease) { open(t, s, dir, another) },
			want: isDeviceGone,
		},
		"the memory does not fit after a restart": {
			lose: func(t *testing.T, s *Server, dir string, _ *Lease) {
				s.Stop()
				open(t, startServer(t, -1), dir, small)
			},
			want: func(err error) bool {
				var oom *OutOfMemoryError
				return errors.As(err, &oom) &&
					*oom == OutOfMemoryError{DeviceUUID: d.UUID(), Requested: 100 * MiB, Free: 10 * MiB, Total: 10 * MiB}
			},
		},
		"a newer stream took the lease over": {
			lose: func(t *testing.T, _ *Server, _ string, l *Lease) {
				stream, err := l.socket.api.Hold(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.Send(l.request); err != nil {
					t.Fatal(err)
				}
			},
			want: hasCode(codes.Aborted),
		},
		"the socket became the node view": {
			lose: func(t *testing.T, s *Server, dir string, _ *Lease) {
				if err := s.OpenNode(dir, nil); err != nil {
					t.Fatal(err)
				}
			},
			want: hasCode(codes.PermissionDenied),
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			root := tempDir(t)
			dir := filepath.Join(root, "dev")
			s := startServer(t, -1)
			open(t, s, dir, d)
			c := discover(t, root, nil)
			l := mustHold(t, c, HoldOptions{MemoryBytes: 100 * MiB})
			if err := l.Err(); err != nil {
				t.Errorf("a lease that lasts has the error %v", err)
			}
			test.lose(t, s, dir, l)
			err := ended(t, l)
			if err == nil || !test.want(err) {
				t.Errorf("the lease ended with %v", err)
			}
			if err := l.Close(); err != nil {
				t.Errorf("Close of a lost lease: %v", err)
			}
			if l.Err() == nil {
				t.Error("Close made the reason of the loss disappear")
			}
		})
	}
}

func isDeviceGone(err error) bool { return errors.Is(err, ErrDeviceGone) }

func hasCode(code codes.Code) func(error) bool {
	return func(err error) bool { return status.Code(err) == code }
}

// A container keeps the folder of a device that was unprepared: as a mount of a
// folder that has no name any more. A descriptor of such a folder is the same thing.
func TestLeaseEndsWhereTheFolderIsAMount(t *testing.T) {
	host, container := filepath.Join(tempDir(t), "dev"), tempDir(t)
	s := startServer(t, -1)
	open(t, s, host, Device{GPU: h100(0)})
	folder, err := os.Open(host)
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	if err := os.Symlink(fmt.Sprintf("/proc/self/fd/%d", folder.Fd()), filepath.Join(container, "dev")); err != nil {
		t.Fatal(err)
	}
	l := mustHold(t, discover(t, container, nil), HoldOptions{MemoryBytes: MiB})
	if err := s.Close(host); err != nil {
		t.Fatal(err)
	}
	if err := ended(t, l); !isDeviceGone(err) {
		t.Errorf("the lease ended with %v, want ErrDeviceGone", err)
	}
}

func TestCloseEndsALeaseWithoutAnError(t *testing.T) {
	tests := map[string]struct {
		away  bool // the driver, when the lease is closed
		close func(*Client, *Lease) error
	}{
		"the lease":                          {false, func(_ *Client, l *Lease) error { return l.Close() }},
		"the client":                         {false, func(c *Client, _ *Lease) error { return c.Close() }},
		"the lease while the driver is away": {true, func(_ *Client, l *Lease) error { return l.Close() }},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			root := tempDir(t)
			s := startServer(t, -1)
			open(t, s, filepath.Join(root, "dev"), Device{GPU: h100(0)})
			logs := newLogCounter()
			c := discover(t, root, slog.New(logs))
			l := mustHold(t, c, HoldOptions{MemoryBytes: MiB})
			if test.away {
				s.Stop()
				eventually(t, "the lease notices", func() bool { return logs.count("Lost the node driver, reconnecting") == 1 })
			}
			if err := test.close(c, l); err != nil {
				t.Fatal(err)
			}
			if err := ended(t, l); err != nil {
				t.Errorf("a closed lease has the error %v", err)
			}
		})
	}
}

// moodyDriver grants a lease, breaks the stream, answers the next attempt with a
// code of its own, and grants again.
type moodyDriver struct {
	v1alpha1.UnimplementedDeviceServer
	answer codes.Code
	calls  atomic.Int32
}

func (*moodyDriver) Snapshot(context.Context, *v1alpha1.SnapshotRequest) (*v1alpha1.SnapshotResponse, error) {
	return toWire(Snapshot{GPUs: []GPUStatus{{GPU: h100(0), Whole: true}}}), nil
}

func (m *moodyDriver) Hold(stream grpc.BidiStreamingServer[v1alpha1.HoldRequest, v1alpha1.HoldResponse]) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	call := m.calls.Add(1)
	if call == 2 {
		return status.Error(m.answer, "in a mood")
	}
	if err := stream.Send(&v1alpha1.HoldResponse{}); err != nil {
		return err
	}
	if call == 1 {
		return status.Error(codes.Unavailable, "stopping")
	}
	<-stream.Context().Done()
	return nil
}

func TestAnswersToAReHold(t *testing.T) {
	tests := map[codes.Code]bool{ // the lease is lost
		codes.NotFound:          true,
		codes.Aborted:           true,
		codes.PermissionDenied:  true,
		codes.InvalidArgument:   true,
		codes.Unavailable:       false,
		codes.Canceled:          false,
		codes.ResourceExhausted: false, // without the detail of memory: too many leases
		codes.Internal:          false,
	}
	for answer, lost := range tests {
		t.Run(answer.String(), func(t *testing.T) {
			root := tempDir(t)
			if err := os.Mkdir(filepath.Join(root, "dev"), 0o700); err != nil {
				t.Fatal(err)
			}
			listener, err := net.Listen("unix", socketPath(filepath.Join(root, "dev")))
			if err != nil {
				t.Fatal(err)
			}
			driver := &moodyDriver{answer: answer}
			server := grpc.NewServer()
			v1alpha1.RegisterDeviceServer(server, driver)
			go func() { _ = server.Serve(listener) }()
			t.Cleanup(server.Stop)

			l := mustHold(t, discover(t, root, nil), HoldOptions{MemoryBytes: MiB})
			if lost {
				if err := ended(t, l); err == nil {
					t.Error("the lease ended without a reason")
				}
				return
			}
			eventually(t, "the lease is asked for again", func() bool { return driver.calls.Load() == 3 })
			select {
			case <-l.Done():
				t.Errorf("the lease ended with %v", l.Err())
			default:
			}
		})
	}
}
