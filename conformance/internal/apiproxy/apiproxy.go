// Package apiproxy stands between a driver and the API server: it notes what the driver asks for, can be out of order
// while the API server itself goes on serving everybody else, can let a request wait, and can drop fields of the
// ResourceSlices that the driver writes as an API server does that does not have the feature.
package apiproxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	apiversion "k8s.io/apimachinery/pkg/version"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"
)

// Request is one request, whatever became of it.
type Request struct {
	Time time.Time `json:"time"`
	// Verb, Resource ("resourceclaims", "resourceclaims/status") and so on are as in RBAC rules; Resource is "" for what is
	// no resource, such as discovery.
	Verb      string `json:"verb"`
	Group     string `json:"group,omitempty"`
	Resource  string `json:"resource,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	Path      string `json:"path"`
	Query     string `json:"query,omitempty"`
	DryRun    bool   `json:"dryRun,omitempty"`
	// Status is the HTTP status code, 0 where the connection was cut or there is no answer yet.
	Status int `json:"status"`
}

// Writes is true if the request may change an object.
func (r Request) Writes() bool {
	switch r.Verb {
	case "create", "update", "patch", "delete", "deletecollection":
		return !r.DryRun
	}
	return false
}

// Proxy is a running proxy.
type Proxy struct {
	// URL and CA are what goes into a kubeconfig.
	URL string
	CA  []byte

	server  *http.Server
	forward *httputil.ReverseProxy
	infos   apirequest.RequestInfoResolver
	version *apiversion.Info
	served  chan struct{}

	mu       sync.Mutex
	out      bool
	cut      context.CancelFunc // of everything that runs
	running  context.Context
	requests []*Request // in the order in which they came
	drop     func(*resourceapi.ResourceSlice)
	holds    []*Hold
}

// Hold lets requests wait.
type Hold struct {
	// Held is closed once a request waits.
	Held  <-chan struct{}
	match func(Request) bool
	held  func()
	// released is closed by Release.
	released chan struct{}
	Release  func()
}

// Start starts a proxy for an API server. A version, if there is one, is what it says the API server is.
func Start(target *rest.Config, version *apiversion.Info) (*Proxy, error) {
	to, err := url.Parse(target.Host)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(target.CAData)
	cert, key, err := certutil.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	running, cut := context.WithCancel(context.Background())
	p := &Proxy{
		URL: "https://" + listener.Addr().String(),
		CA:  cert,
		forward: &httputil.ReverseProxy{
			Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(to) },
			Transport:     &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true},
			FlushInterval: -1, // watches are streams
			ErrorHandler:  func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
		},
		infos:   &apirequest.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")},
		version: version,
		running: running,
		cut:     cut,
		served:  make(chan struct{}),
	}
	p.server = &http.Server{Handler: p, TLSConfig: &tls.Config{Certificates: []tls.Certificate{pair}}, ReadHeaderTimeout: 10 * time.Second}
	go func() {
		defer close(p.served)
		_ = p.server.ServeTLS(listener, "", "")
	}()
	return p, nil
}

// Stop cuts all connections and ends the proxy.
func (p *Proxy) Stop() {
	p.server.Close()
	<-p.served
}

// Outage puts the proxy out of order: what runs, watches too, is cut, and new requests are cut as they come.
func (p *Proxy) Outage() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out = true
	p.cut()
}

// Recover ends an outage.
func (p *Proxy) Recover() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.out {
		p.out = false
		p.running, p.cut = context.WithCancel(context.Background())
	}
}

// Drop has fields removed from ResourceSlices that the driver creates or updates; nil ends that. An API server does the
// same with fields of features that it does not have. Patches are left alone.
func (p *Proxy) Drop(drop func(*resourceapi.ResourceSlice)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop = drop
}

// Hold has requests that match wait until it is released.
func (p *Proxy) Hold(match func(Request) bool) *Hold {
	held, released := make(chan struct{}), make(chan struct{})
	h := &Hold{
		Held: held, match: match, released: released,
		held:    sync.OnceFunc(func() { close(held) }),
		Release: sync.OnceFunc(func() { close(released) }),
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.holds = append(p.holds, h)
	return h
}

// wait waits for the release of what holds the request back.
func (p *Proxy) wait(ctx context.Context, request Request) {
	p.mu.Lock()
	holds := slices.Clone(p.holds)
	p.mu.Unlock()
	for _, h := range holds {
		if !h.match(request) {
			continue
		}
		select {
		case <-h.released:
			continue
		default:
		}
		h.held()
		select {
		case <-h.released:
		case <-ctx.Done():
		}
	}
}

// Requests are those that came since the time, those that still run, such as watches, among them.
func (p *Proxy) Requests(since time.Time) []Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	var requests []Request
	for _, request := range slices.Backward(p.requests) {
		if request.Time.Before(since) {
			break
		}
		requests = append(requests, *request)
	}
	slices.Reverse(requests)
	return requests
}

// ServeHTTP implements [http.Handler].
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	noted := p.describe(r)
	p.mu.Lock()
	out, running, drop := p.out, p.running, p.drop
	noted.Time = time.Now()
	p.requests = append(p.requests, noted)
	p.mu.Unlock()
	if out {
		panic(http.ErrAbortHandler)
	}
	if p.version != nil && r.URL.Path == "/version" {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(p.version)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(running, cancel)()
	p.wait(ctx, *noted)
	if drop != nil && noted.Resource == "resourceslices" && (noted.Verb == "create" || noted.Verb == "update") {
		if err := rewrite(r, drop); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	}
	p.forward.ServeHTTP(&statusWriter{w, func(code int) { p.answered(noted, code) }}, r.WithContext(ctx))
	if running.Err() != nil {
		p.answered(noted, 0)
		panic(http.ErrAbortHandler)
	}
}

// rewrite changes the slice in the request, whatever form it has. It goes on as JSON.
func rewrite(r *http.Request, change func(*resourceapi.ResourceSlice)) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	object, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	if err != nil {
		return fmt.Errorf("read the ResourceSlice that the driver writes: %w", err)
	}
	slice, ok := object.(*resourceapi.ResourceSlice)
	if !ok {
		return fmt.Errorf("the driver writes a %T; only resource.k8s.io/v1 can be dealt with here", object)
	}
	change(slice)
	if body, err = json.Marshal(slice); err != nil {
		return err
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	r.Header.Set("Content-Type", runtime.ContentTypeJSON)
	return nil
}

func (p *Proxy) describe(r *http.Request) *Request {
	noted := &Request{Verb: strings.ToLower(r.Method), Path: r.URL.Path, Query: r.URL.RawQuery, DryRun: r.URL.Query().Has("dryRun")}
	if info, err := p.infos.NewRequestInfo(r); err == nil {
		noted.Verb, noted.Group, noted.Resource = info.Verb, info.APIGroup, info.Resource
		noted.Namespace, noted.Name = info.Namespace, info.Name
		if info.Subresource != "" {
			noted.Resource += "/" + info.Subresource
		}
	}
	return noted
}

func (p *Proxy) answered(noted *Request, code int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	noted.Status = code
}

// statusWriter tells the status code.
type statusWriter struct {
	http.ResponseWriter
	answered func(code int)
}

// WriteHeader implements [http.ResponseWriter].
func (w *statusWriter) WriteHeader(code int) {
	if code >= 200 {
		w.answered(code)
	}
	w.ResponseWriter.WriteHeader(code)
}

// Unwrap lets http.ResponseController flush.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
