package driver

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/dcgm"
)

// TestDashboardShowsWhatIsExported compares the dashboard that the chart ships with the metrics that there are.
func TestDashboardShowsWhatIsExported(t *testing.T) {
	text, err := os.ReadFile("../deployments/helm/simgpu/dashboards/simgpu.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			ID      int
			Title   string
			Type    string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}

	registry := prometheus.NewRegistry()
	gpu := deviceapi.GPUStatus{Whole: true, GPU: deviceapi.GPU{UUID: "GPU-1", PowerLimitWatts: 1, ComputeCapability: "9.0", MemoryBytes: 1}}
	registry.MustRegister(dcgm.New(dcgm.Config{Snapshot: func() deviceapi.Snapshot { return deviceapi.Snapshot{GPUs: []deviceapi.GPUStatus{gpu}} }}))
	answer := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	exported := map[string]bool{}
	for _, match := range regexp.MustCompile(`(?m)^(\w+)[{ ]`).FindAllStringSubmatch(page(t, allMetrics())+answer.Body.String(), -1) {
		exported[match[1]] = true
	}

	name := regexp.MustCompile(`\b(?:simgpu|DCGM)_\w+`)
	ids := map[int]bool{}
	for _, panel := range dashboard.Panels {
		if ids[panel.ID] {
			t.Errorf("panel %q has the id of another one, %d", panel.Title, panel.ID)
		}
		ids[panel.ID] = true
		if panel.Type != "row" && len(panel.Targets) == 0 {
			t.Errorf("panel %q shows nothing", panel.Title)
		}
		for _, target := range panel.Targets {
			names := name.FindAllString(target.Expr, -1)
			if len(names) == 0 {
				t.Errorf("panel %q: no metric in %s", panel.Title, target.Expr)
			}
			for _, metric := range names {
				if !exported[metric] {
					t.Errorf("panel %q: nothing exports %s", panel.Title, metric)
				}
			}
			for _, pair := range []string{"()", "{}", "[]"} {
				if strings.Count(target.Expr, pair[:1]) != strings.Count(target.Expr, pair[1:]) {
					t.Errorf("panel %q: %s are not balanced in %s", panel.Title, pair, target.Expr)
				}
			}
		}
	}
}
