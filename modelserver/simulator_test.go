package modelserver

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSimulatorArgs(t *testing.T) {
	common := []string{"--force-dummy-tokenizer", "--v=1", "--port=8000", "--max-model-len=4096", "--max-num-seqs=256", "--block-size=16"}
	firstToken := []string{"--time-to-first-token=100ms", "--time-to-first-token-std-dev=20ms"}
	otherTokens := []string{"--inter-token-latency=12ms", "--inter-token-latency-std-dev=2ms", "--time-factor-under-load=2.0"}

	for name, test := range map[string]struct {
		argv  []string
		plan  Plan
		extra []string
		want  []string
	}{
		"a model and nothing else": {
			argv: []string{"m"},
			plan: Plan{MaxModelLen: 4096},
			want: slices.Concat([]string{"--model=m"}, common, firstToken, otherTokens),
		},
		"a KV cache of known size": {
			argv: []string{"m"},
			plan: Plan{MaxModelLen: 4096, KVCacheTokens: 171040},
			want: slices.Concat([]string{"--model=m"}, common,
				[]string{"--kv-cache-size=10690", "--enable-kvcache", "--zmq-endpoint="}, firstToken, otherTokens),
		},
		"no prefix caching": {
			argv: []string{"m", "--no-enable-prefix-caching"},
			plan: Plan{MaxModelLen: 4096, KVCacheTokens: 171040},
			want: slices.Concat([]string{"--model=m"}, common, []string{"--kv-cache-size=10690"}, firstToken, otherTokens),
		},
		"everything that the simulator knows": {
			argv: []string{"m", "--served-model-name", "a", "b", "--lora-modules", "sql=/sql", "--max-loras=2", "--max-cpu-loras=3",
				"--enable-sleep-mode", "--enable-request-id-headers", "--seed=7", "--ssl-certfile=c", "--ssl-keyfile=k"},
			plan: Plan{MaxModelLen: 4096},
			want: slices.Concat([]string{"--model=m"}, common, []string{
				"--served-model-name", "a", "b", "--lora-modules", `{"name":"sql","path":"/sql"}`, "--max-loras=2", "--max-cpu-loras=3",
				"--enable-sleep-mode", "--enable-request-id-headers", "--seed=7", "--ssl-certfile=c", "--ssl-keyfile=k",
			}, firstToken, otherTokens),
		},
		"a time of one's own takes its deviation away": {
			argv:  []string{"m"},
			plan:  Plan{MaxModelLen: 4096},
			extra: []string{"--time-to-first-token=0", "--mode=echo"},
			want:  slices.Concat([]string{"--model=m"}, common, otherTokens, []string{"--time-to-first-token=0", "--mode=echo"}),
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := simulatorArgs(parse(t, test.argv...), test.plan, test.extra)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("command line (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSimulatorEnv(t *testing.T) {
	given := []string{"POD_IP=10.0.0.7", "POD_NAME=web", "A=b"}
	got := simulatorEnv(given)
	if !slices.Equal(got[:3], given) {
		t.Errorf("environment begins with %q, want it unchanged", got[:3])
	}
	for _, name := range []string{"POD_IP=", "POD_NAME="} {
		count := func(env []string) (n int) {
			for _, e := range env {
				if strings.HasPrefix(e, name) && e != name {
					n++
				}
			}
			return n
		}
		if n := count(got); n != 1 {
			t.Errorf("%s stands %d times, want what the pod set", name, n)
		}
		if n := count(simulatorEnv(nil)); n != 1 {
			t.Errorf("%s stands %d times without a pod's, want a default", name, n)
		}
	}
}

func TestOptionsFromEnv(t *testing.T) {
	env := map[string]string{
		"SIMGPU_DIR": "/dir", "SIMGPU_INFERENCE_SIM": "/sim", "SIMGPU_INFERENCE_SIM_ARGS": " --mode=echo  --v=4 ",
		"SIMGPU_ALLOW_NO_DEVICE": "1", "SIMGPU_RESERVE_KV_CACHE": "true", "SIMGPU_MODEL_MEMORY": "2GiB", "SIMGPU_LOAD_DURATION": "3s",
		"CUDA_VISIBLE_DEVICES": "",
	}
	lookup := func(name string) (string, bool) {
		value, set := env[name]
		return value, set
	}
	got, err := OptionsFromEnv(lookup)
	if err != nil {
		t.Fatal(err)
	}
	hidden := ""
	want := Options{
		DeviceDir: "/dir", Simulator: "/sim", SimulatorArgs: []string{"--mode=echo", "--v=4"},
		AllowNoDevice: true, ReserveKVCache: true, ModelMemory: 2 << 30, LoadDuration: 3e9, CUDAVisibleDevices: &hidden,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("options (-want +got):\n%s", diff)
	}

	for name, value := range map[string]string{
		"SIMGPU_ALLOW_NO_DEVICE": "perhaps", "SIMGPU_RESERVE_KV_CACHE": "2", "SIMGPU_MODEL_MEMORY": "much", "SIMGPU_LOAD_DURATION": "-1s",
	} {
		env = map[string]string{name: value}
		_, err := OptionsFromEnv(lookup)
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), value) {
			t.Errorf("%s=%s: error %v, want one that names both", name, value, err)
		}
	}
}
