package driver

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/driver/hardware"
	deviceslices "github.com/simgpu/simgpu/driver/slices"
)

// Feature gates of the API server, without which it drops fields of ResourceSlices as if they had not been sent.
const (
	featurePartitions = "DRAPartitionableDevices"
	featureTaints     = "DRADeviceTaints"
	featureShares     = "DRAConsumableCapacity"
)

// apiLimits are features that the API server lacks.
type apiLimits struct {
	// noPartitions: it drops the counters that keep partitions of one GPU apart.
	noPartitions bool
	// noTaints: it drops device taints.
	noTaints bool
	// noShares: it drops what lets several claims share a device.
	noShares bool
}

// apiFeature is a feature that what the node publishes depends on.
type apiFeature struct {
	gate string
	// lacking is the limit that stands for it.
	lacking func(*apiLimits) *bool
	// kept tells from the device of a dry run whether the API server has the feature.
	kept func(resourceapi.Device) bool
	// matters is false while the node publishes the same with and without it.
	matters func(fleet) bool
	// What people are told when it is missing and matters, and when that is over.
	missingReason, missing, backReason, back string
}

var apiFeatures = []apiFeature{
	{
		gate:    featurePartitions,
		lacking: func(l *apiLimits) *bool { return &l.noPartitions },
		kept:    func(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 },
		matters: func(f fleet) bool {
			return slices.ContainsFunc(f.stock.gpus, func(g stockGPU) bool { return g.CounterSet != nil })
		},
		missingReason: reasonPartitionsWithdrawn,
		missing:       "The API server drops the counters that keep partitions of a GPU apart: partitions are not published, whole GPUs are",
		backReason:    reasonPartitionsPublished,
		back:          "The API server keeps device counters, or no partitions are to be published",
	},
	{
		gate:    featureTaints,
		lacking: func(l *apiLimits) *bool { return &l.noTaints },
		kept:    func(d resourceapi.Device) bool { return len(d.Taints) > 0 },
		matters: func(f fleet) bool {
			return f.broken.keepAway() || slices.ContainsFunc(f.stock.gpus, func(g stockGPU) bool { return g.retiring })
		},
		missingReason: reasonTaintsDropped,
		missing:       "The API server drops device taints: devices that would get one are not published, and pods that use them stay",
		backReason:    reasonTaintsKept,
		back:          "Device taints are kept by the API server, or none is needed",
	},
	{
		gate:    featureShares,
		lacking: func(l *apiLimits) *bool { return &l.noShares },
		kept:    func(d resourceapi.Device) bool { return d.AllowMultipleAllocations != nil },
		matters: func(f fleet) bool {
			return slices.ContainsFunc(f.stock.gpus, func(g stockGPU) bool {
				return slices.ContainsFunc(g.Devices, func(d *hardware.Device) bool { return d.Published.AllowMultipleAllocations != nil })
			})
		},
		missingReason: reasonSharesDropped,
		missing:       "The API server drops what lets claims share a device: a device is for one claim at a time",
		backReason:    reasonSharesKept,
		back:          "What lets claims share a device is kept by the API server, or no device is to be shared",
	},
}

// distrustFor is how long the API server is not believed that it has a feature after it dropped its fields from slices
// that it stored. Several API servers may differ, and those in front of them may answer dry runs in another way.
const distrustFor = time.Hour

// dryRun is a slice with one device that has a field of every feature, in a form that is valid for an API server of
// that layout.
func dryRun(nodeName, driverName string, layout deviceslices.Layout) *resourceapi.ResourceSlice {
	counters := map[string]resourceapi.Counter{"counter": {Value: resource.MustParse("1")}}
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "simgpu-dry-run-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   driverName,
			NodeName: &nodeName,
			Pool:     resourceapi.ResourcePool{Name: nodeName, Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{
				Name:                     "dry-run",
				AllowMultipleAllocations: new(true),
				ConsumesCounters:         []resourceapi.DeviceCounterConsumption{{CounterSet: "counters", Counters: counters}},
				Taints:                   []resourceapi.DeviceTaint{{Key: removedTaint, Effect: resourceapi.DeviceTaintEffectNoSchedule}},
			}},
		},
	}
	if layout == deviceslices.Combined {
		slice.Spec.SharedCounters = []resourceapi.CounterSet{{Name: "counters", Counters: counters}}
	}
	return slice
}

