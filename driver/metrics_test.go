package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// series returns a metric by the values of its labels, joined by commas, without those at zero.
func (m *metrics) series(t *testing.T, name string) map[string]float64 {
	t.Helper()
	families, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, metric := range family.GetMetric() {
			var labels []string
			for _, label := range metric.GetLabel() {
				labels = append(labels, label.GetValue())
			}
			if value := metric.GetCounter().GetValue() + metric.GetGauge().GetValue(); value != 0 {
				values[strings.Join(labels, ",")] = value
			}
		}
	}
	return values
}

func page(t *testing.T, m *metrics) string {
	t.Helper()
	answer := httptest.NewRecorder()
	promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return answer.Body.String()
}

func allMetrics() *metrics {
	m := newMetrics(func() (int, int) { return 0, 0 })
	requests := NewAPIRequests()
	requests.WithLabelValues("get", "nodes", "200").Inc()
	m.registry.MustRegister(requests)
	return m
}

func TestMetricsAreWellFormed(t *testing.T) {
	families, err := allMetrics().registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		t.Errorf("%s: %s", problem.Metric, problem.Text)
	}
}

// The package comment is where people look metrics up.
func TestMetricsAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	names := func(text, pattern string) []string {
		var found []string
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			found = append(found, match[1])
		}
		slices.Sort(found)
		return slices.Compact(found)
	}
	documented := names(string(doc), `(?m)^//\t(simgpu_\w+)`)
	exported := names(page(t, allMetrics()), `(?m)^# TYPE (simgpu_\w+)`)
	if diff := cmp.Diff(exported, documented); diff != "" {
		t.Errorf("doc.go lists other metrics than there are (-exported +listed):\n%s", diff)
	}
}

// So are the reasons of Events.
func TestEventsAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	_, events, _ := strings.Cut(string(doc), "\n// # Events\n")
	events, _, _ = strings.Cut(events, "\n// # ")
	source, err := os.ReadFile("reporter.go")
	if err != nil {
		t.Fatal(err)
	}
	reasons := regexp.MustCompile(`(?m)^\treason\w+ += "(\w+)"$`).FindAllStringSubmatch(string(source), -1)
	if len(reasons) == 0 {
		t.Fatal("reporter.go has no reasons")
	}
	for _, reason := range reasons {
		if !regexp.MustCompile(`\b` + reason[1] + `\b`).MatchString(events) {
			t.Errorf("doc.go does not explain Events of reason %s", reason[1])
		}
	}
}

// Nothing that happens adds a series.
func TestSeriesExistFromTheStart(t *testing.T) {
	m := newMetrics(func() (int, int) { return 0, 0 })
	lines := func() int { return strings.Count(page(t, m), "\nsimgpu_") }
	before := lines()
	for _, reason := range failureReasons {
		m.refused(opPrepare, 1, because(reason, errors.New("no")))
	}
	m.conflict(true)
	m.conflict(false)
	m.fieldsDropped([]string{featurePartitions, "DRASomethingNew", "DRASomethingElse"})
	if after := lines(); after != before {
		t.Errorf("%d series at the start, %d later", before, after)
	}
	if diff := cmp.Diff(map[string]float64{featurePartitions: 1, featureOther: 2}, m.series(t, "simgpu_dropped_fields_total")); diff != "" {
		t.Error(diff)
	}
}

func TestReasonOf(t *testing.T) {
	io := &fs.PathError{Op: "open", Path: "/x", Err: os.ErrPermission}
	api := apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "x", errors.New("policy"))
	conflict := &conflictError{conflict: conflict{holders: []holding{{}}}}
	for name, test := range map[string]struct {
		err  error
		want failureReason
	}{
		"wrapped":                   {fmt.Errorf("claim: %w", because(failedConfig, errors.New("x"))), failedConfig},
		"conflict":                  {fmt.Errorf("claim: %w", conflict), failedConflict},
		"conflict that has a cause": {errors.Join(conflict, fmt.Errorf("cannot tell: %w", api)), failedConflict},
		"file":                      {fmt.Errorf("checkpoint: %w", io), failedIO},
		"file, and its undo":        {errors.Join(io, context.Canceled), failedTimeout},
		"rename":                    {&os.LinkError{Op: "rename", Err: os.ErrExist}, failedIO},
		"API":                       {fmt.Errorf("get: %w", api), failedAPI},
		"deadline":                  {fmt.Errorf("wait: %w", context.DeadlineExceeded), failedTimeout},
		"stop":                      {errStopping, failedStopping},
		"anything":                  {errors.New("x"), failedOther},
	} {
		if got := reasonOf(test.err); got != test.want {
			t.Errorf("%s: %s, want %s", name, got, test.want)
		}
	}
	if because(failedConfig, nil) != nil {
		t.Error("no error has become one")
	}
}

