package driver

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/simgpu/simgpu/driver/faults"
)

// Operations on claims, as label values.
const (
	opPrepare   = "prepare"
	opUnprepare = "unprepare"
)

// Kinds of what belongs to no claim, as label values.
const (
	orphanClaim    = "claim" // prepared, and gone from the API
	orphanSpec     = "cdi_spec"
	orphanSocket   = "device_socket"
	orphanMetadata = "device_metadata"
)

// Outcomes of a conflict, as label values.
const (
	conflictRefused  = "refused"
	conflictResolved = "resolved" // who had the device was gone from the API
)

// features whose fields an API server may drop from ResourceSlices, as label values; others count as one.
const featureOther = "other"

var knownFeatures = []string{featurePartitions, featureTaints, featureShares, featureOther}

// metrics are what the driver exports. All series exist from the start, and none comes later.
type metrics struct {
	registry *prometheus.Registry

	duration             *prometheus.HistogramVec
	errors               *prometheus.CounterVec
	conflicts            *prometheus.CounterVec
	orphansRemoved       *prometheus.CounterVec
	publishedSlices      prometheus.Gauge
	publishedDevices     prometheus.Gauge
	publishErrors        prometheus.Counter
	sliceReorders        prometheus.Counter
	droppedFields        *prometheus.CounterVec
	missingFeatures      *prometheus.GaugeVec
	inventoryValid       prometheus.Gauge
	unreadableCheckpoint prometheus.Counter
	unsettledCheckpoints prometheus.Gauge
	attributionErrors    prometheus.Counter
	deviceStatusErrors   prometheus.Counter
	faults               *prometheus.GaugeVec
}

// newMetrics makes the metrics; prepared returns how many claims are prepared, with how many devices.
func newMetrics(prepared func() (claims, devices int)) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "simgpu_claim_operation_duration_seconds",
			Help:    "Time to prepare or unprepare one claim, without the call to the API server that precedes a prepare.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 45},
		}, []string{"operation"}),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "simgpu_claim_operation_errors_total",
			Help: "Prepares and unprepares of one claim that failed.",
		}, []string{"operation", "reason"}),
		conflicts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "simgpu_claim_conflicts_total",
			Help: "Claims whose devices another claim had. Resolved means that the other one had gone from the API.",
		}, []string{"outcome"}),
		orphansRemoved: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "simgpu_orphans_removed_total",
			Help: "What belonged to no claim in the API any more and was removed.",
		}, []string{"kind"}),
		publishedSlices: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "simgpu_published_slices",
			Help: "ResourceSlices of this node last seen in the API.",
		}),
		publishedDevices: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "simgpu_published_devices",
			Help: "Devices of this node last seen in ResourceSlices in the API.",
		}),
		publishErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "simgpu_publish_errors_total",
			Help: "Attempts to publish ResourceSlices that failed, or were not stored as sent.",
		}),
		sliceReorders: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "simgpu_slice_reorders_total",
			Help: "ResourceSlices written only to list their devices in another order.",
		}),
		droppedFields: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "simgpu_dropped_fields_total",
			Help: "ResourceSlices that the API server stored without fields of a feature that is off.",
		}, []string{"feature"}),
		missingFeatures: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "simgpu_api_feature_missing",
			Help: "1 while the API server drops fields of this feature from ResourceSlices, so that the node publishes less.",
		}, []string{"feature"}),
		inventoryValid: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "simgpu_inventory_valid",
			Help: "1 while the inventory as it is now is the one in force, 0 while it has a fault.",
		}),
		unreadableCheckpoint: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "simgpu_checkpoint_unreadable_total",
			Help: "Checkpoints that could not be read at the start of the driver.",
		}),
		unsettledCheckpoints: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "simgpu_checkpoint_unsettled",
			Help: "Claims whose checkpoint could not be read and has not been rebuilt yet; their devices are not given out.",
		}),
		attributionErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "simgpu_pod_attribution_errors_total",
			Help: "Scrapes of the GPUs' metrics in which the kubelet did not tell which pods use them.",
		}),
		deviceStatusErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "simgpu_device_status_errors_total",
			Help: "Claims whose status could not be written after several attempts. The claims are prepared all the same.",
		}),
		faults: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "simgpu_faults",
			Help: "Faults on the node, by type and device; the device is empty for all devices of the node.",
		}, []string{"type", "device"}),
	}
	m.registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collectors.NewBuildInfoCollector(),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "simgpu_claims_prepared",
			Help: "Claims that are prepared on this node.",
		}, func() float64 { claims, _ := prepared(); return float64(claims) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "simgpu_devices_prepared",
			Help: "Devices that prepared claims have, each counted once.",
		}, func() float64 { _, devices := prepared(); return float64(devices) }),
		m.duration, m.errors, m.conflicts, m.orphansRemoved,
		m.publishedSlices, m.publishedDevices, m.publishErrors, m.sliceReorders, m.droppedFields, m.missingFeatures,
		m.inventoryValid, m.unreadableCheckpoint, m.unsettledCheckpoints, m.attributionErrors, m.deviceStatusErrors,
		m.faults,
	)
	m.setFaults(nil)
	for _, operation := range []string{opPrepare, opUnprepare} {
		m.duration.WithLabelValues(operation)
		for _, reason := range failureReasons {
			m.errors.WithLabelValues(operation, string(reason))
		}
	}
	for _, outcome := range []string{conflictRefused, conflictResolved} {
		m.conflicts.WithLabelValues(outcome)
	}
	for _, kind := range []string{orphanClaim, orphanSpec, orphanSocket, orphanMetadata} {
		m.orphansRemoved.WithLabelValues(kind)
	}
	for _, feature := range apiFeatures {
		m.featureMissing(feature.gate, false)
	}
	for _, feature := range knownFeatures {
		m.droppedFields.WithLabelValues(feature)
	}
	return m
}

