package inventory

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/simgpu/simgpu/internal/strictyaml"
	"github.com/simgpu/simgpu/profiles"
)

const (
	APIVersion = "simgpu.dev/v1alpha1"
	Kind       = "NodeInventory"
)

// MIGMode says whether a GPU offers partitions.
type MIGMode string

const (
	// MIGDynamic offers every partition the model can be divided into, created on demand.
	MIGDynamic MIGMode = "dynamic"
	// MIGStatic offers the partitions of a layout, which exist for good.
	MIGStatic MIGMode = "static"
	// MIGDisabled offers the whole GPU only.
	MIGDisabled MIGMode = "disabled"
)

var migModes = fmt.Sprintf("%s, %s, %s", MIGDynamic, MIGStatic, MIGDisabled)

// NodeInventory is a decoded inventory without faults.
type NodeInventory struct {
	Rules []Rule
}

// Rule gives GPUs to the nodes it selects.
type Rule struct {
	Name       string            // "" if it has none
	NodeNames  []string          // patterns, any of which matches; empty: any name
	NodeLabels map[string]string // all must be on the node
	GPUs       []GPUGroup
}

// GPUGroup is a number of equal GPUs, with every default filled in.
type GPUGroup struct {
	Model         string
	Count         int
	MIGMode       MIGMode
	Partitions    []Partition // of each GPU, in static mode only, from left to right
	NUMANode      *int        // nil: the GPUs report none
	PCIeRoot      string      // e.g. pci0000:40, shared by the group; "": each GPU has its own
	DriverVersion string      // "": the model's default
	Seed          string
	// ConsumableShares lets several claims share a device: SharesMemory, SharesUnlimited, or the number of
	// claims that can; "": every device is for one claim.
	ConsumableShares string
}

const (
	// SharesMemory divides a device by memory: a claim gets what it asks for, or all where it does not ask.
	SharesMemory = "memory"
	// SharesUnlimited divides a device by memory, too, but a claim that does not ask takes none and can use all.
	SharesUnlimited = "unlimited"
)

// Partition is one partition of a GPU in static mode.
type Partition struct {
	Profile string // e.g. 3g.40gb
	Start   int    // first memory slice
}

// file is the document as people write it.
type file struct {
	APIVersion string       `json:"apiVersion"`
	Kind       string       `json:"kind"`
	Rules      []ruleFormat `json:"rules"`
}

type ruleFormat struct {
	Name       string            `json:"name"`
	NodeNames  []string          `json:"nodeNames"`
	NodeLabels map[string]string `json:"nodeLabels"`
	GPUs       []groupFormat     `json:"gpus"`
}

type groupFormat struct {
	Model         string            `json:"model"`
	Count         *int              `json:"count"`
	MIGMode       MIGMode           `json:"migMode"`
	Partitions    []partitionFormat `json:"partitions"`
	NUMANode      *int              `json:"numaNode"`
	PCIeRoot      string            `json:"pcieRoot"`
	DriverVersion string            `json:"driverVersion"`
	Seed          string            `json:"seed"`

	ConsumableShares string `json:"consumableShares"`
}

type partitionFormat struct {
	Profile string `json:"profile"`
	Start   *int   `json:"start"`
	Count   *int   `json:"count"`
}

// maxNUMANode is the last node of a kernel built for 1024 of them, the most that Linux allows.
const maxNUMANode = 1023

var sharesNumber = regexp.MustCompile(`^[1-9][0-9]{0,3}$`)

var pcieRoot = regexp.MustCompile(`^pci[0-9a-f]{4}:[0-9a-f]{2}$`)

// Decode reads an inventory that uses the built-in catalogue. Its error lists every fault of the
// file, each with its field path and, where there is a choice, the known values.
func Decode(data []byte) (*NodeInventory, error) {
	catalogue, err := profiles.Load()
	if err != nil {
		return nil, fmt.Errorf("load the built-in catalogue: %w", err)
	}
	return DecodeWith(catalogue, data)
}

// DecodeWith is Decode for another catalogue.
func DecodeWith(catalogue *profiles.Catalogue, data []byte) (*NodeInventory, error) {
	var f file
	faults := strictyaml.Decode(data, &f)
	var inventory *NodeInventory
	if !faults.At("") { // otherwise nothing was read
		inventory = f.convert(catalogue, &faults)
	}
	if err := faults.Err("inventory"); err != nil {
		return nil, err
	}
	return inventory, nil
}

// Group fills in the defaults of a group that stands in no file, and checks it as one that does: with the layout of a
// static group in partitions, and without a default for the NUMA node.
func Group(catalogue *profiles.Catalogue, group GPUGroup, partitions ...profiles.Wanted) (GPUGroup, error) {
	format := groupFormat{
		Model: group.Model, Count: &group.Count, MIGMode: group.MIGMode, NUMANode: new(-1),
		PCIeRoot: group.PCIeRoot, DriverVersion: group.DriverVersion, Seed: group.Seed,
	}
	if group.NUMANode != nil {
		format.NUMANode = group.NUMANode
	}
	for _, p := range partitions {
		format.Partitions = append(format.Partitions, partitionFormat{Profile: p.Profile, Start: p.Start})
	}
	var faults strictyaml.Faults
	group, _ = format.convert(catalogue, "", &faults)
	for i := range faults {
		faults[i].Path = strings.TrimPrefix(faults[i].Path, ".")
	}
	return group, faults.Err("GPUs")
}

