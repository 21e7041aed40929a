// Package placement knows what decides where claims for devices land: the ResourceSlices, classes, claims and nodes of a
// cluster or of files, and asks the scheduler's own allocator. It changes nothing and knows no driver.
//
// Package explain says why claims wait.
package placement

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// Features are those that the scheduler of Kubernetes 1.37 has by default.
func Features() structured.Features {
	return structured.Features{
		AdminAccess: true, PrioritizedList: true, PartitionableDevices: true, DeviceTaints: true, DeviceBindingAndStatus: true, ConsumableCapacity: true,
	}
}

// Snapshot is what counts for the placement of claims, as it was at one time. Objects are not to be changed, and slices not
// replaced once devices were asked for.
type Snapshot struct {
	Nodes     []*corev1.Node
	Slices    []*resourceapi.ResourceSlice
	Classes   []*resourceapi.DeviceClass
	Claims    []*resourceapi.ResourceClaim
	Templates []*resourceapi.ResourceClaimTemplate
	Pods      []*corev1.Pod

	reach *reach // made when it is needed first
}

// New makes a snapshot of lists of objects.
func New(lists ...runtime.Object) *Snapshot {
	s := &Snapshot{}
	for _, list := range lists {
		s.add(list)
	}
	s.complete()
	return s
}

// ReadCluster takes a snapshot of a cluster.
func ReadCluster(ctx context.Context, client kubernetes.Interface) (*Snapshot, error) {
	all := metav1.ListOptions{}
	nodes, err1 := client.CoreV1().Nodes().List(ctx, all)
	resourceSlices, err2 := client.ResourceV1().ResourceSlices().List(ctx, all)
	classes, err3 := client.ResourceV1().DeviceClasses().List(ctx, all)
	claims, err4 := client.ResourceV1().ResourceClaims("").List(ctx, all)
	templates, err5 := client.ResourceV1().ResourceClaimTemplates("").List(ctx, all)
	pods, err6 := client.CoreV1().Pods("").List(ctx, all)
	if err := errors.Join(err1, err2, err3, err4, err5, err6); err != nil {
		return nil, fmt.Errorf("reading the cluster: %w", err)
	}
	return New(nodes, resourceSlices, classes, claims, templates, pods), nil
}

// ReadFiles takes a snapshot from YAML or JSON files with any of the objects, one after the other or in lists. "-" is
// standard input. Objects of other kinds are an error that names them.
func ReadFiles(paths ...string) (*Snapshot, error) {
	s := &Snapshot{}
	for _, path := range paths {
		if err := EachDocument(path, s.decode); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	s.complete()
	return s, nil
}

// EachDocument calls each for the documents of a YAML or JSON file, as JSON, and for the items of lists. "-" is standard input.
func EachDocument(path string, each func(document []byte) error) error {
	content, err := os.ReadFile(path)
	if path == "-" {
		content, err = io.ReadAll(os.Stdin)
	}
	if err != nil {
		return err
	}
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			document, err = yaml.ToJSON(document)
		}
		if err == nil {
			err = eachItem(document, each)
		}
		if err != nil {
			return err
		}
	}
}