// setFaults replaces the faults on the node.
func (m *metrics) setFaults(list []faults.Fault) {
	m.faults.Reset()
	for _, t := range faults.Types() {
		m.faults.WithLabelValues(string(t), "")
	}
	for _, f := range list {
		m.faults.WithLabelValues(string(f.Type), f.Device).Inc()
	}
}

// idle says that another process works on the node now.
func (m *metrics) idle() {
	for _, state := range []prometheus.Gauge{m.publishedSlices, m.publishedDevices, m.inventoryValid, m.unsettledCheckpoints} {
		state.Set(0)
	}
	for _, feature := range apiFeatures {
		m.missingFeatures.WithLabelValues(feature.gate).Set(0)
	}
	m.setFaults(nil)
}

// operation counts one that was done or failed.
func (m *metrics) operation(operation string, start time.Time, err error) {
	m.duration.WithLabelValues(operation).Observe(time.Since(start).Seconds())
	if err != nil {
		m.refused(operation, 1, err)
	}
}

// refused counts operations that failed, be it before they began.
func (m *metrics) refused(operation string, claims int, err error) {
	m.errors.WithLabelValues(operation, string(reasonOf(err))).Add(float64(claims))
}

func (m *metrics) conflict(resolved bool) {
	outcome := conflictRefused
	if resolved {
		outcome = conflictResolved
	}
	m.conflicts.WithLabelValues(outcome).Inc()
}

func (m *metrics) fieldsDropped(features []string) {
	for _, feature := range features {
		if !slices.Contains(knownFeatures, feature) {
			feature = featureOther
		}
		m.droppedFields.WithLabelValues(feature).Inc()
	}
}

func (m *metrics) featureMissing(feature string, missing bool) {
	value := 0.0
	if missing {
		value = 1
	}
	m.missingFeatures.WithLabelValues(feature).Set(value)
}
