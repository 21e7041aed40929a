// Package inventory is the NodeInventory file: which simulated GPUs a node has. It owns the format,
// its strict decoding and the choice of the rule for a node. It does not know what a GPU publishes;
// that is package hardware.
package inventory

import (
	"errors"

	"github.com/simgpu/simgpu/profiles"
)

// MIGMode says whether a GPU offers partitions.
type MIGMode string

const (
	// MIGDynamic offers every partition the model can be divided into, created on demand.
	MIGDynamic MIGMode = "dynamic"
	// MIGDisabled offers the whole GPU only.
	MIGDisabled MIGMode = "disabled"
)

// NodeInventory is a decoded, valid inventory.
type NodeInventory struct {
	Rules []Rule
}

// Rule gives GPUs to the nodes it selects.
type Rule struct {
	Name       string            // optional
	NodeNames  []string          // names, "*" matches any run of characters; empty: any name
	NodeLabels map[string]string // all must be present; empty: any labels
	GPUs       []GPUGroup
}

// GPUGroup is a number of equal GPUs, with every default filled in.
type GPUGroup struct {
	Model         string
	Count         int
	MIGMode       MIGMode
	NUMANode      *int   // nil: the GPUs report none
	PCIeRoot      string // e.g. pci0000:40, shared by the group; "": each GPU has its own
	DriverVersion string // "": the model's default
	Seed          string // changes UUIDs and serials
}

// Decode reads an inventory for the built-in catalogue. Its error lists every fault of the file,
// each with its field path and, where there is a choice, the known values.
func Decode(data []byte) (*NodeInventory, error) { return nil, errors.New("not built yet") }

// DecodeWith is Decode for another catalogue.
func DecodeWith(catalogue *profiles.Catalogue, data []byte) (*NodeInventory, error) {
	return nil, errors.New("not built yet")
}

// ForNode returns the GPUs of the first rule that selects the node, nil if none does.
func (n *NodeInventory) ForNode(name string, labels map[string]string) ([]GPUGroup, error) {
	return nil, errors.New("not built yet")
}
