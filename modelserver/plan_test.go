package modelserver

import (
	"errors"
	"strings"
	"testing"
)

// slice is a partition, total and used in MiB.
func slice(total, used int64) Device {
	return Device{UUID: "MIG-1", Name: "NVIDIA H100 80GB HBM3 MIG", TotalBytes: total * mib, UsedBytes: used * mib}
}

func h100s(n int) []Device {
	var devices []Device
	for range n {
		devices = append(devices, Device{UUID: "GPU-1", Name: "NVIDIA H100 80GB HBM3", TotalBytes: 81559 * mib})
	}
	return devices
}

func plan(t *testing.T, visible []Device, argv ...string) (Plan, error) {
	t.Helper()
	args := parse(t, argv...)
	model, err := loadModels(t).Footprint(args, 0)
	if err != nil {
		t.Fatal(err)
	}
	return NewPlan(args, model, visible)
}

func TestPlan(t *testing.T) {
	for name, test := range map[string]struct {
		visible []Device
		argv    []string
		devices int
		weights int64 // MiB per device
		tokens  int64
		length  int
	}{
		// 40448 x 0.9 - 15023 MiB are 21380; a token takes 2 x 32 x 8 x 128 x 2 bytes = 128 KiB.
		"Llama 3.1 8B on a 3g.40gb slice": {
			[]Device{slice(40448, 0)}, []string{"meta-llama/Meta-Llama-3.1-8B-Instruct", "--max-model-len=4096"}, 1, 15023, 171040, 4096},
		"the context of the model where nobody says": {
			[]Device{slice(40448, 0)}, []string{"meta-llama/Llama-3.1-8B"}, 1, 15023, 171040, 131072},
		"a KV cache in fp8 holds twice as much": {
			[]Device{slice(40448, 0)}, []string{"meta-llama/Llama-3.1-8B", "--kv-cache-dtype=fp8"}, 1, 15023, 342080, 131072},
		"the longest context that fits": {
			[]Device{slice(20000, 0)}, []string{"meta-llama/Llama-3.1-8B", "--max-model-len=auto"}, 1, 15023, 23808, 23808},
		"tensor parallel: weights and heads are split": {
			h100s(4), []string{"meta-llama/Llama-3.1-8B", "-tp", "4"}, 4, 3756, 2228704, 131072},
		"pipeline parallel: layers are split": {
			h100s(2), []string{"meta-llama/Llama-3.1-8B", "-pp", "2"}, 2, 7512, 1054256, 131072},
		"data parallel: whole copies": {
			h100s(2), []string{"meta-llama/Llama-3.1-8B", "-dp", "2"}, 2, 15023, 467040, 131072},
		"more devices than needed: the first": {
			h100s(3), []string{"meta-llama/Llama-3.1-8B"}, 1, 15023, 467040, 131072},
		"a head is not split": {
			h100s(8), []string{"Qwen/Qwen2.5-7B", "-tp", "8"}, 8, 1816, 5236080, 32768},
		"the smallest device decides": {
			append(h100s(1), slice(40448, 0)), []string{"meta-llama/Llama-3.1-8B", "-tp", "2"}, 2, 7512, 462256, 131072},
		"a KV cache of unknown shape": {
			h100s(1), []string{"acme/foo-7b"}, 1, 13352, 0, assumedModelLen},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := plan(t, test.visible, test.argv...)
			if err != nil {
				t.Fatal(err)
			}
			if len(got.Devices) != test.devices || got.WeightBytes != test.weights*mib {
				t.Errorf("%d MiB on each of %d devices, want %d on %d", got.WeightBytes/mib, len(got.Devices), test.weights, test.devices)
			}
			if got.KVCacheTokens != test.tokens || got.MaxModelLen != test.length {
				t.Errorf("KV cache of %d tokens and contexts of %d, want %d and %d", got.KVCacheTokens, got.MaxModelLen, test.tokens, test.length)
			}
		})
	}
}

func TestPlanRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		visible []Device
		argv    []string
		kind    string
		want    []string
	}{
		"no device": {
			nil, []string{"meta-llama/Llama-3.1-8B"},
			"RuntimeError", []string{"No CUDA GPUs are available", "resources.claims", "--device cpu"}},
		"fewer devices than the model spreads over": {
			h100s(2), []string{"meta-llama/Llama-3.1-8B", "-tp", "4"},
			"ValueError", []string{"World size 4", "--tensor-parallel-size 4", "which is 2"}},
		"one partition for two": {
			[]Device{slice(40448, 0)}, []string{"meta-llama/Llama-3.1-8B", "-tp", "2"},
			"ValueError", []string{"which is 1", "MIG devices", "one per process"}},
		"another server on the device": {
			[]Device{slice(40448, 15023)}, []string{"meta-llama/Llama-3.1-8B"},
			"ValueError", []string{"Free memory on device cuda:0", "24.83 GiB of 39.50 GiB", "--gpu-memory-utilization 0.9 asks for 35.55 GiB", "Lower"}},
		"weights beyond the device": {
			[]Device{slice(9984, 0)}, []string{"meta-llama/Llama-3.1-8B"},
			"torch.OutOfMemoryError", []string{"CUDA out of memory. Tried to allocate 14.67 GiB", "total capacity of 9.75 GiB", "9.75 GiB is free", "larger device"}},
		"weights in what the utilization leaves to others": {
			[]Device{slice(16000, 0)}, []string{"meta-llama/Llama-3.1-8B"},
			"ValueError", []string{"No available memory for the KV cache", "14.67 GiB", "14.06 GiB of 15.62 GiB", "Raise --gpu-memory-utilization"}},
		"a context that does not fit": {
			[]Device{slice(20000, 0)}, []string{"meta-llama/Llama-3.1-8B"},
			"ValueError", []string{"131072 tokens", "16.00 GiB", "2.91 GiB", "23808 tokens", "lower --max-model-len"}},
		"a context the model does not have": {
			h100s(1), []string{"meta-llama/Meta-Llama-3-8B", "--max-model-len=9000"},
			"ValueError", []string{"--max-model-len 9000", "8192"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := plan(t, test.visible, test.argv...)
			var refusal *RefusalError
			if !errors.As(err, &refusal) {
				t.Fatalf("error %v, want a RefusalError", err)
			}
			if refusal.Kind != test.kind {
				t.Errorf("kind %s, want %s", refusal.Kind, test.kind)
			}
			for _, part := range test.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("message %q lacks %q", err, part)
				}
			}
		})
	}
}
