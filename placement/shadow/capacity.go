package shadow

import (
	"cmp"
	"context"
	"maps"
	"regexp"
	"slices"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/simgpu/simgpu/placement"
)

// Pool is what a pool has left. A pool that has no counters has devices alone.
type Pool struct {
	Driver      string `json:"driver"`
	Pool        string `json:"pool"`
	Devices     int    `json:"devices"`
	DevicesFree int    `json:"devicesFree"` // neither allocated nor in the way of counters
	Sets        []Set  `json:"sets,omitempty"`
}

// Set is a counter set: with most drivers a piece of hardware, such as one GPU.
type Set struct {
	Name string `json:"name"`
	// Counters that count more than one of something, as quantities.
	Counters map[string]Level `json:"counters"`
	// Units are counters that are numbered and have one each, such as memory-slice-0: true if it is free.
	Units []bool `json:"units,omitempty"`
	// Largest is the device with the most memory, or else the most counters, that could be allocated still.
	Largest string `json:"largest,omitempty"`
}

// Level of a counter.
type Level struct {
	Total string `json:"total"`
	Free  string `json:"free"`
}

var numbered = regexp.MustCompile(`^(.+)-(\d+)$`)

// Capacity of all pools, sorted.
func Capacity(s *placement.Snapshot) []Pool {
	holders := s.Holders()
	pools := map[string]*Pool{}
	devices := map[string][]*placement.Device{}
	seen := map[string]bool{}
	for _, node := range s.Nodes {
		list, err := s.Devices(node)
		if err != nil {
			continue // Resolve has said so
		}
		for _, device := range list {
			key := device.Driver + "/" + device.Pool
			if id := key + "/" + device.Name; seen[id] {
				continue
			} else {
				seen[id] = true
			}
			if pools[key] == nil {
				pools[key] = &Pool{Driver: device.Driver, Pool: device.Pool}
			}
			devices[key] = append(devices[key], device)
		}
	}
	var result []Pool
	for _, key := range slices.Sorted(maps.Keys(pools)) {
		pool := pools[key]
		counters := s.Counters(pool.Driver, pool.Pool)
		largest := map[string]*placement.Device{}
		for _, device := range devices[key] {
			pool.Devices++
			if len(holders[device.ID()]) > 0 || !fits(device, counters) {
				continue
			}
			pool.DevicesFree++
			for _, consumption := range device.ConsumesCounters {
				if best := largest[consumption.CounterSet]; best == nil || size(device) > size(best) {
					largest[consumption.CounterSet] = device
				}
			}
		}
		for _, name := range slices.Sorted(maps.Keys(counters)) {
			pool.Sets = append(pool.Sets, setOf(name, counters[name], largest[name]))
		}
		result = append(result, *pool)
	}
	return result
}

func setOf(name string, counters map[string]*placement.Counter, largest *placement.Device) Set {
	set := Set{Name: name, Counters: map[string]Level{}}
	units := map[int]bool{}
	for counter, level := range counters {
		if match := numbered.FindStringSubmatch(counter); match != nil && level.Total == 1 {
			if number, err := strconv.Atoi(match[2]); err == nil {
				units[number] = level.Free > 0
			}
			continue
		}
		if level.Total > 0 {
			set.Counters[counter] = Level{Total: placement.Amount(level.Total), Free: placement.Amount(max(level.Free, 0))}
		}
	}
	for _, number := range slices.Sorted(maps.Keys(units)) {
		set.Units = append(set.Units, units[number])
	}
	if largest != nil {
		set.Largest = largest.Name
		if profile, found := largest.Attributes["profile"]; found && profile.StringValue != nil {
			set.Largest = *profile.StringValue
		}
	}
	return set
}

// size compares devices: by memory where they have any, else by what they consume.
func size(device *placement.Device) int64 {
	if memory, found := device.Capacity["memory"]; found {
		return memory.Value.Value()
	}
	var sum int64
	for _, consumption := range device.ConsumesCounters {
		for _, counter := range consumption.Counters {
			sum += counter.Value.Value()
		}
	}
	return sum
}

func fits(device *placement.Device, counters map[string]map[string]*placement.Counter) bool {
	for _, consumption := range device.ConsumesCounters {
		for name, counter := range consumption.Counters {
			if have := counters[consumption.CounterSet][name]; have == nil || counter.Value.Value() > have.Free {
				return false
			}
		}
	}
	return true
}

// leastConsumption is, per counter, what the device that consumes least of it takes, of those that a request selects.
func leastConsumption(s *placement.Snapshot, devices []*placement.Device, request *resourceapi.ExactDeviceRequest, compiled *placement.Cache) map[string]int64 {
	var least map[string]int64
	for _, device := range selected(s, devices, request, compiled) {
		consumes := map[string]int64{}
		if !device.Shared() { // several claims consume once
			for _, consumption := range device.ConsumesCounters {
				for name, counter := range consumption.Counters {
					consumes[name] += counter.Value.Value()
				}
			}
		}
		if least == nil {
			least = consumes
		}
		for name := range least {
			least[name] = min(least[name], consumes[name])
		}
	}
	return least
}

// selected are the devices that a request and its class select. An expression that fails selects none.
func selected(s *placement.Snapshot, devices []*placement.Device, request *resourceapi.ExactDeviceRequest, compiled *placement.Cache) []*placement.Device {
	class, err := s.Get(request.DeviceClassName)
	if err != nil {
		return nil
	}
	devices = slices.Clone(devices)
	for _, selector := range slices.Concat(class.Spec.Selectors, request.Selectors) {
		if selector.CEL == nil {
			continue
		}
		program := compiled.GetOrCompile(selector.CEL.Expression)
		devices = slices.DeleteFunc(devices, func(device *placement.Device) bool {
			is, err := device.Selected(context.Background(), program)
			return err != nil || !is
		})
	}
	return devices
}

// sortUnits by what they need at least.
func sortUnits(s *placement.Snapshot, units []Unit, order Order) error {
	if order == AsListed || order == "" {
		return nil
	}
	compiled := placement.NewCache()
	needs := map[string]int64{}
	var all []*placement.Device
	for _, node := range s.Nodes {
		devices, err := s.Devices(node)
		if err != nil {
			return err
		}
		all = append(all, devices...)
	}
	for _, unit := range units {
		for _, claim := range unit.Claims {
			for _, request := range placement.Defaulted(claim).Spec.Devices.Requests {
				if request.Exactly == nil {
					continue
				}
				if devices := selected(s, all, request.Exactly, compiled); len(devices) > 0 {
					smallest := slices.MinFunc(devices, func(a, b *placement.Device) int { return cmp.Compare(size(a), size(b)) })
					needs[unit.Name] += size(smallest) * max(request.Exactly.Count, 1)
				}
			}
		}
	}
	slices.SortStableFunc(units, func(a, b Unit) int {
		if order == LargestFirst {
			a, b = b, a
		}
		return cmp.Compare(needs[a.Name], needs[b.Name])
	})
	return nil
}