func (f *file) convert(catalogue *profiles.Catalogue, faults *strictyaml.Faults) *NodeInventory {
	if f.APIVersion != APIVersion {
		faults.Add("apiVersion", "%q is not supported; known: %s", f.APIVersion, APIVersion)
	}
	if f.Kind != Kind {
		faults.Add("kind", "%q is not supported; known: %s", f.Kind, Kind)
	}
	if len(f.Rules) == 0 {
		faults.Add("rules", "is required")
	}
	inventory := &NodeInventory{}
	names := map[string]string{}
	everyNode := "" // path of a rule that selects every node
	for i := range f.Rules {
		rule, path := &f.Rules[i], fmt.Sprintf("rules[%d]", i)
		if rule.Name != "" {
			if other, taken := names[rule.Name]; taken {
				faults.Add(path+".name", "%q is already the name of %s", rule.Name, other)
			} else {
				names[rule.Name] = path
			}
		}
		if everyNode != "" {
			faults.Add(path, "is never reached: %s has neither nodeNames nor nodeLabels and so selects every node; put that rule last", everyNode)
		}
		if len(rule.NodeNames) == 0 && len(rule.NodeLabels) == 0 && !faultsBelow(*faults, path+".node") {
			everyNode = cmp.Or(everyNode, path)
		}
		inventory.Rules = append(inventory.Rules, rule.convert(catalogue, path, faults))
	}
	return inventory
}

// faultsBelow is true when a fault was noted at a path that starts so.
func faultsBelow(faults strictyaml.Faults, prefix string) bool {
	return slices.ContainsFunc(faults, func(f strictyaml.Fault) bool { return strings.HasPrefix(f.Path, prefix) })
}

func (r *ruleFormat) convert(catalogue *profiles.Catalogue, path string, faults *strictyaml.Faults) Rule {
	for i, name := range r.NodeNames {
		if name == "" {
			faults.Add(fmt.Sprintf("%s.nodeNames[%d]", path, i), `is empty; "*" is every name`)
		}
	}
	if r.GPUs == nil {
		faults.Add(path+".gpus", "is required; write [] for a node without GPUs")
	}
	rule := Rule{Name: r.Name, NodeNames: r.NodeNames, NodeLabels: r.NodeLabels}
	total, vendors := 0, map[*profiles.Vendor]bool{}
	for i := range r.GPUs {
		groupPath := fmt.Sprintf("%s.gpus[%d]", path, i)
		group, vendor := r.GPUs[i].convert(catalogue, groupPath, faults)
		rule.GPUs = append(rule.GPUs, group)
		if vendor == nil || group.Count <= 0 {
			continue
		}
		vendors[vendor] = true
		if len(vendors) > 1 {
			faults.Add(groupPath+".model", "%q is of vendor %s; a node has the GPUs of one vendor only", group.Model, vendor.Name)
		}
		if total += min(group.Count, vendor.MaxGPUs+1); total > vendor.MaxGPUs {
			faults.Add(groupPath+".count", "%d more GPUs are too many: a node can have %d", group.Count, vendor.MaxGPUs)
		}
	}
	return rule
}

