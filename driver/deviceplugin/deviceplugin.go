// Package deviceplugin serves devices as an extended resource through the kubelet's device plugin API (v1beta1), the way GPUs
// were given out before DRA. It owns one socket in the kubelet's folder of device plugins, and registers anew whenever a kubelet
// starts. Which devices there are and what a container gets of them is somebody else's to say.
package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// again is how soon a registration that failed is tried again.
const again = time.Second

// Device that can be given out.
type Device struct {
	ID      string
	Healthy bool
	// Taken is a device that cannot be given out although it counts, so that the kubelet is to take others.
	Taken bool
}

// Plugin of one extended resource.
type Plugin struct {
	// Resource is its name, as nvidia.com/gpu.
	Resource string
	// Dir is the kubelet's folder of device plugins, in which it listens at kubelet.sock.
	Dir string
	// Devices returns all devices.
	Devices func() []Device
	// Allocate makes devices usable by a container and returns their CDI names.
	Allocate func(ctx context.Context, ids []string) (cdi []string, err error)

	mu      sync.Mutex
	changed chan struct{} // closed by Changed
}

// Changed says that Devices returns something else now.
func (p *Plugin) Changed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed != nil {
		close(p.changed)
	}
	p.changed = make(chan struct{})
}

func (p *Plugin) change() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

// Run serves the resource until the context ends. A kubelet that starts removes all sockets from its folder, and knows no
// plugin: each time there is a new socket and another registration.
func (p *Plugin) Run(ctx context.Context) {
	logger := klog.FromContext(ctx)
	for ctx.Err() == nil {
		err := p.serve(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			logger.Error(err, "Not registered as a device plugin, trying again", "resource", p.Resource)
		}
		select {
		case <-ctx.Done():
		case <-time.After(again):
		}
	}
}

// Socket is the name of the plugin's socket in the kubelet's folder.
func (p *Plugin) socket() string {
	return "simgpu-" + strings.ReplaceAll(p.Resource, "/", "_") + ".sock"
}

// serve until the context ends, which is an error, or the kubelet has removed the socket or made its own anew.
func (p *Plugin) serve(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch the kubelet's folder of device plugins: %w", err)
	}
	defer watcher.Close()
	if err := watcher.Add(p.Dir); err != nil {
		return fmt.Errorf("watch the kubelet's folder of device plugins: %w", err)
	}
	path := filepath.Join(p.Dir, p.socket())
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, &service{plugin: p, ended: ctx.Done()})
	served := make(chan error, 1)
	go func() {
		defer close(served)
		served <- server.Serve(listener)
	}()
	defer func() {
		server.Stop()
		for range served { // until it has ended
		}
	}()

	if err := p.register(ctx); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Registered as a device plugin", "resource", p.Resource, "devices", len(p.Devices()))
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-served:
			return fmt.Errorf("serve %s: %w", path, err)
		case event := <-watcher.Events:
			name := filepath.Base(event.Name)
			if name == p.socket() && event.Has(fsnotify.Remove) || name == "kubelet.sock" && event.Has(fsnotify.Create) {
				return nil
			}
		case err := <-watcher.Errors:
			return fmt.Errorf("watch the kubelet's folder of device plugins: %w", err)
		}
	}
}

func (p *Plugin) register(ctx context.Context) error {
	conn, err := grpc.NewClient("unix://"+filepath.Join(p.Dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = api.NewRegistrationClient(conn).Register(ctx, &api.RegisterRequest{Version: api.Version, Endpoint: p.socket(), ResourceName: p.Resource})
	if err != nil {
		return fmt.Errorf("register %s with the kubelet: %w", p.Resource, err)
	}
	return nil
}

// service answers the kubelet.
type service struct {
	api.UnimplementedDevicePluginServer
	plugin *Plugin
	ended  <-chan struct{}
}

func (s *service) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// GetPreferredAllocation prefers those that are not taken.
func (s *service) GetPreferredAllocation(_ context.Context, request *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	answer := &api.PreferredAllocationResponse{}
	devices := s.plugin.Devices()
	for _, container := range request.ContainerRequests {
		ids := slices.Clone(container.MustIncludeDeviceIDs)
		for _, device := range devices {
			if len(ids) < int(container.AllocationSize) && !device.Taken && slices.Contains(container.AvailableDeviceIDs, device.ID) && !slices.Contains(ids, device.ID) {
				ids = append(ids, device.ID)
			}
		}
		answer.ContainerResponses = append(answer.ContainerResponses, &api.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return answer, nil
}

// ListAndWatch sends the devices now and after every change.
func (s *service) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	var sent []Device
	for first := true; ; first = false {
		change := s.plugin.change()
		devices := s.plugin.Devices()
		if first || !slices.Equal(devices, sent) {
			answer := &api.ListAndWatchResponse{}
			for _, device := range devices {
				health := api.Unhealthy
				if device.Healthy {
					health = api.Healthy
				}
				answer.Devices = append(answer.Devices, &api.Device{ID: device.ID, Health: health})
			}
			if err := stream.Send(answer); err != nil {
				return err
			}
			sent = devices
		}
		select {
		case <-change:
		case <-stream.Context().Done():
			return nil
		case <-s.ended:
			return nil
		}
	}
}

// Allocate answers for each container with the CDI names of its devices.
func (s *service) Allocate(ctx context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	answer := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		names, err := s.plugin.Allocate(ctx, container.DevicesIds)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Devices not given out", "resource", s.plugin.Resource, "devices", container.DevicesIds)
			return nil, status.Error(codes.FailedPrecondition, err.Error())
		}
		response := &api.ContainerAllocateResponse{}
		for _, name := range names {
			response.CdiDevices = append(response.CdiDevices, &api.CDIDevice{Name: name})
		}
		answer.ContainerResponses = append(answer.ContainerResponses, response)
	}
	return answer, nil
}
