package modelserver

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// defaults are the arguments of `vllm serve m`, changed by change.
func defaults(model string, change func(*Args)) Args {
	a := Args{
		Model: model, TensorParallel: 1, PipelineParallel: 1, DataParallel: 1,
		GPUMemoryUtilization: 0.9, MaxNumSeqs: 256, BlockSize: 16, DType: "auto", KVCacheDType: "auto",
		PrefixCaching: true, Device: "auto", Host: "0.0.0.0", Port: 8000,
	}
	if change != nil {
		change(&a)
	}
	return a
}

func TestParseArgs(t *testing.T) {
	seed := int64(-7)
	for name, test := range map[string]struct {
		argv []string
		want Args
	}{
		"two Llamas on one H100": {
			argv: []string{
				"meta-llama/Meta-Llama-3.1-8B-Instruct",
				"--disable-access-log-for-endpoints=/health,/metrics,/v1/models",
				"--tensor-parallel-size=1",
				"--gpu-memory-utilization=0.9",
				"--max-model-len=4096",
			},
			want: defaults("meta-llama/Meta-Llama-3.1-8B-Instruct", func(a *Args) {
				a.MaxModelLen = 4096
				a.Ignored = []string{"--disable-access-log-for-endpoints=/health,/metrics,/v1/models"}
			}),
		},
		"KServe's template of a model server": {
			argv: []string{
				"vllm", "serve", "/mnt/models",
				"--served-model-name", "Qwen/Qwen2.5-7B-Instruct",
				"--port", "8000",
				"--disable-log-requests",
				"--enable-ssl-refresh",
				"--ssl-certfile", "/var/run/kserve/tls/tls.crt",
				"--ssl-keyfile", "/var/run/kserve/tls/tls.key",
			},
			want: defaults("/mnt/models", func(a *Args) {
				a.ServedModelNames = []string{"Qwen/Qwen2.5-7B-Instruct"}
				a.SSLCertFile, a.SSLKeyFile = "/var/run/kserve/tls/tls.crt", "/var/run/kserve/tls/tls.key"
				a.Ignored = []string{"--disable-log-requests", "--enable-ssl-refresh"}
			}),
		},
		"KServe's managed-DRA sample": {
			argv: []string{"serve", "hf://Qwen/Qwen2.5-7B-Instruct"},
			want: defaults("Qwen/Qwen2.5-7B-Instruct", nil),
		},
		"a revision of the hub": {
			argv: []string{"hf://Qwen/Qwen2.5-7B-Instruct:a09a354"},
			want: defaults("Qwen/Qwen2.5-7B-Instruct", nil),
		},
		"python's module": {
			argv: []string{"-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--port", "8080"},
			want: defaults("m", func(a *Args) { a.Port = 8080 }),
		},
		"a model named first wins over --model": {
			argv: []string{"serve", "first", "--model=second"},
			want: defaults("first", nil),
		},
		"a model after its flags": {
			argv: []string{"--max-num-seqs", "4", "--enforce-eager", "m"},
			want: defaults("m", func(a *Args) {
				a.MaxNumSeqs = 4
				a.Ignored = []string{"--enforce-eager"}
			}),
		},
		"underscores, short forms, the last wins": {
			argv: []string{"m", "--tensor_parallel_size", "8", "-tp", "2", "-pp=2", "-dp", "2", "-q", "awq", "--gpu_memory_utilization=0.5"},
			want: defaults("m", func(a *Args) {
				a.TensorParallel, a.PipelineParallel, a.DataParallel = 2, 2, 2
				a.Quantization = "awq"
				a.GPUMemoryUtilization = 0.5
			}),
		},
		"an unknown flag takes the word after it, unless that is a flag": {
			argv: []string{"m", "--speculative-config", `{"method": "ngram"}`, "--new-switch", "--port=9000", "--new-number", "-1", "-O3", "--compilation_config.level", "3"},
			want: defaults("m", func(a *Args) {
				a.Port = 9000
				a.Ignored = []string{`--speculative-config {"method": "ngram"}`, "--new-switch", "--new-number -1", "-O3", "--compilation_config.level 3"}
			}),
		},
		"further words of an unknown list are not the model": {
			argv: []string{"--model", "m", "--new-list", "a", "b"},
			want: defaults("m", func(a *Args) { a.Ignored = []string{"--new-list a", "b"} }),
		},
		"switches of vLLM do not take the model for their value": {
			argv: []string{"--trust-remote-code", "m", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"},
			want: defaults("m", func(a *Args) {
				a.PrefixCaching = false
				a.Ignored = []string{"--trust-remote-code", "--no-enable-chunked-prefill"}
			}),
		},
		"adapters in both spellings": {
			argv: []string{"m", "--enable-lora", "--lora-modules", "sql=/adapters/sql", `{"name": "chat", "path": "/adapters/chat", "base_model_name": "m"}`, "--max-loras", "2"},
			want: defaults("m", func(a *Args) {
				a.LoRAModules = []LoRAModule{{"sql", "/adapters/sql"}, {"chat", "/adapters/chat"}}
				a.MaxLoRAs = 2
				a.Ignored = []string{"--enable-lora"}
			}),
		},
		"numbers for people": {
			argv: []string{"m", "--max-model-len", "4K", "--max-num-seqs=1k", "--seed", "-7"},
			want: defaults("m", func(a *Args) { a.MaxModelLen, a.MaxNumSeqs, a.Seed = 4096, 1000, &seed }),
		},
		"decimal thousands": {
			argv: []string{"m", "--max-model-len", "25.6k"},
			want: defaults("m", func(a *Args) { a.MaxModelLen = 25600 }),
		},
		"the longest context that fits": {
			argv: []string{"m", "--max-model-len", "-1"},
			want: defaults("m", func(a *Args) { a.MaxModelLen = AutoMaxModelLen }),
		},
		"a model after the end of the flags": {
			argv: []string{"--port", "1", "--", "m"},
			want: defaults("m", func(a *Args) { a.Port = 1 }),
		},
		"help needs no model": {
			argv: []string{"serve", "--help"},
			want: defaults("", func(a *Args) { a.Help = true }),
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseArgs(test.argv)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("arguments (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseArgsRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		argv []string
		want []string // parts of the message
	}{
		"no model":                  {[]string{"serve"}, []string{"no model", "vllm serve MODEL"}},
		"an empty model":            {[]string{"m", "--model="}, []string{"--model", `""`}},
		"a word for a number":       {[]string{"m", "--port", "http"}, []string{"--port", `"http"`, "1 to 65535"}},
		"a port that is none":       {[]string{"m", "--port=70000"}, []string{"--port", `"70000"`}},
		"all and more":              {[]string{"m", "--gpu-memory-utilization", "1.5"}, []string{"--gpu-memory-utilization", `"1.5"`, "up to 1"}},
		"not a number":              {[]string{"m", "--gpu-memory-utilization", "nan"}, []string{`"nan"`}},
		"no devices":                {[]string{"m", "-tp", "0"}, []string{"-tp", `"0"`, "1 up"}},
		"a context of no length":    {[]string{"m", "--max-model-len", "0"}, []string{"--max-model-len", `"0"`}},
		"a context beyond numbers":  {[]string{"m", "--max-model-len", "9999999G"}, []string{`"9999999G"`}},
		"a type that is none":       {[]string{"m", "--dtype", "int3"}, []string{"--dtype", `"int3"`, "bfloat16"}},
		"an unknown quantization":   {[]string{"m", "-q", "zip"}, []string{"-q", `"zip"`, "awq", "fp8"}},
		"a block the API lacks":     {[]string{"m", "--block-size", "17"}, []string{"--block-size", `"17"`, "16"}},
		"a value that is missing":   {[]string{"m", "--dtype", "--port", "1"}, []string{"--dtype", "expected one value"}},
		"a list that is missing":    {[]string{"m", "--served-model-name"}, []string{"--served-model-name", "at least one"}},
		"a switch with a value":     {[]string{"m", "--enable-prefix-caching=yes"}, []string{"--enable-prefix-caching", `"yes"`}},
		"an adapter without a path": {[]string{"m", "--lora-modules", "sql"}, []string{"--lora-modules", `"sql"`, "NAME=PATH"}},
		"an adapter of bad JSON":    {[]string{"m", "--lora-modules", `{"name": `}, []string{"--lora-modules"}},
		"a key without certificate": {[]string{"m", "--ssl-keyfile", "k"}, []string{"--ssl-certfile", "--ssl-keyfile"}},
		"fewer adapters than run":   {[]string{"m", "--max-loras=4", "--max-cpu-loras=2"}, []string{"--max-cpu-loras", "4"}},
		"a seed of no integer":      {[]string{"m", "--seed=x"}, []string{"--seed", `"x"`}},
		"a config that is not there": {[]string{"m", "--config", "/nowhere.yaml"},
			[]string{"--config", "/nowhere.yaml"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseArgs(test.argv)
			var usage *UsageError
			if !errors.As(err, &usage) {
				t.Fatalf("error %v, want a UsageError", err)
			}
			for _, part := range test.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("message %q lacks %q", err, part)
				}
			}
		})
	}
}

func TestConfigFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	config := `
model: from-file
served-model-name: [a, b]
port: 9000
tensor_parallel_size: 2
enable-sleep-mode: true
enable-request-id-headers: false
speculative-config: {method: ngram}
`
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	want := defaults("from-file", func(a *Args) {
		a.ServedModelNames = []string{"a", "b"}
		a.Port = 9001
		a.TensorParallel = 2
		a.SleepMode = true
		a.Ignored = []string{`--speculative-config={"method":"ngram"}`}
	})
	got, err := ParseArgs([]string{"serve", "--config", path, "--port=9001"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the command line overrides the file (-want +got):\n%s", diff)
	}
	got, err = ParseArgs([]string{"from-command-line", "--config=" + path})
	if err != nil {
		t.Fatal(err)
	}
	if got.Model != "from-command-line" || !cmp.Equal(got.ServedModelNames, []string{"a", "b"}) {
		t.Errorf("model %q served as %q, want the model of the command line under the names of the file", got.Model, got.ServedModelNames)
	}
}
