package deviceapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/simgpu/simgpu/deviceapi/v1alpha1"
)

// closePatience is how long Lease.Close waits for the driver to confirm.
const closePatience = 2 * time.Second

// Lease is held memory. It comes back by itself after a restart of the driver. Done
// and Err tell where it cannot.
type Lease struct {
	client  *Client
	socket  *socket
	request *v1alpha1.HoldRequest // sent first on every stream; owned by run

	ctx         context.Context // of the streams
	cancel      context.CancelCauseFunc
	closing     chan struct{} // closed by Close
	closeOnce   sync.Once
	done        chan struct{} // closed by end
	err         error         // why it was lost; written before done is closed
	utilization chan int      // latest value to report; capacity 1
}

func newLease(c *Client, s *socket, uuid string, opts HoldOptions) *Lease {
	ctx, cancel := context.WithCancelCause(context.Background())
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
	release := context.AfterFunc(ctx, func() { l.cancel(nil) })
	stream, err := l.acquire()
	var oom *OutOfMemoryError
	if !release() && !errors.As(err, &oom) {
		err = context.Cause(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("%w on %s: no memory granted in time", ErrUnreachable, l.socket.path)
		}
	}
	if err != nil {
		l.end(err)
		return err
	}
	l.request.Rehold = true
	go func() { l.end(l.run(stream)) }()
	return nil
}

// end leaves nothing of the lease but the reason.
func (l *Lease) end(reason error) {
	l.cancel(nil)
	l.client.remove(l)
	l.err = reason
	close(l.done)
}

// run keeps the lease. It returns nil when the lease was closed and the reason when
// it was lost for good.
func (l *Lease) run(stream holdStream) error {
	for {
		err := l.keep(stream)
		if err == nil {
			return nil
		}
		if forGood(err) {
			return refusal(l.socket, err)
		}
		l.client.driverLost(l.socket, err)
		stream, err = l.acquire()
		l.client.driverBack(err == nil)
		if err != nil && l.isClosing() {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// acquire tries until the lease is granted. It waits for a driver that does not
// answer. A lease that was granted before also outlasts refusals that may pass.
func (l *Lease) acquire() (holdStream, error) {
	defer l.watch()()
	logged := false
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		stream, err := l.open()
		if err == nil {
			return stream, nil
		}
		if l.ctx.Err() != nil {
			return nil, context.Cause(l.ctx)
		}
		if !unanswered(err) {
			if forGood(err) || !l.request.Rehold {
				return nil, refusal(l.socket, err)
			}
			if !logged {
				logged = true
				l.client.logger.Error("The node driver refuses memory that was held before, trying on",
					"socket", l.socket.path, "err", status.Convert(err).Message())
			}
		}
		if err := sleep(l.ctx, pause); err != nil {
			return nil, context.Cause(l.ctx)
		}
	}
}

// unanswered says that the driver is away, or was stopping, which gives Canceled.
func unanswered(err error) bool {
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.Canceled
}

// forGood says that asking again for the same lease is in vain.
func forGood(err error) bool {
	switch status.Code(err) {
	case codes.NotFound, codes.Aborted, codes.PermissionDenied, codes.InvalidArgument:
		return true
	}
	_, oom := outOfMemory(err)
	return oom
}

// refusal is the driver's answer as callers know it.
func refusal(s *socket, err error) error {
	if oom, ok := outOfMemory(err); ok {
		return oom
	}
	if uuid, lost := deviceLost(err); lost {
		return fmt.Errorf("%s: %w", uuid, ErrDeviceLost)
	}
	if status.Code(err) == codes.NotFound {
		return fmt.Errorf("%w on %s: %s", ErrDeviceGone, s.path, status.Convert(err).Message())
	}
	return callError(s, err)
}

// watch ends acquire where that has become pointless: the lease was closed, or its
// device is gone. The function it returns ends that.
func (l *Lease) watch() func() {
	stop := make(chan struct{})
	go func() {
		tick := time.NewTicker(lastPause)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-l.closing:
				l.cancel(nil)
				return
			case <-tick.C:
				if l.socket.removed() {
					l.cancel(fmt.Errorf("%w: %s was removed", ErrDeviceGone, filepath.Dir(l.socket.path)))
					return
				}
			}
		}
	}()
	return func() { close(stop) }
}

// open opens one stream and waits for the grant.
func (l *Lease) open() (holdStream, error) {
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
			return reason
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

// Done is closed when the lease has ended: by Close, or because it is lost for good.
// While the driver is away the lease has not ended.
func (l *Lease) Done() <-chan struct{} { return l.done }

// Err says why the lease is lost for good. It is nil while the lease lasts and when
// Close has ended it. The reasons are
//
//	ErrDeviceGone         the device was unprepared, or its socket serves another one
//	ErrDeviceLost         the GPU is lost
//	*OutOfMemoryError     after a restart of the driver the memory does not fit any more
//	a gRPC status error   the lease was taken over (Aborted), or the driver does not
//	                      accept it any more (PermissionDenied, InvalidArgument)
func (l *Lease) Err() error {
	select {
	case <-l.done:
		return l.err
	default:
		return nil
	}
}

// Close gives the memory back and waits until the driver knows it or is
// unreachable. More than one call is fine. The error is always nil.
func (l *Lease) Close() error {
	l.closeOnce.Do(func() { close(l.closing) })
	<-l.done
	return nil
}
