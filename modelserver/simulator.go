package modelserver

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// simulatorName is the program that serves the API: github.com/llm-d/llm-d-inference-sim,
// built by the module in the folder inferencesim.
const simulatorName = "llm-d-inference-sim"

// latency is the simulator's timing unless its arguments say otherwise: its published
// profile of an 8B model on one H100 at balanced load. The flags of a group depend on
// the first one, and are left out together.
var latency = [][]string{
	{"--time-to-first-token=100ms", "--time-to-first-token-std-dev=20ms"},
	{"--inter-token-latency=12ms", "--inter-token-latency-std-dev=2ms"},
	{"--time-factor-under-load=2.0"},
}

// simulatorArgs is the simulator's command line. It refuses flags it does not know,
// so vLLM's are translated one by one. extra comes last and wins.
func simulatorArgs(args Args, plan Plan, extra []string) []string {
	words := []string{
		"--model=" + args.Model,
		// Without this it asks the hub for the tokenizer.
		"--force-dummy-tokenizer",
		// Warnings and errors: its account of a good start would push ours out of
		// `kubectl logs --tail=20`.
		"--v=1",
		"--port=" + strconv.Itoa(args.Port),
		"--max-model-len=" + strconv.Itoa(plan.MaxModelLen),
		"--max-num-seqs=" + strconv.Itoa(args.MaxNumSeqs),
		"--block-size=" + strconv.Itoa(args.BlockSize),
	}
	if len(args.ServedModelNames) > 0 {
		words = append(append(words, "--served-model-name"), args.ServedModelNames...)
	}
	if blocks := plan.KVCacheTokens / int64(args.BlockSize); blocks > 0 {
		words = append(words, "--kv-cache-size="+strconv.FormatInt(blocks, 10))
		if args.PrefixCaching {
			// No endpoint: nobody is told of the cache's content unless extra says whom.
			words = append(words, "--enable-kvcache", "--zmq-endpoint=")
		}
	}
	if len(args.LoRAModules) > 0 {
		words = append(words, "--lora-modules")
		for _, module := range args.LoRAModules {
			data, _ := json.Marshal(module) // two strings
			words = append(words, string(data))
		}
	}
	if args.MaxLoRAs > 0 {
		words = append(words, "--max-loras="+strconv.Itoa(args.MaxLoRAs))
	}
	if args.MaxCPULoRAs > 0 {
		words = append(words, "--max-cpu-loras="+strconv.Itoa(args.MaxCPULoRAs))
	}
	if args.SleepMode {
		words = append(words, "--enable-sleep-mode")
	}
	if args.RequestIDHeaders {
		words = append(words, "--enable-request-id-headers")
	}
	if args.Seed != nil {
		words = append(words, "--seed="+strconv.FormatInt(*args.Seed, 10))
	}
	if args.SSLCertFile != "" {
		words = append(words, "--ssl-certfile="+args.SSLCertFile, "--ssl-keyfile="+args.SSLKeyFile)
	}
	for _, group := range latency {
		name, _, _ := strings.Cut(group[0], "=")
		if !slices.ContainsFunc(extra, func(word string) bool { return word == name || strings.HasPrefix(word, name+"=") }) {
			words = append(words, group...)
		}
	}
	return append(words, extra...)
}

// simulatorEnv adds what the simulator reads of the downward API where a pod does not
// set it: its address (needed for the KV cache), its name and its namespace (in the
// headers of its answers).
func simulatorEnv(environ []string) []string {
	env := slices.Clone(environ)
	for _, v := range []struct {
		name  string
		value func() string
	}{
		{"POD_IP", podIP},
		{"POD_NAME", podName},
		{"POD_NAMESPACE", podNamespace},
	} {
		if slices.ContainsFunc(environ, func(e string) bool { return strings.HasPrefix(e, v.name+"=") }) {
			continue
		}
		if value := v.value(); value != "" {
			env = append(env, v.name+"="+value)
		}
	}
	return env
}

// podIP is the first address of the network namespace that others can reach.
func podIP() string {
	addresses, err := net.InterfaceAddrs()
	if err == nil {
		for _, address := range addresses {
			if ip, ok := address.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() {
				return ip.IP.String()
			}
		}
	}
	return "127.0.0.1"
}

// podName is the host name, which the kubelet sets to the pod's.
func podName() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}

// podNamespace is empty where the pod has no service account token.
func podNamespace() string {
	data, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// findSimulator returns the path of the simulator: the one asked for, else the one
// beside this program, else the one in the PATH.
func findSimulator(asked string) (string, error) {
	if asked != "" {
		path, err := exec.LookPath(asked)
		if err != nil {
			return "", fmt.Errorf("the simulator that SIMGPU_INFERENCE_SIM names cannot be run: %w", err)
		}
		return path, nil
	}
	beside := ""
	if self, err := os.Executable(); err == nil {
		if self, err = filepath.EvalSymlinks(self); err == nil {
			beside = filepath.Join(filepath.Dir(self), simulatorName)
			if path, err := exec.LookPath(beside); err == nil {
				return path, nil
			}
		}
	}
	path, err := exec.LookPath(simulatorName)
	if err != nil {
		return "", fmt.Errorf("%s is neither at %s nor in the PATH: install it there, or name it in SIMGPU_INFERENCE_SIM", simulatorName, beside)
	}
	return path, nil
}
