package driver

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Operations on claims, as label values.
const (
	opPrepare   = "prepare"
	opUnprepare = "unprepare"
)

// metrics are what the driver exports. All series exist from the start.
type metrics struct {
	registry *prometheus.Registry

	duration             *prometheus.HistogramVec
	errors               *prometheus.CounterVec
	publishedDevices     prometheus.Gauge
	publishErrors        prometheus.Counter
	partitionsWithdrawn  prometheus.Gauge
	inventoryValid       prometheus.Gauge
	unreadableCheckpoint prometheus.Counter
	unsettledCheckpoints prometheus.Gauge
}

// newMetrics makes the metrics; prepared returns how many claims are prepared.
func newMetrics(prepared func() int) *metrics {
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
		}, []string{"operation"}),
		publishedDevices: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "simgpu_published_devices",
			Help: "Devices of this node last seen in ResourceSlices in the API.",
		}),
		publishErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "simgpu_publish_errors_total",
			Help: "Attempts to publish ResourceSlices that failed, or were not stored as sent.",
		}),
		partitionsWithdrawn: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "simgpu_partitions_withdrawn",
			Help: "1 while partitions are not published because the API server drops the counters that tell them apart.",
		}),
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
	}
	m.registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "simgpu_claims_prepared",
			Help: "Claims that are prepared on this node.",
		}, func() float64 { return float64(prepared()) }),
		m.duration, m.errors, m.publishedDevices, m.publishErrors, m.partitionsWithdrawn,
		m.inventoryValid, m.unreadableCheckpoint, m.unsettledCheckpoints,
	)
	for _, operation := range []string{opPrepare, opUnprepare} {
		m.duration.WithLabelValues(operation)
		m.errors.WithLabelValues(operation)
	}
	return m
}

func (m *metrics) operation(operation string, start time.Time, err error) {
	m.duration.WithLabelValues(operation).Observe(time.Since(start).Seconds())
	if err != nil {
		m.errors.WithLabelValues(operation).Inc()
	}
}
