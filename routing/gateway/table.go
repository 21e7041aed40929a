package gateway

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// table has all matches of all routes, the more specific first (the order that HTTPRouteRule's documentation prescribes).
type table []entry

type entry struct {
	host string // "" for any, *.example.com for those below
	match
	rule *rule
}

type match struct {
	path    string
	exact   bool
	method  string
	headers map[string]string // by canonical name
}

// rule says what happens to the requests that match.
type rule struct {
	backends []backend
	rewrite  *gatewayv1.HTTPPathModifier
}

// backend is a Service or an InferencePool.
type backend struct {
	pool    bool
	name    types.NamespacedName
	port    int32 // of a Service
	weight  int32
	missing bool // requests get status 500, as the specification wants it
}

const (
	kindService = "Service"
	kindPool    = "InferencePool"
	groupPool   = "inference.networking.k8s.io"
)

// unsupported is a part of a route that this gateway does not implement.
type unsupported struct{ what string }

func (u *unsupported) Error() string { return u.what + " is not supported by this gateway" }

// entries of a route for these hostnames, which are empty for any.
func entries(route *gatewayv1.HTTPRoute, hosts []string) (table, error) {
	var list table
	if len(hosts) == 0 {
		hosts = []string{""}
	}
	for i := range route.Spec.Rules {
		spec := &route.Spec.Rules[i]
		rule, err := ruleOf(route.Namespace, spec)
		if err != nil {
			return nil, fmt.Errorf("rule %d: %w", i, err)
		}
		matches := spec.Matches
		if len(matches) == 0 {
			matches = []gatewayv1.HTTPRouteMatch{{}}
		}
		for j := range matches {
			m, err := matchOf(&matches[j])
			if err != nil {
				return nil, fmt.Errorf("rule %d, match %d: %w", i, j, err)
			}
			for _, host := range hosts {
				list = append(list, entry{host, m, rule})
			}
		}
	}
	return list, nil
}

func matchOf(spec *gatewayv1.HTTPRouteMatch) (match, error) {
	m := match{path: "/", headers: map[string]string{}}
	if path := spec.Path; path != nil {
		m.path = ptr.Deref(path.Value, "/")
		switch kind := ptr.Deref(path.Type, gatewayv1.PathMatchPathPrefix); kind {
		case gatewayv1.PathMatchExact:
			m.exact = true
		case gatewayv1.PathMatchPathPrefix:
			m.path = "/" + strings.Trim(m.path, "/")
		default:
			return m, &unsupported{fmt.Sprintf("a path match of type %s", kind)}
		}
	}
	if spec.Method != nil {
		m.method = string(*spec.Method)
	}
	for _, header := range spec.Headers {
		if kind := ptr.Deref(header.Type, gatewayv1.HeaderMatchExact); kind != gatewayv1.HeaderMatchExact {
			return m, &unsupported{fmt.Sprintf("a header match of type %s", kind)}
		}
		name := http.CanonicalHeaderKey(string(header.Name))
		if _, found := m.headers[name]; !found { // the first of a name counts
			m.headers[name] = header.Value
		}
	}
	if len(spec.QueryParams) > 0 {
		return m, &unsupported{"a match of query parameters"}
	}
	return m, nil
}

func ruleOf(namespace string, spec *gatewayv1.HTTPRouteRule) (*rule, error) {
	r := &rule{}
	for _, filter := range spec.Filters {
		if filter.Type != gatewayv1.HTTPRouteFilterURLRewrite || filter.URLRewrite == nil || filter.URLRewrite.Hostname != nil {
			return nil, &unsupported{fmt.Sprintf("a filter of type %s, other than a URLRewrite of the path,", filter.Type)}
		}
		r.rewrite = filter.URLRewrite.Path
	}
	for _, ref := range spec.BackendRefs {
		if len(ref.Filters) > 0 {
			return nil, &unsupported{"a filter of a backend"}
		}
		b := backend{name: types.NamespacedName{Namespace: namespace, Name: string(ref.Name)}, weight: ptr.Deref(ref.Weight, 1)}
		switch group, kind := ptr.Deref(ref.Group, ""), ptr.Deref(ref.Kind, kindService); {
		case ref.Namespace != nil && string(*ref.Namespace) != namespace:
			return nil, &unsupported{"a backend in another namespace"}
		case group == "" && kind == kindService:
			b.port = ptr.Deref(ref.Port, 0)
		case group == groupPool && kind == kindPool:
			b.pool = true
		default:
			return nil, &unsupported{fmt.Sprintf("a backend of kind %s.%s", kind, group)}
		}
		r.backends = append(r.backends, b)
	}
	return r, nil
}

