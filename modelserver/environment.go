package modelserver

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// OptionsFromEnv reads the options that the environment gives; usage lists them.
// lookup is os.LookupEnv. An empty variable counts as not set, except for
// CUDA_VISIBLE_DEVICES, where it hides every device.
func OptionsFromEnv(lookup func(string) (string, bool)) (Options, error) {
	get := func(name string) string {
		value, _ := lookup(name)
		return strings.TrimSpace(value)
	}
	opts := Options{
		DeviceDir:     get("SIMGPU_DIR"),
		Simulator:     get("SIMGPU_INFERENCE_SIM"),
		SimulatorArgs: strings.Fields(get("SIMGPU_INFERENCE_SIM_ARGS")),
	}
	if value, set := lookup("CUDA_VISIBLE_DEVICES"); set {
		opts.CUDAVisibleDevices = &value
	}
	for _, v := range []struct {
		name string
		to   *bool
	}{
		{"SIMGPU_ALLOW_NO_DEVICE", &opts.AllowNoDevice},
		{"SIMGPU_RESERVE_KV_CACHE", &opts.ReserveKVCache},
	} {
		value := get(v.name)
		if value == "" {
			continue
		}
		on, err := strconv.ParseBool(value)
		if err != nil {
			return Options{}, fmt.Errorf("environment variable %s=%q: expected 1 or 0", v.name, value)
		}
		*v.to = on
	}
	if value := get("SIMGPU_MODEL_MEMORY"); value != "" {
		bytes, err := ParseMemory(value)
		if err != nil {
			return Options{}, fmt.Errorf("environment variable SIMGPU_MODEL_MEMORY=%q: %w", value, err)
		}
		opts.ModelMemory = bytes
	}
	if value := get("SIMGPU_LOAD_DURATION"); value != "" {
		d, err := time.ParseDuration(value)
		if err != nil || d < 0 {
			return Options{}, fmt.Errorf("environment variable SIMGPU_LOAD_DURATION=%q: expected a duration, for instance 30s", value)
		}
		opts.LoadDuration = d
	}
	return opts, nil
}
