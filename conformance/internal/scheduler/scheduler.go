// Package scheduler does for claims what kube-scheduler does: it finds devices in the ResourceSlices that are in the API,
// with the scheduler's own allocator, and writes the allocation and the reservation for a pod into the claim. It works for
// one node and when it is called; nothing waits for a place.
package scheduler

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// ErrDoesNotFit is returned for claims that cannot be allocated from the devices that are published and free.
var ErrDoesNotFit = errors.New("the published devices do not satisfy the claim")

// Scheduler allocates for one node.
type Scheduler struct {
	client   kubernetes.Interface
	nodeName string
	cache    *cel.Cache
}

// New returns a scheduler for a node.
func New(client kubernetes.Interface, nodeName string) *Scheduler {
	return &Scheduler{client: client, nodeName: nodeName, cache: cel.NewCache(100, celFeatures)}
}

var celFeatures = cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true}

// features are those that the API server of this kit has, too.
var features = structured.Features{
	AdminAccess:            true,
	CompatibilityGroups:    true,
	ConsumableCapacity:     true,
	DerivedAttributes:      true,
	DeviceBindingAndStatus: true,
	DeviceTaints:           true,
	ListTypeAttributes:     true,
	OptionalNodeOperations: true,
	PartitionableDevices:   true,
	PrioritizedList:        true,
}

// Schedule allocates the claims, all or none, and reserves them for the pod. Claims that have an allocation keep it. It
// returns the claims as they are in the API then, or an error that wraps ErrDoesNotFit.
func (s *Scheduler) Schedule(ctx context.Context, pod *corev1.Pod, claims ...*resourceapi.ResourceClaim) ([]*resourceapi.ResourceClaim, error) {
	var open []*resourceapi.ResourceClaim
	for _, claim := range claims {
		if claim.Status.Allocation == nil {
			open = append(open, claim)
		}
	}
	allocations, err := s.allocate(ctx, open)
	if err != nil {
		return nil, err
	}
	scheduled := make([]*resourceapi.ResourceClaim, len(claims))
	for i, claim := range claims {
		claim = claim.DeepCopy()
		if claim.Status.Allocation == nil {
			claim.Status.Allocation, allocations = &allocations[0], allocations[1:]
		}
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod.Name, UID: pod.UID})
		if scheduled[i], err = s.client.ResourceV1().ResourceClaims(claim.Namespace).UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
			return nil, fmt.Errorf("write the allocation of claim %s: %w", claim.Name, err)
		}
	}
	return scheduled, nil
}

func (s *Scheduler) allocate(ctx context.Context, claims []*resourceapi.ResourceClaim) ([]resourceapi.AllocationResult, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	node, err := s.client.CoreV1().Nodes().Get(ctx, s.nodeName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	published, err := s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	listed, err := s.client.ResourceV1().DeviceClasses().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	all, err := s.client.ResourceV1().ResourceClaims("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	allocator, err := structured.NewAllocator(ctx, features, inUse(all.Items), classes(listed.Items), pointers(published.Items), s.cache)
	if err != nil {
		return nil, err
	}
	results, err := allocator.Allocate(ctx, node, claims)
	if err != nil {
		return nil, fmt.Errorf("allocate: %w", err)
	}
	if len(results) != len(claims) {
		return nil, fmt.Errorf("claim %s: %w", claims[0].Name, ErrDoesNotFit)
	}
	return results, nil
}

// inUse is what the claims in the API have.
func inUse(claims []resourceapi.ResourceClaim) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			if ptr.Deref(result.AdminAccess, false) {
				continue
			}
			device := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			if result.ShareID == nil {
				state.AllocatedDevices.Insert(device)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(device, result.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(device, result.ConsumedCapacity))
		}
	}
	return state
}

// classes lists DeviceClasses for the allocator.
type classes []resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return pointers(c), nil }

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for i := range c {
		if c[i].Name == name {
			return &c[i], nil
		}
	}
	return nil, fmt.Errorf("device class %s does not exist", name)
}

func pointers[T any](items []T) []*T {
	all := make([]*T, len(items))
	for i := range items {
		all[i] = &items[i]
	}
	return all
}