func TestErrorsAreCountedByReason(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	holder := claimOf("holder", []string{left0})
	api := newFakeAPI(holder)
	unreachable := false
	api.PrependReactor("get", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		if unreachable {
			return true, nil, apierrors.NewServiceUnavailable("down")
		}
		return false, nil, nil
	})
	plugin, events := n.withAPI(p, api)
	prepare := func(claim *resourceapi.ResourceClaim) {
		t.Helper()
		if _, err := plugin.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{claim}); err != nil {
			t.Fatal(err)
		}
	}
	prepare(holder)
	prepare(claimOf("lost", []string{"gpu-9"}))
	prepare(claimOf("late", []string{whole0}))
	prepare(claimOf("odd", []string{right0}, config(`{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "Odd"}`)))
	good := p.store
	p.store = fullDisk{good}
	prepare(claimOf("full", []string{right0}))
	p.store = good
	// Who had the device is gone, which cannot be seen while the API is away.
	if err := api.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), namespace, "holder"); err != nil {
		t.Fatal(err)
	}
	unreachable = true
	prepare(claimOf("next", []string{left0}))
	unreachable = false
	prepare(claimOf("next", []string{left0}))

	for metric, want := range map[string]map[string]float64{
		"simgpu_claim_operation_errors_total": {
			"prepare,not_found": 1, "prepare,conflict": 2, "prepare,config": 1, "prepare,io": 1,
		},
		"simgpu_claim_conflicts_total": {conflictRefused: 2, conflictResolved: 1},
		"simgpu_orphans_removed_total": {orphanClaim: 1},
		"simgpu_claims_prepared":       {"": 1},
		"simgpu_devices_prepared":      {"": 1},
	} {
		if diff := cmp.Diff(want, plugin.metrics.series(t, metric)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", metric, diff)
		}
	}
	events.expect(t, reasonClaimReleased, "team/holder", "uid-holder")
}

func TestOrphansAreCountedAndTold(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	claim := claimOf("a", []string{left0})
	p.mustPrepare(t, claim)
	n.noteMetadata(claim)
	// Its files stay while the claim is forgotten.
	if err := p.store.Remove(claim.UID); err != nil {
		t.Fatal(err)
	}
	p.release(claim.UID)
	plugin, events := n.withAPI(p, newFakeAPI())
	for range 2 {
		if err := plugin.reconciler.removeOrphans(); err != nil {
			t.Fatal(err)
		}
	}
	got := plugin.metrics.series(t, "simgpu_orphans_removed_total")
	if got[orphanSpec] != 1 || got[orphanSocket] != 1 || got[orphanMetadata] == 0 {
		t.Errorf("counted %v", got)
	}
	events.expect(t, reasonOrphansRemoved, "1 CDI specs", "1 device folders")
	n.expectFiles("nothing is left")
}

func TestFailedUnprepareIsToldAboutTheClaim(t *testing.T) {
	n := newTestNode(t)
	p := n.start()
	claim := claimOf("a", []string{left0})
	p.mustPrepare(t, claim)
	plugin, events := n.withAPI(p, newFakeAPI(claim))
	p.claims.sockets = stuckSockets{p.sockets}
	results, err := plugin.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{
		NamespacedName: types.NamespacedName{Namespace: namespace, Name: "a"}, UID: claim.UID,
	}})
	if err != nil {
		t.Fatal(err)
	}
	expectError(t, results[claim.UID], "stuck")
	events.expect(t, reasonUnprepareFailed, "stuck")
}

// stuckSockets cannot be closed.
type stuckSockets struct{ socketServer }

func (stuckSockets) Close(string) error { return errors.New("stuck") }

func TestAPIRequests(t *testing.T) {
	requests := NewAPIRequests()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "{}", http.StatusTeapot) }))
	config := &rest.Config{Host: server.URL}
	config.Wrap(requests.Wrap)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	m := newMetrics(func() (int, int) { return 0, 0 })
	m.registry.MustRegister(requests)
	ctx := t.Context()
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}}
	slicesOf := client.ResourceV1().ResourceSlices()
	calls := map[string]func() error{
		"list,resourceslices":   func() error { _, err := slicesOf.List(ctx, metav1.ListOptions{}); return err },
		"watch,resourceslices":  func() error { _, err := slicesOf.Watch(ctx, metav1.ListOptions{}); return err },
		"create,resourceslices": func() error { _, err := slicesOf.Create(ctx, slice, metav1.CreateOptions{}); return err },
		"dryrun,resourceslices": func() error {
			_, err := slicesOf.Create(ctx, slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return err
		},
		"update,resourceslices": func() error { _, err := slicesOf.Update(ctx, slice, metav1.UpdateOptions{}); return err },
		"delete,resourceslices": func() error { return slicesOf.Delete(ctx, "s", metav1.DeleteOptions{}) },
		"patch,events": func() error {
			_, err := client.CoreV1().Events("ns").Patch(ctx, "e", types.MergePatchType, []byte("{}"), metav1.PatchOptions{})
			return err
		},
		"get,resourceclaims": func() error {
			_, err := client.ResourceV1().ResourceClaims("ns").Get(ctx, "c", metav1.GetOptions{})
			return err
		},
		"get,nodes":  func() error { _, err := client.CoreV1().Nodes().Get(ctx, "n", metav1.GetOptions{}); return err },
		"list,other": func() error { _, err := client.Discovery().ServerVersion(); return err },
	}
	want := map[string]float64{}
	for what, call := range calls {
		if call() == nil {
			t.Errorf("%s succeeded", what)
		}
		verb, resource, _ := strings.Cut(what, ",")
		want["418,"+resource+","+verb] = 1
	}
	server.Close()
	if calls["get,nodes"]() == nil {
		t.Error("a server that is gone has answered")
	}
	want["error,nodes,get"] = 1
	if diff := cmp.Diff(want, m.series(t, "simgpu_api_requests_total")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
