package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// httpServer serves metrics and probes. Its methods work on nil, which is a server that is off.
type httpServer struct {
	server   *http.Server
	listener net.Listener
	done     chan struct{}
}

// startHTTP listens on the endpoint, nothing if it is "". Failures after that go to fatal.
func startHTTP(endpoint string, registry *prometheus.Registry, healthy, ready func() error, fatal func(error)) (*httpServer, error) {
	mux := metricsPage(registry)
	mux.HandleFunc("GET /healthz", probe(healthy))
	mux.HandleFunc("GET /readyz", probe(ready))
	return serveHTTP("HTTP endpoint", endpoint, mux, fatal)
}

func metricsPage(registry *prometheus.Registry) *http.ServeMux {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return mux
}

func serveHTTP(what, endpoint string, handler http.Handler, fatal func(error)) (*httpServer, error) {
	if endpoint == "" {
		return nil, nil
	}
	listener, err := net.Listen("tcp", endpoint)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	s := &httpServer{
		server:   &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second},
		listener: listener,
		done:     make(chan struct{}),
	}
	go func() {
		defer close(s.done)
		if err := s.server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			fatal(fmt.Errorf("%s: %w", what, err))
		}
	}()
	return s, nil
}

func probe(check func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if err := check(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	}
}

// addr is the address listened on, "" if there is none.
func (s *httpServer) addr() string {
	if s == nil {
		return ""
	}
	return s.listener.Addr().String()
}

// stop lets running requests end, for a short while.
func (s *httpServer) stop() {
	if s == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if s.server.Shutdown(ctx) != nil {
		s.server.Close()
	}
	<-s.done
}
