package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httputil"
	"slices"
	"strings"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// largestBody that is held in memory for an endpoint picker.
const largestBody = 32 << 20

// pool is an InferencePool as the proxy needs it.
type pool struct {
	picker   string // host:port of its endpoint picker
	failOpen bool   // a request goes to any endpoint when the picker cannot be asked
}

// state of the cluster.
type state struct {
	table table
	pools map[types.NamespacedName]pool
}

// Proxy sends requests where the routes say. It implements [http.Handler].
type Proxy struct {
	state     atomic.Pointer[state]
	pickers   pickers
	endpoints func(ctx context.Context, pool types.NamespacedName) ([]string, error) // host:port of all that are ready
	reverse   *httputil.ReverseProxy
	transport http.RoundTripper
}

// trip is what is known of a request on its way.
type trip struct {
	path      string
	endpoints []string // to be tried one after the other
	header    http.Header
	body      []byte
	asked     *conversation
}

type tripKey struct{}

func newProxy(endpoints func(context.Context, types.NamespacedName) ([]string, error)) *Proxy {
	p := &Proxy{endpoints: endpoints, transport: http.DefaultTransport}
	p.state.Store(&state{})
	p.reverse = &httputil.ReverseProxy{
		FlushInterval: -1, // tokens are shown as they come
		Transport:     roundTripper(p.roundTrip),
		Rewrite: func(r *httputil.ProxyRequest) {
			t := r.In.Context().Value(tripKey{}).(*trip) //nolint:forcetypeassert // ServeHTTP puts it there
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.URL.Path, r.Out.URL.RawPath = "http", t.endpoints[0], t.path, ""
			r.Out.Host = r.In.Host
			r.SetXForwarded()
			for name, values := range t.header {
				if name != "Content-Length" && !strings.HasPrefix(name, ":") {
					r.Out.Header[name] = values
				}
			}
			if t.asked != nil {
				r.Out.ContentLength = int64(len(t.body))
			}
		},
		ModifyResponse: func(response *http.Response) error {
			klog.InfoS("Served", "method", response.Request.Method, "path", response.Request.URL.Path, "endpoint", response.Request.URL.Host, "status", response.StatusCode)
			if t := response.Request.Context().Value(tripKey{}).(*trip); t.asked != nil { //nolint:forcetypeassert // as above
				return t.asked.response(response)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			klog.ErrorS(err, "Request failed", "method", r.Method, "path", r.URL.Path)
			http.Error(w, "gateway: "+err.Error(), http.StatusBadGateway)
		},
	}
	return p
}

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	now := p.state.Load()
	entry := now.table.find(r)
	if entry == nil {
		http.Error(w, fmt.Sprintf("gateway: no HTTPRoute matches %s %s%s", r.Method, r.Host, r.URL.Path), http.StatusNotFound)
		return
	}
	to := entry.rule.choose()
	if to == nil || to.missing {
		http.Error(w, "gateway: the rule that matches has no backend that exists, see the HTTPRoute's status", http.StatusInternalServerError)
		return
	}
	t := &trip{path: entry.rewritten(r.URL.Path)}
	if to.pool {
		ctx, cancel := context.WithCancel(r.Context()) // ends the conversation with the picker
		defer cancel()
		r = r.WithContext(ctx)
		if !p.pick(w, r, to.name, now.pools[to.name], t) {
			return
		}
	} else {
		t.endpoints = []string{fmt.Sprintf("%s.%s.svc:%d", to.name.Name, to.name.Namespace, to.port)}
	}
	p.reverse.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), tripKey{}, t)))
}

// pick endpoints for a request to a pool. It answers the request itself, and returns false, where there are none.
func (p *Proxy) pick(w http.ResponseWriter, r *http.Request, name types.NamespacedName, of pool, t *trip) bool {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, largestBody))
	if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
		http.Error(w, fmt.Sprintf("gateway: the body is larger than %d bytes", tooLarge.Limit), http.StatusRequestEntityTooLarge)
		return false
	} else if err != nil {
		http.Error(w, "gateway: reading the request: "+err.Error(), http.StatusBadRequest)
		return false
	}
	t.body = body
	asked, verdict, err := p.pickers.ask(r.Context(), of.picker, r, t.path, body)
	switch {
	case err != nil && of.failOpen:
		klog.ErrorS(err, "The endpoint picker cannot be asked: any endpoint will do", "pool", name, "picker", of.picker)
		if t.endpoints, err = p.endpoints(r.Context(), name); err != nil || len(t.endpoints) == 0 {
			http.Error(w, fmt.Sprintf("gateway: the InferencePool %s has no endpoint that is ready", name), http.StatusServiceUnavailable)
			return false
		}
		rand.Shuffle(len(t.endpoints), func(i, j int) { t.endpoints[i], t.endpoints[j] = t.endpoints[j], t.endpoints[i] })
	case err != nil:
		klog.ErrorS(err, "The endpoint picker cannot be asked", "pool", name, "picker", of.picker)
		http.Error(w, fmt.Sprintf("gateway: the endpoint picker of InferencePool %s cannot be asked", name), http.StatusServiceUnavailable)
		return false
	case verdict.refused != nil:
		for _, option := range verdict.refused.GetHeaders().GetSetHeaders() {
			w.Header().Set(option.Header.Key, valueOf(option.Header))
		}
		w.WriteHeader(int(verdict.refused.GetStatus().GetCode()))
		_, _ = w.Write(verdict.refused.GetBody())
		return false
	default:
		t.endpoints, t.header, t.asked = verdict.endpoints, verdict.header, asked
		if len(body) > 0 {
			t.body = verdict.body
		}
	}
	r.Body = http.NoBody // it is in the trip
	r.ContentLength = int64(len(t.body))
	return true
}

// roundTrip tries one endpoint after the other until one can be reached.
func (p *Proxy) roundTrip(r *http.Request) (*http.Response, error) {
	t := r.Context().Value(tripKey{}).(*trip) //nolint:forcetypeassert // ServeHTTP puts it there
	var errs []error
	for _, endpoint := range slices.Compact(t.endpoints) {
		r.URL.Host = endpoint
		if len(t.body) > 0 {
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(t.body)), int64(len(t.body))
		}
		response, err := p.transport.RoundTrip(r)
		if err == nil {
			return response, nil
		}
		errs = append(errs, fmt.Errorf("endpoint %s: %w", endpoint, err))
		if r.Context().Err() != nil || len(t.body) == 0 && r.ContentLength != 0 {
			break // the client is gone, or the body is
		}
	}
	return nil, errors.Join(errs...)
}
