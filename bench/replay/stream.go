package replay

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

// wholeGPU is what a mix calls a GPU that is not divided.
const wholeGPU = "gpu"

// Mix says what claims ask for, with what weight: "2g" is the smallest partition with two compute
// slices, "1g+" the one with one compute slice and more memory than "1g", "gpu" the whole GPU.
type Mix struct {
	Name    string             `json:"name"`
	Weights map[string]float64 `json:"weights"`
}

// Mixes are those that the benchmark replays.
func Mixes() []Mix {
	return []Mix{
		{"uniform", map[string]float64{"1g": 1, "1g+": 1, "2g": 1, "3g": 1, "4g": 1, "7g": 1}},
		{"small", map[string]float64{"1g": 6, "1g+": 1, "2g": 2, "3g": 1}},
		{"inference", map[string]float64{"1g": 4, "2g": 3, "3g": 2, "4g": 1}},
		{"large", map[string]float64{"1g": 1, "2g": 1, "3g": 3, "4g": 3, "7g": 2}},
		{"bimodal", map[string]float64{"1g": 8, "4g": 1, wholeGPU: 1}},
	}
}

// Claim asks for one device.
type Claim struct {
	Arrival, Stay float64
	// Kind is what the claim asks for, as its mix calls it.
	Kind string
	// Compute is how many compute slices that is.
	Compute int
}

// Node is a node with GPUs of one model.
type Node struct {
	*hardware.Node
	catalogue *profiles.Catalogue
	board     *board
	// profiles are the partitions that mixes can ask for, by what mixes call them.
	profiles map[string]*profiles.Profile
	slices   int // compute slices of one GPU
	kinds    map[string][]int
}

// NewNode returns a node with so many GPUs of a model, partitioned on demand.
func NewNode(catalogue *profiles.Catalogue, model string, gpus int) (*Node, error) {
	node, err := hardware.New(hardware.Config{
		NodeName: "node", Catalogue: catalogue, Groups: []inventory.GPUGroup{{Model: model, Count: gpus, MIGMode: inventory.MIGDynamic}},
	})
	if err != nil {
		return nil, err
	}
	n := &Node{Node: node, catalogue: catalogue, board: newBoard(node.GPUs[0]), profiles: map[string]*profiles.Profile{}, kinds: map[string][]int{}}
	all := slices.Clone(node.GPUs[0].Table.Profiles)
	// Extensions such as media engines are left out: they change nothing about where a partition fits.
	all = slices.DeleteFunc(all, func(p *profiles.Profile) bool { return strings.ContainsAny(p.Name, "+-") })
	slices.SortStableFunc(all, func(a, b *profiles.Profile) int { return a.Size - b.Size })
	for _, p := range all {
		n.slices = max(n.slices, p.Slices)
		kind := fmt.Sprintf("%dg", p.Slices)
		if n.profiles[kind] != nil {
			kind += "+"
		}
		if n.profiles[kind] == nil {
			n.profiles[kind] = p
		}
	}
	return n, nil
}

// compute returns the compute slices of what a mix calls by that name.
func (n *Node) compute(kind string) (int, error) {
	if kind == wholeGPU {
		if !slices.ContainsFunc(n.GPUs[0].Devices, func(d *hardware.Device) bool { return d.Partition == nil }) {
			return 0, fmt.Errorf("a GPU of model %s that is partitioned does not offer itself as a whole", n.GPUs[0].Model.ID)
		}
		return n.slices, nil
	}
	profile := n.profiles[kind]
	if profile == nil {
		return 0, fmt.Errorf("model %s has no partition %s", n.GPUs[0].Model.ID, kind)
	}
	return profile.Slices, nil
}

// Stream returns the first so many claims of a stream; the same seed gives the same stream.
func (n *Node) Stream(mix Mix, load float64, claims int, seed uint64) ([]Claim, error) {
	var kinds []string
	for kind := range mix.Weights {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	var total, mean float64
	sizes := map[string]int{}
	for _, kind := range kinds {
		size, err := n.compute(kind)
		if err != nil {
			return nil, fmt.Errorf("mix %s: %w", mix.Name, err)
		}
		sizes[kind] = size
		total += mix.Weights[kind]
		mean += mix.Weights[kind] * float64(size)
	}
	mean /= total
	rate := load * float64(n.slices*len(n.GPUs)) / mean

	r := rand.New(rand.NewPCG(seed, 0))
	stream := make([]Claim, claims)
	now := 0.0
	for i := range stream {
		now += r.ExpFloat64() / rate
		kind := kinds[len(kinds)-1]
		for at, k := r.Float64()*total, 0; k < len(kinds); k++ {
			if at -= mix.Weights[kinds[k]]; at < 0 {
				kind = kinds[k]
				break
			}
		}
		stream[i] = Claim{Arrival: now, Stay: r.ExpFloat64(), Kind: kind, Compute: sizes[kind]}
	}
	return stream, nil
}