func eachItem(document []byte, each func([]byte) error) error {
	if text := bytes.TrimSpace(document); len(text) == 0 || string(text) == "null" {
		return nil
	}
	var list struct {
		metav1.TypeMeta `json:",inline"`
		Items           []json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(document, &list); err != nil {
		return err
	}
	if list.Kind != "List" {
		return each(document)
	}
	for _, item := range list.Items {
		if err := eachItem(item, each); err != nil {
			return err
		}
	}
	return nil
}

func (s *Snapshot) decode(document []byte) error {
	object, kind, err := scheme.Codecs.UniversalDeserializer().Decode(document, nil, nil)
	if err != nil {
		return err
	}
	if !s.add(object) {
		return fmt.Errorf("has a %s, which does not count for the placement of claims", kind.Kind)
	}
	return nil
}

func (s *Snapshot) add(object runtime.Object) bool {
	switch object := object.(type) {
	case *corev1.Node:
		s.Nodes = append(s.Nodes, object)
	case *resourceapi.ResourceSlice:
		s.Slices = append(s.Slices, object)
	case *resourceapi.DeviceClass:
		s.Classes = append(s.Classes, object)
	case *resourceapi.ResourceClaim:
		s.Claims = append(s.Claims, object)
	case *resourceapi.ResourceClaimTemplate:
		s.Templates = append(s.Templates, object)
	case *corev1.Pod:
		s.Pods = append(s.Pods, object)
	case *corev1.NodeList:
		s.Nodes = append(s.Nodes, pointers(object.Items)...)
	case *resourceapi.ResourceSliceList:
		s.Slices = append(s.Slices, pointers(object.Items)...)
	case *resourceapi.DeviceClassList:
		s.Classes = append(s.Classes, pointers(object.Items)...)
	case *resourceapi.ResourceClaimList:
		s.Claims = append(s.Claims, pointers(object.Items)...)
	case *resourceapi.ResourceClaimTemplateList:
		s.Templates = append(s.Templates, pointers(object.Items)...)
	case *corev1.PodList:
		s.Pods = append(s.Pods, pointers(object.Items)...)
	default:
		return false
	}
	return true
}

func pointers[T any](items []T) []*T {
	list := make([]*T, len(items))
	for i := range items {
		list[i] = &items[i]
	}
	return list
}

// complete sorts, and adds the nodes that slices name and nobody described, as in files.
func (s *Snapshot) complete() {
	known := sets.New[string]()
	for _, node := range s.Nodes {
		known.Insert(node.Name)
	}
	for _, slice := range s.Slices {
		if name := slice.Spec.NodeName; name != nil && !known.Has(*name) {
			known.Insert(*name)
			s.Nodes = append(s.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: *name}})
		}
	}
	slices.SortFunc(s.Nodes, func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Slices, func(a, b *resourceapi.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Claims, func(a, b *resourceapi.ResourceClaim) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
}

// Get is the class of that name, for the allocator.
func (s *Snapshot) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range s.Classes {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("DeviceClass %q does not exist; there are: %s", name, cmp.Or(strings.Join(s.classNames(), ", "), "none"))
}

// List is all classes, for the allocator.
func (s *Snapshot) List() ([]*resourceapi.DeviceClass, error) { return s.Classes, nil }

func (s *Snapshot) classNames() []string {
	names := make([]string, len(s.Classes))
	for i, class := range s.Classes {
		names[i] = class.Name
	}
	slices.Sort(names)
	return names
}

// Claim finds a claim, nil if there is none.
func (s *Snapshot) Claim(namespace, name string) *resourceapi.ResourceClaim {
	return find(s.Claims, namespace, name)
}

// Template finds a claim template, nil if there is none.
func (s *Snapshot) Template(namespace, name string) *resourceapi.ResourceClaimTemplate {
	return find(s.Templates, namespace, name)
}

func find[T metav1.Object](list []T, namespace, name string) (found T) {
	for _, object := range list {
		if object.GetNamespace() == namespace && object.GetName() == name {
			return object
		}
	}
	return found
}

// Clone returns a snapshot whose claims can be replaced without changing this one.
func (s *Snapshot) Clone() *Snapshot {
	clone := *s
	clone.Claims = slices.Clone(s.Claims)
	return &clone
}

// Allocated is what the claims have, as the scheduler counts it.
func (s *Snapshot) Allocated() structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range s.Claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			if ptr.Deref(result.AdminAccess, false) {
				continue
			}
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			if result.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
		}
	}
	return state
}

// Allocator decides with the scheduler's code. It is good for one state of a snapshot.
type Allocator struct {
	allocator structured.Allocator
}

// NewAllocator prepares to place claims beside those of the snapshot.
func NewAllocator(ctx context.Context, s *Snapshot, compiled *Cache) (*Allocator, error) {
	allocator, err := structured.NewAllocator(ctx, Features(), s.Allocated(), s, s.Slices, compiled)
	if err != nil {
		return nil, err
	}
	return &Allocator{allocator: allocator}, nil
}

// Cache holds compiled CEL expressions.
type Cache = cel.Cache

