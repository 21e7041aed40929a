// Package kubelet is the part of the kubelet that deals with DRA drivers: its plugin manager, which finds and registers
// drivers, and its DRA manager, which calls them and keeps the checkpoint of prepared claims. Both are the real code. What
// is missing is what leads to the calls: pods are prepared and unprepared when the caller says so.
package kubelet

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/plugin"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager/cache"
)

// Config says where a kubelet works.
type Config struct {
	// NodeName is the name of the Node object, which must exist.
	NodeName string
	// Client is the kubelet's own.
	Client kubernetes.Interface
	// RegistryDir is where drivers put the sockets by which they register.
	RegistryDir string
	// StateDir is where the kubelet keeps its checkpoints. A kubelet that is started again in the same folder goes on where
	// the last one ended.
	StateDir string
}

// Kubelet is a running kubelet.
type Kubelet struct {
	config Config
	dra    *dra.Manager
	// plugins is the part of the DRA manager that knows the registered drivers.
	plugins    *plugin.DRAPluginManager
	registered registered
	cancel     context.CancelFunc
	done       sync.WaitGroup

	mu   sync.Mutex
	pods []*corev1.Pod
}

// Start starts a kubelet that already has the pods. As every kubelet that starts, it removes the ResourceSlices of its node.
func Start(ctx context.Context, config Config, pods ...*corev1.Pod) (*Kubelet, error) {
	if err := os.MkdirAll(config.RegistryDir, 0o755); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(config.StateDir, 0o755); err != nil {
		return nil, err
	}
	manager, err := dra.NewManager(klog.FromContext(ctx), config.Client, config.StateDir)
	if err != nil {
		return nil, fmt.Errorf("DRA manager of the kubelet: %w", err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	k := &Kubelet{config: config, dra: manager, cancel: cancel, pods: pods}
	getNode := func(ctx context.Context) (*corev1.Node, error) {
		return config.Client.CoreV1().Nodes().Get(ctx, config.NodeName, metav1.GetOptions{})
	}
	if err := manager.Start(ctx, k.activePods, getNode, ready{}); err != nil {
		cancel()
		return nil, fmt.Errorf("DRA manager of the kubelet: %w", err)
	}
	k.registered.PluginHandler, k.registered.endpoints = manager.GetWatcherHandler(), map[string][]string{}
	k.plugins = k.registered.PluginHandler.(*plugin.DRAPluginManager)
	plugins := pluginmanager.NewPluginManager(config.RegistryDir, &record.FakeRecorder{})
	plugins.AddHandler(registerapi.DRAPlugin, &k.registered)
	k.done.Go(func() { plugins.Run(ctx, ready{}, ctx.Done()) })
	k.done.Go(func() { drain(ctx, manager) })
	return k, nil
}

// drain takes the news about changed health: nobody else does, and the channel is of a fixed size.
func drain(ctx context.Context, manager *dra.Manager) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-manager.Updates():
		}
	}
}

// Stop ends the kubelet. What it keeps on disk stays.
func (k *Kubelet) Stop() {
	k.cancel()
	k.dra.Stop()
	k.done.Wait()
}

// Reach is nil if a driver of that name is registered and answers a call for no claims.
func (k *Kubelet) Reach(ctx context.Context, driverName string) error {
	driver, err := k.plugins.GetPlugin(driverName)
	if err != nil {
		return err
	}
	if _, err := driver.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{}); err != nil {
		return fmt.Errorf("DRA driver %s is registered but does not answer: %w", driverName, err)
	}
	return nil
}

// Registered is true while a driver of that name is registered, whether it answers or not.
func (k *Kubelet) Registered(driverName string) bool {
	_, err := k.plugins.GetPlugin(driverName)
	return err == nil
}

// Endpoints are those of the instances of a driver that are registered.
func (k *Kubelet) Endpoints(driverName string) []string { return k.registered.of(driverName) }

// Prepare does what the kubelet does before it starts the containers of a pod.
func (k *Kubelet) Prepare(ctx context.Context, pod *corev1.Pod) error {
	k.mu.Lock()
	if !slices.ContainsFunc(k.pods, func(p *corev1.Pod) bool { return p.UID == pod.UID }) {
		k.pods = append(k.pods, pod)
	}
	k.mu.Unlock()
	return k.dra.PrepareResources(ctx, pod)
}

// Unprepare does what the kubelet does once the containers of a pod have ended.
func (k *Kubelet) Unprepare(ctx context.Context, pod *corev1.Pod) error {
	if err := k.dra.UnprepareResources(ctx, pod); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = slices.DeleteFunc(k.pods, func(p *corev1.Pod) bool { return p.UID == pod.UID })
	return nil
}

// CDIDevices are the ids that the kubelet gives the container runtime for a container of a prepared pod.
func (k *Kubelet) CDIDevices(pod *corev1.Pod, container *corev1.Container) ([]string, error) {
	info, err := k.dra.GetResources(pod, container)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, device := range info.CDIDevices {
		ids = append(ids, device.Name)
	}
	return ids, nil
}

// Health is what the kubelet would write about the devices into the status of a prepared pod.
func (k *Kubelet) Health(ctx context.Context, pod *corev1.Pod) []corev1.ResourceHealth {
	status := &corev1.PodStatus{}
	for _, container := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, corev1.ContainerStatus{Name: container.Name})
	}
	k.dra.UpdateAllocatedResourcesStatus(klog.FromContext(ctx), pod, status)
	var all []corev1.ResourceHealth
	for _, container := range status.ContainerStatuses {
		for _, resource := range container.AllocatedResourcesStatus {
			all = append(all, resource.Resources...)
		}
	}
	return all
}

// Checkpoint is the file with the prepared claims.
func (k *Kubelet) Checkpoint() string { return filepath.Join(k.config.StateDir, "dra_manager_state") }

func (k *Kubelet) activePods() []*corev1.Pod {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.pods)
}

// ready is a kubelet that has heard of all its pods.
type ready struct{}

var _ config.SourcesReady = ready{}

func (ready) AddSource(string) {}
func (ready) AllReady() bool   { return true }

// registered remembers what is registered with a handler, which does not tell.
type registered struct {
	cache.PluginHandler

	mu        sync.Mutex
	endpoints map[string][]string // by driver
}

// RegisterPlugin implements [cache.PluginHandler].
func (r *registered) RegisterPlugin(ctx context.Context, name, endpoint string, versions []string, timeout *time.Duration) error {
	if err := r.PluginHandler.RegisterPlugin(ctx, name, endpoint, versions, timeout); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endpoints[name] = append(r.endpoints[name], endpoint)
	return nil
}

// DeRegisterPlugin implements [cache.PluginHandler].
func (r *registered) DeRegisterPlugin(ctx context.Context, name, endpoint string) {
	r.PluginHandler.DeRegisterPlugin(ctx, name, endpoint)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endpoints[name] = slices.DeleteFunc(r.endpoints[name], func(e string) bool { return e == endpoint })
}

func (r *registered) of(name string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.endpoints[name])
}
