package modelserver

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// takes is how many words after a flag belong to it.
type takes int

const (
	none takes = iota
	one
	several
)

// flag is a flag of vLLM. set reports the first value that cannot be and false, or
// stores the values; a nil set is a flag that has no effect here and stands in the
// table so that its values are told from the model's name.
type flag struct {
	takes   takes
	allowed string
	set     func(a *Args, values []string) (bad string, ok bool)
}

// lookupFlag finds a flag by its normalized name or by a short one.
func lookupFlag(name string) (flag, bool) {
	switch name {
	case "-tp":
		name = "--tensor-parallel-size"
	case "-pp":
		name = "--pipeline-parallel-size"
	case "-dp":
		name = "--data-parallel-size"
	case "-q":
		name = "--quantization"
	case "-h":
		name = "--help"
	case "-v":
		name = "--version"
	}
	if f, ok := effective()[name]; ok {
		return f, true
	}
	if slices.Contains(switches, strings.TrimPrefix(strings.TrimPrefix(name, "--"), "no-")) {
		return flag{takes: none}, true
	}
	if slices.Contains(lists, strings.TrimPrefix(name, "--")) {
		return flag{takes: several, allowed: "a list of words"}, true
	}
	return flag{}, false
}

// effective returns the flags that change something.
func effective() map[string]flag {
	return map[string]flag{
		"--help":    toggle(func(a *Args) *bool { return &a.Help }, true),
		"--version": toggle(func(a *Args) *bool { return &a.Version }, true),

		"--model":             text(func(a *Args) *string { return &a.Model }, "a model's name or path"),
		"--served-model-name": {takes: several, allowed: "the names the API answers to", set: setServedModelNames},

		"--tensor-parallel-size":   count(func(a *Args) *int { return &a.TensorParallel }),
		"--pipeline-parallel-size": count(func(a *Args) *int { return &a.PipelineParallel }),
		"--data-parallel-size":     count(func(a *Args) *int { return &a.DataParallel }),
		"--device":                 choice(func(a *Args) *string { return &a.Device }, "auto", "cuda", "cpu"),

		"--gpu-memory-utilization": {takes: one, allowed: "a fraction above 0 and up to 1", set: setUtilization},
		"--max-model-len": {takes: one, set: setMaxModelLen,
			allowed: "a number of tokens from 1 up, with k, m, g (thousands) or K, M, G (1024s), or auto"},
		"--max-num-seqs": {takes: one, set: setMaxNumSeqs,
			allowed: "a whole number from 1 up, with k, m, g (thousands) or K, M, G (1024s)"},
		"--block-size":               {takes: one, allowed: "8, 16, 32, 64 or 128", set: setBlockSize},
		"--dtype":                    choice(func(a *Args) *string { return &a.DType }, "auto", "half", "float16", "bfloat16", "float", "float32"),
		"--quantization":             choice(func(a *Args) *string { return &a.Quantization }, quantizationMethods()...),
		"--kv-cache-dtype":           choice(func(a *Args) *string { return &a.KVCacheDType }, kvCacheDTypes...),
		"--enable-prefix-caching":    toggle(func(a *Args) *bool { return &a.PrefixCaching }, true),
		"--no-enable-prefix-caching": toggle(func(a *Args) *bool { return &a.PrefixCaching }, false),

		"--host":         text(func(a *Args) *string { return &a.Host }, "an address"),
		"--port":         {takes: one, allowed: "a port from 1 to 65535", set: setPort},
		"--api-key":      {takes: several, allowed: "the keys clients may present", set: setAPIKey},
		"--ssl-keyfile":  text(func(a *Args) *string { return &a.SSLKeyFile }, "a file"),
		"--ssl-certfile": text(func(a *Args) *string { return &a.SSLCertFile }, "a file"),

		"--lora-modules":  {takes: several, allowed: `adapters as NAME=PATH or {"name": NAME, "path": PATH}`, set: setLoRAModules},
		"--max-loras":     count(func(a *Args) *int { return &a.MaxLoRAs }),
		"--max-cpu-loras": count(func(a *Args) *int { return &a.MaxCPULoRAs }),

		"--enable-sleep-mode":         toggle(func(a *Args) *bool { return &a.SleepMode }, true),
		"--no-enable-sleep-mode":      toggle(func(a *Args) *bool { return &a.SleepMode }, false),
		"--enable-request-id-headers": toggle(func(a *Args) *bool { return &a.RequestIDHeaders }, true),
		"--seed":                      {takes: one, allowed: "a whole number", set: setSeed},
	}
}

