package inventory

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/simgpu/simgpu/profiles"
)

const header = "apiVersion: simgpu.dev/v1alpha1\nkind: NodeInventory\n"

func TestDecode(t *testing.T) {
	for name, test := range map[string]struct {
		yaml string
		want []Rule
	}{
		"shortest": {
			"rules:\n- gpus:\n  - model: h100-sxm5-80gb\n",
			[]Rule{{GPUs: []GPUGroup{{Model: "h100-sxm5-80gb", Count: 1, MIGMode: MIGDynamic, NUMANode: new(0)}}}},
		},
		"everything": {
			`rules:
- name: training
  nodeNames: [big-*]
  nodeLabels: {pool: training}
  gpus:
  - {model: a100-80gb, count: 4, migMode: disabled, numaNode: 1, pcieRoot: "pci0000:40", driverVersion: 550.54.15, seed: s}
  - {model: a100-80gb, numaNode: -1, count: 0}
- name: none
  nodeLabels: {pool: cpu}
  gpus: []
- gpus:
  - model: h100-sxm5-80gb
    migMode: static
    partitions: [{profile: 1g.10gb, count: 2}, {profile: 3g.40gb, start: 4}]
`,
			[]Rule{
				{
					Name: "training", NodeNames: []string{"big-*"}, NodeLabels: map[string]string{"pool": "training"},
					GPUs: []GPUGroup{
						{Model: "a100-80gb", Count: 4, MIGMode: MIGDisabled, NUMANode: new(1), PCIeRoot: "pci0000:40", DriverVersion: "550.54.15", Seed: "s"},
						{Model: "a100-80gb", Count: 0, MIGMode: MIGDynamic},
					},
				},
				{Name: "none", NodeLabels: map[string]string{"pool": "cpu"}},
				{GPUs: []GPUGroup{{
					Model: "h100-sxm5-80gb", Count: 1, MIGMode: MIGStatic, NUMANode: new(0),
					Partitions: []Partition{{"1g.10gb", 0}, {"1g.10gb", 1}, {"3g.40gb", 4}},
				}}},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Decode([]byte(header + test.yaml))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got.Rules); diff != "" {
				t.Errorf("rules (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDecodeFaults(t *testing.T) {
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	models := strings.Join(modelIDs(catalogue), ", ")
	for name, test := range map[string]struct {
		yaml string // after the header
		want string // after "inventory: "
	}{
		"no rules":       {"", "rules: is required"},
		"unknown model":  {"rules: [{gpus: [{model: h1000}]}]", `rules[0].gpus[0].model: unknown model "h1000"; known models: ` + models},
		"no model":       {"rules: [{gpus: [{count: 1}]}]", "rules[0].gpus[0].model: is required; known models: " + models},
		"negative count": {"rules: [{gpus: [{model: a100-40gb, count: -1}]}]", "rules[0].gpus[0].count: -1 is negative"},
		"count is text":  {"rules: [{gpus: [{model: a100-40gb, count: two}]}]", `rules[0].gpus[0].count: must be an integer, not the string "two"`},
		"unknown field":  {"rules: [{gpus: [{model: a100-40gb, migmode: dynamic}]}]", "rules[0].gpus[0].migmode: unknown field; known here: consumableShares, count, driverVersion, migMode, model, numaNode, partitions, pcieRoot, seed"},
		"no layout":      {"rules: [{gpus: [{model: a100-40gb, migMode: static}]}]", "rules[0].gpus[0].partitions: is required with migMode static"},
		"layout in vain": {"rules: [{gpus: [{model: a100-40gb, partitions: [{profile: 1g.5gb}]}]}]", "rules[0].gpus[0].partitions: is for migMode static only"},
		"static of what": {"rules: [{gpus: [{model: l4-24gb, migMode: static, partitions: [{profile: 1g.5gb}]}]}]", "rules[0].gpus[0].migMode: model l4-24gb cannot be partitioned; use disabled"},
		"count of a partition": {
			"rules: [{gpus: [{model: a100-40gb, migMode: static, partitions: [{profile: 1g.5gb}, {profile: 1g.5gb, count: 8}]}]}]",
			"rules[0].gpus[0].partitions[1].count: must be from 1 to 7, which is how many partitions a GPU of model a100-40gb can have",
		},
		"count of a placed partition": {
			"rules: [{gpus: [{model: a100-40gb, migMode: static, partitions: [{profile: 1g.5gb, start: 0, count: 2}]}]}]",
			"rules[0].gpus[0].partitions[0].count: must be 1 where start is given",
		},
		"impossible layout": {
			"rules: [{gpus: [{model: a100-40gb, migMode: static, partitions: [{profile: 4g.20gb}, {profile: 2g.10gb, count: 2}]}]}]",
			"rules[0].gpus[0].partitions[1]: 2g.10gb does not fit beside 4g.20gb at 0, 2g.10gb at 4: at 4 memory slices 4-5 are taken by 2g.10gb at 4; " +
				"at 0, 2 memory slices 0-3 are taken by 4g.20gb at 0. What fits: 1g.5gb at 6; 1g.5gb+me at 6; 1g.10gb at 6",
		},
		"profiles and starts": {
			"rules: [{gpus: [{model: a30-24gb, migMode: static, partitions: [{profile: 1g.5gb, count: 2}, {profile: 2g.12gb, start: 1}, {}]}]}]",
			"3 faults:\n" +
				`- rules[0].gpus[0].partitions[0]: model a30-24gb has no profile "1g.5gb" with driver version 580.95.05; it has: 1g.6gb, 1g.6gb+me, 2g.12gb, 2g.12gb+me, 4g.24gb` + "\n" +
				"- rules[0].gpus[0].partitions[1]: 2g.12gb cannot start at memory slice 1; it can at 0, 2\n" +
				`- rules[0].gpus[0].partitions[2]: model a30-24gb has no profile "" with driver version 580.95.05; it has: 1g.6gb, 1g.6gb+me, 2g.12gb, 2g.12gb+me, 4g.24gb`,
		},
		"unknown mode":    {"rules: [{gpus: [{model: a100-40gb, migMode: mixed}]}]", `rules[0].gpus[0].migMode: "mixed" is unknown; known: dynamic, static, disabled`},
		"no gpus":         {"rules: [{name: cpu}]", "rules[0].gpus: is required; write [] for a node without GPUs"},
		"empty node name": {`rules: [{nodeNames: [""], gpus: []}]`, `rules[0].nodeNames[0]: is empty; "*" is every name`},
		"NUMA node":       {"rules: [{gpus: [{model: a100-40gb, numaNode: -2}]}]", "rules[0].gpus[0].numaNode: must be from 0 to 1023, or -1 for none"},
		"PCIe root":       {"rules: [{gpus: [{model: a100-40gb, pcieRoot: '0000:40'}]}]", `rules[0].gpus[0].pcieRoot: "0000:40" is not a PCIe root like pci0000:40`},
		"too many GPUs": {
			"rules: [{gpus: [{model: a100-40gb, count: 250}, {model: a100-80gb, count: 4}, {model: a100-80gb, count: 9223372036854775807}]}]",
			"rules[0].gpus[2].count: 9223372036854775807 more GPUs are too many: a node can have 254",
		},
		"driver version not sourced": {
			"rules: [{gpus: [{model: a100-80gb, driverVersion: 580.95.05}]}]",
			"rules[0].gpus[0].driverVersion: no figures of model a100-80gb are sourced for driver version 580.95.05; sourced: through 570 (default 570.169)",
		},
		"driver version unquoted": {
			"rules: [{gpus: [{model: a100-80gb, driverVersion: 570.169}]}]",
			"rules[0].gpus[0].driverVersion: must be a string, not the number 570.169 (put it in quotes)",
		},
		"figures not sourced": {
			`rules: [{gpus: [{model: h100-sxm5-80gb, migMode: dynamic, driverVersion: "525.125"}]}]`,
			"rules[0].gpus[0].migMode: model h100-sxm5-80gb cannot be partitioned with driver version 525.125, nobody sourced: memory of 1g.10gb+me, 7g.80gb; use static, for the profiles that are, or disabled",
		},
		"rule names taken": {
			"rules: [{name: a, nodeNames: [node-1], gpus: []}, {name: a, gpus: []}]",
			`rules[1].name: "a" is already the name of rules[0]`,
		},
		"rule never reached": {
			"rules: [{gpus: []}, {nodeNames: [node-1], gpus: []}]",
			"rules[1]: is never reached: rules[0] has neither nodeNames nor nodeLabels and so selects every node; put that rule last",
		},
		"a bad selector selects nothing": {
			"rules: [{nodeNames: node-1, gpus: []}, {gpus: []}]",
			`rules[0].nodeNames: must be a list, not the string "node-1"`,
		},
		"unknown shares": {
			"rules: [{gpus: [{model: a100-40gb, consumableShares: '0'}]}]",
			`rules[0].gpus[0].consumableShares: "0" is unknown; known: memory, unlimited, or a number of claims from 1 to 9999 in quotes`,
		},
		"not YAML": {"rules: [", "not valid YAML: yaml: line 3: did not find expected node content"},
		"all at once": {
			"rulez: []\nrules: [{nodeNames: [a], gpus: [{model: x, migMode: mixed}]}, {gpus: [{model: a100-40gb, count: -3, driverVersion: '1'}]}]",
			"5 faults:\n" +
				"- rulez: unknown field; known here: apiVersion, kind, rules\n" +
				`- rules[0].gpus[0].model: unknown model "x"; known models: ` + models + "\n" +
				`- rules[0].gpus[0].migMode: "mixed" is unknown; known: dynamic, static, disabled` + "\n" +
				"- rules[1].gpus[0].count: -3 is negative\n" +
				`- rules[1].gpus[0].driverVersion: driver version "1" of model a100-40gb is not a version like 580.95.05`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Decode([]byte(header + test.yaml))
			if err == nil {
				t.Fatalf("got %+v, want the error %s", got, test.want)
			}
			if diff := cmp.Diff("inventory: "+test.want, err.Error()); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDecodeHeaderFaults(t *testing.T) {
	for name, test := range map[string]struct{ yaml, want string }{
		"empty file": {"", "inventory: 3 faults:\n- apiVersion: \"\" is not supported; known: simgpu.dev/v1alpha1\n- kind: \"\" is not supported; known: NodeInventory\n- rules: is required"},
		"other version": {
			strings.Replace(header, "v1alpha1", "v1", 1) + "rules: [{gpus: []}]",
			`inventory: apiVersion: "simgpu.dev/v1" is not supported; known: simgpu.dev/v1alpha1`,
		},
		"other kind": {
			strings.Replace(header, "Node", "", 1) + "rules: [{gpus: []}]",
			`inventory: kind: "Inventory" is not supported; known: NodeInventory`,
		},
		"two documents": {header + "rules: [{gpus: []}]\n---\n" + header, "inventory: more than one YAML document; a file holds exactly one"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Decode([]byte(test.yaml))
			if err == nil || err.Error() != test.want {
				t.Errorf("got error %v, want %s", err, test.want)
			}
		})
	}
}

func TestDefaultMIGMode(t *testing.T) {
	for model, want := range map[string]MIGMode{"h100-sxm5-80gb": MIGDynamic, "a30-24gb": MIGDynamic, "gh200-96gb": MIGDynamic, "l4-24gb": MIGDisabled, "b300-288gb": MIGDisabled} {
		got, err := Decode([]byte(header + "rules: [{gpus: [{model: " + model + "}]}]"))
		if err != nil {
			t.Fatal(err)
		}
		if mode := got.Rules[0].GPUs[0].MIGMode; mode != want {
			t.Errorf("default MIG mode of %s: got %s, want %s", model, mode, want)
		}
	}
	_, err := Decode([]byte(header + "rules: [{gpus: [{model: l4-24gb, migMode: dynamic}]}]"))
	if want := "inventory: rules[0].gpus[0].migMode: model l4-24gb cannot be partitioned; use disabled"; err == nil || err.Error() != want {
		t.Errorf("got error %v, want %s", err, want)
	}
}

func TestForNode(t *testing.T) {
	inventory, err := Decode([]byte(header + `rules:
- nodeNames: [exact, "gpu-*-a", "*.example"]
  gpus: [{model: h100-sxm5-80gb, seed: by name}]
- nodeLabels: {pool: big, zone: z1}
  gpus: [{model: h100-sxm5-80gb, seed: by labels}]
- nodeNames: [both-*]
  nodeLabels: {pool: small}
  gpus: [{model: h100-sxm5-80gb, seed: by both}]
- nodeNames: ["a*b*b"]
  gpus: [{model: h100-sxm5-80gb, seed: by pattern}]
`))
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		node   string
		labels map[string]string
		want   string // seed of the group; "" for no GPUs
	}{
		"exact name":                     {"exact", nil, "by name"},
		"no part of a name":              {"exactly", nil, ""},
		"pattern":                        {"gpu-17-a", nil, "by name"},
		"pattern with nothing for it":    {"gpu--a", nil, "by name"},
		"pattern does not overlap":       {"gpu-a", nil, ""},
		"pattern at the start":           {"n1.example", nil, "by name"},
		"all labels":                     {"n", map[string]string{"pool": "big", "zone": "z1", "more": "x"}, "by labels"},
		"one label missing":              {"n", map[string]string{"pool": "big"}, ""},
		"one label with another value":   {"n", map[string]string{"pool": "big", "zone": "z2"}, ""},
		"name and label":                 {"both-1", map[string]string{"pool": "small"}, "by both"},
		"name without label":             {"both-1", nil, ""},
		"the first rule wins":            {"exact", map[string]string{"pool": "big", "zone": "z1"}, "by name"},
		"several stars":                  {"a1b2b", nil, "by pattern"},
		"several stars, one too few":     {"ab", nil, ""},
		"several stars, wrong end":       {"abbc", nil, ""},
		"several stars, nothing between": {"abb", nil, "by pattern"},
	} {
		t.Run(name, func(t *testing.T) {
			groups, err := inventory.ForNode(test.node, test.labels)
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			for _, group := range groups {
				got += group.Seed
			}
			if got != test.want {
				t.Errorf("got GPUs %q, want %q", got, test.want)
			}
		})
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(header + "rules:\n- gpus:\n  - model: h100-sxm5-80gb\n"))
	f.Add([]byte(header + "rules:\n- {name: a, nodeNames: ['*'], nodeLabels: {a: b}, gpus: [{model: a100-80gb, count: 4, migMode: disabled, numaNode: -1, pcieRoot: 'pci0000:40', driverVersion: '570.169', seed: s}]}\n"))
	f.Add([]byte(header + "rules: [{gpus: [{model: a30-24gb, migMode: static, partitions: [{profile: 1g.6gb, count: 2}, {profile: 2g.12gb, start: 2}]}]}]\n"))
	f.Add([]byte(header + "rules: [{gpus: []}]\n---\n"))
	f.Add([]byte("a: &a [x]\nb: [*a, *a]\n"))
	catalogue, err := profiles.Load()
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		inventory, err := DecodeWith(catalogue, data)
		if err != nil {
			if inventory != nil {
				t.Error("an inventory comes with the error")
			}
			return
		}
		for _, rule := range inventory.Rules {
			total := 0
			for _, group := range rule.GPUs {
				if _, err := catalogue.Model(group.Model); err != nil {
					t.Error(err)
				}
				if group.Count < 0 || !strings.Contains(migModes, string(group.MIGMode)) || (group.MIGMode == MIGStatic) != (len(group.Partitions) > 0) {
					t.Errorf("group without defaults: %+v", group)
				}
				total += group.Count
			}
			if total > 254 {
				t.Errorf("%d GPUs in one rule", total)
			}
		}
	})
}
