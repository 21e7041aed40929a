// Package explain says why a claim or pod waits for devices, and what to change first. Whether the devices fit is what the
// scheduler's own allocator says; what this package adds is how many devices each part of a request leaves on each node, and
// who holds what is missing. It works for any driver.
package explain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/placement"
)

// Outcome of asking.
type Outcome string

const (
	// Allocated: the claims have their devices.
	Allocated Outcome = "Allocated"
	// Fits: the allocator finds devices on some node; the scheduler has not come to it, or something else holds the pod up.
	Fits Outcome = "Fits"
	// Waits: no node has the devices.
	Waits Outcome = "Waits"
	// Broken: no node can ever have them before an object is mended or made.
	Broken Outcome = "Broken"
)

// Explanation of one pod, or of one claim alone.
type Explanation struct {
	Kind      string  `json:"kind"` // Pod or ResourceClaim
	Namespace string  `json:"namespace"`
	Name      string  `json:"name"`
	Outcome   Outcome `json:"outcome"`
	// Sentence names the first thing to change.
	Sentence string `json:"sentence"`
	// Node is where the claims fit, or are allocated where that is one node.
	Node string `json:"node,omitempty"`
	// Requests of the claims that have no devices yet.
	Requests []Request `json:"requests,omitempty"`
	// Nodes that were looked at, with what the allocator says.
	Nodes []Node `json:"nodes,omitempty"`
}

// Request is one request of a claim, or one of the alternatives of a request.
type Request struct {
	Claim string `json:"claim"`
	Name  string `json:"name"` // REQUEST, or REQUEST/SUBREQUEST
	Class string `json:"class"`
	Count int64  `json:"count,omitempty"` // 0: all
	Steps []Step `json:"steps"`
}

// Step is one part of a request: how many devices it leaves of those that the step before has left.
type Step struct {
	Name string `json:"name"`
	// Left is the number of devices by node, in the order of Explanation.Nodes.
	Left []int `json:"left"`
	// Details say on the nodes where this step is the first that leaves too few what took the others.
	Details []string `json:"details,omitempty"`
}

// Node is one that the pod may run on.
type Node struct {
	Name string `json:"name"`
	Fits bool   `json:"fits"`
	Note string `json:"note,omitempty"`
}

// allocatorTime bounds how long the allocator may look for devices on all nodes.
const allocatorTime = 5 * time.Second

// Claim explains one claim.
func Claim(ctx context.Context, s *placement.Snapshot, claim *resourceapi.ResourceClaim) (*Explanation, error) {
	e := &Explanation{Kind: "ResourceClaim", Namespace: claim.Namespace, Name: claim.Name}
	if claim.Status.Allocation != nil {
		e.allocated(claim)
		return e, nil
	}
	return e, e.explain(ctx, s, s.Nodes, []*resourceapi.ResourceClaim{claim})
}

// Pod explains all claims of a pod together, as the scheduler has to find them on one node.
func Pod(ctx context.Context, s *placement.Snapshot, pod *corev1.Pod) (*Explanation, error) {
	e := &Explanation{Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name}
	nodes, why, err := Candidates(s, pod)
	if err != nil {
		return nil, err
	}
	var waiting []*resourceapi.ResourceClaim
	var has []*resourceapi.ResourceClaim
	for _, ref := range pod.Spec.ResourceClaims {
		claim, problem := claimOf(s, pod, ref)
		switch {
		case problem != "":
			e.Outcome, e.Sentence = Broken, problem
			return e, nil
		case claim == nil: // the pod needs none for this reference
		case claim.Status.Allocation != nil:
			has = append(has, claim)
			if nodes, err = where(nodes, claim); err != nil {
				return nil, err
			}
			if len(nodes) == 0 && why == "" {
				why = fmt.Sprintf("claim %s is allocated where the pod cannot run", claim.Name)
			}
		default:
			waiting = append(waiting, claim)
		}
	}
	if claim := extended(s, pod); claim != nil {
		waiting = append(waiting, claim)
	}
	switch {
	case len(waiting) == 0 && len(has) == 0:
		e.Outcome, e.Sentence = Fits, "the pod asks for no devices: what holds it up is something else, see kubectl describe pod"
	case len(waiting) == 0:
		e.allocated(has...)
	case len(nodes) == 0:
		e.Outcome = Waits
		e.Sentence = cmp.Or(why, "there are no nodes")
	default:
		return e, e.explain(ctx, s, nodes, waiting)
	}
	return e, nil
}