// convert returns no vendor where the model is unknown.
func (g *groupFormat) convert(catalogue *profiles.Catalogue, path string, faults *strictyaml.Faults) (GPUGroup, *profiles.Vendor) {
	group := GPUGroup{
		Model:         g.Model,
		Count:         1,
		MIGMode:       g.MIGMode,
		NUMANode:      new(int),
		PCIeRoot:      g.PCIeRoot,
		DriverVersion: g.DriverVersion,
		Seed:          g.Seed,

		ConsumableShares: g.ConsumableShares,
	}
	if s := g.ConsumableShares; s != "" && s != SharesMemory && s != SharesUnlimited && !sharesNumber.MatchString(s) {
		faults.Add(path+".consumableShares", "%q is unknown; known: %s, %s, or a number of claims from 1 to 9999 in quotes", s, SharesMemory, SharesUnlimited)
	}
	if g.Count != nil {
		group.Count = *g.Count
	}
	if group.Count < 0 {
		faults.Add(path+".count", "%d is negative", group.Count)
	}
	if g.NUMANode != nil {
		switch n := *g.NUMANode; {
		case n == -1:
			group.NUMANode = nil
		case n < -1 || n > maxNUMANode:
			faults.Add(path+".numaNode", "must be from 0 to %d, or -1 for none", maxNUMANode)
		default:
			*group.NUMANode = n
		}
	}
	if g.PCIeRoot != "" && !pcieRoot.MatchString(g.PCIeRoot) {
		faults.Add(path+".pcieRoot", "%q is not a PCIe root like pci0000:40", g.PCIeRoot)
	}

	var model *profiles.Model
	if g.Model == "" {
		faults.Add(path+".model", "is required; known models: %s", strings.Join(modelIDs(catalogue), ", "))
	} else if known, err := catalogue.Model(g.Model); err != nil {
		faults.Add(path+".model", "%v", err)
	} else {
		model = known
	}
	switch g.MIGMode {
	case "", MIGDynamic, MIGStatic, MIGDisabled:
	default:
		faults.Add(path+".migMode", "%q is unknown; known: %s", g.MIGMode, migModes)
	}
	if g.MIGMode != MIGStatic && g.Partitions != nil {
		faults.Add(path+".partitions", "is for migMode %s only", MIGStatic)
	}
	if model == nil {
		return group, nil
	}
	if table, err := model.Table(g.DriverVersion); err != nil {
		at := ".model"
		if g.DriverVersion != "" {
			at = ".driverVersion"
		}
		faults.Add(path+at, "%v", err)
	} else if _, err := table.Partitionable(); group.MIGMode == MIGStatic {
		group.Partitions = g.layout(table, path, faults)
	} else if group.MIGMode == "" {
		group.MIGMode = MIGDynamic
		if err != nil {
			group.MIGMode = MIGDisabled
		}
	} else if group.MIGMode == MIGDynamic && err != nil {
		possible := string(MIGDisabled)
		if slices.ContainsFunc(table.Profiles, func(p *profiles.Profile) bool { return len(p.Absent) == 0 }) {
			possible = fmt.Sprintf("%s, for the profiles that are, or %s", MIGStatic, MIGDisabled)
		}
		faults.Add(path+".migMode", "%v; use %s", err, possible)
	}
	return group, model.Vendor
}

// layout finds a placement for each partition.
func (g *groupFormat) layout(table *profiles.Table, path string, faults *strictyaml.Faults) []Partition {
	if table.Model.Partitioning == nil {
		faults.Add(path+".migMode", "model %s cannot be partitioned; use %s", g.Model, MIGDisabled)
		return nil
	}
	if len(g.Partitions) == 0 {
		faults.Add(path+".partitions", "is required with migMode %s", MIGStatic)
		return nil
	}
	var wanted []profiles.Wanted
	var paths []string // of the entry that each is from
	most := table.Model.Partitioning.MaxInstances
	for i, p := range g.Partitions {
		entry, count := fmt.Sprintf("%s.partitions[%d]", path, i), 1
		if p.Count != nil {
			count = *p.Count
		}
		switch {
		case count < 1 || count > most:
			faults.Add(entry+".count", "must be from 1 to %d, which is how many partitions a GPU of model %s can have", most, g.Model)
			return nil
		case p.Start != nil && count > 1:
			faults.Add(entry+".count", "must be 1 where start is given")
			return nil
		}
		for range count {
			wanted = append(wanted, profiles.Wanted{Profile: p.Profile, Start: p.Start})
			paths = append(paths, entry)
		}
	}
	found, err := table.Layout(wanted)
	if impossible := (*profiles.LayoutError)(nil); errors.As(err, &impossible) {
		for i, fault := range impossible.Faults {
			if i > 0 && paths[fault.Index] == paths[impossible.Faults[i-1].Index] {
				continue // the same for each of a count
			}
			faults.Add(paths[fault.Index], "%s", fault.Reason)
		}
	}
	var partitions []Partition
	for _, p := range found {
		partitions = append(partitions, Partition{Profile: p.Profile.Name, Start: p.Start})
	}
	return partitions
}

func modelIDs(catalogue *profiles.Catalogue) []string {
	var ids []string
	for _, model := range catalogue.Models() {
		ids = append(ids, model.ID)
	}
	return ids
}

// ForNode returns the GPUs of the first rule that selects the node. A node that no rule selects has no
// GPUs, which is no error.
func (n *NodeInventory) ForNode(name string, labels map[string]string) ([]GPUGroup, error) {
	for i := range n.Rules {
		if n.Rules[i].selects(name, labels) {
			return slices.Clone(n.Rules[i].GPUs), nil
		}
	}
	return nil, nil
}

func (r *Rule) selects(name string, labels map[string]string) bool {
	for key, want := range r.NodeLabels {
		if got, found := labels[key]; !found || got != want {
			return false
		}
	}
	return len(r.NodeNames) == 0 || slices.ContainsFunc(r.NodeNames, func(pattern string) bool { return matches(pattern, name) })
}

// matches compares a name with a pattern in which "*" stands for any run of characters.
func matches(pattern, name string) bool {
	parts := strings.Split(pattern, "*")
	if len(parts) == 1 {
		return pattern == name
	}
	first, last := parts[0], parts[len(parts)-1]
	if len(name) < len(first)+len(last) || !strings.HasPrefix(name, first) || !strings.HasSuffix(name, last) {
		return false
	}
	name = name[len(first) : len(name)-len(last)]
	for _, part := range parts[1 : len(parts)-1] {
		_, rest, found := strings.Cut(name, part)
		if !found {
			return false
		}
		name = rest
	}
	return true
}
