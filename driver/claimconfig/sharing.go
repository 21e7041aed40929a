package claimconfig

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/simgpu/simgpu/internal/strictyaml"
)

// Strategy is how containers share a device.
type Strategy string

const (
	TimeSlicing Strategy = "TimeSlicing"
	MPS         Strategy = "MPS"
)

var strategies = []string{string(TimeSlicing), string(MPS)}

// intervals are the lengths of a time slice that can be asked for; what they are in milliseconds is
// up to the device.
var intervals = []string{"Default", "Short", "Medium", "Long"}

// Sharing is how the containers of a claim share a device.
type Sharing struct {
	Strategy Strategy
	// Interval is the length of a time slice, "Default" unless asked for otherwise. Only for
	// TimeSlicing of whole GPUs.
	Interval string
	// ActiveThreadPercentage limits what one process can use of the multiprocessors, 0 to 100. Only
	// for MPS; nil: no limit.
	ActiveThreadPercentage *int

	pinnedMemory          *resource.Quantity
	pinnedMemoryPerDevice map[string]resource.Quantity
}

type wireSharing struct {
	Strategy    string           `json:"strategy"`
	TimeSlicing *wireTimeSlicing `json:"timeSlicingConfig"`
	MPS         *wireMPS         `json:"mpsConfig"`
}

type wirePartitionSharing struct {
	Strategy string   `json:"strategy"`
	MPS      *wireMPS `json:"mpsConfig"`
}

type wireTimeSlicing struct {
	Interval *string `json:"interval"`
}

type wireMPS struct {
	ActiveThreadPercentage *int              `json:"defaultActiveThreadPercentage"`
	PinnedMemory           *string           `json:"defaultPinnedDeviceMemoryLimit"`
	PinnedMemoryPerDevice  map[string]string `json:"defaultPerDevicePinnedMemoryLimit"`
}

func sharing(wire wireSharing, faults *strictyaml.Faults) *Sharing {
	const path = "sharing"
	s := &Sharing{Strategy: Strategy(wire.Strategy)}
	switch s.Strategy {
	case TimeSlicing:
		if wire.MPS != nil {
			faults.Add(path+".mpsConfig", "does not go with strategy %s", s.Strategy)
		}
		s.Interval = intervals[0]
		if wire.TimeSlicing != nil && wire.TimeSlicing.Interval != nil {
			s.Interval = *wire.TimeSlicing.Interval
		}
		if !slices.Contains(intervals, s.Interval) {
			faults.Add(path+".timeSlicingConfig.interval", "must be one of %s, not %q", strings.Join(intervals, ", "), s.Interval)
		}
	case MPS:
		if wire.TimeSlicing != nil {
			faults.Add(path+".timeSlicingConfig", "does not go with strategy %s", s.Strategy)
		}
		if wire.MPS != nil {
			s.mps(*wire.MPS, path+".mpsConfig", faults)
		}
	default:
		faults.Add(path+".strategy", "must be one of %s, not %q", strings.Join(strategies, ", "), wire.Strategy)
	}
	return s
}

func (s *Sharing) mps(wire wireMPS, path string, faults *strictyaml.Faults) {
	if p := wire.ActiveThreadPercentage; p != nil {
		if *p < 0 || *p > 100 {
			faults.Add(path+".defaultActiveThreadPercentage", "must be between 0 and 100, not %d", *p)
		}
		s.ActiveThreadPercentage = p
	}
	if wire.PinnedMemory != nil {
		limit := memoryLimit(*wire.PinnedMemory, path+".defaultPinnedDeviceMemoryLimit", faults)
		s.pinnedMemory = &limit
	}
	for _, device := range slices.Sorted(maps.Keys(wire.PinnedMemoryPerDevice)) {
		limit := memoryLimit(wire.PinnedMemoryPerDevice[device], path+".defaultPerDevicePinnedMemoryLimit."+device, faults)
		if s.pinnedMemoryPerDevice == nil {
			s.pinnedMemoryPerDevice = map[string]resource.Quantity{}
		}
		s.pinnedMemoryPerDevice[device] = limit
	}
}

func memoryLimit(text, path string, faults *strictyaml.Faults) resource.Quantity {
	limit, err := resource.ParseQuantity(text)
	switch {
	case err != nil:
		faults.Add(path, "must be an amount of memory such as 10Gi, not %q", text)
	case limit.Value() < 1<<20:
		faults.Add(path, "must be at least 1Mi, not %s", text)
	}
	return limit
}

// PinnedMemory returns the limits of memory in force on the devices that share one entry of the
// configuration, nil for a device without one. The devices are given by UUID in the order of the
// allocation: a limit of its own names a device by UUID or by position. It fails if a limit names none
// of the devices.
func (s *Sharing) PinnedMemory(uuids []string) ([]*resource.Quantity, error) {
	limits := make([]*resource.Quantity, len(uuids))
	for i := range limits {
		limits[i] = s.pinnedMemory
	}
	for _, key := range slices.Sorted(maps.Keys(s.pinnedMemoryPerDevice)) {
		i := slices.Index(uuids, key)
		if i < 0 {
			n, err := strconv.Atoi(key)
			if err != nil || n < 0 || n >= len(uuids) {
				return nil, fmt.Errorf("sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit: %q is neither the UUID nor the position (0 to %d) of a device that the configuration is for", key, len(uuids)-1)
			}
			i = n
		}
		limit := s.pinnedMemoryPerDevice[key]
		limits[i] = &limit
	}
	return limits, nil
}

// String is the sharing state in a form for scripts: comma-separated key=value pairs in a fixed order.
func (s *Sharing) String() string {
	text := "strategy=" + string(s.Strategy)
	if s.Interval != "" {
		text += ",interval=" + s.Interval
	}
	if s.ActiveThreadPercentage != nil {
		text += fmt.Sprintf(",activeThreadPercentage=%d", *s.ActiveThreadPercentage)
	}
	return text
}
