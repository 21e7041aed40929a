package gateway

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"k8s.io/apimachinery/pkg/types"
)

// picker sends every request to the same endpoints, puts a word before each piece of a request and response, and keeps what
// it was told.
type picker struct {
	extprocv3.UnimplementedExternalProcessorServer
	endpoints string
	refuse    bool
	dies      bool // after the response's header
	path      string
	status    string
	ended     chan struct{}
}

func (p *picker) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	defer close(p.ended)
	for {
		request, err := stream.Recv()
		if err != nil {
			return nil // the gateway ends the conversation
		}
		var answers []*extprocv3.ProcessingResponse
		destination := &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocv3.HeadersResponse{
			Response: &extprocv3.CommonResponse{HeaderMutation: &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{
				{Header: &corev3.HeaderValue{Key: destinationHeader, RawValue: []byte(p.endpoints)}},
			}}},
		}}}
		piece := func(body []byte, ended bool) *extprocv3.CommonResponse {
			if len(body) > 0 {
				body = append([]byte("picked "), body...)
			}
			return &extprocv3.CommonResponse{BodyMutation: &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_StreamedResponse{
				StreamedResponse: &extprocv3.StreamedBodyResponse{Body: body, EndOfStream: ended},
			}}}
		}
		switch r := request.Request.(type) {
		case *extprocv3.ProcessingRequest_RequestHeaders:
			p.path = header(r.RequestHeaders, ":path")
			if r.RequestHeaders.EndOfStream {
				answers = append(answers, destination)
			}
		case *extprocv3.ProcessingRequest_RequestBody:
			if p.refuse {
				answers = append(answers, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{
					ImmediateResponse: &extprocv3.ImmediateResponse{Status: &typev3.HttpStatus{Code: typev3.StatusCode_TooManyRequests}, Body: []byte("too many")},
				}})
				break
			}
			answers = append(answers, destination, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{
				RequestBody: &extprocv3.BodyResponse{Response: piece(r.RequestBody.Body, r.RequestBody.EndOfStream)},
			}})
		case *extprocv3.ProcessingRequest_ResponseHeaders:
			p.status = header(r.ResponseHeaders, ":status")
			answers = append(answers, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocv3.HeadersResponse{
				Response: &extprocv3.CommonResponse{HeaderMutation: &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{
					{Header: &corev3.HeaderValue{Key: "x-picker", Value: "was here"}},
				}}},
			}}})
		case *extprocv3.ProcessingRequest_ResponseBody:
			if p.dies {
				return errors.New("gone")
			}
			answers = append(answers, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{
				ResponseBody: &extprocv3.BodyResponse{Response: piece(r.ResponseBody.Body, r.ResponseBody.EndOfStream)},
			}})
		}
		for _, answer := range answers {
			if err := stream.Send(answer); err != nil {
				return err
			}
		}
	}
}

func header(headers *extprocv3.HttpHeaders, name string) string {
	for _, h := range headers.Headers.Headers {
		if h.Key == name {
			return string(h.RawValue)
		}
	}
	return ""
}

// serve a picker over TLS, and return its address.
func (p *picker) serve(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	certificate := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, certificate, certificate, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}))) //nolint:gosec // for a test
	extprocv3.RegisterExternalProcessorServer(server, p)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}