// NewCache makes a cache, for as long as its expressions are of use.
func NewCache() *Cache {
	return cel.NewCache(100, cel.Features{EnableConsumableCapacity: true})
}

// Allocate returns what the claims would get on a node, in their order; nil if they do not fit.
func (a *Allocator) Allocate(ctx context.Context, node *corev1.Node, claims ...*resourceapi.ResourceClaim) ([]resourceapi.AllocationResult, error) {
	withDefaults := make([]*resourceapi.ResourceClaim, len(claims))
	for i, claim := range claims {
		withDefaults[i] = Defaulted(claim)
	}
	results, err := a.allocator.Allocate(ctx, node, withDefaults)
	if errors.Is(err, structured.ErrFailedAllocationOnNode) {
		return nil, nil
	}
	return results, err
}

// Defaulted is a claim with what the API server sets where the user says nothing.
func Defaulted(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	claim = claim.DeepCopy()
	if claim.UID == "" {
		claim.UID = types.UID(claim.Namespace + "/" + claim.Name)
	}
	set := func(mode *resourceapi.DeviceAllocationMode, count *int64) {
		if *mode == "" {
			*mode = resourceapi.DeviceAllocationModeExactCount
		}
		if *mode == resourceapi.DeviceAllocationModeExactCount && *count == 0 {
			*count = 1
		}
	}
	for i := range claim.Spec.Devices.Requests {
		request := &claim.Spec.Devices.Requests[i]
		if request.Exactly != nil {
			set(&request.Exactly.AllocationMode, &request.Exactly.Count)
		}
		for j := range request.FirstAvailable {
			set(&request.FirstAvailable[j].AllocationMode, &request.FirstAvailable[j].Count)
		}
	}
	return claim
}

// Device is one of a pool, with what decides where it can be used.
type Device struct {
	*resourceapi.Device
	Driver, Pool string
	// Complete is false for a pool of which slices are missing: the scheduler does not use it.
	Complete bool
}

// ID is how claims name the device.
func (d *Device) ID() structured.DeviceID { return structured.MakeDeviceID(d.Driver, d.Pool, d.Name) }

// String is pool and name.
func (d *Device) String() string { return d.Pool + "/" + d.Name }

// Shared is true if several claims can have the device.
func (d *Device) Shared() bool {
	return ptr.Deref(d.AllowMultipleAllocations, false)
}

// Selected evaluates one compiled expression of a selector on the device.
func (d *Device) Selected(ctx context.Context, program cel.CompilationResult) (bool, error) {
	if program.Error != nil {
		return false, program.Error
	}
	selected, _, err := program.DeviceMatches(ctx, cel.Device{Driver: d.Driver, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity})
	return selected, err
}

// pool names one of a driver's.
type pool struct{ driver, name string }

// reach finds the slices that matter to a node without looking at all of them, of which there are as many as nodes and more.
type reach struct {
	complete map[pool]bool
	ofNode   map[string][]*resourceapi.ResourceSlice // of the newest generation of their pool, by the node they name
	others   []*resourceapi.ResourceSlice            // which say otherwise for which nodes they are
}

func newReach(list []*resourceapi.ResourceSlice) *reach {
	newest, count := map[pool]int64{}, map[pool]int64{}
	for _, slice := range list {
		p := pool{slice.Spec.Driver, slice.Spec.Pool.Name}
		switch generation := slice.Spec.Pool.Generation; {
		case generation > newest[p] || count[p] == 0:
			newest[p], count[p] = generation, 1
		case generation == newest[p]:
			count[p]++
		}
	}
	r := &reach{complete: map[pool]bool{}, ofNode: map[string][]*resourceapi.ResourceSlice{}}
	for _, slice := range list {
		p := pool{slice.Spec.Driver, slice.Spec.Pool.Name}
		if slice.Spec.Pool.Generation != newest[p] {
			continue
		}
		r.complete[p] = count[p] == slice.Spec.Pool.ResourceSliceCount
		if name := slice.Spec.NodeName; name != nil {
			r.ofNode[*name] = append(r.ofNode[*name], slice)
		} else {
			r.others = append(r.others, slice)
		}
	}
	return r
}