// sort puts what is more specific first: exact hostnames, longer ones, exact paths, longer ones, a method, more headers.
// What is equal keeps its order.
func (t table) sort() {
	slices.SortStableFunc(t, func(a, b entry) int {
		return cmp.Or(
			-compareBool(a.host != "" && !strings.HasPrefix(a.host, "*"), b.host != "" && !strings.HasPrefix(b.host, "*")),
			-cmp.Compare(len(a.host), len(b.host)),
			-compareBool(a.exact, b.exact),
			-cmp.Compare(len(a.path), len(b.path)),
			-compareBool(a.method != "", b.method != ""),
			-cmp.Compare(len(a.headers), len(b.headers)),
		)
	})
}

// find the entry for a request, nil if there is none.
func (t table) find(r *http.Request) *entry {
	host, _, _ := strings.Cut(r.Host, ":")
	for i := range t {
		if e := &t[i]; hostMatches(e.host, strings.ToLower(host)) && e.matches(r) {
			return e
		}
	}
	return nil
}

func hostMatches(pattern, host string) bool {
	if suffix, wildcard := strings.CutPrefix(pattern, "*"); wildcard {
		return len(host) > len(suffix) && strings.HasSuffix(host, suffix)
	}
	return pattern == "" || pattern == host
}

func (m *match) matches(r *http.Request) bool {
	if m.exact && r.URL.Path != m.path || !m.exact && !under(m.path, r.URL.Path) || m.method != "" && m.method != r.Method {
		return false
	}
	for name, value := range m.headers {
		if strings.Join(r.Header[name], ",") != value {
			return false
		}
	}
	return true
}

// under is true if path is the prefix or below it, element by element.
func under(prefix, path string) bool {
	rest, found := strings.CutPrefix(path, prefix)
	return found && (prefix == "/" || rest == "" || rest[0] == '/')
}

// path is that of a request as the backend sees it.
func (e *entry) rewritten(path string) string {
	switch rewrite := e.rule.rewrite; {
	case rewrite == nil:
		return path
	case rewrite.Type == gatewayv1.FullPathHTTPPathModifier:
		return ptr.Deref(rewrite.ReplaceFullPath, "/")
	case e.exact:
		return ptr.Deref(rewrite.ReplacePrefixMatch, "/")
	default:
		rest := strings.TrimPrefix(strings.TrimPrefix(path, e.path), "/")
		return strings.TrimSuffix(ptr.Deref(rewrite.ReplacePrefixMatch, "/"), "/") + "/" + rest
	}
}

// choose a backend by weight, nil if there is none with any.
func (r *rule) choose() *backend {
	var total int32
	for _, b := range r.backends {
		total += b.weight
	}
	if total == 0 {
		return nil
	}
	at := rand.Int32N(total) //nolint:gosec // no secret
	for i := range r.backends {
		if at -= r.backends[i].weight; at < 0 {
			return &r.backends[i]
		}
	}
	return nil
}

// hosts are those of a route that a listener takes: what is in both, where a wildcard contains what is below it.
func hosts(route []gatewayv1.Hostname, listener string) (list []string, ok bool) {
	if len(route) == 0 {
		if listener == "" {
			return nil, true
		}
		return []string{listener}, true
	}
	for _, name := range route {
		switch host := strings.ToLower(string(name)); {
		case hostMatches(listener, host):
			list = append(list, host)
		case hostMatches(host, listener):
			list = append(list, listener)
		}
	}
	return list, len(list) > 0
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}
