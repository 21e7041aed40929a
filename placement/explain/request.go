package explain

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/simgpu/simgpu/placement"
)

// examiner looks at requests one by one.
type examiner struct {
	snapshot *placement.Snapshot
	compiled *placement.Cache
	nodes    []nodeDevices
	holders  map[structured.DeviceID][]string
	counters map[string]map[string]map[string]*placement.Counter // driver/pool, set, name
	state    *structured.AllocatedState
}

// alternative is a request, or one of the alternatives of a request.
type alternative struct {
	name, class string
	mode        resourceapi.DeviceAllocationMode
	count       int64
	selectors   []resourceapi.DeviceSelector
	tolerations []resourceapi.DeviceToleration
	capacity    *resourceapi.CapacityRequirements
	admin       bool
}

func alternatives(request resourceapi.DeviceRequest) []alternative {
	if exactly := request.Exactly; exactly != nil {
		return []alternative{{
			name: request.Name, class: exactly.DeviceClassName, mode: exactly.AllocationMode, count: exactly.Count, selectors: exactly.Selectors,
			tolerations: exactly.Tolerations, capacity: exactly.Capacity, admin: exactly.AdminAccess != nil && *exactly.AdminAccess,
		}}
	}
	var list []alternative
	for _, sub := range request.FirstAvailable {
		list = append(list, alternative{
			name: request.Name + "/" + sub.Name, class: sub.DeviceClassName, mode: sub.AllocationMode, count: sub.Count, selectors: sub.Selectors,
			tolerations: sub.Tolerations, capacity: sub.Capacity,
		})
	}
	return list
}

// request adds the steps of a request, and returns what is in its way: nil if a node has enough devices for it. Of several
// alternatives the last one's obstacle counts, since the user has put the most wanted first.
func (x *examiner) request(ctx context.Context, e *Explanation, claim *resourceapi.ResourceClaim, request resourceapi.DeviceRequest) *obstacle {
	var last *obstacle
	enough := false
	for _, a := range alternatives(request) {
		obstacle := x.alternative(ctx, e, claim, a)
		enough = enough || obstacle == nil
		last = obstacle
		if obstacle != nil && obstacle.broken {
			return obstacle // the allocator gives up on the whole claim
		}
	}
	if enough {
		return nil
	}
	return last
}

// filter is one step: which devices it leaves.
type filter struct {
	name string
	// keep says if a device is left, or why it is not.
	keep func(*placement.Device) (bool, string, error)
	// sentence about the node that comes closest, where the step leaves too few devices of those before.
	sentence func(a alternative, node string, before []*placement.Device, left int, why []string) string
}

