package deviceapi

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/simgpu/simgpu/deviceapi/v1alpha1"
)

// service answers the calls of one socket.
type service struct {
	v1alpha1.UnimplementedDeviceServer

	ledger *ledger
	logger *slog.Logger
	dir    string
	uuid   string // of the device; empty: the node view
	limit  *limiter
	// graceEnds is when a device that was served before grants memory to
	// holders that are new.
	graceEnds time.Time
}

// Snapshot implements v1alpha1.DeviceServer.
func (s *service) Snapshot(context.Context, *v1alpha1.SnapshotRequest) (*v1alpha1.SnapshotResponse, error) {
	if s.uuid == "" {
		return toWire(s.ledger.node()), nil
	}
	return toWire(s.ledger.device(s.uuid, s.dir)), nil
}

// Hold implements v1alpha1.DeviceServer.
func (s *service) Hold(stream grpc.BidiStreamingServer[v1alpha1.HoldRequest, v1alpha1.HoldResponse]) error {
	ctx := stream.Context()
	req, err := stream.Recv()
	if err != nil {
		return err
	}
	if s.uuid == "" {
		return status.Error(codes.PermissionDenied, "the node view holds no memory: use the socket of a device")
	}
	if uuid := req.GetDeviceUuid(); uuid != "" && uuid != s.uuid {
		return status.Errorf(codes.NotFound, "this socket serves %s", s.uuid)
	}
	h, err := checkHold(s.dir, req)
	if err != nil {
		return err
	}
	if !req.GetRehold() {
		if err := sleep(ctx, time.Until(s.graceEnds)); err != nil {
			return err
		}
	}
	free, total, err := s.ledger.acquire(s.uuid, h)
	if err != nil {
		var oom *OutOfMemoryError
		if errors.As(err, &oom) {
			return outOfMemoryStatus(oom)
		}
		if errors.Is(err, ErrDeviceLost) {
			return lostStatus(s.uuid)
		}
		return status.Error(codes.ResourceExhausted, err.Error())
	}
	defer s.ledger.release(s.uuid, h)
	s.logger.Debug("Memory held", "device", s.uuid, "process", h.Name, "pid", h.PID, "bytes", h.Memory, "rehold", req.GetRehold())
	if err := stream.Send(&v1alpha1.HoldResponse{DeviceUuid: s.uuid, FreeBytes: uint64(free), TotalBytes: uint64(total)}); err != nil {
		return err
	}

	// The reader ends when this function returns: the stream's context ends.
	ended := make(chan error, 1)
	go func() { ended <- s.follow(stream, h) }()
	select {
	case err := <-ended:
		return err
	case <-h.replaced:
		return status.Error(codes.Aborted, "a newer stream took this lease over")
	case <-h.lost:
		return lostStatus(s.uuid)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// follow applies the later messages of a Hold until the client ends the stream.
func (s *service) follow(stream grpc.BidiStreamingServer[v1alpha1.HoldRequest, v1alpha1.HoldResponse], h *hold) error {
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if req.GetUtilizationPercent() > 100 {
			return status.Errorf(codes.InvalidArgument, "utilization_percent must be at most 100, not %d", req.GetUtilizationPercent())
		}
		s.ledger.setUtilization(h, int(req.GetUtilizationPercent()))
		if err := s.limit.Wait(stream.Context()); err != nil {
			return err
		}
	}
}

// limiter slows down a client that calls too often; it refuses nobody.
type limiter struct{ *rate.Limiter }

func (l *limiter) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := l.Wait(ctx); err != nil {
		return nil, status.Error(codes.ResourceExhausted, "too many calls on this socket")
	}
	return handler(ctx, req)
}

func (l *limiter) stream(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := l.Wait(stream.Context()); err != nil {
		return status.Error(codes.ResourceExhausted, "too many calls on this socket")
	}
	return handler(srv, stream)
}

// sleep waits for d or for the end of ctx; d may be negative.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
