package gateway

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"
)

// routeOf is a route with these rules, in YAML.
func routeOf(t *testing.T, rules string) *gatewayv1.HTTPRoute {
	t.Helper()
	route := &gatewayv1.HTTPRoute{}
	route.Namespace = "ns"
	if err := yaml.UnmarshalStrict([]byte(rules), &route.Spec.Rules); err != nil {
		t.Fatal(err)
	}
	return route
}

func TestFind(t *testing.T) {
	var all table
	for host, rules := range map[string]string{
		"": `
- backendRefs: [{name: default, port: 1}]
- matches: [{path: {value: /a}}]
  backendRefs: [{name: a, port: 1}]
- matches: [{path: {value: /a/b/}}]
  backendRefs: [{name: ab, port: 1}]
- matches: [{path: {type: Exact, value: /a/b}}]
  backendRefs: [{name: exact, port: 1}]
- matches: [{path: {value: /a}, method: POST}]
  backendRefs: [{name: post, port: 1}]
- matches: [{path: {value: /a}, headers: [{name: x-model, value: llama}]}]
  backendRefs: [{name: header, port: 1}]
`,
		"llama.example.com": `[{backendRefs: [{name: host, port: 1}]}]`,
		"*.example.com":     `[{backendRefs: [{name: wildcard, port: 1}]}]`,
	} {
		names := []string{host}
		if host == "" {
			names = nil
		}
		list, err := entries(routeOf(t, rules), names)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, list...)
	}
	all.sort()
	for name, tc := range map[string]struct {
		method, url string
		header      string
		want        string
	}{
		"anything":           {"GET", "http://other/", "", "default"},
		"prefix":             {"GET", "http://other/a/c", "", "a"},
		"prefix itself":      {"GET", "http://other/a", "", "a"},
		"not an element":     {"GET", "http://other/ab", "", "default"},
		"longer prefix":      {"GET", "http://other/a/b/c", "", "ab"},
		"exact":              {"GET", "http://other/a/b", "", "exact"},
		"exact before post":  {"POST", "http://other/a/b", "", "exact"},
		"method":             {"POST", "http://other/a/c", "", "post"},
		"header":             {"GET", "http://other/a/c", "llama", "header"},
		"other header":       {"GET", "http://other/a/c", "qwen", "a"},
		"host":               {"GET", "http://llama.example.com:8080/a", "", "host"},
		"host in capitals":   {"GET", "http://LLAMA.example.com/a", "", "host"},
		"wildcard":           {"GET", "http://qwen.example.com/", "", "wildcard"},
		"several below it":   {"GET", "http://a.qwen.example.com/", "", "wildcard"},
		"not the domain":     {"GET", "http://example.com/", "", "default"},
		"not another domain": {"GET", "http://badexample.com/", "", "default"},
	} {
		t.Run(name, func(t *testing.T) {
			request := httptest.NewRequest(tc.method, tc.url, nil)
			if tc.header != "" {
				request.Header.Set("X-Model", tc.header)
			}
			found := all.find(request)
			if found == nil || found.rule.backends[0].name.Name != tc.want {
				t.Errorf("found %+v, want %s", found, tc.want)
			}
		})
	}
}

func TestRewritten(t *testing.T) {
	for name, tc := range map[string]struct{ rule, path, want string }{
		"nothing":            {`[{matches: [{path: {value: /ns/qwen}}]}]`, "/ns/qwen/v1/models", "/ns/qwen/v1/models"},
		"prefix to root":     {`[{matches: [{path: {value: /ns/qwen}}], filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]}]`, "/ns/qwen/v1/models", "/v1/models"},
		"prefix itself":      {`[{matches: [{path: {value: /ns/qwen}}], filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]}]`, "/ns/qwen", "/"},
		"prefix to a prefix": {`[{matches: [{path: {value: /old/}}], filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /new}}}]}]`, "/old/a", "/new/a"},
		"whole":              {`[{filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplaceFullPath, replaceFullPath: /health}}}]}]`, "/a/b", "/health"},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := entries(routeOf(t, tc.rule), nil)
			if err != nil {
				t.Fatal(err)
			}
			found := list.find(httptest.NewRequest(http.MethodGet, "http://host"+tc.path, nil))
			if found == nil {
				t.Fatal("no match")
			}
			if got := found.rewritten(tc.path); got != tc.want {
				t.Errorf("%s becomes %s, want %s", tc.path, got, tc.want)
			}
		})
	}
}

func TestUnsupported(t *testing.T) {
	for name, rule := range map[string]string{
		"regular expression": `[{matches: [{path: {type: RegularExpression, value: /a.*}}]}]`,
		"header expression":  `[{matches: [{headers: [{type: RegularExpression, name: a, value: b.*}]}]}]`,
		"query parameter":    `[{matches: [{queryParams: [{name: a, value: b}]}]}]`,
		"mirror":             `[{filters: [{type: RequestMirror, requestMirror: {backendRef: {name: a, port: 1}}}]}]`,
		"hostname":           `[{filters: [{type: URLRewrite, urlRewrite: {hostname: other}}]}]`,
		"backend's filter":   `[{backendRefs: [{name: a, port: 1, filters: [{type: RequestHeaderModifier}]}]}]`,
		"other namespace":    `[{backendRefs: [{name: a, namespace: other, port: 1}]}]`,
		"other kind":         `[{backendRefs: [{name: a, group: example.com, kind: Thing}]}]`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := entries(routeOf(t, rule), nil)
			if u := (*unsupported)(nil); !errors.As(err, &u) {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestHosts(t *testing.T) {
	for name, tc := range map[string]struct {
		route    []gatewayv1.Hostname
		listener string
		want     string
		ok       bool
	}{
		"any and any":                {nil, "", "", true},
		"any and one":                {nil, "a.example.com", "a.example.com", true},
		"one and any":                {[]gatewayv1.Hostname{"A.example.com"}, "", "a.example.com", true},
		"the same":                   {[]gatewayv1.Hostname{"a.example.com"}, "a.example.com", "a.example.com", true},
		"another":                    {[]gatewayv1.Hostname{"b.example.com"}, "a.example.com", "", false},
		"below the listener's":       {[]gatewayv1.Hostname{"a.example.com"}, "*.example.com", "a.example.com", true},
		"the listener's is below it": {[]gatewayv1.Hostname{"*.example.com"}, "a.example.com", "a.example.com", true},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := hosts(tc.route, tc.listener)
			if ok != tc.ok || tc.want == "" && len(got) > 0 || tc.want != "" && (len(got) != 1 || got[0] != tc.want) {
				t.Errorf("%v, %v", got, ok)
			}
		})
	}
}

func TestChoose(t *testing.T) {
	r := &rule{backends: []backend{{weight: 0}, {weight: 1, port: 1}, {weight: 3, port: 2}}}
	counts := map[int32]int{}
	for range 4000 {
		counts[r.choose().port]++
	}
	if counts[0] != 0 || counts[1] < 700 || counts[1] > 1300 {
		t.Errorf("of 4000 requests the backends of weight 0, 1 and 3 got %v", counts)
	}
	if (&rule{}).choose() != nil {
		t.Error("a rule without backends has one")
	}
}
