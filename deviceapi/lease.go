package deviceapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/simgpu/simgpu/deviceapi/v1alpha1"
)

// closePatience is how long Lease.Close waits for the driver to confirm.
const closePatience = 2 * time.Second

// Lease is held memory. It comes back by itself after a restart of the driver.
type Lease struct {
	client  *Client
	socket  *socket
	request *v1alpha1.HoldRequest // sent first on every stream; owned by run

	ctx         context.Context // of the streams
	cancel      context.CancelFunc
	closing     chan struct{} // closed by Close
	closeOnce   sync.Once
	done        chan struct{} // closed when run has ended
	utilization chan int      // latest value to report; capacity 1
}

func newLease(c *Client, s *socket, uuid string, opts HoldOptions) *Lease {
	ctx, cancel := context.WithCancel(context.Background())
	return &Lease{
		client: c,
		socket: s,
		request: &v1alpha1.HoldRequest{
			LeaseId:            newLeaseID(),
			DeviceUuid:         uuid,
			MemoryBytes:        uint64(opts.MemoryBytes),
			Pid:                uint32(opts.PID),
			ProcessName:        cleanProcessName(opts.ProcessName),
			UtilizationPercent: uint32(opts.Utilization),
		},
		ctx:         ctx,
		cancel:      cancel,
		closing:     make(chan struct{}),
		done:        make(chan struct{}),
		utilization: make(chan int, 1),
	}
}

type holdStream = grpc.BidiStreamingClient[v1alpha1.HoldRequest, v1alpha1.HoldResponse]

// start waits for the first grant, bounded by ctx, and leaves run behind.
func (l *Lease) start(ctx context.Context) error {
	// The stream outlives ctx, so it has a context of its own, which ctx can
	// end until the grant.
	release := context.AfterFunc(ctx, l.cancel)
	defer l.cancelOnClose()()
	stream, err := l.firstGrant()
	var oom *OutOfMemoryError
	if !release() && !errors.As(err, &oom) {
		err = context.Cause(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("%w on %s: no memory granted in time", ErrUnreachable, l.socket.path)
		}
	}
	if err != nil {
		l.cancel()
		close(l.done)
		l.client.remove(l)
		return err
	}
	l.request.Rehold = true
	go l.run(stream)
	return nil
}

// cancelOnClose lets Close end an attempt to get the lease. The function it returns
// ends that.
func (l *Lease) cancelOnClose() func() {
	stop := make(chan struct{})
	go func() {
		select {
		case <-l.closing:
			l.cancel()
		case <-stop:
		}
	}()
	return func() { close(stop) }
}

// firstGrant opens the stream. It tries again where the driver went away between
// the connection and the grant.
func (l *Lease) firstGrant() (holdStream, error) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		stream, err := l.acquire()
		if err == nil {
			return stream, nil
		}
		if oom, ok := outOfMemory(err); ok {
			return nil, oom
		}
		if l.ctx.Err() != nil {
			return nil, l.ctx.Err()
		}
		// Canceled comes from a driver that is stopping.
		if code := status.Code(err); code != codes.Unavailable && code != codes.Canceled {
			return nil, callError(l.socket, err)
		}
		if err := sleep(l.ctx, pause); err != nil {
			return nil, err
		}
	}
}

// acquire opens one stream and waits for the grant.
func (l *Lease) acquire() (holdStream, error) {
	ctx, cancel := context.WithCancel(l.ctx)
	stream, err := l.socket.api.Hold(ctx)
	if err == nil {
		// A failed Send shows its reason in Recv.
		if err = stream.Send(l.request); err == nil || errors.Is(err, io.EOF) {
			_, err = stream.Recv()
		}
	}
	if err != nil {
		cancel()
		return nil, err
	}
	context.AfterFunc(stream.Context(), cancel)
	return stream, nil
}

// run keeps the lease until Close.
func (l *Lease) run(stream holdStream) {
	defer close(l.done)
	defer l.client.remove(l)
	defer l.cancel()
	for {
		err := l.keep(stream)
		if err == nil {
			return
		}
		l.client.driverLost(l.socket, err)
		stream = l.reacquire()
		l.client.driverBack(stream != nil)
		if stream == nil {
			return
		}
	}
}

// keep stays on a granted stream. It returns nil when the lease was closed and the
// reason when the stream broke.
func (l *Lease) keep(stream holdStream) error {
	var reason error // once broken is closed
	broken := make(chan struct{})
	go func() {
		defer close(broken)
		for reason == nil {
			_, reason = stream.Recv()
		}
	}()
	for {
		select {
		case percent := <-l.utilization:
			l.request.UtilizationPercent = uint32(percent)
			// A failure shows in Recv.
			_ = stream.Send(l.request)
		case <-broken:
			if l.isClosing() {
				return nil
			}
			return fmt.Errorf("stream ended: %s", status.Convert(reason).Message())
		case <-l.closing:
			_ = stream.CloseSend()
			select {
			case <-broken: // the driver has confirmed, or is gone
			case <-time.After(closePatience):
			}
			return nil
		}
	}
}

func (l *Lease) isClosing() bool {
	select {
	case <-l.closing:
		return true
	default:
		return false
	}
}

// reacquire tries until the lease is granted again, or returns nil when it was
// closed meanwhile. A refusal does not end it: the process goes on believing that
// it has its memory, and whoever took it may give it back.
func (l *Lease) reacquire() holdStream {
	defer l.cancelOnClose()()
	refused := false
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		stream, err := l.acquire()
		if err == nil {
			return stream
		}
		if l.ctx.Err() != nil {
			return nil
		}
		if code := status.Code(err); code != codes.Unavailable && code != codes.Canceled && !refused {
			refused = true
			l.client.logger.Error("The node driver refuses memory that was held before, trying on",
				"socket", l.socket.path, "err", status.Convert(err).Message())
		}
		if err := sleep(l.ctx, pause); err != nil {
			return nil
		}
	}
}

// DeviceUUID is the device the lease is on.
func (l *Lease) DeviceUUID() string { return l.request.GetDeviceUuid() }

// SetUtilization reports a new utilization in percent, from 0 to 100; values
// outside are cut. It never blocks: of several quick calls the last one counts.
func (l *Lease) SetUtilization(percent int) {
	percent = min(max(percent, 0), 100)
	for {
		select {
		case l.utilization <- percent:
			return
		default:
		}
		select {
		case <-l.utilization:
		default:
		}
	}
}

// Close gives the memory back and waits until the driver knows it or is
// unreachable. More than one call is fine. The error is always nil.
func (l *Lease) Close() error {
	l.closeOnce.Do(func() { close(l.closing) })
	<-l.done
	return nil
}
