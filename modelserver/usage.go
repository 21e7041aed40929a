package modelserver

const usage = `usage: vllm serve MODEL [flags]
       vllm chat --quick QUESTION [--url URL]

Takes vLLM's command line, holds the memory of MODEL on the simulated devices of this
container, and serves the OpenAI API with llm-d-inference-sim. Flags of vLLM that are
not listed are accepted and have no effect.

model and context
  --model MODEL, --served-model-name NAME...
  --max-model-len TOKENS|auto, --max-num-seqs N, --block-size TOKENS
  --dtype, --quantization (-q), --kv-cache-dtype, --[no-]enable-prefix-caching
  --lora-modules NAME=PATH..., --max-loras N, --max-cpu-loras N
devices
  --tensor-parallel-size (-tp) N, --pipeline-parallel-size (-pp) N,
  --data-parallel-size (-dp) N, --gpu-memory-utilization FRACTION, --device cuda|cpu
server
  --port PORT, --ssl-certfile FILE, --ssl-keyfile FILE, --enable-request-id-headers
  --enable-sleep-mode, --seed N, --config FILE

environment
  SIMGPU_MODEL_MEMORY=15023MiB     memory of the weights, where the table of models is
                                   wrong or knows nothing
  SIMGPU_RESERVE_KV_CACHE=1        hold --gpu-memory-utilization of the device, as the
                                   real server does, not the weights alone
  SIMGPU_LOAD_DURATION=30s         how long loading takes; no API before
  SIMGPU_ALLOW_NO_DEVICE=1         serve without a device where there is none
  SIMGPU_INFERENCE_SIM=PATH        the simulator; else beside this program or in PATH
  SIMGPU_INFERENCE_SIM_ARGS=...    more arguments for it, separated by spaces
  SIMGPU_DIR=/run/simgpu           where the devices are
  CUDA_VISIBLE_DEVICES             as CUDA reads it
`
