package deviceapi

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/simgpu/simgpu/deviceapi/v1alpha1"
)

// rawCodec sends bytes as they are.
type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (rawCodec) Unmarshal(data []byte, v any) error { *v.(*[]byte) = data; return nil }
func (rawCodec) Name() string                       { return "proto" }

// fuzzServer serves a device to whoever sends anything.
func fuzzServer(f *testing.F) (socket string) {
	f.Helper()
	dir, err := os.MkdirTemp("", "sg")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { os.RemoveAll(dir) })
	server := NewServer(ServerOptions{Grace: -1})
	f.Cleanup(server.Stop)
	if err := server.Open(filepath.Join(dir, "d"), Device{GPU: h100(0)}); err != nil {
		f.Fatal(err)
	}
	return filepath.Join(dir, "d", SocketName)
}

// expectServing checks that a well-behaved client is served as ever, and that nothing is held any more.
func expectServing(t *testing.T, socket string) {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		snapshot, err := v1alpha1.NewDeviceClient(conn).Snapshot(ctx, &v1alpha1.SnapshotRequest{})
		if err != nil {
			t.Fatalf("a client afterwards: %v", err)
		}
		if snapshot.Gpus[0].MemoryUsedBytes == 0 && len(snapshot.Gpus[0].Processes) == 0 {
			return
		}
	}
}

// FuzzMessages sends messages of any content to each method of the device API.
func FuzzMessages(f *testing.F) {
	socket := fuzzServer(f)
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{})))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { conn.Close() })
	for _, message := range []*v1alpha1.HoldRequest{
		{},
		{LeaseId: "a", MemoryBytes: 1 << 30, ProcessName: "python3", Pid: 1},
		{LeaseId: "a", MemoryBytes: 1 << 63, ProcessName: "\n\x1b[31m", Pid: 4294967295, UtilizationPercent: 101, Rehold: true},
		{LeaseId: "a", DeviceUuid: "other"},
	} {
		data, err := proto.Marshal(message)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, data)
	}
	f.Add([]byte{0xff, 0xff}, []byte{0x08})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		var answer []byte
		_ = conn.Invoke(ctx, v1alpha1.Device_Snapshot_FullMethodName, &first, &answer)
		stream, err := conn.NewStream(metadata.AppendToOutgoingContext(ctx, "x", "y"), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, v1alpha1.Device_Hold_FullMethodName)
		if err != nil {
			t.Fatal(err)
		}
		if errors.Join(stream.SendMsg(&first), stream.SendMsg(&second), stream.CloseSend()) == nil {
			for stream.RecvMsg(&answer) == nil {
			}
		}
		cancel()
		expectServing(t, socket)
	})
}

// FuzzConnection writes bytes of any content to the socket, after the preface of HTTP/2 or without it.
func FuzzConnection(f *testing.F) {
	socket := fuzzServer(f)
	const (
		opening                      = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
		dataFrame, headers, settings = 0, 1, 4
	)
	frame := func(kind byte, stream uint32, payload string) []byte {
		data := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
		return append(binary.BigEndian.AppendUint32(append(data, 0), stream), payload...)
	}
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), false)
	f.Add(frame(settings, 0, ""), true)
	f.Add(append(frame(settings, 0, ""), frame(headers, 1, "\x82\x86\x84")...), true)
	f.Add(frame(dataFrame, 7, "\x00\x00\x00\x00\x05hello"), true)
	f.Add([]byte{}, true)
	f.Fuzz(func(t *testing.T, data []byte, preface bool) {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		if preface {
			data = append([]byte(opening), data...)
		}
		_ = conn.SetDeadline(time.Now().Add(patience))
		_, _ = conn.Write(data)
		conn.Close()
		expectServing(t, socket)
	})
}
