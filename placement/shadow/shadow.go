// Package shadow finds out where claims would land, one after the other, with the scheduler's own allocator and without
// touching anything: before a migration, or before more of the same is asked for.
//
// Nodes are tried in the order of their names. The scheduler scores nodes by more than devices (CPU, memory, affinity), so
// that on a cluster with several nodes that fit it may choose another one; on each node the devices are those that it takes.
package shadow

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/simgpu/simgpu/placement"
	"github.com/simgpu/simgpu/placement/explain"
)

// Order in which the units are resolved.
type Order string

const (
	AsListed      Order = "as-listed"
	LargestFirst  Order = "largest-first"
	SmallestFirst Order = "smallest-first"
)

// Unit is what has to land on one node together: a pod with its claims, or one claim.
type Unit struct {
	Name   string
	Pod    *corev1.Pod // nil: a claim that any node will do for
	Claims []*resourceapi.ResourceClaim
}

// Result for one unit.
type Result struct {
	Name    string   `json:"name"`
	Node    string   `json:"node,omitempty"`    // "" if it does not fit
	Devices []string `json:"devices,omitempty"` // CLAIM/REQUEST=DEVICE
	Why     string   `json:"why,omitempty"`     // why it does not fit
}

// Report of a resolution.
type Report struct {
	Results []Result `json:"results"`
	Placed  int      `json:"placed"`
	Before  []Pool   `json:"before"`
	After   []Pool   `json:"after"`
}

// patience bounds the allocator's search for one unit on one node.
const patience = time.Second

// Resolve places the units on a copy of the snapshot, in that order.
func Resolve(ctx context.Context, s *placement.Snapshot, units []Unit, order Order) (*Report, error) {
	s = s.Clone()
	if err := sortUnits(s, units, order); err != nil {
		return nil, err
	}
	report := &Report{Before: Capacity(s)}
	compiled := placement.NewCache()
	for _, unit := range units {
		result := Result{Name: unit.Name}
		nodes, why := s.Nodes, ""
		if unit.Pod != nil {
			var err error
			if nodes, why, err = explain.Candidates(s, unit.Pod); err != nil {
				return nil, fmt.Errorf("%s: %w", unit.Name, err)
			}
		}
		if len(nodes) == 0 {
			result.Why = cmp.Or(why, "there are no nodes")
			report.Results = append(report.Results, result)
			continue
		}
		// What can be told without a search is told first.
		sentence, err := explain.Obstacle(ctx, s, nodes, unit.Claims)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", unit.Name, err)
		}
		result.Why = sentence
		if sentence == "" {
			if err := place(ctx, s, unit, nodes, compiled, &result); err != nil {
				return nil, fmt.Errorf("%s: %w", unit.Name, err)
			}
		}
		if result.Node != "" {
			report.Placed++
		}
		report.Results = append(report.Results, result)
	}
	report.After = Capacity(s)
	return report, nil
}

// place takes the first node on which the allocator finds devices, and adds the allocated claims to the snapshot.
func place(ctx context.Context, s *placement.Snapshot, unit Unit, nodes []*corev1.Node, compiled *placement.Cache, result *Result) error {
	allocator, err := placement.NewAllocator(ctx, s, compiled)
	if err != nil {
		return err
	}
	var notes []string
	for _, node := range nodes {
		if short, err := tooLittle(s, node, unit.Claims, compiled); err != nil {
			return err
		} else if short != "" {
			notes = append(notes, short)
			continue
		}
		bounded, cancel := context.WithTimeout(ctx, patience)
		allocations, err := allocator.Allocate(bounded, node, unit.Claims...)
		cancel()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, context.DeadlineExceeded):
			notes = append(notes, fmt.Sprintf("node %s: the allocator found nothing within %s, which does not mean that there is nothing", node.Name, patience))
		case err != nil:
			return err
		case allocations != nil:
			result.Node, result.Why = node.Name, ""
			for i, allocation := range allocations {
				claim := unit.Claims[i].DeepCopy()
				claim.Status.Allocation = &allocation
				s.Claims = append(s.Claims, claim)
				for _, device := range allocation.Devices.Results {
					result.Devices = append(result.Devices, fmt.Sprintf("%s/%s=%s", claim.Name, device.Request, device.Device))
				}
			}
			return nil
		}
	}
	result.Why = strings.Join(notes, "; ")
	if result.Why == "" {
		result.Why = "each request finds devices, but not all requests together: they share counters, or constraints cannot be met"
	}
	return nil
}

// tooLittle is the bound on the counters: if even the least that the requests may consume is more than all sets of the node
// have left together, no search will find anything. "" if it is not.
func tooLittle(s *placement.Snapshot, node *corev1.Node, claims []*resourceapi.ResourceClaim, compiled *placement.Cache) (string, error) {
	devices, err := s.Devices(node)
	if err != nil {
		return "", err
	}
	free := map[string]int64{}
	seen := map[string]bool{}
	for _, device := range devices {
		if pool := device.Driver + "/" + device.Pool; !seen[pool] {
			seen[pool] = true
			for _, set := range s.Counters(device.Driver, device.Pool) {
				for name, counter := range set {
					free[name] += max(counter.Free, 0)
				}
			}
		}
	}
	needed := map[string]int64{}
	for _, claim := range claims {
		for _, request := range placement.Defaulted(claim).Spec.Devices.Requests {
			if request.Exactly == nil || request.Exactly.AllocationMode != resourceapi.DeviceAllocationModeExactCount {
				continue
			}
			for name, least := range leastConsumption(s, devices, request.Exactly, compiled) {
				needed[name] += least * request.Exactly.Count
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(needed)) {
		if needed[name] > free[name] {
			return fmt.Sprintf("node %s: at least %s of %s needed, %s free in all", node.Name, placement.Amount(needed[name]), name, placement.Amount(free[name])), nil
		}
	}
	return "", nil
}