// askFeatures finds out in a dry run which features the API server has. It has to be a creation: an update keeps the
// fields that the stored slice has, whatever the gates are.
func (p *publisher) askFeatures(ctx context.Context, layout deviceslices.Layout) error {
	sent := dryRun(p.nodeName, p.driverName, layout)
	answer, err := p.client.ResourceV1().ResourceSlices().Create(ctx, sent, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	switch {
	case apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err):
		// Somebody on the way does not take dry runs. Dropped fields are told of when slices are stored.
		klog.FromContext(ctx).V(2).Info("The API server refused a dry run", "err", err)
		answer = sent
	case err != nil:
		return fmt.Errorf("ask the API server which fields of ResourceSlices it keeps: %w", err)
	case len(answer.Spec.Devices) != 1:
		return fmt.Errorf("the API server answered the dry run of 1 device with %d devices", len(answer.Spec.Devices))
	}
	for _, feature := range apiFeatures {
		p.learn(feature, feature.kept(answer.Spec.Devices[0]), false)
	}
	return nil
}

// fieldsDropped is told that a slice was stored without some of its fields.
func (p *publisher) fieldsDropped(ctx context.Context, dropped *resourceslice.DroppedFieldsError) {
	gates := slices.DeleteFunc(dropped.DisabledFeatures(), func(gate string) bool { return slices.Contains(alphaGates, gate) })
	if len(gates) == 0 {
		klog.FromContext(ctx).V(2).Info("The API server does not have the alpha features that were to be used", "features", dropped.DisabledFeatures())
		return
	}
	p.metrics.publishErrors.Inc()
	klog.FromContext(ctx).Error(dropped, "The API server dropped fields of a ResourceSlice")
	p.metrics.fieldsDropped(gates)
	told := true
	for _, gate := range gates {
		known := slices.IndexFunc(apiFeatures, func(f apiFeature) bool { return f.gate == gate })
		if known < 0 {
			told = false
			continue
		}
		p.learn(apiFeatures[known], false, true)
	}
	if !told {
		p.reporter.node(corev1.EventTypeWarning, reasonFieldsDropped, "The API server dropped fields of a ResourceSlice (features disabled: %s)", strings.Join(gates, ", "))
	}
	p.lookAgain()
}

// learn notes whether the API server has a feature, from a slice that it stored or from what it only said. That it has
// the feature is not believed for a while after stored slices showed the opposite, unless it has admitted it meanwhile.
func (p *publisher) learn(feature apiFeature, has, stored bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if has && time.Since(p.dropped[feature.gate]) < distrustFor {
		return
	}
	delete(p.dropped, feature.gate)
	if stored {
		p.dropped[feature.gate] = time.Now()
	}
	*feature.lacking(&p.lacks) = !has
}

// tellFeatures tells people when a feature that the fleet needs is missing, and when that is over.
func (p *publisher) tellFeatures(ctx context.Context, f fleet, api apiLimits) {
	logger := klog.FromContext(ctx)
	for _, feature := range apiFeatures {
		missing := *feature.lacking(&api) && feature.matters(f)
		p.metrics.featureMissing(feature.gate, missing)
		if missing == p.told[feature.gate] {
			continue
		}
		p.told[feature.gate] = missing
		if missing {
			logger.Error(nil, feature.missing, "featureGate", feature.gate)
			p.reporter.node(corev1.EventTypeWarning, feature.missingReason, "%s. Enable the feature gate %s in the API server and the scheduler to change that", feature.missing, feature.gate)
		} else {
			logger.Info(feature.back, "featureGate", feature.gate)
			p.reporter.node(corev1.EventTypeNormal, feature.backReason, "%s", feature.back)
		}
	}
}

// unshared makes every device one for a single claim at a time, as it would be without the fields that the API server
// drops. What is published is another thing then once the API server keeps them.
func unshared(resources resourceslice.DriverResources) {
	for _, pool := range resources.Pools {
		for i := range pool.Slices {
			for n := range pool.Slices[i].Devices {
				device := &pool.Slices[i].Devices[n]
				device.AllowMultipleAllocations = nil
				for name, capacity := range device.Capacity {
					capacity.RequestPolicy = nil
					device.Capacity[name] = capacity
				}
			}
		}
	}
}
