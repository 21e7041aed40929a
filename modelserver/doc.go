// Package modelserver stands in for vLLM on a simulated device: it takes vLLM's
// own command line, works out what the model needs, holds that much memory of the
// devices the container can see, and runs llm-d-inference-sim for the OpenAI API.
//
// A server starts in five steps, each in a file of its own:
//
//	ParseArgs   args.go       vLLM's command line; what is unknown is named, not refused
//	Footprint   footprint.go  what the weights and the KV cache take (models.yaml)
//	Visible     devices.go    which devices CUDA would enumerate in this container
//	NewPlan     plan.go       what is held where, or vLLM's refusal
//	Run         server.go     hold the memory, run the simulator, end together
//
// The memory is held before the simulator starts and for as long as it runs, so
// /health of the simulator is the readiness of the whole. Only the weights are held
// unless Options.ReserveKVCache is set: the real server takes the KV cache at
// start-up too, which hides from nvidia-smi what the model needs.
//
// The package does not generate text and serves no API. It speaks to the driver
// through package deviceapi and knows nothing of claims.
package modelserver