func (x *examiner) alternative(ctx context.Context, e *Explanation, claim *resourceapi.ResourceClaim, a alternative) *obstacle {
	class, err := x.snapshot.Get(a.class)
	if err != nil {
		return &obstacle{broken: true, sentence: fmt.Sprintf("request %q: %v; create the class or name another", a.name, err)}
	}
	report := Request{Claim: claim.Namespace + "/" + claim.Name, Name: a.name, Class: a.class, Count: a.count}
	published := Step{Name: "published"}
	left := make([][]*placement.Device, len(x.nodes))
	total := 0
	for i, node := range x.nodes {
		left[i] = node.devices
		total += len(node.devices)
		published.Left = append(published.Left, len(node.devices))
	}
	report.Steps = append(report.Steps, published)
	if total == 0 {
		e.Requests = append(e.Requests, report)
		return &obstacle{sentence: "no node publishes any device: see whether a driver runs, kubectl get resourceslices"}
	}

	blocked := make([]string, len(x.nodes)) // the sentence of the step that leaves too few
	depth, had := make([]int, len(x.nodes)), make([]int, len(x.nodes))
	for depthNow, f := range x.filters(ctx, class, a) {
		step := Step{Name: f.name}
		for i := range x.nodes {
			before := left[i]
			var kept []*placement.Device
			var why []string
			for _, device := range before {
				ok, reason, err := f.keep(device)
				if err != nil {
					e.Requests = append(e.Requests, report)
					return &obstacle{broken: true, sentence: fmt.Sprintf("request %q: %s fails on device %s: %v", a.name, f.name, device, err)}
				}
				if ok {
					kept = append(kept, device)
				} else if reason != "" {
					why = append(why, reason)
				}
			}
			left[i] = kept
			step.Left = append(step.Left, len(kept))
			short := len(kept) == 0 || a.mode == resourceapi.DeviceAllocationModeExactCount && int64(len(kept)) < a.count ||
				a.mode == resourceapi.DeviceAllocationModeAll && f.mustKeepAll() && len(kept) < len(before)
			if short && blocked[i] == "" {
				blocked[i] = f.sentence(a, x.nodes[i].node.Name, before, len(kept), why)
				depth[i], had[i] = depthNow+1, len(kept)
				step.Details = append(step.Details, x.nodes[i].node.Name+": "+blocked[i])
			}
		}
		report.Steps = append(report.Steps, step)
	}
	e.Requests = append(e.Requests, report)
	// The node on which most steps were passed, and then most devices are left, comes closest: what is in the way there is the
	// first thing to change.
	closest := -1
	for i := range x.nodes {
		if blocked[i] == "" {
			return nil
		}
		if closest < 0 || cmp.Or(cmp.Compare(depth[i], depth[closest]), cmp.Compare(had[i], had[closest]), cmp.Compare(len(x.nodes[i].devices), len(x.nodes[closest].devices))) > 0 {
			closest = i
		}
	}
	return &obstacle{sentence: fmt.Sprintf("request %q: %s", a.name, blocked[closest])}
}

const (
	stepTaints    = "tolerates taints"
	stepFree      = "not allocated"
	stepCounters  = "counters free"
	stepComplete  = "pool complete"
	stepOfClass   = "of class "
	stepSelector  = "selector "
	stepAvailable = "capacity free"
)

// mustKeepAll: allocationMode All wants every device that the selectors leave.
func (f filter) mustKeepAll() bool {
	return !strings.HasPrefix(f.name, stepOfClass) && !strings.HasPrefix(f.name, stepSelector)
}

func (x *examiner) filters(ctx context.Context, class *resourceapi.DeviceClass, a alternative) []filter {
	list := []filter{{
		name: stepComplete,
		keep: func(d *placement.Device) (bool, string, error) { return d.Complete, d.Pool, nil },
		sentence: func(a alternative, node string, before []*placement.Device, left int, why []string) string {
			if len(before) == 0 {
				return fmt.Sprintf("node %s publishes no devices", node)
			}
			if left == len(before) {
				return fmt.Sprintf("node %s publishes %d devices, and %d are wanted", node, left, a.count)
			}
			return fmt.Sprintf("pool %s is incomplete, the driver is still publishing it or cannot: see its log", some(why))
		},
	}}
	selector := func(name, from string, selector resourceapi.DeviceSelector) {
		if selector.CEL == nil {
			return
		}
		list = append(list, x.selector(ctx, name, from, selector.CEL.Expression))
	}
	for i, s := range class.Spec.Selectors {
		name := stepOfClass + class.Name
		if len(class.Spec.Selectors) > 1 {
			name += fmt.Sprintf(", selector %d", i+1)
		}
		selector(name, "of the class", s)
	}
	for i, s := range a.selectors {
		selector(fmt.Sprintf("%s%d", stepSelector, i+1), "of the request", s)
	}
	list = append(list, x.taints(a.tolerations))
	if !a.admin {
		list = append(list, x.free(), x.available(a))
	}
	return append(list, x.countersFree())
}

