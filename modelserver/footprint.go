package modelserver

import (
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

//go:embed models.yaml
var modelsYAML []byte

// Models is the table of what models take.
type Models struct {
	Models        []Model        `json:"models"`
	Quantizations []Quantization `json:"quantizations"`
	NameHints     []NameHint     `json:"nameHints"`
}

// Model is one entry of the table; models.yaml explains the fields.
type Model struct {
	Names               []string  `json:"names"`
	Parameters          int64     `json:"parameters"`
	EmbeddingParameters int64     `json:"embeddingParameters,omitempty"`
	ObservedMiB         int64     `json:"observedMiB,omitempty"`
	BitsPerWeight       float64   `json:"bitsPerWeight,omitempty"`
	KVCache             *KVLayout `json:"kvCache,omitempty"`
	MaxModelLen         int       `json:"maxModelLen,omitempty"`
	Source              string    `json:"source"`
}

// KVLayout is the shape of a model's KV cache.
type KVLayout struct {
	Layers  int `json:"layers"`
	Heads   int `json:"heads"`
	HeadDim int `json:"headDim"`
}

// Quantization gives the bits per weight of vLLM's --quantization values.
type Quantization struct {
	Methods       []string `json:"methods"`
	BitsPerWeight float64  `json:"bitsPerWeight"`
}

// NameHint gives the bits per weight that words in a checkpoint's name stand for.
type NameHint struct {
	Words         []string `json:"words"`
	BitsPerWeight float64  `json:"bitsPerWeight"`
}

// Footprint is what a model takes, over all devices of one copy.
type Footprint struct {
	// WeightBytes is what the loaded weights take.
	WeightBytes int64
	// KV is nil where the shape of the KV cache is not known.
	KV *KVLayout
	// KVBytesPerValue depends on --kv-cache-dtype and --dtype.
	KVBytesPerValue int64
	// MaxModelLen is the longest context of the model in tokens; 0: not known.
	MaxModelLen int
	// Explanation says how WeightBytes came about.
	Explanation string
}

// LoadModels reads the embedded table.
func LoadModels() (*Models, error) {
	var m Models
	if err := yaml.UnmarshalStrict(modelsYAML, &m); err != nil {
		return nil, fmt.Errorf("models.yaml: %w", err)
	}
	return &m, nil
}

// quantizationMethods are the values of --quantization, sorted. The table is
// embedded and covered by tests, so it can be read.
func quantizationMethods() []string {
	m, err := LoadModels()
	if err != nil {
		return nil
	}
	var methods []string
	for _, q := range m.Quantizations {
		methods = append(methods, q.Methods...)
	}
	slices.Sort(methods)
	return methods
}

// Footprint works out what args.Model takes: by its name in the table, else by a
// size in its name (7B, 0.5b, 8x7B). A model whose own name says nothing, such as a
// path, is looked up by the names it is served under. weights, where positive,
// replaces the computed size of the weights in bytes.
func (m *Models) Footprint(args Args, weights int64) (Footprint, error) {
	model, name, found := m.identify(append([]string{args.Model}, args.ServedModelNames...))
	f := Footprint{
		KV:              model.KVCache,
		KVBytesPerValue: kvBytesPerValue(args),
		MaxModelLen:     model.MaxModelLen,
	}
	switch {
	case weights > 0:
		f.WeightBytes = weights
		f.Explanation = "as SIMGPU_MODEL_MEMORY says"
	case found:
		f.WeightBytes, f.Explanation = model.weights(m.bitsPerWeight(args, name))
	default:
		return Footprint{}, fmt.Errorf("ValueError: how much memory the model %q takes is not known: it is not in the table of models, and no size such as 7B is in its name or in a --served-model-name; set the environment variable SIMGPU_MODEL_MEMORY to the memory of its weights, for instance SIMGPU_MODEL_MEMORY=15023MiB",
			args.Model)
	}
	return f, nil
}

// identify returns the model that the first telling name stands for, and that name.
func (m *Models) identify(names []string) (Model, string, bool) {
	for _, name := range names {
		if model, ok := m.lookup(name); ok {
			return model, name, true
		}
		if parameters := sizeInName(name); parameters > 0 {
			return Model{Parameters: parameters}, name, true
		}
	}
	return Model{}, "", false
}

// lookup finds the entry with the longest name that is in name.
func (m *Models) lookup(name string) (Model, bool) {
	longest := 0
	var found Model
	for _, model := range m.Models {
		for _, word := range model.Names {
			if len(word) > longest && containsWord(name, word) {
				longest, found = len(word), model
			}
		}
	}
	return found, longest > 0
}

// bitsPerWeight is what a weight takes where that differs from how the model is
// published, and 0 where it does not.
func (m *Models) bitsPerWeight(args Args, name string) float64 {
	longest, bits := 0, 0.0
	for _, hint := range m.NameHints {
		for _, word := range hint.Words {
			if len(word) > longest && containsWord(name, word) {
				longest, bits = len(word), hint.BitsPerWeight
			}
		}
	}
	if longest > 0 {
		return bits
	}
	for _, q := range m.Quantizations {
		if slices.Contains(q.Methods, args.Quantization) {
			return q.BitsPerWeight
		}
	}
	if is32Bit(args) {
		return 32
	}
	return 0
}

// weights is the size of the weights in bytes, and how it came about. bits is what
// a weight takes, 0 for the published form. Quantization leaves the embeddings at 16
// bits.
func (model Model) weights(bits float64) (bytes int64, explanation string) {
	parameters := billions(model.Parameters) + " parameters"
	if bits == 0 && model.ObservedMiB > 0 {
		return model.ObservedMiB << 20, parameters + ", as observed"
	}
	if bits == 0 {
		bits = cmp.Or(model.BitsPerWeight, 16)
	}
	embeddings := int64(0)
	if bits < 16 {
		embeddings = model.EmbeddingParameters
	}
	return int64(math.Ceil(float64(model.Parameters-embeddings)*bits/8)) + 2*embeddings,
		fmt.Sprintf("%s at %s bits per weight", parameters, strconv.FormatFloat(bits, 'g', -1, 64))
}

// is32Bit says whether weights that are not quantized take 32 bits. They take 16
// unless asked: every model in the table is published in 16 bits or less.
func is32Bit(args Args) bool { return args.DType == "float" || args.DType == "float32" }

func kvBytesPerValue(args Args) int64 {
	switch {
	case strings.HasPrefix(args.KVCacheDType, "fp8"):
		return 1
	case args.KVCacheDType == "auto" && is32Bit(args):
		return 4
	default:
		return 2
	}
}

var dashes = strings.NewReplacer(".", "-", "_", "-")

// containsWord reports whether word stands in name between boundaries.
func containsWord(name, word string) bool {
	name = dashes.Replace(strings.ToLower(name))
	word = dashes.Replace(strings.ToLower(word))
	for start := 0; ; {
		i := strings.Index(name[start:], word)
		if i < 0 {
			return false
		}
		i += start
		end := i + len(word)
		if (i == 0 || !alphanumeric(name[i-1])) && (end == len(name) || !alphanumeric(name[end])) {
			return true
		}
		start = i + 1
	}
}

func alphanumeric(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' }

// sizes are 7B, 0.5b, 125m, 8x7B between boundaries. Three groups: experts, number,
// unit.
var sizes = regexp.MustCompile(`(?i)(?:^|[^a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?:$|[^a-z0-9])`)

// sizeInName reads a number of parameters from the last part of a name that has
// one; of several in a part the largest is the model. The experts of 8x7B count in
// full, which is the upper bound. 0: there is none.
func sizeInName(name string) int64 {
	for _, part := range slices.Backward(strings.Split(name, "/")) {
		if n := largestSize(part); n > 0 {
			return n
		}
	}
	return 0
}

func largestSize(part string) int64 {
	largest := 0.0
	for {
		at := sizes.FindStringSubmatchIndex(part)
		if at == nil {
			return int64(largest)
		}
		experts, number := 1.0, 0.0
		if at[2] >= 0 {
			experts, _ = strconv.ParseFloat(part[at[2]:at[3]], 64) // digits only
		}
		number, _ = strconv.ParseFloat(part[at[4]:at[5]], 64)
		unit := 1e9
		if strings.EqualFold(part[at[6]:at[7]], "m") {
			unit = 1e6
		}
		// More than the largest model by far is no size.
		if n := experts * number * unit; n < 1e15 {
			largest = max(largest, n)
		}
		// The boundary behind one size may be the one before the next.
		part = part[at[7]:]
	}
}

func billions(parameters int64) string {
	if parameters < 1e9 {
		return fmt.Sprintf("%.0fM", float64(parameters)/1e6)
	}
	return fmt.Sprintf("%.2fB", float64(parameters)/1e9)
}

// ParseMemory reads an amount of memory in bytes: 15023MiB, 14.5GiB, 15Gi, 16GB. A
// bare number is MiB, the unit of nvidia-smi.
func ParseMemory(s string) (int64, error) {
	units := []struct {
		suffix string
		bytes  float64
	}{
		{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
		{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40},
		{"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12},
		{"", 1 << 20},
	}
	for _, unit := range units {
		number, ok := strings.CutSuffix(s, unit.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		if bytes := n * unit.bytes; err == nil && bytes >= 1 && bytes < 1<<60 {
			return int64(bytes), nil
		}
		break
	}
	return 0, errors.New("expected an amount of memory above zero, for instance 15023MiB or 14.5GiB")
}
