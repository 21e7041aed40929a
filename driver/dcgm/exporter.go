package dcgm

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/driver/podresources"
)

// askWithin is how long the kubelet may take; a scrape without pods is better than none.
const askWithin = 2 * time.Second

// Config says of which node an exporter tells.
type Config struct {
	// NodeName is the value of the label hostname.
	NodeName string
	// Snapshot is the view of the node.
	Snapshot func() deviceapi.Snapshot
	// Uses tells which containers use which devices; nil leaves all rows without a container. Its error
	// leaves those of one scrape without one.
	Uses func(context.Context) ([]podresources.Use, error)
	// UUID returns the UUID of a device of the node's pool, "" for one that it does not have.
	UUID func(device string) string
}

// Exporter is a [prometheus.Collector] whose metrics have labels that depend on the row. Register it in
// a registry of its own, which its names are for.
type Exporter struct {
	config Config
	fields []field
}

// New returns an exporter.
func New(config Config) *Exporter { return &Exporter{config: config, fields: fields()} }

// Describe implements [prometheus.Collector]: it describes nothing, since labels are not known before.
func (e *Exporter) Describe(chan<- *prometheus.Desc) {}

// Collect implements [prometheus.Collector].
func (e *Exporter) Collect(metrics chan<- prometheus.Metric) {
	users := e.users()
	for _, r := range rows(e.config.Snapshot()) {
		labels := e.labels(r)
		if len(users[r.uuid()]) == 0 {
			e.send(metrics, r, labels)
		}
		for _, use := range users[r.uuid()] {
			labels := maps.Clone(labels)
			maps.Copy(labels, useLabels(use, r.partition))
			e.send(metrics, r, labels)
		}
	}
}

// rows are the GPUs, and in place of a GPU its partitions in use.
func rows(snapshot deviceapi.Snapshot) []row {
	var all []row
	for i, gpu := range snapshot.GPUs {
		if len(gpu.Partitions) == 0 {
			all = append(all, row{gpu: gpu, index: i})
		}
		for _, partition := range gpu.Partitions {
			all = append(all, row{gpu: gpu, index: i, partition: &partition})
		}
	}
	return all
}

func (r row) uuid() string {
	if r.partition != nil {
		return r.partition.UUID
	}
	return r.gpu.UUID
}

// users are the containers by the UUID of the device they use.
func (e *Exporter) users() map[string][]podresources.Use {
	if e.config.Uses == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), askWithin)
	defer cancel()
	uses, err := e.config.Uses(ctx)
	if err != nil {
		return nil // who asks has been told by Uses
	}
	users := map[string][]podresources.Use{}
	for _, use := range uses {
		if use.Pool != e.config.NodeName {
			continue
		}
		if uuid := e.config.UUID(use.Device); uuid != "" {
			users[uuid] = append(users[uuid], use)
		}
	}
	return users
}

func (e *Exporter) labels(r row) prometheus.Labels {
	labels := prometheus.Labels{
		"gpu":                    strconv.Itoa(r.index),
		"UUID":                   r.gpu.UUID,
		"pci_bus_id":             deviceapi.BusID(r.gpu.PCIBusID),
		"device":                 "nvidia" + strconv.Itoa(r.gpu.Minor),
		"modelName":              r.gpu.ProductName,
		"hostname":               e.config.NodeName,
		"DCGM_FI_DRIVER_VERSION": r.gpu.DriverVersion,
	}
	if r.partition != nil {
		labels["GPU_I_PROFILE"] = r.partition.Profile
		labels["GPU_I_ID"] = strconv.Itoa(r.partition.GPUInstanceID)
	}
	return labels
}

func useLabels(use podresources.Use, partition *deviceapi.PartitionStatus) prometheus.Labels {
	labels := prometheus.Labels{
		"container":           use.Container,
		"namespace":           use.Namespace,
		"pod":                 use.Pod,
		"dra_claim_name":      use.ClaimName,
		"dra_claim_namespace": use.ClaimNamespace,
		"dra_driver_name":     use.Driver,
		"dra_pool_name":       use.Pool,
		"dra_device_name":     use.Device,
	}
	if partition != nil {
		labels["dra_mig_profile"] = partition.Profile
		labels["dra_mig_device_uuid"] = partition.UUID
	}
	return labels
}

func (e *Exporter) send(metrics chan<- prometheus.Metric, r row, labels prometheus.Labels) {
	names := slices.Sorted(maps.Keys(labels))
	values := make([]string, len(names))
	for i, name := range names {
		values[i] = labels[name]
	}
	for _, f := range e.fields {
		value, known := f.value(r)
		if !known || r.gpu.Health.Lost && f.name != xidErrors {
			continue
		}
		metric, err := prometheus.NewConstMetric(prometheus.NewDesc(f.name, f.help, names, nil), f.kind, value, values...)
		if err != nil {
			metric = prometheus.NewInvalidMetric(prometheus.NewInvalidDesc(err), err)
		}
		metrics <- metric
	}
}
