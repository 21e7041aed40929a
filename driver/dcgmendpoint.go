package driver

import (
	"context"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/dcgm"
	"github.com/simgpu/simgpu/driver/podresources"
)

// startDCGM serves the metrics of the node's GPUs: of none while another process has them.
func (d *Driver) startDCGM(ctx context.Context, fatal func(error)) (*httpServer, error) {
	config := dcgm.Config{
		NodeName: d.opts.NodeName,
		Snapshot: func() deviceapi.Snapshot {
			if s := d.session.Load(); s != nil {
				return s.sockets.Snapshot()
			}
			return deviceapi.Snapshot{}
		},
		UUID: func(name string) string {
			if s := d.session.Load(); s != nil {
				if device := s.claims.currentStock().device(name); device != nil {
					return device.UUID
				}
			}
			return ""
		},
	}
	if d.opts.PodResourcesSocket != "" {
		config.Uses = (&podUses{socket: d.opts.PodResourcesSocket, driverName: d.opts.DriverName, logger: klog.FromContext(ctx), failed: d.metrics.attributionErrors}).list
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(dcgm.New(config))
	server, err := serveHTTP("DCGM endpoint", d.opts.DCGMEndpoint, metricsPage(registry), fatal)
	if err != nil {
		return nil, err
	}
	addr := server.addr()
	d.dcgmAddr.Store(&addr)
	return server, nil
}

// DCGMAddr is the address that the metrics of the GPUs are served on, "" before that and without it.
func (d *Driver) DCGMAddr() string {
	if addr := d.dcgmAddr.Load(); addr != nil {
		return *addr
	}
	return ""
}

// podUses asks the kubelet which pods use the driver's devices. It tells of a failure once.
type podUses struct {
	socket, driverName string
	logger             klog.Logger
	failed             prometheus.Counter

	mu   sync.Mutex
	last string
}

func (u *podUses) list(ctx context.Context) ([]podresources.Use, error) {
	uses, err := podresources.List(ctx, u.socket, u.driverName)
	u.mu.Lock()
	defer u.mu.Unlock()
	if err == nil {
		u.last = ""
		return uses, nil
	}
	u.failed.Inc()
	if u.last != err.Error() {
		u.last = err.Error()
		u.logger.Info("Metrics of GPUs do not name the pods that use them", "socket", u.socket, "err", err)
	}
	return nil, err
}
