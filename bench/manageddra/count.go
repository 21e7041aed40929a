package main

import (
	"net/http"
	"strings"
	"sync"
)

// requests are how many requests the controller has sent, by kind.
type requests struct {
	Reads, Writes, Events int
}

func (r requests) minus(other requests) requests {
	return requests{r.Reads - other.Reads, r.Writes - other.Writes, r.Events - other.Events}
}

// counter counts what passes it.
type counter struct {
	mutex sync.Mutex
	sent  requests
}

func (c *counter) total() requests {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.sent
}

// wrap is a [rest.Config]'s WrapTransport.
func (c *counter) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(request *http.Request) (*http.Response, error) {
		c.mutex.Lock()
		switch {
		case request.Method == http.MethodGet:
			c.sent.Reads++
		case strings.Contains(request.URL.Path, "/events"):
			c.sent.Events++
		default:
			c.sent.Writes++
		}
		c.mutex.Unlock()
		return next.RoundTrip(request)
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }
