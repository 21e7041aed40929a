package modelserver

import (
	"slices"
	"strings"
	"testing"
)

func loadModels(t *testing.T) *Models {
	t.Helper()
	m, err := LoadModels()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func parse(t *testing.T, argv ...string) Args {
	t.Helper()
	args, err := ParseArgs(argv)
	if err != nil {
		t.Fatal(err)
	}
	return args
}

func TestFootprintMiB(t *testing.T) {
	models := loadModels(t)
	for name, test := range map[string]struct {
		argv []string
		want int64
	}{
		"Llama 3.1 8B, as the walkthrough shows it": {[]string{"meta-llama/Meta-Llama-3.1-8B-Instruct"}, 15023},
		"in the type it asks for":                   {[]string{"meta-llama/Llama-3.1-8B-Instruct", "--dtype", "float16"}, 15023},
		"in 32 bits: parameters x 4":                {[]string{"meta-llama/Llama-3.1-8B", "--dtype", "float32"}, 30634},
		"in fp8: the embeddings stay in 16 bits":    {[]string{"RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8"}, 8661},
		"in fp8 by a flag":                          {[]string{"meta-llama/Llama-3.1-8B", "-q", "fp8"}, 8661},
		"in 4 bits by its name":                     {[]string{"hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4"}, 5466},
		"a name's 8 bits over a method's 4":         {[]string{"Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "-q", "gptq"}, 8303},
		"Qwen2.5-7B":                                {[]string{"hf://Qwen/Qwen2.5-7B-Instruct"}, 14526},
		"a path, by the name it is served under":    {[]string{"/mnt/models", "--served-model-name", "Qwen/Qwen2.5-7B-Instruct"}, 14526},
		"a path of the hub's cache":                 {[]string{"/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots/a09a"}, 14526},
		"a path with underscores":                   {[]string{"/models/qwen2_5-7b"}, 14526},
		"a fine-tune that names its base":           {[]string{"NousResearch/Hermes-3-Llama-3.1-8B"}, 15023},
		"the longer name wins":                      {[]string{"microsoft/Phi-4-mini-instruct"}, 7317},
		"the shorter one where it is meant":         {[]string{"microsoft/phi-4"}, 27961},
		"a distillate is not its teacher":           {[]string{"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}, 14526},
		"published in fp8":                          {[]string{"deepseek-ai/DeepSeek-R1"}, 641683},
		"published in mxfp4":                        {[]string{"openai/gpt-oss-20b"}, 13107},
		"active parameters are not the size":        {[]string{"meta-llama/Llama-4-Scout-17B-16E-Instruct"}, 207902},
		"unknown, a size in the name":               {[]string{"acme/Foo-7B-chat"}, 13352},
		"unknown, a fraction":                       {[]string{"acme/foo-0.5b"}, 954},
		"unknown, millions":                         {[]string{"acme/foo-350m"}, 668},
		"unknown, experts":                          {[]string{"acme/foo-8x7B"}, 106812},
		"unknown, the largest size is the model":    {[]string{"acme/foo-7B-1M"}, 13352},
		"unknown, size and 4 bits":                  {[]string{"acme/foo-7B-GPTQ"}, 3472},
		"bits are no size":                          {[]string{"acme/foo-4bit-7b"}, 3472},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := models.Footprint(parse(t, test.argv...), 0)
			if err != nil {
				t.Fatal(err)
			}
			if got := ceilDiv(f.WeightBytes, mib); got != test.want {
				t.Errorf("weights take %d MiB (%s), want %d", got, f.Explanation, test.want)
			}
		})
	}
}

func TestFootprintOfUnknownModelSaysWhatToDo(t *testing.T) {
	models := loadModels(t)
	for _, argv := range [][]string{
		{"acme/foo"},
		{"/mnt/models", "--served-model-name", "chat"},
		{"acme/b7b2b"}, // a commit, not a size
	} {
		_, err := models.Footprint(parse(t, argv...), 0)
		if err == nil {
			t.Errorf("%q: no error", argv)
			continue
		}
		for _, part := range []string{argv[0], "SIMGPU_MODEL_MEMORY"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q: message %q lacks %q", argv, err, part)
			}
		}
	}
}

func TestFootprintOverride(t *testing.T) {
	models := loadModels(t)
	for _, model := range []string{"acme/foo", "meta-llama/Llama-3.1-8B"} {
		f, err := models.Footprint(parse(t, model), 20*mib)
		if err != nil {
			t.Fatal(err)
		}
		if f.WeightBytes != 20*mib {
			t.Errorf("%s: %d bytes, want those of the override", model, f.WeightBytes)
		}
	}
}

func TestKVBytesPerValue(t *testing.T) {
	models := loadModels(t)
	for dtype, want := range map[string]int64{"auto": 2, "fp8": 1, "fp8_e5m2": 1, "bfloat16": 2} {
		f, err := models.Footprint(parse(t, "meta-llama/Llama-3.1-8B", "--kv-cache-dtype", dtype), 0)
		if err != nil {
			t.Fatal(err)
		}
		if f.KVBytesPerValue != want {
			t.Errorf("%s: %d bytes per value, want %d", dtype, f.KVBytesPerValue, want)
		}
	}
}

// Each name must lead to its own entry, and every figure must be usable.
func TestModelTable(t *testing.T) {
	models := loadModels(t)
	for _, model := range models.Models {
		for _, name := range model.Names {
			found, ok := models.lookup("org/" + strings.ToUpper(name) + "-Instruct")
			if !ok || !slices.Equal(found.Names, model.Names) {
				t.Errorf("%s leads to the entry of %v", name, found.Names)
			}
		}
		if model.Parameters <= model.EmbeddingParameters || model.EmbeddingParameters <= 0 {
			t.Errorf("%v: %d parameters, %d of them embeddings", model.Names, model.Parameters, model.EmbeddingParameters)
		}
		if model.MaxModelLen <= 0 || model.Source == "" {
			t.Errorf("%v: no context length or no source", model.Names)
		}
		if kv := model.KVCache; kv != nil && (kv.Layers <= 0 || kv.Heads <= 0 || kv.HeadDim <= 0) {
			t.Errorf("%v: KV cache %+v", model.Names, *kv)
		}
	}
	var methods []string
	for _, q := range models.Quantizations {
		methods = append(methods, q.Methods...)
	}
	slices.Sort(methods)
	if len(slices.Compact(slices.Clone(methods))) != len(methods) || len(methods) == 0 {
		t.Errorf("quantization methods are missing or stand twice: %v", methods)
	}
}

func TestParseMemory(t *testing.T) {
	for text, want := range map[string]int64{
		"15023MiB": 15023 << 20,
		"15023Mi":  15023 << 20,
		"15023":    15023 << 20,
		"14.5GiB":  14.5 * (1 << 30),
		"16GB":     16e9,
		"1 TiB":    1 << 40,
	} {
		got, err := ParseMemory(text)
		if err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "0", "-1GiB", "much", "nanGiB", "infTiB", "GiB"} {
		if got, err := ParseMemory(text); err == nil {
			t.Errorf("%q: %d, want an error", text, got)
		}
	}
}
