package driver

import (
	"context"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

const (
	// healthLease is how long the kubelet believes a report: its own default.
	healthLease = 30 * time.Second
	// healthRenewal is how often a report is repeated to renew the lease.
	healthRenewal = 10 * time.Second
)

// WatchHealthStatus does what [kubeletplugin.DRAPlugin] says: it reports all devices, at once and whenever the
// health of one changes, and renews the lease of what it has reported.
func (p *plugin) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	renew := time.NewTicker(healthRenewal)
	defer renew.Stop()
	for {
		changes := p.faults.changes()
		select {
		case reports <- p.faults.report():
		case <-ctx.Done():
			return nil
		}
		select {
		case <-changes:
		case <-renew.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// report is the health of all devices of the node, in the order of the stock.
func (n *nodeFaults) report() kubeletplugin.DeviceHealthReport {
	var report kubeletplugin.DeviceHealthReport
	s := n.claims.currentStock()
	broken := n.conditions(s).devices
	now := time.Now()
	for _, gpu := range s.gpus {
		for _, device := range gpu.Devices {
			health := kubeletplugin.DeviceHealth{
				PoolName: n.nodeName, DeviceName: device.Name, Health: kubeletplugin.HealthStatusHealthy,
				LastUpdated: now, HealthCheckTimeout: healthLease, Message: broken[device.Name].message,
			}
			if broken[device.Name].unhealthy {
				health.Health = kubeletplugin.HealthStatusUnhealthy
			}
			report.Devices = append(report.Devices, health)
		}
	}
	return report
}