// Devices are those of the newest generation of each pool that can be used on a node.
func (s *Snapshot) Devices(node *corev1.Node) ([]*Device, error) {
	if s.reach == nil {
		s.reach = newReach(s.Slices)
	}
	var devices []*Device
	for _, slice := range slices.Concat(s.reach.ofNode[node.Name], s.reach.others) {
		p := pool{slice.Spec.Driver, slice.Spec.Pool.Name}
		perDevice := ptr.Deref(slice.Spec.PerDeviceNodeSelection, false)
		here := perDevice
		if !perDevice {
			var err error
			if here, err = matches(node, slice.Spec.NodeName, slice.Spec.AllNodes, slice.Spec.NodeSelector); err != nil {
				return nil, fmt.Errorf("ResourceSlice %s: %w", slice.Name, err)
			}
		}
		if !here {
			continue
		}
		for i := range slice.Spec.Devices {
			device := &slice.Spec.Devices[i]
			if perDevice {
				here, err := matches(node, device.NodeName, device.AllNodes, device.NodeSelector)
				if err != nil {
					return nil, fmt.Errorf("device %s of ResourceSlice %s: %w", device.Name, slice.Name, err)
				}
				if !here {
					continue
				}
			}
			devices = append(devices, &Device{Device: device, Driver: p.driver, Pool: p.name, Complete: s.reach.complete[p]})
		}
	}
	return devices, nil
}

func matches(node *corev1.Node, name *string, all *bool, selector *corev1.NodeSelector) (bool, error) {
	return structured.NodeMatches(Features(), node, ptr.Deref(name, ""), ptr.Deref(all, false), selector)
}

// Counter is one of a counter set: what there is and what is left, and the claims that hold the rest.
type Counter struct {
	Total, Free int64
	Holders     []string // NAMESPACE/NAME of claims
}

// Amount prints a counter as a quantity, with binary units where it has them.
func Amount(n int64) string { return resource.NewQuantity(n, resource.BinarySI).String() }

// Counters of one pool by set and name. Free may be negative where a driver has shrunk a set in use.
func (s *Snapshot) Counters(driver, pool string) map[string]map[string]*Counter {
	counters := map[string]map[string]*Counter{}
	devices := map[string]*resourceapi.Device{}
	for _, slice := range s.Slices {
		if slice.Spec.Driver != driver || slice.Spec.Pool.Name != pool {
			continue
		}
		for _, set := range slice.Spec.SharedCounters {
			counters[set.Name] = map[string]*Counter{}
			for name, counter := range set.Counters {
				counters[set.Name][name] = &Counter{Total: counter.Value.Value(), Free: counter.Value.Value()}
			}
		}
		for i := range slice.Spec.Devices {
			devices[slice.Spec.Devices[i].Name] = &slice.Spec.Devices[i]
		}
	}
	counted := sets.New[string]() // a shared device consumes once
	for _, claim := range s.Claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			device := devices[result.Device]
			if result.Driver != driver || result.Pool != pool || device == nil {
				continue
			}
			first := !counted.Has(result.Device)
			counted.Insert(result.Device)
			for _, consumption := range device.ConsumesCounters {
				for name, value := range consumption.Counters {
					counter := counters[consumption.CounterSet][name]
					if counter == nil || value.Value.IsZero() {
						continue
					}
					if first {
						counter.Free -= value.Value.Value()
					}
					counter.Holders = append(counter.Holders, nameOf(claim))
				}
			}
		}
	}
	return counters
}

// Holders are the claims that have each device.
func (s *Snapshot) Holders() map[structured.DeviceID][]string {
	holders := map[structured.DeviceID][]string{}
	for _, claim := range s.Claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			if ptr.Deref(result.AdminAccess, false) {
				continue
			}
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			holders[id] = append(holders[id], nameOf(claim))
		}
	}
	return holders
}

// nameOf a claim for people: NAMESPACE/NAME, or the name alone where a file says no namespace.
func nameOf(claim *resourceapi.ResourceClaim) string {
	return strings.TrimPrefix(claim.Namespace+"/"+claim.Name, "/")
}