func (e *Explanation) allocated(claims ...*resourceapi.ResourceClaim) {
	e.Outcome = Allocated
	var devices []string
	for _, claim := range claims {
		for _, result := range claim.Status.Allocation.Devices.Results {
			devices = append(devices, result.Pool+"/"+result.Device)
		}
	}
	e.Sentence = "allocated: " + strings.Join(devices, ", ")
}

// Candidates are the nodes that the pod may run on as far as node selector, affinity, cordons and taints say. If there are
// none, why says why.
func Candidates(s *placement.Snapshot, pod *corev1.Pod) (nodes []*corev1.Node, why string, err error) {
	required := nodeaffinity.GetRequiredNodeAffinity(pod)
	var refused []string
	for _, node := range s.Nodes {
		if pod.Spec.NodeName != "" && pod.Spec.NodeName != node.Name {
			continue
		}
		ok, err := required.Match(node)
		if err != nil {
			return nil, "", fmt.Errorf("the pod's node selector: %w", err)
		}
		taint, tainted := scheduling.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints, pod.Spec.Tolerations, keepsPodsAway, true)
		switch {
		case !ok:
		case node.Spec.Unschedulable:
			refused = append(refused, node.Name+" is cordoned")
		case tainted:
			refused = append(refused, fmt.Sprintf("%s has the taint %s", node.Name, taint.ToString()))
		default:
			nodes = append(nodes, node)
		}
	}
	if len(nodes) == 0 && len(s.Nodes) > 0 {
		why = fmt.Sprintf("none of the %d nodes is one that the pod may run on: look at its nodeSelector and affinity", len(s.Nodes))
		if len(refused) > 0 {
			why = "no node that the pod asks for takes it: " + some(refused)
		}
	}
	return nodes, why, nil
}

func keepsPodsAway(taint *corev1.Taint) bool {
	return taint.Effect == corev1.TaintEffectNoSchedule || taint.Effect == corev1.TaintEffectNoExecute
}

// claimOf finds the claim that a pod refers to, or makes what it will be. The claim is nil if the pod needs none.
func claimOf(s *placement.Snapshot, pod *corev1.Pod, ref corev1.PodResourceClaim) (claim *resourceapi.ResourceClaim, problem string) {
	name, _, err := resourceclaim.Name(pod, &ref)
	switch {
	case errors.Is(err, resourceclaim.ErrAPIUnsupported):
		return nil, fmt.Sprintf("spec.resourceClaims %q names neither a claim nor a template", ref.Name)
	case err == nil && name == nil:
		return nil, ""
	case err == nil:
		if claim := s.Claim(pod.Namespace, *name); claim != nil {
			return claim, ""
		}
		if ref.ResourceClaimName != nil {
			return nil, fmt.Sprintf("spec.resourceClaims %q names ResourceClaim %q, which does not exist: create it", ref.Name, *name)
		}
	}
	template := s.Template(pod.Namespace, *ref.ResourceClaimTemplateName)
	if template == nil {
		return nil, fmt.Sprintf("spec.resourceClaims %q names ResourceClaimTemplate %q, which does not exist: create it, no claim can be made before", ref.Name, *ref.ResourceClaimTemplateName)
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name + "-" + ref.Name},
		Spec:       template.Spec.Spec,
	}, ""
}

// extended is the claim that the scheduler makes for extended resources that DeviceClasses stand for, nil without any
// (KEP-5004). A class stands for its extendedResourceName, and for deviceclass.resource.kubernetes.io/NAME.
func extended(s *placement.Snapshot, pod *corev1.Pod) *resourceapi.ResourceClaim {
	if pod.Status.ExtendedResourceClaimStatus != nil || pod.Spec.NodeName != "" {
		return nil
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name + "-extended-resources"}}
	for i, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for _, class := range s.Classes {
			for _, name := range []string{ptr.Deref(class.Spec.ExtendedResourceName, ""), resourceapi.ResourceDeviceClassPrefix + class.Name} {
				if quantity := container.Resources.Requests[corev1.ResourceName(name)]; !quantity.IsZero() {
					claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{
						Name:    fmt.Sprintf("container-%d-request-%d", i, len(claim.Spec.Devices.Requests)),
						Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class.Name, Count: quantity.Value()},
					})
				}
			}
		}
	}
	if len(claim.Spec.Devices.Requests) == 0 {
		return nil
	}
	return claim
}

