package driver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func inventoryText(rules string) string {
	return "apiVersion: simgpu.dev/v1alpha1\nkind: NodeInventory\nrules:\n" + rules
}

func gpusRule(model string, count int) string {
	return fmt.Sprintf("- gpus:\n  - model: %s\n    count: %d\n", model, count)
}

// configMap is a folder as the kubelet mounts a ConfigMap: the file is a symbolic link into a folder
// that is exchanged as a whole.
type configMap struct {
	t       *testing.T
	dir     string
	version int
}

func newConfigMap(t *testing.T) *configMap {
	t.Helper()
	return &configMap{t: t, dir: t.TempDir()}
}

func (m *configMap) file() string { return filepath.Join(m.dir, "inventory.yaml") }

func (m *configMap) write(content string) {
	m.t.Helper()
	m.version++
	data := fmt.Sprintf("..version_%d", m.version)
	steps := []error{
		os.Mkdir(filepath.Join(m.dir, data), 0o755),
		os.WriteFile(filepath.Join(m.dir, data, "inventory.yaml"), []byte(content), 0o600),
		os.Symlink(data, filepath.Join(m.dir, "..data_tmp")),
		os.Rename(filepath.Join(m.dir, "..data_tmp"), filepath.Join(m.dir, "..data")),
	}
	if m.version == 1 {
		steps = append(steps, os.Symlink("..data/inventory.yaml", m.file()))
	} else {
		steps = append(steps, os.RemoveAll(filepath.Join(m.dir, fmt.Sprintf("..version_%d", m.version-1))))
	}
	for _, err := range steps {
		if err != nil {
			m.t.Fatal(err)
		}
	}
}

// runningSource is an inventorySource at work, and what it last applied.
type runningSource struct {
	events  *events
	metrics *metrics
	labels  chan map[string]string

	mu      sync.Mutex
	gpus    []string
	err     error
	applied int
}

func startSource(t *testing.T, file string) *runningSource {
	t.Helper()
	n := newTestNode(t)
	s := &runningSource{events: newEvents(), metrics: newMetrics(func() (int, int) { return 0, 0 }), labels: make(chan map[string]string)}
	source := &inventorySource{
		factory: factory{nodeName: nodeName, driverName: driverName, catalogue: n.catalogue},
		file:    file, reporter: s.events.reporter(), metrics: s.metrics,
		apply: func(gpus []stockGPU, err error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.applied++
			s.err = err
			if err == nil {
				s.gpus = []string{}
				for _, gpu := range gpus {
					s.gpus = append(s.gpus, gpu.Model.ID)
				}
			}
		},
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { source.run(ctx, s.labels) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return s
}

func (s *runningSource) expect(t *testing.T, valid bool, gpus ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("valid %v, GPUs %v", valid, gpus), func() (bool, any) {
		s.mu.Lock()
		defer s.mu.Unlock()
		seen := fmt.Sprint(s.gpus, s.err)
		return (s.err == nil) == valid && cmp.Equal(gpus, s.gpus), seen
	})
	want := 0.0
	if valid {
		want = 1
	}
	if got := s.metrics.value(t, "simgpu_inventory_valid"); got != want {
		t.Errorf("metric is %v, want %v", got, want)
	}
}

func TestInventoryIsFollowed(t *testing.T) {
	m := newConfigMap(t)
	m.write(inventoryText(gpusRule("h100-sxm5-80gb", 1)))
	s := startSource(t, m.file())
	s.labels <- map[string]string{}
	s.expect(t, true, "h100-sxm5-80gb")
	if events := s.events.all(); len(events) != 0 {
		t.Errorf("an ordinary start told %q", events)
	}

	m.write(inventoryText(gpusRule("a100-40gb", 2)))
	s.expect(t, true, "a100-40gb", "a100-40gb")
	s.events.expect(t, reasonInventoryApplied, "2 GPUs")

	m.write(inventoryText("- gpus:\n  - model: h2000\n    count: -1\n    colour: blue\n"))
	s.expect(t, false, "a100-40gb", "a100-40gb")
	s.events.expect(t, reasonInvalidInventory, "h2000", "count", "colour", "The previous one stays in force")

	m.write(inventoryText(gpusRule("a100-40gb", 2)))
	s.expect(t, true, "a100-40gb", "a100-40gb")
}

func TestInventoryThatIsFaultyFromTheStart(t *testing.T) {
	m := newConfigMap(t)
	s := startSource(t, m.file())
	s.labels <- map[string]string{}
	s.expect(t, false)
	s.events.expect(t, reasonInvalidInventory, m.file(), "no such file", "Nothing is published")
	m.write(inventoryText(gpusRule("h100-sxm5-80gb", 1)))
	s.expect(t, true, "h100-sxm5-80gb")
}

func TestInventoryFollowsTheLabelsOfTheNode(t *testing.T) {
	m := newConfigMap(t)
	m.write(inventoryText("- nodeLabels: {gpu: h100}\n  gpus:\n  - model: h100-sxm5-80gb\n    count: 1\n- nodeLabels: {gpu: a100}\n  gpus:\n  - model: a100-40gb\n    count: 1\n"))
	s := startSource(t, m.file())
	api := newFakeAPI()
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() {
		watchNode(ctx, api, nodeName, func() {}, func(types.UID) {}, func(string) {}, func(labels map[string]string) { s.labels <- labels })
	})
	defer watching.Wait()
	defer cancel()
	s.expect(t, true, []string{}...)

	label := func(value string) {
		t.Helper()
		node, err := api.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		node.Labels = map[string]string{"gpu": value}
		if _, err := api.CoreV1().Nodes().Update(t.Context(), node, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	label("h100")
	s.expect(t, true, "h100-sxm5-80gb")
	label("a100")
	s.expect(t, true, "a100-40gb")

	// What changes on a Node all the time, and other Nodes, are nobody's business.
	s.mu.Lock()
	applied := s.applied
	s.mu.Unlock()
	node, err := api.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady}}
	if _, err := api.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-2", Labels: map[string]string{"gpu": "h100"}}}
	if _, err := api.CoreV1().Nodes().Create(t.Context(), other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	label("h100")
	s.expect(t, true, "h100-sxm5-80gb")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.applied != applied+1 {
		t.Errorf("applied %d times, want once", s.applied-applied)
	}
}
