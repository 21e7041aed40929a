package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

var healthWatches atomic.Int32

// WatchHealthStatus implements [kubeletplugin.DRAPlugin]. A device is broken while there is a file that says so.
func (d *driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	watches := healthWatches.Add(1)
	defer healthWatches.Add(-1)
	switch {
	case d.fault == "health-fails":
		return errors.New("cannot watch")
	case d.fault == "health-for-one" && watches > 1, d.fault == "health-late":
		<-ctx.Done()
		return nil
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case reports <- d.health():
		}
		pause := 500 * time.Millisecond
		if d.fault == "health-once" {
			pause = time.Hour
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

func (d *driver) health() kubeletplugin.DeviceHealthReport {
	var report kubeletplugin.DeviceHealthReport
	add := func(pool, name string) {
		health := kubeletplugin.HealthStatusHealthy
		if _, err := os.Stat(filepath.Join(d.dir, "broken-"+name)); err == nil && d.fault != "health-does-not-change" {
			health = kubeletplugin.HealthStatusUnhealthy
		}
		report.Devices = append(report.Devices, kubeletplugin.DeviceHealth{
			PoolName: pool, DeviceName: name, Health: health, LastUpdated: time.Now(), HealthCheckTimeout: 3 * time.Second,
		})
	}
	for _, name := range deviceNames() {
		add(d.node, name)
	}
	if d.fault == "health-of-strangers" {
		add(d.node, "stranger")
	}
	return report
}
