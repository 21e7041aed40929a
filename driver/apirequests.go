package driver

import (
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// requestResources are the resources that are told apart; all others count as one.
var requestResources = []string{"resourceslices", "resourceclaims", "nodes", "events"}

// APIRequests counts the requests of the driver to the API server, as its [prometheus.Collector] and for
// rest.Config.Wrap.
type APIRequests struct {
	*prometheus.CounterVec
}

// NewAPIRequests returns counters at zero.
func NewAPIRequests() *APIRequests {
	return &APIRequests{prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "simgpu_api_requests_total",
		Help: "Requests to the API server. The verb is dryrun where nothing was to be stored, the code error where no answer came.",
	}, []string{"verb", "resource", "code"})}
}

// Wrap counts what goes through a transport.
func (a *APIRequests) Wrap(next http.RoundTripper) http.RoundTripper {
	return countedTransport{a, next}
}

type countedTransport struct {
	requests *APIRequests
	next     http.RoundTripper
}

// RoundTrip implements [http.RoundTripper].
func (t countedTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	verb, resource := describeRequest(request)
	response, err := t.next.RoundTrip(request)
	code := "error"
	if err == nil {
		code = strconv.Itoa(response.StatusCode)
	}
	t.requests.WithLabelValues(verb, resource, code).Inc()
	return response, err
}

// describeRequest reads verb and resource off a request, as the API server does.
func describeRequest(request *http.Request) (verb, resource string) {
	path := strings.Split(strings.Trim(request.URL.Path, "/"), "/")
	switch {
	case len(path) > 2 && path[0] == "api":
		path = path[2:] // api, version
	case len(path) > 3 && path[0] == "apis":
		path = path[3:] // apis, group, version
	default:
		path = []string{""}
	}
	if path[0] == "namespaces" && len(path) > 2 {
		path = path[2:]
	}
	resource = path[0]
	if !slices.Contains(requestResources, resource) {
		resource = "other"
	}
	query := request.URL.Query()
	switch {
	case query.Has("dryRun"):
		verb = "dryrun"
	case request.Method == http.MethodPost:
		verb = "create"
	case request.Method == http.MethodPut:
		verb = "update"
	case request.Method == http.MethodPatch:
		verb = "patch"
	case request.Method == http.MethodDelete:
		verb = "delete"
	case query.Get("watch") == "true" || query.Get("watch") == "1":
		verb = "watch"
	case len(path) > 1:
		verb = "get"
	default:
		verb = "list"
	}
	return verb, resource
}
