package main

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/simgpu/simgpu/driver/inventory"
)

func TestModels(t *testing.T) {
	stdout, _, err := run(t, "models")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "models.txt", stdout)
}

func TestModel(t *testing.T) {
	for _, id := range []string{"h100-sxm5-80gb", "rtx-pro-6000-96gb", "gb200-186gb", "l4-24gb", "gh200-144gb"} {
		t.Run(id, func(t *testing.T) {
			stdout, _, err := run(t, "model", id)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, "model/"+id+".txt", stdout)
		})
	}
}

func TestModelsForPrograms(t *testing.T) {
	stdout, _, err := run(t, "models", "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var views []modelView
	if err := json.Unmarshal([]byte(stdout), &views); err != nil {
		t.Fatal(err)
	}
	modes := map[string][]inventory.MIGMode{}
	for _, view := range views {
		modes[view.ID] = view.MIGModes
	}
	if len(modes) != 19 {
		t.Errorf("got %d models", len(modes))
	}
	for id, want := range map[string][]inventory.MIGMode{
		"a30-24gb": {"dynamic", "static", "disabled"}, "gb200-186gb": {"static", "disabled"}, "b300-288gb": {"disabled"}, "l4-24gb": {"disabled"}, "gh200-144gb": {},
	} {
		if diff := cmp.Diff(want, modes[id]); diff != "" {
			t.Errorf("modes of %s (-want +got):\n%s", id, diff)
		}
	}
}

func TestModelOfADriverVersion(t *testing.T) {
	stdout, _, err := run(t, "model", "a100-40gb", "--driver-version", "470.57.02", "-o", "yaml")
	if err != nil {
		t.Fatal(err)
	}
	var view modelView
	if err := yaml.Unmarshal([]byte(stdout), &view); err != nil {
		t.Fatal(err)
	}
	if view.CUDAVersion != "11.4" || view.Partitioning.Shared["memory"] != 40448 || view.Partitioning.InstanceIDs != "inferred" {
		t.Errorf("got %+v", view)
	}
	if diff := cmp.Diff([]string{"memory of 1g.5gb, 1g.5gb+me"}, view.Missing); diff != "" {
		t.Errorf("missing (-want +got):\n%s", diff)
	}
}

func TestModelRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"driver version": {[]string{"model", "a100-80gb", "--driver-version", "580.95.05"}, "no figures of model a100-80gb are sourced for driver version 580.95.05; sourced: through 570 (default 570.169)"},
		"output":         {[]string{"models", "-o", "wide"}, `--output "wide" is not known: use table, json or yaml`},
		"no id":          {[]string{"model"}, "accepts 1 arg(s), received 0"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := run(t, test.args...); err == nil || err.Error() != test.want {
				t.Errorf("got error %v, want %s", err, test.want)
			}
		})
	}
}