// where are the nodes on which an allocated claim can be used.
func where(nodes []*corev1.Node, claim *resourceapi.ResourceClaim) ([]*corev1.Node, error) {
	if claim.Status.Allocation.NodeSelector == nil {
		return nodes, nil
	}
	selector, err := nodeaffinity.NewNodeSelector(claim.Status.Allocation.NodeSelector)
	if err != nil {
		return nil, fmt.Errorf("claim %s is allocated with an invalid node selector: %w", claim.Name, err)
	}
	var here []*corev1.Node
	for _, node := range nodes {
		if selector.Match(node) {
			here = append(here, node)
		}
	}
	return here, nil
}

// Obstacle says what keeps the claims from devices on all of these nodes, before asking the allocator: "" if every request
// finds enough devices somewhere, which does not mean that all do together.
func Obstacle(ctx context.Context, s *placement.Snapshot, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) (string, error) {
	first, _, err := (&Explanation{}).examine(ctx, s, nodes, claims)
	if err != nil || first == nil {
		return "", err
	}
	return first.sentence, nil
}

// examine fills in the steps of every request on every node, and returns what to change first, nil if nothing.
func (e *Explanation) examine(ctx context.Context, s *placement.Snapshot, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) (*obstacle, *placement.Cache, error) {
	compiled := placement.NewCache()
	x := &examiner{snapshot: s, compiled: compiled, holders: s.Holders(), counters: map[string]map[string]map[string]*placement.Counter{}}
	for _, node := range nodes {
		devices, err := s.Devices(node)
		if err != nil {
			return nil, nil, err
		}
		x.nodes = append(x.nodes, nodeDevices{node, devices})
		e.Nodes = append(e.Nodes, Node{Name: node.Name})
	}
	var first *obstacle
	for _, claim := range claims {
		claim = placement.Defaulted(claim)
		for _, request := range claim.Spec.Devices.Requests {
			obstacle := x.request(ctx, e, claim, request)
			if first == nil || obstacle != nil && obstacle.broken && !first.broken {
				first = obstacle
			}
		}
	}
	return first, compiled, nil
}

// explain has the requests examined, asks the allocator, and says the sentence.
func (e *Explanation) explain(ctx context.Context, s *placement.Snapshot, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) error {
	if len(nodes) == 0 {
		e.Outcome, e.Sentence = Waits, "there are no nodes"
		return nil
	}
	first, compiled, err := e.examine(ctx, s, nodes, claims)
	if err != nil {
		return err
	}
	if first != nil && first.broken {
		e.Outcome, e.Sentence = Broken, first.sentence
		return nil
	}

	bounded, cancel := context.WithTimeout(ctx, allocatorTime)
	defer cancel()
	allocator, err := placement.NewAllocator(bounded, s, compiled)
	if err != nil {
		return fmt.Errorf("asking the allocator: %w", err)
	}
	e.Outcome = Waits
	for i, node := range nodes {
		results, err := allocator.Allocate(bounded, node, claims...)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, context.DeadlineExceeded):
			e.Nodes[i].Note = fmt.Sprintf("the allocator found nothing within %s", allocatorTime)
		case err != nil:
			e.Nodes[i].Note = err.Error()
		case results != nil:
			e.Nodes[i].Fits = true
			e.Outcome, e.Node = Fits, cmp.Or(e.Node, node.Name)
		}
	}
	switch {
	case e.Outcome == Fits:
		e.Sentence = fmt.Sprintf("the devices are free on node %s: the scheduler has not come to it yet, or something other than devices is in the way, see kubectl describe", e.Node)
	case first != nil:
		e.Sentence = first.sentence
	default:
		e.Sentence = "each request finds devices, but not all requests together: constraints that the devices cannot meet, or devices that share counters and do not fit beside each other"
		for _, claim := range claims {
			for _, constraint := range claim.Spec.Devices.Constraints {
				if constraint.MatchAttribute != nil {
					e.Sentence = fmt.Sprintf("each request finds devices, but none that have the same %s, as claim %s wants it", *constraint.MatchAttribute, claim.Name)
				}
			}
		}
	}
	return nil
}

// nodeDevices are the devices of a node.
type nodeDevices struct {
	node    *corev1.Node
	devices []*placement.Device
}

// obstacle is what keeps a request from its devices.
type obstacle struct {
	sentence string
	broken   bool
}

// quoted shortens what is long for a sentence.
func quoted(s string) string {
	const longest = 160
	if len(s) > longest {
		s = s[:longest] + "..."
	}
	return fmt.Sprintf("%q", s)
}

// some lists a few of many.
func some(list []string) string {
	slices.Sort(list)
	list = slices.Compact(list)
	const few = 4
	if len(list) > few {
		return fmt.Sprintf("%s and %d more", strings.Join(list[:few], ", "), len(list)-few)
	}
	return strings.Join(list, ", ")
}