// selector evaluates one CEL expression.
func (x *examiner) selector(ctx context.Context, name, from, expression string) filter {
	program := x.compiled.GetOrCompile(expression)
	return filter{
		name: name,
		keep: func(d *placement.Device) (bool, string, error) {
			ok, err := d.Selected(ctx, program)
			if err != nil {
				return false, "", fmt.Errorf("%s: %w", quoted(expression), err)
			}
			return ok, "", nil
		},
		sentence: func(a alternative, node string, before []*placement.Device, left int, _ []string) string {
			s := fmt.Sprintf("%s %s, %s, leaves %d of %d devices", name, from, quoted(expression), left, len(before))
			if !strings.HasPrefix(name, stepSelector) {
				s = fmt.Sprintf("class %s, %s, selects %d of %d devices", a.class, quoted(expression), left, len(before))
			}
			if left > 0 {
				s += fmt.Sprintf(" on node %s, and %d are wanted", node, a.count)
			}
			if has := values(expression, before); has != "" {
				s += "; those before have " + has
			}
			return s
		},
	}
}

// mentioned finds attributes and capacities in an expression: .name or ["name"] after attributes["domain"] or capacity["domain"].
var mentioned = regexp.MustCompile(`(attributes|capacity)\[['"]([^'"]+)['"]\](?:\.([A-Za-z_][A-Za-z0-9_]*)|\[['"]([^'"]+)['"]\])`)

// values are what devices have of what an expression mentions.
func values(expression string, devices []*placement.Device) string {
	var list []string
	seen := map[string]bool{}
	for _, match := range mentioned.FindAllStringSubmatch(expression, -1) {
		domain, name := match[2], match[3]+match[4]
		if seen[match[1]+name] {
			continue
		}
		seen[match[1]+name] = true
		found := map[string]bool{}
		for _, d := range devices {
			for _, key := range []resourceapi.QualifiedName{resourceapi.QualifiedName(name), resourceapi.QualifiedName(domain + "/" + name)} {
				if string(key) == name && d.Driver != domain {
					continue
				}
				if attribute, ok := d.Attributes[key]; ok && match[1] == "attributes" {
					found[attributeText(attribute)] = true
				}
				if capacity, ok := d.Capacity[key]; ok && match[1] == "capacity" {
					found[capacity.Value.String()] = true
				}
			}
		}
		if len(found) > 0 {
			list = append(list, fmt.Sprintf("%s %s", name, some(slices.Collect(maps.Keys(found)))))
		} else if len(devices) > 0 {
			list = append(list, fmt.Sprintf("no %s", name))
		}
	}
	return strings.Join(list, "; ")
}

func attributeText(a resourceapi.DeviceAttribute) string {
	switch {
	case a.StringValue != nil:
		return fmt.Sprintf("%q", *a.StringValue)
	case a.IntValue != nil:
		return fmt.Sprint(*a.IntValue)
	case a.BoolValue != nil:
		return fmt.Sprint(*a.BoolValue)
	case a.VersionValue != nil:
		return *a.VersionValue
	}
	return "a list"
}

func (x *examiner) taints(tolerations []resourceapi.DeviceToleration) filter {
	return filter{
		name: stepTaints,
		keep: func(d *placement.Device) (bool, string, error) {
			for _, taint := range d.Taints {
				if taint.Effect != resourceapi.DeviceTaintEffectNoSchedule && taint.Effect != resourceapi.DeviceTaintEffectNoExecute {
					continue
				}
				if !slices.ContainsFunc(tolerations, func(t resourceapi.DeviceToleration) bool { return resourceclaim.ToleratesTaint(t, taint) }) {
					return false, strings.TrimSuffix(fmt.Sprintf("%s=%s:%s", taint.Key, taint.Value, taint.Effect), "="), nil
				}
			}
			return true, "", nil
		},
		sentence: func(_ alternative, node string, before []*placement.Device, left int, why []string) string {
			return fmt.Sprintf("%d of the %d devices that match on node %s are tainted (%s): repair them, or tolerate the taint in the request", len(before)-left, len(before), node, some(why))
		},
	}
}

// free leaves devices that no claim has. Those that several claims can have are not in question here.
func (x *examiner) free() filter {
	return filter{
		name: stepFree,
		keep: func(d *placement.Device) (bool, string, error) {
			if d.Shared() {
				return true, "", nil
			}
			if holders := x.holders[d.ID()]; len(holders) > 0 {
				return false, fmt.Sprintf("%s to claim %s", d.Name, strings.Join(holders, ", ")), nil
			}
			return true, "", nil
		},
		sentence: func(a alternative, node string, before []*placement.Device, left int, why []string) string {
			s := fmt.Sprintf("%d of the %d devices that match on node %s are allocated (%s)", len(before)-left, len(before), node, some(why))
			if left > 0 {
				s += fmt.Sprintf("; %d left, and %d are wanted", left, a.count)
			}
			return s + ": wait for one to be released, or add devices"
		},
	}
}

