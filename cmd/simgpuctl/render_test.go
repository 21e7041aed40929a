package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/simgpu/simgpu/profiles"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// run calls the command as a person does.
func run(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := newCommand("simgpuctl", &out, &errs)
	cmd.SetArgs(args)
	err = cmd.ExecuteContext(t.Context())
	return out.String(), errs.String(), err
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	file = filepath.Join("testdata", file)
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s differs; if that is meant, run the test with -update (-want +got):\n%s", file, diff)
	}
}

// TestRenderModels holds what a node with one GPU publishes, for every model, or why it cannot.
func TestRenderModels(t *testing.T) {
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, model := range catalogue.Models() {
		t.Run(model.ID, func(t *testing.T) {
			stdout, stderr, err := run(t, "render", "--model", model.ID, "-o", "table")
			if err != nil {
				stderr += "simgpuctl: " + err.Error() + "\n"
			}
			golden(t, "render/"+model.ID+".txt", stdout+stderr)
		})
	}
}

// rendered returns the slices that a program gets.
func rendered(t *testing.T, args ...string) []resourceapi.ResourceSlice {
	t.Helper()
	stdout, _, err := run(t, append([]string{"render", "-o", "json"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	var list struct {
		APIVersion, Kind string
		Items            []resourceapi.ResourceSlice
	}
	if err := json.Unmarshal([]byte(stdout), &list); err != nil {
		t.Fatal(err)
	}
	if list.APIVersion != "v1" || list.Kind != "List" {
		t.Errorf("got %s %s, want a v1 List", list.APIVersion, list.Kind)
	}
	return list.Items
}

func TestRenderLayouts(t *testing.T) {
	for version, want := range map[string]int{"1.34": 2, "v1.34.3": 2, "1.35": 3, "1.36": 3, "1.37": 3} {
		slices := rendered(t, "--model", "h100-sxm5-80gb", "--gpus", "2", "--kubernetes", version)
		if len(slices) != want {
			t.Errorf("%s: got %d slices, want %d", version, len(slices), want)
		}
		for _, slice := range slices {
			if together := len(slice.Spec.SharedCounters) > 0 && len(slice.Spec.Devices) > 0; together != (want == 2) {
				t.Errorf("%s: counter sets and devices in one slice: %t", version, together)
			}
			if slice.APIVersion != "resource.k8s.io/v1" || slice.Kind != "ResourceSlice" || *slice.Spec.NodeName != "node-1" || slice.Spec.Pool.ResourceSliceCount != int64(want) {
				t.Errorf("%s: not a complete object: %+v", version, slice)
			}
		}
	}
}

func TestRenderInventory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "inventory.yaml")
	content := `apiVersion: simgpu.dev/v1alpha1
kind: NodeInventory
rules:
- nodeLabels: {pool: ampere}
  gpus: [{model: a100-80gb, migMode: disabled}, {model: l4-24gb, count: 2}]
- nodeNames: [empty]
  gpus: []
- gpus: [{model: h100-sxm5-80gb}]
`
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		args []string
		want []string // devices without partitions
	}{
		"by label": {[]string{"--node-labels", "pool=ampere"}, []string{"gpu-0", "gpu-1", "gpu-2"}},
		"by name":  {[]string{"--node", "empty"}, nil},
		"default":  {nil, []string{"gpu-0"}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, slice := range rendered(t, append(test.args, "--inventory", file, "--driver-name", "gpu.example.com")...) {
				if slice.Spec.Driver != "gpu.example.com" || !strings.Contains(slice.GenerateName, "gpu.example.com") {
					t.Errorf("slice of driver %s named %s", slice.Spec.Driver, slice.GenerateName)
				}
				for _, device := range slice.Spec.Devices {
					if !strings.Contains(device.Name, "mig") {
						got = append(got, device.Name)
					}
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("whole GPUs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRenderStatic(t *testing.T) {
	stdout, _, err := run(t, "render", "--model", "h100-sxm5-80gb", "--mig", "static", "--partitions", "3g.40gb@4,1g.10gb,1g.10gb", "--kubernetes", "1.34")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "render/h100-sxm5-80gb.static.yaml", stdout)
}

func TestRenderOrder(t *testing.T) {
	first := func(order string) string {
		return rendered(t, "--model", "h100-sxm5-80gb", "--device-order", order)[1].Spec.Devices[0].Name
	}
	if vendor, packed := first("vendor"), first("packed"); vendor != "gpu-0" || packed != "gpu-0-mig-1g10gb-19-6" {
		t.Errorf("first devices: got %s and %s", vendor, packed)
	}
}

func TestRenderRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"nothing":           {nil, "--model or --inventory is required"},
		"both":              {[]string{"--model", "l4-24gb", "--inventory", "x"}, "--model and --inventory exclude each other: an inventory names its models"},
		"output":            {[]string{"--model", "l4-24gb", "-o", "wide"}, `--output "wide" is not known: use yaml, json or table`},
		"version":           {[]string{"--model", "l4-24gb", "--kubernetes", "new"}, `--kubernetes "new" is not a version like 1.35`},
		"old version":       {[]string{"--model", "l4-24gb", "--kubernetes", "1.33"}, "the API server is Kubernetes 1.33; 1.34 or later is needed"},
		"order":             {[]string{"--model", "l4-24gb", "--device-order", "best"}, `--device-order: unknown device order "best"; known: vendor, packed, adaptive`},
		"no file":           {[]string{"--inventory", "absent.yaml"}, "open absent.yaml: no such file or directory"},
		"too many":          {[]string{"--model", "l4-24gb", "--gpus", "255"}, "GPU group 0: 255 GPUs of model l4-24gb after 0 others are too many: a node can have 254"},
		"negative":          {[]string{"--model", "l4-24gb", "--gpus", "-1"}, "GPUs: count: -1 is negative"},
		"driver version":    {[]string{"--model", "a100-80gb", "--driver-version", "580.95.05"}, "GPUs: driverVersion: no figures of model a100-80gb are sourced for driver version 580.95.05; sourced: through 570 (default 570.169)"},
		"no partitions":     {[]string{"--model", "l4-24gb", "--mig", "dynamic"}, "GPUs: migMode: model l4-24gb cannot be partitioned; use disabled"},
		"figures of a GPU":  {[]string{"--model", "gh200-144gb"}, "GPUs: model: model gh200-144gb cannot be simulated, nobody sourced its product name and its memory"},
		"layout":            {[]string{"--model", "a30-24gb", "--mig", "static", "--partitions", "4g.24gb,1g.6gb"}, "GPUs: partitions[1]: 1g.6gb does not fit beside 4g.24gb at 0: at 0, 1, 2, 3 memory slices 0-3 are taken by 4g.24gb at 0. Nothing more fits"},
		"start":             {[]string{"--model", "a30-24gb", "--mig", "static", "--partitions", "4g.24gb@x"}, `--partitions "4g.24gb@x" is not a profile, or a profile and its first memory slice as in 3g.40gb@4`},
		"figures of shares": {[]string{"--model", "gb200-186gb", "--mig", "dynamic"}, "GPUs: migMode: model gb200-186gb cannot be partitioned with driver version 580.95.05, nobody sourced: all figures of 3g.93gb, 4g.93gb, 7g.186gb; use static, for the profiles that are, or disabled"},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, _, err := run(t, append([]string{"render"}, test.args...)...)
			if err == nil || err.Error() != test.want {
				t.Errorf("got error %v\nwant %s", err, test.want)
			}
			if stdout != "" {
				t.Errorf("printed all the same: %s", stdout)
			}
		})
	}
}

func TestRenderRefusesNamesThatNothingCanHave(t *testing.T) {
	for _, test := range [][2]string{{"--node", "Node_1"}, {"--node", ""}, {"--driver-name", "gpu/../x"}} {
		option, value := test[0], test[1]
		stdout, _, err := run(t, "render", "--model", "l4-24gb", option+"="+value)
		if want := fmt.Sprintf("%s %q: ", option, value); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got error %v, want %s...", err, want)
		}
		if stdout != "" {
			t.Errorf("%s %q: printed all the same: %s", option, value, stdout)
		}
	}
}

func TestUnknownCommandsAreRefused(t *testing.T) {
	for _, args := range [][]string{{"modelz"}, {"fault", "ad"}} {
		if _, _, err := run(t, args...); err == nil || !strings.Contains(err.Error(), "unknown command") {
			t.Errorf("%v: got error %v", args, err)
		}
	}
}
