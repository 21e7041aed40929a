// Package inventory is the NodeInventory file: it says which simulated GPUs each node has.
//
//	apiVersion: simgpu.dev/v1alpha1
//	kind: NodeInventory
//	rules:
//	- nodeLabels: {pool: ampere}
//	  gpus:
//	  - {model: a100-40gb, count: 8, migMode: disabled}
//	- gpus:
//	  - model: h100-sxm5-80gb
//
// Rules are tried from the top and the first one that selects a node decides, so a rule without
// nodeNames and nodeLabels, which selects every node, comes last. The example gives all nodes
// that are not in the pool one H100 that offers partitions.
//
// A rule has:
//   - name: shown in messages; optional, unique.
//   - nodeNames: names, or patterns in which "*" stands for any run of characters. Any one must match.
//   - nodeLabels: all must be on the node. A rule with nodeNames and nodeLabels wants both.
//   - gpus: the groups of GPUs, numbered through from the top; [] for a node without GPUs.
//
// A group has:
//   - model: its id in the catalogue.
//   - count: how many; 1 unless given.
//   - migMode: "dynamic" offers every partition that fits, created on demand, and is the default where the
//     figures of the model's partitions are known; "static" offers the partitions of a layout, which exist
//     for good; "disabled" offers whole GPUs only. An Ampere GPU in dynamic mode does not offer itself
//     as a whole, as on real hardware, and no GPU in static mode does.
//   - partitions: the layout of each GPU in static mode, a list of
//     {profile: 3g.40gb, start: 4} or {profile: 1g.10gb, count: 2}. A start is the first memory slice. Without
//     it a partition goes where the vendor's driver would put it once those with a start are there. A
//     layout that no GPU can have is refused with what stands in the way and what would fit.
//   - numaNode: 0 unless given; -1 if the GPUs are to report none.
//   - pcieRoot: for example pci0000:40, where the GPUs of the group are to share one; each has its own
//     otherwise.
//   - driverVersion: of the vendor's driver, for example 580.95.05; the model's default unless given.
//   - consumableShares: lets several claims share a device (Kubernetes 1.36 and later; before that each device
//     is for one claim). "memory" divides it by memory, in MiB, and a claim that asks for no amount gets all
//     that there is; "unlimited" does, too, but such a claim takes nothing and can use everything; a number
//     in quotes is "unlimited" for so many claims at most.
//   - seed: any text; another one gives the GPUs other UUIDs and serial numbers.
//
// The package owns the format, its strict decoding and the choice of the rule. What a GPU is and
// publishes is for package hardware.
package inventory
