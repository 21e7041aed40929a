package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
)

// destinationHeader is where an endpoint picker says which endpoints it has picked, the first to be tried first (Endpoint
// Picker Protocol, gateway-api-inference-extension docs/proposals/004).
const destinationHeader = "x-gateway-destination-endpoint"

// patience with a picker that cannot be reached. Every request has it, until it goes on without or is refused.
const patience = 2 * time.Second

// pickers has a connection to each endpoint picker.
type pickers struct {
	mutex       sync.Mutex
	connections map[string]*grpc.ClientConn
}

func (p *pickers) connection(address string) (*grpc.ClientConn, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if connection := p.connections[address]; connection != nil {
		return connection, nil
	}
	connection, err := grpc.NewClient("dns:///"+address, grpc.WithConnectParams(grpc.ConnectParams{
		// A picker that comes back is asked at once.
		Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}, MinConnectTimeout: 5 * time.Second,
	}), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		InsecureSkipVerify: true, //nolint:gosec // self-signed by default, see the package's comment
	})))
	if err == nil {
		if p.connections == nil {
			p.connections = map[string]*grpc.ClientConn{}
		}
		p.connections[address] = connection
	}
	return connection, err
}

// reachable waits a little for a picker that is just starting.
func reachable(ctx context.Context, connection *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		state := connection.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Idle:
			connection.Connect()
		}
		if !connection.WaitForStateChange(ctx, state) {
			return fmt.Errorf("not reachable within %s: %s", patience, state)
		}
	}
}

// keep closes the connections to all other addresses.
func (p *pickers) keep(addresses map[string]bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for address, connection := range p.connections {
		if !addresses[address] {
			_ = connection.Close()
			delete(p.connections, address)
		}
	}
}

// conversation about one request.
type conversation struct {
	stream extprocv3.ExternalProcessor_ProcessClient
}

// verdict of an endpoint picker about a request.
type verdict struct {
	endpoints []string // host:port
	header    http.Header
	body      []byte
	// refused is an answer for the client instead.
	refused *extprocv3.ImmediateResponse
}

// ask which endpoint is to have a request. The conversation goes on with the response.
func (p *pickers) ask(ctx context.Context, address string, r *http.Request, path string, body []byte) (*conversation, *verdict, error) {
	connection, err := p.connection(address)
	if err != nil {
		return nil, nil, err
	}
	if err := reachable(ctx, connection); err != nil {
		return nil, nil, err
	}
	stream, err := extprocv3.NewExternalProcessorClient(connection).Process(ctx)
	if err != nil {
		return nil, nil, err
	}
	c := &conversation{stream}
	headers := append([]*corev3.HeaderValue{
		{Key: ":method", RawValue: []byte(r.Method)}, {Key: ":path", RawValue: []byte(path)},
		{Key: ":authority", RawValue: []byte(r.Host)}, {Key: ":scheme", RawValue: []byte("http")},
	}, headerValues(r.Header)...)
	err = stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{
		RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: headers}, EndOfStream: len(body) == 0},
	}})
	if err == nil && len(body) > 0 {
		err = stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
			RequestBody: &extprocv3.HttpBody{Body: body, EndOfStream: true},
		}})
	}
	if err != nil && !errors.Is(err, io.EOF) { // of an ended stream Recv says why
		return nil, nil, err
	}
	verdict, err := c.verdict(len(body) > 0)
	return c, verdict, err
}

func (c *conversation) verdict(hasBody bool) (*verdict, error) {
	v := &verdict{header: http.Header{}}
	for headers, ended := false, !hasBody; !headers || !ended; {
		answer, err := c.stream.Recv()
		if err != nil {
			return nil, err
		}
		switch answer := answer.Response.(type) {
		case *extprocv3.ProcessingResponse_ImmediateResponse:
			v.refused = answer.ImmediateResponse
			return v, nil
		case *extprocv3.ProcessingResponse_RequestHeaders:
			headers = true
			for _, option := range answer.RequestHeaders.GetResponse().GetHeaderMutation().GetSetHeaders() {
				v.header.Set(option.Header.Key, valueOf(option.Header))
			}
		case *extprocv3.ProcessingResponse_RequestBody:
			chunk := answer.RequestBody.GetResponse().GetBodyMutation().GetStreamedResponse()
			v.body = append(v.body, chunk.GetBody()...)
			ended = chunk.GetEndOfStream()
		default:
			return nil, fmt.Errorf("the endpoint picker answers a request with %T", answer)
		}
	}
	for endpoint := range strings.SplitSeq(v.header.Get(destinationHeader), ",") {
		if endpoint = strings.TrimSpace(endpoint); endpoint != "" {
			v.endpoints = append(v.endpoints, endpoint)
		}
	}
	if len(v.endpoints) == 0 {
		return nil, errors.New("the endpoint picker names no endpoint")
	}
	return v, nil
}

// response tells the picker of a response, and returns its header and body as the picker wants them. Closing the body ends the
// conversation.
func (c *conversation) response(response *http.Response) error {
	headers := append([]*corev3.HeaderValue{{Key: ":status", RawValue: fmt.Append(nil, response.StatusCode)}}, headerValues(response.Header)...)
	if err := c.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{
		ResponseHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: headers}},
	}}); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	answer, err := c.stream.Recv()
	if err != nil {
		return err
	}
	mutation := answer.GetResponseHeaders().GetResponse().GetHeaderMutation()
	for _, option := range mutation.GetSetHeaders() {
		response.Header.Set(option.Header.Key, valueOf(option.Header))
	}
	for _, name := range mutation.GetRemoveHeaders() {
		response.Header.Del(name)
	}
	// The picker may change the body's length.
	response.Header.Del("Content-Length")
	response.ContentLength = -1
	body := &processedBody{conversation: c, source: response.Body}
	go body.send()
	response.Body = body
	return nil
}

// processedBody is a body that goes through the picker.
type processedBody struct {
	*conversation
	source io.ReadCloser
	ready  []byte
	ended  bool
}

// send the source to the picker, in pieces as they come.
func (b *processedBody) send() {
	buffer := make([]byte, 32<<10)
	for {
		n, err := b.source.Read(buffer)
		ended := errors.Is(err, io.EOF)
		if n > 0 || ended {
			sent := b.stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
				ResponseBody: &extprocv3.HttpBody{Body: slices.Clone(buffer[:n]), EndOfStream: ended},
			}})
			if sent != nil {
				return
			}
		}
		if err != nil {
			_ = b.stream.CloseSend()
			return
		}
	}
}

// Read what comes back from the picker.
func (b *processedBody) Read(p []byte) (int, error) {
	for len(b.ready) == 0 {
		if b.ended {
			return 0, io.EOF
		}
		answer, err := b.stream.Recv()
		if errors.Is(err, io.EOF) {
			return 0, io.ErrUnexpectedEOF
		}
		if err != nil {
			return 0, err
		}
		chunk := answer.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		b.ready, b.ended = chunk.GetBody(), chunk.GetEndOfStream()
	}
	n := copy(p, b.ready)
	b.ready = b.ready[n:]
	return n, nil
}

func (b *processedBody) Close() error { return b.source.Close() }

func headerValues(header http.Header) []*corev3.HeaderValue {
	var list []*corev3.HeaderValue
	for name, values := range header {
		list = append(list, &corev3.HeaderValue{Key: strings.ToLower(name), RawValue: []byte(strings.Join(values, ","))})
	}
	return list
}

func valueOf(header *corev3.HeaderValue) string {
	if len(header.RawValue) > 0 {
		return string(header.RawValue)
	}
	return header.Value
}
