// Package canary compares pods that get their devices in different ways, DRA and device plugins, by the figures that decide
// whether a change goes on or is rolled back: how long pods take to be scheduled, how many wait or have failed, and what is left
// for the next ones on each node. It works for any driver and any extended resource.
package canary

import (
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/simgpu/simgpu/placement"
	"github.com/simgpu/simgpu/placement/shadow"
)

// Path is the way in which a pod gets its devices.
type Path string

const (
	// DRA: by claims, the pod's own or those that the scheduler makes for extended resources.
	DRA Path = "DRA"
	// DevicePlugin: an extended resource that a node has by a device plugin.
	DevicePlugin Path = "device plugin"
	// Undecided: an extended resource, and no node yet.
	Undecided Path = "undecided"
)

// Report of a comparison.
type Report struct {
	Paths []Figures `json:"paths"`
	Nodes []Node    `json:"nodes"`
}

// Figures of the pods of one path.
type Figures struct {
	Path Path `json:"path"`
	Pods int  `json:"pods"`
	// Ready of them are ready, Pending have no node, Failed have ended with an error, refused by the kubelet included.
	Ready   int `json:"ready"`
	Pending int `json:"pending"`
	Failed  int `json:"failed"`
	// Restarts of all containers.
	Restarts int32 `json:"restarts"`
	// Scheduled is the median time from a pod's creation until it had a node, Longest that of the slowest. The API keeps whole
	// seconds.
	Scheduled time.Duration `json:"scheduledNanoseconds"`
	Longest   time.Duration `json:"longestNanoseconds"`
}

// Node is what a node has left, on both paths.
type Node struct {
	Name string `json:"name"`
	// Devices are those in slices, and how many of them could be allocated one by one.
	Devices     int `json:"devices"`
	DevicesFree int `json:"devicesFree"`
	// Largest device that could be allocated still, by counter set: smaller than the whole where the free part of a set is in
	// pieces.
	Largest map[string]string `json:"largest,omitempty"`
	// Plugin is what device plugins offer of the resource, PluginFree what of it no pod has.
	Plugin     int64 `json:"plugin"`
	PluginFree int64 `json:"pluginFree"`
}

// Compare those pods of a snapshot that chosen takes and that ask for devices. The resource is the extended resource in question.
func Compare(s *placement.Snapshot, resource corev1.ResourceName, chosen func(*corev1.Pod) bool) Report {
	byPath := map[Path]*Figures{}
	times := map[Path][]time.Duration{}
	requested := map[string]int64{}
	for _, pod := range s.Pods {
		path, asks := pathOf(pod, resource)
		over := pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded
		if pod.Spec.NodeName != "" && !over { // as the scheduler counts: a claim for the resource makes no difference
			requested[pod.Spec.NodeName] += amount(pod, resource)
		}
		if !asks || !chosen(pod) {
			continue
		}
		f := byPath[path]
		if f == nil {
			f = &Figures{Path: path}
			byPath[path] = f
		}
		f.count(pod)
		if at := scheduledAt(pod); at != nil {
			times[path] = append(times[path], at.Sub(pod.CreationTimestamp.Time))
		}
	}
	report := Report{Paths: []Figures{}, Nodes: []Node{}}
	for _, path := range slices.Sorted(maps.Keys(byPath)) {
		f := byPath[path]
		if list := times[path]; len(list) > 0 {
			slices.Sort(list)
			f.Scheduled, f.Longest = list[len(list)/2], list[len(list)-1]
		}
		report.Paths = append(report.Paths, *f)
	}
	pools := shadow.Capacity(s)
	for _, node := range s.Nodes {
		n := Node{Name: node.Name}
		for _, pool := range pools {
			if pool.Pool != node.Name { // pools of a node have its name by convention, those of the network no node
				continue
			}
			n.Devices += pool.Devices
			n.DevicesFree += pool.DevicesFree
			for _, set := range pool.Sets {
				if set.Largest != "" {
					if n.Largest == nil {
						n.Largest = map[string]string{}
					}
					n.Largest[set.Name] = set.Largest
				}
			}
		}
		if quantity, found := node.Status.Allocatable[resource]; found {
			n.Plugin = quantity.Value()
			n.PluginFree = max(0, n.Plugin-requested[node.Name])
		}
		report.Nodes = append(report.Nodes, n)
	}
	return report
}

func (f *Figures) count(pod *corev1.Pod) {
	f.Pods++
	switch {
	case pod.Status.Phase == corev1.PodFailed:
		f.Failed++
	case pod.Spec.NodeName == "":
		f.Pending++
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue {
			f.Ready++
		}
	}
	for _, container := range pod.Status.ContainerStatuses {
		f.Restarts += container.RestartCount
	}
}

// pathOf a pod; asks is false for one that wants no devices.
func pathOf(pod *corev1.Pod, resource corev1.ResourceName) (path Path, asks bool) {
	switch {
	case len(pod.Spec.ResourceClaims) > 0 || pod.Status.ExtendedResourceClaimStatus != nil:
		return DRA, true
	case amount(pod, resource) == 0:
		return "", false
	case pod.Spec.NodeName != "":
		return DevicePlugin, true
	default:
		return Undecided, true
	}
}

// amount of a resource that the containers of a pod ask for.
func amount(pod *corev1.Pod, resource corev1.ResourceName) int64 {
	var sum int64
	for i := range pod.Spec.Containers {
		quantity := pod.Spec.Containers[i].Resources.Requests[resource]
		sum += quantity.Value()
	}
	return sum
}

func scheduledAt(pod *corev1.Pod) *time.Time {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionTrue {
			return &condition.LastTransitionTime.Time
		}
	}
	return nil
}
