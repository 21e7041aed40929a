package dcgm

import (
	"context"
	"errors"
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/podresources"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

func h100(minor int) deviceapi.GPUStatus {
	return deviceapi.GPUStatus{
		GPU: deviceapi.GPU{
			UUID: "GPU-5b6e0f1c-7d1f-4c55-9a25-6f0ad6f3a00" + string(rune('1'+minor)), ProductName: "NVIDIA H100 80GB HBM3", Minor: minor,
			PCIBusID: "0000:1b:00.0", DriverVersion: "580.95.05", ComputeCapability: "9.0.0", MIGMode: deviceapi.MIGDisabled,
			MemoryBytes: 81559 * deviceapi.MiB, PowerLimitWatts: 700,
		},
		Whole: true,
	}
}

func slice3g(instance int, used int64, load int) deviceapi.PartitionStatus {
	return deviceapi.PartitionStatus{
		Partition: deviceapi.Partition{
			UUID: "MIG-" + string(rune('0'+instance)), Profile: "3g.40gb", GPUInstanceID: instance, MemoryBytes: 40448 * deviceapi.MiB,
		},
		MemoryUsed: used * deviceapi.MiB, Utilization: load,
	}
}

func use(pod, container, claim, device string) podresources.Use {
	return podresources.Use{Namespace: "team", Pod: pod, Container: container, ClaimNamespace: "team", ClaimName: claim,
		Driver: "gpu.nvidia.com", Pool: "node-1", Device: device}
}

// scrape returns what an exporter answers.
func scrape(t *testing.T, config Config) string {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(New(config))
	answer := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if answer.Code != http.StatusOK {
		t.Fatalf("status %d: %s", answer.Code, answer.Body)
	}
	return answer.Body.String()
}

func snapshots() map[string]deviceapi.Snapshot {
	busy, idle := h100(0), h100(1)
	busy.MemoryUsed, busy.Utilization = 70000*deviceapi.MiB, 81
	partitioned := h100(0)
	partitioned.MIGMode = deviceapi.MIGEnabled
	partitioned.MemoryUsed = 30046 * deviceapi.MiB
	partitioned.Partitions = []deviceapi.PartitionStatus{slice3g(1, 15023, 60), slice3g(2, 15023, 0)}
	empty := h100(0)
	empty.MIGMode = deviceapi.MIGEnabled
	broken, lost := h100(0), h100(1)
	broken.MIGMode, broken.Health.XID = deviceapi.MIGEnabled, 48
	broken.Partitions = []deviceapi.PartitionStatus{slice3g(1, 0, 0), slice3g(2, 0, 0)}
	broken.Partitions[1].Health.XID = 63
	lost.Health = deviceapi.Health{Lost: true, XID: 79}
	old := h100(0)
	old.ProductName, old.ComputeCapability, old.PowerLimitWatts, old.MIGMode = "Tesla T4", "7.5", 0, deviceapi.MIGUnsupported
	return map[string]deviceapi.Snapshot{
		"one GPU busy, one idle":            {GPUs: []deviceapi.GPUStatus{busy, idle}},
		"two partitions, one shared":        {GPUs: []deviceapi.GPUStatus{partitioned}},
		"MIG mode without a partition":      {GPUs: []deviceapi.GPUStatus{empty}},
		"no power limit, no row remapping":  {GPUs: []deviceapi.GPUStatus{old}},
		"a node whose inventory is refused": {},
		"XIDs and a lost GPU":               {GPUs: []deviceapi.GPUStatus{broken, lost}},
	}
}

func TestMetrics(t *testing.T) {
	uuids := map[string]string{"gpu-0": h100(0).UUID, "gpu-0-mig-3g40gb-9-0": "MIG-2", "gpu-0-mig-3g40gb-9-4": "MIG-1"}
	uses := map[string][]podresources.Use{
		"one GPU busy, one idle": {
			use("server", "main", "gpu", "gpu-0"),
			{Namespace: "team", Pod: "gone", Container: "main", Driver: "gpu.nvidia.com", Pool: "node-1", Device: "gpu-9"},
			{Namespace: "team", Pod: "elsewhere", Container: "main", Driver: "gpu.nvidia.com", Pool: "another-pool", Device: "gpu-0"},
		},
		"two partitions, one shared": {
			use("server", "main", "slice", "gpu-0-mig-3g40gb-9-4"),
			use("server", "sidecar", "slice", "gpu-0-mig-3g40gb-9-4"),
		},
	}
	for name, snapshot := range snapshots() {
		t.Run(name, func(t *testing.T) {
			got := scrape(t, Config{
				NodeName: "node-1",
				Snapshot: func() deviceapi.Snapshot { return snapshot },
				Uses:     func(context.Context) ([]podresources.Use, error) { return uses[name], nil },
				UUID:     func(device string) string { return uuids[device] },
			})
			path := filepath.Join("testdata", regexp.MustCompile(`\W+`).ReplaceAllString(name, "-")+".metrics")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got; go test -update accepts it):\n%s", path, diff)
			}
		})
	}
}

func TestKubeletIsNotNeeded(t *testing.T) {
	snapshot := snapshots()["two partitions, one shared"]
	config := Config{NodeName: "node-1", Snapshot: func() deviceapi.Snapshot { return snapshot }}
	never := scrape(t, config)
	config.Uses = func(context.Context) ([]podresources.Use, error) { return nil, errors.New("no such socket") }
	if diff := cmp.Diff(never, scrape(t, config)); diff != "" {
		t.Errorf("a kubelet that does not answer makes a difference (-never asked +failed):\n%s", diff)
	}
}
