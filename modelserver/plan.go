package modelserver

import (
	"fmt"
	"math"
)

// Plan is what a server holds and how long its contexts can be.
type Plan struct {
	// Devices in CUDA's order, as many as the server spreads over.
	Devices []Device
	// WeightBytes and KVCacheBytes are per device.
	WeightBytes  int64
	KVCacheBytes int64
	// KVCacheTokens of one copy of the model; 0: not known.
	KVCacheTokens int64
	// MaxModelLen in tokens; ModelLenAssumed: nobody said and the model is not known.
	MaxModelLen     int
	ModelLenAssumed bool
}

// assumedModelLen is for models of which the table knows no context length.
const assumedModelLen = 8192

// RefusalError is a start that vLLM would refuse too. Kind is the Python exception.
type RefusalError struct {
	Kind    string
	Message string
}

func (e *RefusalError) Error() string { return e.Kind + ": " + e.Message }

func valueErrorf(format string, a ...any) error {
	return &RefusalError{Kind: "ValueError", Message: fmt.Sprintf(format, a...)}
}

// NewPlan spreads the model over the visible devices, or returns the *RefusalError
// with which vLLM would stop, checked in its order: too few devices, too little free
// memory at start-up, no room for the weights, no room for the KV cache of one
// context.
func NewPlan(args Args, model Footprint, visible []Device) (Plan, error) {
	if args.Devices() > len(visible) {
		return Plan{}, tooFewDevices(args, visible)
	}
	perCopy := int64(args.TensorParallel * args.PipelineParallel)
	plan := Plan{
		Devices:     visible[:args.Devices()],
		WeightBytes: ceilDiv(ceilDiv(model.WeightBytes, perCopy), mib) * mib,
	}

	if model.MaxModelLen > 0 && args.MaxModelLen > model.MaxModelLen {
		return Plan{}, valueErrorf("--max-model-len %d is more than max_position_embeddings of %s, which is %d; ask for at most that",
			args.MaxModelLen, args.Model, model.MaxModelLen)
	}

	plan.KVCacheBytes = math.MaxInt64
	for i, d := range plan.Devices {
		wanted := int64(args.GPUMemoryUtilization * float64(d.TotalBytes))
		if d.FreeBytes() < wanted {
			return Plan{}, valueErrorf("Free memory on device cuda:%d (%s) at start-up is %s of %s, and --gpu-memory-utilization %g asks for %s. Lower --gpu-memory-utilization, or end what else uses the device (nvidia-smi lists it)",
				i, d.Name, gib(d.FreeBytes()), gib(d.TotalBytes), args.GPUMemoryUtilization, gib(wanted))
		}
		if plan.WeightBytes > d.FreeBytes() {
			return Plan{}, outOfMemory(args, i, d.Name, plan.WeightBytes, d.FreeBytes(), d.TotalBytes)
		}
		if wanted <= plan.WeightBytes {
			return Plan{}, valueErrorf("No available memory for the KV cache on device cuda:%d (%s): the weights of %s take %s, and --gpu-memory-utilization %g allows %s of %s. Raise --gpu-memory-utilization, or take a larger device, a quantized model or a higher --tensor-parallel-size",
				i, d.Name, args.Model, gib(plan.WeightBytes), args.GPUMemoryUtilization, gib(wanted), gib(d.TotalBytes))
		}
		// The smallest device of all decides.
		plan.KVCacheBytes = min(plan.KVCacheBytes, wanted-plan.WeightBytes)
	}
	return plan.withModelLen(args, model)
}

// withModelLen settles the context length and checks that one context fits.
func (p Plan) withModelLen(args Args, model Footprint) (Plan, error) {
	p.MaxModelLen = args.MaxModelLen
	if p.MaxModelLen <= 0 {
		p.MaxModelLen = model.MaxModelLen
	}
	if p.MaxModelLen <= 0 {
		p.MaxModelLen, p.ModelLenAssumed = assumedModelLen, true
	}
	if model.KV == nil || len(p.Devices) == 0 {
		return p, nil
	}

	perToken := kvBytesPerToken(args, model)
	block := int64(args.BlockSize)
	p.KVCacheTokens = p.KVCacheBytes / (perToken * block) * block
	if args.MaxModelLen == AutoMaxModelLen && p.KVCacheTokens > 0 {
		p.MaxModelLen = int(min(int64(p.MaxModelLen), p.KVCacheTokens))
	}
	if int64(p.MaxModelLen) > p.KVCacheTokens {
		return Plan{}, valueErrorf("one request with the max seq len of %s (%d tokens) needs %s of KV cache, and %s are available, which is room for %d tokens. Raise --gpu-memory-utilization or lower --max-model-len",
			args.Model, p.MaxModelLen, gib(int64(p.MaxModelLen)*perToken), gib(p.KVCacheBytes), p.KVCacheTokens)
	}
	return p, nil
}

// kvBytesPerToken is what a token takes on each device: layers are split over the
// pipeline, heads over the tensor-parallel devices, and a head is not split further.
func kvBytesPerToken(args Args, model Footprint) int64 {
	layers := ceilDiv(int64(model.KV.Layers), int64(args.PipelineParallel))
	heads := ceilDiv(int64(model.KV.Heads), int64(args.TensorParallel))
	return 2 * layers * heads * int64(model.KV.HeadDim) * model.KVBytesPerValue
}

func tooFewDevices(args Args, visible []Device) error {
	wanted := fmt.Sprintf("World size %d (--tensor-parallel-size %d x --pipeline-parallel-size %d x --data-parallel-size %d)",
		args.Devices(), args.TensorParallel, args.PipelineParallel, args.DataParallel)
	if len(visible) == 0 {
		return &RefusalError{Kind: "RuntimeError", Message: fmt.Sprintf("No CUDA GPUs are available: %s needs %d, and this container sees none. Give the container a claim of a device (resources.claims), and look at CUDA_VISIBLE_DEVICES where that is set; to run without one, pass --device cpu or set SIMGPU_ALLOW_NO_DEVICE=1",
			wanted, args.Devices())}
	}
	hint := ""
	if visible[0].isPartition() {
		hint = "; of MIG devices CUDA uses one per process, however many a container sees"
	}
	return valueErrorf("%s is larger than the number of available GPUs, which is %d%s. Claim more devices or lower the parallelism",
		wanted, len(visible), hint)
}

// outOfMemory is how PyTorch says that an allocation does not fit.
func outOfMemory(args Args, index int, name string, requested, free, total int64) error {
	return &RefusalError{Kind: "torch.OutOfMemoryError", Message: fmt.Sprintf("CUDA out of memory. Tried to allocate %s for the weights of %s. GPU %d (%s) has a total capacity of %s of which %s is free. Take a larger device or partition, a quantized model, or more devices with --tensor-parallel-size",
		gib(requested), args.Model, index, name, gib(total), gib(free))}
}

const mib = int64(1) << 20

func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }

func gib(bytes int64) string { return fmt.Sprintf("%.2f GiB", float64(bytes)/(1<<30)) }
