// Package helm tests that the chart and the driver mean the same by an inventory. Everything that can be said of the
// chart without the driver is tested in e2e/chart.
package helm

import (
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/simgpu/simgpu/driver/inventory"
)

// decode does with the chart's values.inventory what templates/inventory.yaml and the driver do.
func decode(t *testing.T, values string) (*inventory.NodeInventory, error) {
	t.Helper()
	var chart struct {
		Inventory map[string]any `json:"inventory"`
	}
	if err := yaml.Unmarshal([]byte(values), &chart); err != nil {
		t.Fatalf("%v\n%s", err, values)
	}
	document := map[string]any{"apiVersion": "simgpu.dev/v1alpha1", "kind": "NodeInventory"}
	maps.Copy(document, chart.Inventory)
	text, err := yaml.Marshal(document)
	if err != nil {
		t.Fatal(err)
	}
	return inventory.Decode(text)
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile("simgpu/" + file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestDefaultInventoryIsOneH100PerNode(t *testing.T) {
	decoded, err := decode(t, read(t, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := decoded.ForNode("any-node", nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(gpus) != 1 || gpus[0].Model != "h100-sxm5-80gb" || gpus[0].Count != 1 || gpus[0].MIGMode != inventory.MIGDynamic {
		t.Errorf("a node gets %+v", gpus)
	}
}

func TestInventoryInTheReadmeIsAccepted(t *testing.T) {
	_, rest, _ := strings.Cut(read(t, "README.md"), "```yaml\ninventory:")
	example, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatal("README.md has no block of YAML that starts with inventory:")
	}
	decoded, err := decode(t, "inventory:"+example)
	if err != nil {
		t.Fatal(err)
	}
	if len(decoded.Rules) < 2 {
		t.Errorf("only %d rules: the example shows too little", len(decoded.Rules))
	}
}

// What the schema of the values lets pass, the driver has to know, and the other way round.
func TestSchemaAndDriverKnowTheSameFields(t *testing.T) {
	var schema struct {
		Definitions map[string]struct {
			Properties map[string]struct {
				Enum []string `json:"enum"`
			} `json:"properties"`
		} `json:"definitions"`
	}
	if err := json.Unmarshal([]byte(read(t, "values.schema.json")), &schema); err != nil {
		t.Fatal(err)
	}
	group := map[string]any{
		"model": "h100-sxm5-80gb", "count": 2, "migMode": "dynamic", "partitions": []any{}, "numaNode": -1, "pcieRoot": "pci0000:40", "driverVersion": "", "seed": "s", "consumableShares": "memory",
	}
	rule := map[string]any{"name": "n", "nodeNames": []string{"a-*"}, "nodeLabels": map[string]string{"a": "b"}, "gpus": []any{group}}
	partition := map[string]any{"profile": "3g.40gb", "start": 4, "count": 1}
	for definition, fields := range map[string]map[string]any{"rule": rule, "gpuGroup": group, "partition": partition} {
		got, want := slices.Sorted(maps.Keys(schema.Definitions[definition].Properties)), slices.Sorted(maps.Keys(fields))
		if !slices.Equal(got, want) {
			t.Errorf("%s: the schema has %v, the test has %v", definition, got, want)
		}
	}
	modes := schema.Definitions["gpuGroup"].Properties["migMode"].Enum
	if len(modes) == 0 {
		t.Fatal("the schema names no MIG modes")
	}
	for _, mode := range modes {
		group["migMode"] = mode
		delete(group, "partitions")
		if mode == string(inventory.MIGStatic) {
			group["partitions"] = []any{partition}
		}
		values, err := yaml.Marshal(map[string]any{"inventory": map[string]any{"rules": []any{rule}}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decode(t, string(values)); err != nil {
			t.Errorf("migMode %s: %v", mode, err)
		}
	}
}