// available leaves shared devices with as much capacity as is asked for.
func (x *examiner) available(a alternative) filter {
	return filter{
		name: stepAvailable,
		keep: func(d *placement.Device) (bool, string, error) {
			if !d.Shared() {
				return true, "", nil
			}
			if x.state == nil {
				state := x.snapshot.Allocated()
				x.state = &state
			}
			consumed := x.state.AggregatedCapacity[d.ID()]
			for name, capacity := range d.Capacity {
				want := wanted(a.capacity, name, capacity)
				free := capacity.Value.DeepCopy()
				if used := consumed[name]; used != nil {
					free.Sub(*used)
				}
				if free.Cmp(want) < 0 {
					return false, fmt.Sprintf("%s has %s of %s left, %s wanted, held by %s", d.Name, free.String(), name, want.String(), claims(x.holders[d.ID()])), nil
				}
			}
			return true, "", nil
		},
		sentence: func(_ alternative, node string, _ []*placement.Device, _ int, why []string) string {
			return fmt.Sprintf("the shared devices on node %s have too little left: %s", node, some(why))
		},
	}
}

// wanted is what one claim takes of a capacity of a shared device: what it asks for, else the default, else all.
func wanted(requirements *resourceapi.CapacityRequirements, name resourceapi.QualifiedName, capacity resourceapi.DeviceCapacity) resource.Quantity {
	if requirements != nil {
		if want, ok := requirements.Requests[name]; ok {
			return want
		}
	}
	if capacity.RequestPolicy != nil && capacity.RequestPolicy.Default != nil {
		return *capacity.RequestPolicy.Default
	}
	return capacity.Value
}

// countersFree leaves devices whose counters have enough left for one of them.
func (x *examiner) countersFree() filter {
	return filter{
		name: stepCounters,
		keep: func(d *placement.Device) (bool, string, error) {
			if d.Shared() && len(x.holders[d.ID()]) > 0 {
				return true, "", nil // consumes nothing more
			}
			key := d.Driver + "/" + d.Pool
			if x.counters[key] == nil {
				x.counters[key] = x.snapshot.Counters(d.Driver, d.Pool)
			}
			// Of several counters that are short the one counts of which least is left, compared with what is needed.
			var short string
			least := 1.0
			for _, consumption := range d.ConsumesCounters {
				for _, name := range slices.Sorted(maps.Keys(consumption.Counters)) {
					value := consumption.Counters[name].Value
					counter := x.counters[key][consumption.CounterSet][name]
					if counter == nil {
						return false, fmt.Sprintf("%s consumes counter %s of set %s, which the pool does not have", d.Name, name, consumption.CounterSet), nil
					}
					need, free := value.Value(), max(counter.Free, 0)
					if left := float64(free) / float64(max(need, 1)); need > counter.Free && left < least {
						least = left
						short = fmt.Sprintf("%s of %s: %s needed, %s free, held by %s", name, consumption.CounterSet, placement.Amount(need), placement.Amount(free), claims(counter.Holders))
					}
				}
			}
			if short != "" {
				return false, short, nil
			}
			return true, "", nil
		},
		sentence: func(a alternative, node string, before []*placement.Device, left int, why []string) string {
			s := fmt.Sprintf("none of the %d matching devices on node %s fits beside what is in use: %s", len(before), node, some(why))
			if left > 0 {
				s = fmt.Sprintf("%d of the %d matching devices on node %s fit beside what is in use, and %d are wanted: %s", left, len(before), node, a.count, some(why))
			}
			return s
		},
	}
}

// claims names a few.
func claims(names []string) string {
	if len(names) == 0 {
		return "nobody"
	}
	return "claim " + some(slices.Clone(names))
}
