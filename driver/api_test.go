package driver

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/version"
	fakediscovery "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
)

// fakeAPI is an API server as far as the driver can tell: it makes names, answers dry runs, and can
// drop what a disabled feature gate drops.
type fakeAPI struct {
	*fake.Clientset

	mu       sync.Mutex
	names    int
	revision int // last resourceVersion
	drops    func(*resourceapi.ResourceSlice)
	honest   bool // dry runs drop, too
	dryRuns  int
	requests map[string]int // "verb resource" or "verb resource/subresource" -> count
}

func newFakeAPI(objects ...runtime.Object) *fakeAPI {
	api := &fakeAPI{honest: true, drops: func(*resourceapi.ResourceSlice) {}, requests: map[string]int{}}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node-uid", Labels: map[string]string{"pool": "h100"}}}
	api.Clientset = fake.NewClientset(append(objects, node)...)
	api.setMinor("37")
	write := func(action clienttesting.Action) (bool, runtime.Object, error) {
		api.mu.Lock()
		defer api.mu.Unlock()
		var slice *resourceapi.ResourceSlice
		dryRun := false
		switch action := action.(type) {
		case clienttesting.CreateActionImpl:
			slice = action.Object.(*resourceapi.ResourceSlice)
			dryRun = slices.Equal(action.CreateOptions.DryRun, []string{metav1.DryRunAll})
			if slice.Name == "" {
				api.names++
				slice.Name = fmt.Sprintf("%s%05d", slice.GenerateName, api.names)
				slice.UID = types.UID(slice.Name)
			}
		case clienttesting.UpdateActionImpl:
			slice = action.Object.(*resourceapi.ResourceSlice)
		}
		if dryRun {
			api.dryRuns++
			answer := slice.DeepCopy()
			if api.honest {
				api.drops(answer)
			}
			return true, answer, nil
		}
		api.drops(slice)
		api.revision++
		slice.ResourceVersion = strconv.Itoa(1000 + api.revision)
		return false, nil, nil
	}
	api.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		// The object of the action belongs to the caller.
		create := action.(clienttesting.CreateActionImpl)
		create.Object = create.Object.DeepCopyObject()
		handled, object, err := write(create)
		if handled || err != nil {
			return handled, object, err
		}
		return true, create.Object, api.Tracker().Create(create.GetResource(), create.Object, "")
	})
	api.PrependReactor("update", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		update := action.(clienttesting.UpdateActionImpl)
		update.Object = update.Object.DeepCopyObject()
		if handled, object, err := write(update); handled || err != nil {
			return handled, object, err
		}
		return true, update.Object, api.Tracker().Update(update.GetResource(), update.Object, "")
	})
	// Before the others, so that it sees all requests.
	api.PrependReactor("*", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		api.mu.Lock()
		defer api.mu.Unlock()
		request := action.GetVerb() + " " + action.GetResource().Resource
		if sub := action.GetSubresource(); sub != "" {
			request += "/" + sub
		}
		api.requests[request]++
		return false, nil, nil
	})
	return api
}

func (a *fakeAPI) setMinor(minor string) {
	a.Discovery().(*fakediscovery.FakeDiscovery).FakedServerVersion = &version.Info{Major: "1", Minor: minor, GitVersion: "v1." + minor + ".0"}
}

func (a *fakeAPI) setDrops(drops func(*resourceapi.ResourceSlice)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.drops = drops
}

// setHonest lets dry runs drop what is dropped when slices are stored.
func (a *fakeAPI) setHonest() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.honest = true
}

// asked is the number of dry runs.
func (a *fakeAPI) asked() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.dryRuns
}

func (a *fakeAPI) count(request string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.requests[request]
}

func dropCounters(slice *resourceapi.ResourceSlice) {
	slice.Spec.SharedCounters = nil
	for i := range slice.Spec.Devices {
		slice.Spec.Devices[i].ConsumesCounters = nil
	}
}

// published returns the devices in the API in order, with "!" after those that are tainted.
func (a *fakeAPI) published(t *testing.T) []string {
	t.Helper()
	list, err := a.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(list.Items, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	names := []string{}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			name := d.Name
			if len(d.Taints) > 0 {
				name += "!"
			}
			names = append(names, name)
		}
	}
	return names
}

// events collects what is told to people.
type events struct {
	*record.FakeRecorder
	mu   sync.Mutex
	seen []string
}

func newEvents() *events { return &events{FakeRecorder: record.NewFakeRecorder(1000)} }

func (e *events) reporter() *reporter { return newReporter(e.FakeRecorder, nodeName) }

func (e *events) all() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	for {
		select {
		case event := <-e.Events:
			e.seen = append(e.seen, event)
		default:
			return slices.Clone(e.seen)
		}
	}
}

// expect checks that exactly one event of that reason was told, and what it mentions.
func (e *events) expect(t *testing.T, reason string, mentions ...string) {
	t.Helper()
	var found []string
	for _, event := range e.all() {
		if strings.Contains(event, " "+reason+" ") {
			found = append(found, event)
		}
	}
	if len(found) != 1 {
		t.Errorf("%d events %s, want one; all: %q", len(found), reason, e.all())
		return
	}
	for _, m := range mentions {
		if !strings.Contains(found[0], m) {
			t.Errorf("event %q does not mention %q", found[0], m)
		}
	}
}

// eventually waits for a condition; what it returns last is reported.
func eventually(t *testing.T, what string, condition func() (bool, any)) {
	t.Helper()
	var last any
	err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		done, state := condition()
		last = state
		return done, nil
	})
	if err != nil {
		t.Fatalf("%s: %v; last seen: %v", what, err, last)
	}
}

// value returns a metric, summed over its labels.
func (m *metrics) value(t *testing.T, name string) float64 {
	t.Helper()
	families, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		var sum float64
		for _, metric := range family.GetMetric() {
			sum += metric.GetGauge().GetValue() + metric.GetCounter().GetValue()
		}
		return sum
	}
	t.Fatalf("no metric %s", name)
	return 0
}
