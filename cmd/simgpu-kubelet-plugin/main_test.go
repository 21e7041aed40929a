package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/rest"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/simgpu/simgpu/driver"
	"github.com/simgpu/simgpu/driver/order"
)

// parse returns what the command would run with.
func parse(t *testing.T, env map[string]string, args ...string) (config, error) {
	t.Helper()
	var got config
	cmd := newCommand(func(name string) string { return env[name] }, func(_ context.Context, c config) error {
		got = c
		return nil
	})
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(t.Context())
	return got, err
}

func TestFlagsReachTheDriver(t *testing.T) {
	got, err := parse(t, nil,
		"--node-name=n", "--driver-name=gpu.example.com", "--inventory=/etc/i.yaml",
		"--kubelet-plugins-dir=/k/plugins", "--kubelet-registrar-dir=/k/registry", "--cdi-dir=/cdi", "--tools-dir=/tools",
		"--http-endpoint=:1", "--kubeconfig=/kc", "--device-order=adaptive", "--device-order-interval=3s", "--force-beside-real-gpu", "--logging-format=json", "-v=4",
	)
	if err != nil {
		t.Fatal(err)
	}
	want := driver.DefaultOptions()
	want.NodeName, want.DriverName, want.InventoryFile = "n", "gpu.example.com", "/etc/i.yaml"
	want.KubeletPluginsDir, want.KubeletRegistrarDir, want.CDIDir = "/k/plugins", "/k/registry", "/cdi"
	want.ToolsDir, want.Tools = "/tools", []string{"nvidia-smi", "simgpu-run"}
	want.HTTPEndpoint, want.ForceBesideRealGPU = ":1", true
	want.DeviceOrder, want.DeviceOrderInterval = order.Adaptive, 3*time.Second
	if diff := cmp.Diff(want, got.driver); diff != "" {
		t.Error(diff)
	}
	if got.kubeconfig != "/kc" || got.logging.Format != logsapi.JSONLogFormat || got.logging.Verbosity != 4 {
		t.Errorf("kubeconfig %q, logging %+v", got.kubeconfig, got.logging)
	}
}

func TestDefaults(t *testing.T) {
	c, err := parse(t, map[string]string{"NODE_NAME": "from-env", "POD_UID": "uid-1"}, []string{}...)
	if err != nil {
		t.Fatal(err)
	}
	if c.driver.NodeName != "from-env" || c.driver.PodUID != "uid-1" {
		t.Errorf("node name %q, pod UID %q", c.driver.NodeName, c.driver.PodUID)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if c.driver.ToolsDir != filepath.Dir(self) {
		t.Errorf("tools %q", c.driver.ToolsDir)
	}
}

func TestMistakesAreErrors(t *testing.T) {
	for name, args := range map[string][]string{
		"unknown flag": {"--inventry=x"},
		"argument":     {"x"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := parse(t, nil, args...); err == nil {
				t.Error("accepted")
			}
		})
	}
	err := runDriver(t.Context(), config{logging: logsapi.NewLoggingConfiguration(), kubeconfig: "/does/not/exist"})
	if err == nil || !strings.Contains(err.Error(), "/does/not/exist") {
		t.Errorf("got %v", err)
	}
}

func TestOutsideAClusterAKubeconfigIsNeeded(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := newClient("", driver.NewAPIRequests()); !errors.Is(err, rest.ErrNotInCluster) {
		t.Errorf("got %v, want that this is not inside a cluster", err)
	}
}