// nobody is an address at which nothing listens.
func nobody(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

func TestProxy(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.WriteHeader(http.StatusAccepted)
		fmt.Fprintf(w, "%s %s %q length %d", r.Method, r.URL.Path, body, r.ContentLength)
	}))
	t.Cleanup(server.Close)
	endpoint := strings.TrimPrefix(server.URL, "http://")
	name := types.NamespacedName{Namespace: "ns", Name: "pool"}

	for title, tc := range map[string]struct {
		picker   *picker // nil: none answers
		failOpen bool
		method   string
		body     string
		status   int
		answer   string
	}{
		"with a body":       {&picker{endpoints: endpoint}, false, "POST", "question", http.StatusAccepted, `picked POST /v1/chat "picked question" length 15`},
		"without a body":    {&picker{endpoints: endpoint}, false, "GET", "", http.StatusAccepted, `picked GET /v1/chat "" length 0`},
		"second endpoint":   {&picker{endpoints: nobody(t) + ", " + endpoint}, false, "POST", "question", http.StatusAccepted, `picked POST /v1/chat "picked question" length 15`},
		"endpoints away":    {&picker{endpoints: nobody(t)}, false, "POST", "question", http.StatusBadGateway, "connection refused"},
		"refused":           {&picker{refuse: true}, false, "POST", "question", http.StatusTooManyRequests, "too many"},
		"no endpoint":       {&picker{}, false, "POST", "question", http.StatusServiceUnavailable, "cannot be asked"},
		"picker away":       {nil, false, "POST", "question", http.StatusServiceUnavailable, "cannot be asked"},
		"picker away, open": {nil, true, "POST", "question", http.StatusAccepted, `POST /v1/chat "question" length 8`},
		"too large":         {&picker{endpoints: endpoint}, false, "POST", strings.Repeat("x", largestBody+1), http.StatusRequestEntityTooLarge, "larger than"},
	} {
		t.Run(title, func(t *testing.T) {
			address := nobody(t)
			if tc.picker != nil {
				tc.picker.ended = make(chan struct{})
				address = tc.picker.serve(t)
			}
			proxy := newProxy(func(context.Context, types.NamespacedName) ([]string, error) { return []string{endpoint}, nil })
			list, err := entries(routeOf(t, `
- matches: [{path: {value: /ns/qwen}}]
  filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]
  backendRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: pool}]
`), nil)
			if err != nil {
				t.Fatal(err)
			}
			proxy.state.Store(&state{table: list, pools: map[types.NamespacedName]pool{name: {picker: address, failOpen: tc.failOpen}}})
			front := httptest.NewServer(proxy)
			defer front.Close()
			request, err := http.NewRequestWithContext(t.Context(), tc.method, front.URL+"/ns/qwen/v1/chat", strings.NewReader(tc.body))
			if err != nil {
				t.Fatal(err)
			}
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			answer, err := io.ReadAll(response.Body)
			if err != nil || response.StatusCode != tc.status || !strings.Contains(string(answer), tc.answer) {
				t.Errorf("%d %s (%v), want %d %s", response.StatusCode, answer, err, tc.status, tc.answer)
			}
			if tc.status == http.StatusAccepted && tc.picker != nil {
				if response.Header.Get("X-Picker") != "was here" || tc.picker.status != "202" || tc.picker.path != "/v1/chat" {
					t.Errorf("header %v; the picker was told of path %s and status %s", response.Header, tc.picker.path, tc.picker.status)
				}
				<-tc.picker.ended // the conversation ends with the request
			}
		})
	}
}

// TestProxyTellsOfABrokenAnswer: a client must not take a part of an answer for the whole.
func TestProxyTellsOfABrokenAnswer(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "an answer") }))
	defer server.Close()
	p := &picker{endpoints: strings.TrimPrefix(server.URL, "http://"), dies: true, ended: make(chan struct{})}
	proxy := newProxy(nil)
	list, err := entries(routeOf(t, `[{backendRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: pool}]}]`), nil)
	if err != nil {
		t.Fatal(err)
	}
	proxy.state.Store(&state{table: list, pools: map[types.NamespacedName]pool{{Namespace: "ns", Name: "pool"}: {picker: p.serve(t)}}})
	front := httptest.NewServer(proxy)
	defer front.Close()
	response, err := http.Get(front.URL)
	if err == nil {
		defer response.Body.Close()
		_, err = io.ReadAll(response.Body)
	}
	if err == nil {
		t.Error("the client sees no error")
	}
}

func TestProxyWithoutABackend(t *testing.T) {
	list, err := entries(routeOf(t, `
- matches: [{path: {value: /missing}}]
  backendRefs: [{name: missing, port: 1}]
- matches: [{path: {value: /none}}]
`), nil)
	if err != nil {
		t.Fatal(err)
	}
	list[0].rule.backends[0].missing = true
	proxy := newProxy(nil)
	proxy.state.Store(&state{table: list})
	for path, want := range map[string]int{"/missing": http.StatusInternalServerError, "/none": http.StatusInternalServerError, "/other": http.StatusNotFound} {
		answer := httptest.NewRecorder()
		proxy.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
		if answer.Code != want {
			t.Errorf("%s: status %d, want %d", path, answer.Code, want)
		}
	}
}