// kvCacheDTypes are vLLM's; the fp8 ones take one byte per value.
var kvCacheDTypes = []string{"auto", "bfloat16", "float16", "fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "fp8_inc"}

// switches are the flags of vLLM that take no value and change nothing here. Each
// exists as --no-<name> too.
var switches = []string{
	"aggregate-engine-logging", "allow-credentials", "allow-deprecated-quantization",
	"async-scheduling", "calculate-kv-scales",
	"data-parallel-external-lb", "data-parallel-hybrid-lb", "disable-async-output-proc",
	"disable-cascade-attn", "disable-chunked-mm-input", "disable-custom-all-reduce",
	"disable-fastapi-docs", "disable-frontend-multiprocessing", "disable-hybrid-kv-cache-manager",
	"disable-log-requests", "disable-log-stats", "disable-mm-preprocessor-cache",
	"disable-nccl-for-dp-synchronization", "disable-sliding-window", "disable-uvicorn-access-log",
	"enable-auto-tool-choice", "enable-chunked-prefill", "enable-dbo", "enable-eplb",
	"enable-expert-parallel", "enable-force-include-usage", "enable-log-outputs",
	"enable-log-requests", "enable-lora", "enable-lora-bias", "enable-mfu-metrics",
	"enable-mm-embeds", "enable-multimodal-encoder-data-parallel", "enable-prompt-embeds",
	"enable-prompt-tokens-details", "enable-reasoning", "enable-return-routed-experts",
	"enable-server-load-tracking", "enable-ssl-refresh", "enable-tokenizer-info-endpoint",
	"enable-layerwise-nvtx-tracing", "enforce-eager", "exclude-tools-when-tool-choice-none",
	"fully-sharded-loras", "headless", "interleave-mm-strings", "kv-sharing-fast-prefill",
	"language-model-only", "log-error-stack",

	"ray-workers-use-nsight", "return-tokens-as-token-ids", "skip-mm-profiling",
	"skip-tokenizer-init", "trust-remote-code", "trust-request-chat-template",
	"use-tqdm-on-load", "use-v2-block-manager",
}

// lists are the flags of vLLM that take several values and change nothing here.
var lists = []string{"cudagraph-capture-sizes", "cuda-graph-sizes", "ignore-patterns", "long-lora-scaling-factors"}

func toggle(field func(*Args) *bool, to bool) flag {
	return flag{takes: none, set: func(a *Args, _ []string) (string, bool) {
		*field(a) = to
		return "", true
	}}
}

func text(field func(*Args) *string, allowed string) flag {
	return flag{takes: one, allowed: allowed, set: func(a *Args, values []string) (string, bool) {
		*field(a) = values[0]
		return values[0], values[0] != ""
	}}
}

func choice(field func(*Args) *string, choices ...string) flag {
	return flag{takes: one, allowed: "one of " + strings.Join(choices, ", "), set: func(a *Args, values []string) (string, bool) {
		*field(a) = values[0]
		return values[0], slices.Contains(choices, values[0])
	}}
}

func count(field func(*Args) *int) flag {
	return flag{takes: one, allowed: "a whole number from 1 up", set: func(a *Args, values []string) (string, bool) {
		n, err := strconv.Atoi(values[0])
		*field(a) = n
		return values[0], err == nil && n >= 1
	}}
}

func setServedModelNames(a *Args, values []string) (string, bool) {
	a.ServedModelNames = values
	return firstEmpty(values)
}

func setAPIKey(a *Args, values []string) (string, bool) {
	a.APIKey = true
	return "", true
}

func firstEmpty(values []string) (string, bool) {
	return "", !slices.Contains(values, "")
}

func setUtilization(a *Args, values []string) (string, bool) {
	f, err := strconv.ParseFloat(values[0], 64)
	a.GPUMemoryUtilization = f
	return values[0], err == nil && f > 0 && f <= 1 // false for NaN
}

func setMaxModelLen(a *Args, values []string) (string, bool) {
	if values[0] == "auto" || values[0] == "-1" {
		a.MaxModelLen = AutoMaxModelLen
		return "", true
	}
	n, ok := parseHumanInt(values[0])
	a.MaxModelLen = n
	return values[0], ok
}

func setMaxNumSeqs(a *Args, values []string) (string, bool) {
	n, ok := parseHumanInt(values[0])
	a.MaxNumSeqs = n
	return values[0], ok
}

// parseHumanInt reads 4096, 4k (4000), 4K (4096), 25.6k (25600). Only the decimal
// units take a fraction, as in vLLM.
func parseHumanInt(s string) (int, bool) {
	units := map[byte]float64{'k': 1e3, 'm': 1e6, 'g': 1e9, 'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30}
	unit := 1.0
	if s != "" {
		if u, ok := units[s[len(s)-1]]; ok {
			unit = u
			if s[len(s)-1] >= 'a' {
				f, err := strconv.ParseFloat(s[:len(s)-1], 64)
				n := f * unit
				return int(n), err == nil && n >= 1 && n <= math.MaxInt32
			}
			s = s[:len(s)-1]
		}
	}
	n, err := strconv.ParseInt(s, 10, 32)
	f := float64(n) * unit
	return int(f), err == nil && f >= 1 && f <= math.MaxInt32
}

func setBlockSize(a *Args, values []string) (string, bool) {
	n, err := strconv.Atoi(values[0])
	a.BlockSize = n
	return values[0], err == nil && slices.Contains([]int{8, 16, 32, 64, 128}, n)
}

func setPort(a *Args, values []string) (string, bool) {
	n, err := strconv.Atoi(values[0])
	a.Port = n
	return values[0], err == nil && n >= 1 && n <= 65535
}

func setSeed(a *Args, values []string) (string, bool) {
	n, err := strconv.ParseInt(values[0], 10, 64)
	a.Seed = &n
	return values[0], err == nil
}

func setLoRAModules(a *Args, values []string) (string, bool) {
	modules := make([]LoRAModule, 0, len(values))
	for _, value := range values {
		module, err := parseLoRAModule(value)
		if err != nil {
			return value, false
		}
		modules = append(modules, module)
	}
	a.LoRAModules = modules
	return "", true
}

func parseLoRAModule(value string) (LoRAModule, error) {
	var module LoRAModule
	if strings.HasPrefix(value, "{") {
		if err := json.Unmarshal([]byte(value), &module); err != nil {
			return LoRAModule{}, err
		}
	} else {
		module.Name, module.Path, _ = strings.Cut(value, "=")
	}
	if module.Name == "" || module.Path == "" {
		return LoRAModule{}, fmt.Errorf("adapter %q: name and path are needed", value)
	}
	return module, nil
}
