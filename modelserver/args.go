package modelserver

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// Args is what the server understood of vLLM's command line. The zero value of a
// field is what holds where the flag was not given, except for the fields that
// ParseArgs fills with vLLM's defaults.
type Args struct {
	// Model as given, without an hf:// scheme and the revision after it.
	Model            string
	ServedModelNames []string

	TensorParallel   int
	PipelineParallel int
	DataParallel     int

	GPUMemoryUtilization float64
	// MaxModelLen in tokens; 0: what the model supports; AutoMaxModelLen: the
	// longest that fits.
	MaxModelLen  int
	MaxNumSeqs   int
	BlockSize    int // tokens
	DType        string
	Quantization string
	KVCacheDType string
	// PrefixCaching is vLLM's default since V1.
	PrefixCaching bool
	Device        string

	Host        string
	Port        int
	APIKey      bool
	SSLKeyFile  string
	SSLCertFile string

	LoRAModules []LoRAModule
	MaxLoRAs    int
	MaxCPULoRAs int

	SleepMode        bool
	RequestIDHeaders bool
	Seed             *int64

	Help    bool
	Version bool

	// Ignored holds the flags without an effect here, as written and in their
	// order: those that vLLM knows and those that nobody may know.
	Ignored []string
}

// LoRAModule is an adapter that is served beside the model.
type LoRAModule struct {
	Name string `json:"name"`
	Path string `json:"path"`
}

// AutoMaxModelLen asks for the longest context that fits (--max-model-len auto).
const AutoMaxModelLen = -1

// Devices is the number of devices the server spreads over.
func (a Args) Devices() int { return a.TensorParallel * a.PipelineParallel * a.DataParallel }

// UsageError is a command line that vLLM would refuse too.
type UsageError struct{ Message string }

func (e *UsageError) Error() string { return "vllm serve: error: " + e.Message }

func usagef(format string, a ...any) error {
	return &UsageError{Message: fmt.Sprintf(format, a...)}
}

// ParseArgs reads the arguments after the program name, in every spelling that
// vLLM takes: `serve MODEL [flags]`, `MODEL [flags]`, `--model MODEL`, and what
// follows `python3` in `python3 -m vllm.entrypoints.openai.api_server [flags]`.
// Underscores in a flag's name are dashes, `--flag=value` is `--flag value`, and
// the last of several wins. The YAML file of --config holds flags that the command
// line overrides.
//
// A flag without an effect here lands in Args.Ignored together with its value: the
// word after it, unless that looks like a flag. A flag with an effect and a value
// that cannot be is a *UsageError, as is a missing model.
func ParseArgs(argv []string) (Args, error) {
	argv, config, err := cutConfig(skipCommand(argv))
	if err != nil {
		return Args{}, err
	}

	args := Args{
		TensorParallel:       1,
		PipelineParallel:     1,
		DataParallel:         1,
		GPUMemoryUtilization: 0.9,
		MaxNumSeqs:           256,
		BlockSize:            16,
		DType:                "auto",
		KVCacheDType:         "auto",
		PrefixCaching:        true,
		Device:               "auto",
		Host:                 "0.0.0.0",
		Port:                 8000,
	}
	// The file first: what is set later wins.
	if _, err := parseFlags(&args, config); err != nil {
		return Args{}, err
	}
	leading := ""
	if len(argv) > 0 && !looksLikeFlag(argv[0]) {
		leading, argv = argv[0], argv[1:]
	}
	words, err := parseFlags(&args, argv)
	if err != nil {
		return Args{}, err
	}
	if args.Help || args.Version {
		return args, nil
	}

	// A model named first wins over --model, as in vLLM. A word further back may
	// be the second value of a flag that is not known here, so it comes last.
	if leading != "" {
		args.Model = leading
	}
	if args.Model == "" && len(words) > 0 {
		args.Model, words = words[0], words[1:]
	}
	if args.Model == "" {
		return Args{}, usagef("no model: name it first (vllm serve MODEL [flags]) or with --model; " +
			"a word after a flag that is not known here is taken for the flag's value")
	}
	args.Ignored = append(args.Ignored, words...)
	args.Model = trimHuggingFace(args.Model)

	if (args.SSLCertFile == "") != (args.SSLKeyFile == "") {
		return Args{}, usagef("arguments --ssl-certfile and --ssl-keyfile: one needs the other, found certfile %q and keyfile %q",
			args.SSLCertFile, args.SSLKeyFile)
	}
	if args.MaxCPULoRAs != 0 && args.MaxCPULoRAs < max(args.MaxLoRAs, 1) {
		return Args{}, usagef("argument --max-cpu-loras: invalid value \"%d\": at least --max-loras, which is %d",
			args.MaxCPULoRAs, max(args.MaxLoRAs, 1))
	}
	return args, nil
}

// skipCommand removes the words that only say which program is meant.
func skipCommand(argv []string) []string {
	if len(argv) >= 2 && argv[0] == "-m" && strings.HasPrefix(argv[1], "vllm.") {
		argv = argv[2:]
	}
	// The image's entry point is `vllm serve`, and a pod's command may say it again.
	for _, word := range []string{"vllm", "serve"} {
		if len(argv) > 0 && argv[0] == word {
			argv = argv[1:]
		}
	}
	return argv
}

// parseFlags fills args and returns the words that belong to no flag.
func parseFlags(args *Args, argv []string) (words []string, err error) {
	for i := 0; i < len(argv); i++ {
		word := argv[i]
		if word == "--" {
			return append(words, argv[i+1:]...), nil
		}
		if !looksLikeFlag(word) {
			words = append(words, word)
			continue
		}
		name, value, attached := strings.Cut(word, "=")
		name = normalizeFlag(name)

		known, isKnown := lookupFlag(name)
		if !isKnown {
			ignored := word
			// -O3 carries its value in the same word.
			if !attached && !strings.HasPrefix(name, "-O") && i+1 < len(argv) && !looksLikeFlag(argv[i+1]) {
				i++
				ignored += " " + argv[i]
			}
			args.Ignored = append(args.Ignored, ignored)
			continue
		}

		var values []string
		switch {
		case attached:
			values = []string{value}
		case known.takes == one && i+1 < len(argv) && !looksLikeFlag(argv[i+1]):
			i++
			values = []string{argv[i]}
		case known.takes == several:
			for i+1 < len(argv) && !looksLikeFlag(argv[i+1]) {
				i++
				values = append(values, argv[i])
			}
		}
		switch {
		case known.takes == none && attached:
			return nil, usagef("argument %s: takes no value, found %q", name, value)
		case known.takes == one && len(values) == 0:
			return nil, usagef("argument %s: expected one value, which is %s", name, known.allowed)
		case known.takes == several && len(values) == 0:
			return nil, usagef("argument %s: expected at least one value, which is %s", name, known.allowed)
		}
		if known.set == nil {
			args.Ignored = append(args.Ignored, strings.Join(append([]string{word}, detached(values, attached)...), " "))
			continue
		}
		if bad, ok := known.set(args, values); !ok {
			return nil, usagef("argument %s: invalid value %q: allowed is %s", name, bad, known.allowed)
		}
	}
	return words, nil
}

func detached(values []string, attached bool) []string {
	if attached {
		return nil
	}
	return values
}

var negativeNumber = regexp.MustCompile(`^-(\d+|\d*\.\d+)$`)

// looksLikeFlag follows argparse: a negative number is a value.
func looksLikeFlag(word string) bool {
	return len(word) > 1 && word[0] == '-' && !negativeNumber.MatchString(word)
}

// normalizeFlag turns underscores of a long flag into dashes. The part after a dot
// is a key of a JSON value and stays.
func normalizeFlag(name string) string {
	if !strings.HasPrefix(name, "--") {
		return name
	}
	head, tail, dotted := strings.Cut(name, ".")
	head = strings.ReplaceAll(head, "_", "-")
	if dotted {
		return head + "." + tail
	}
	return head
}

// trimHuggingFace turns hf://org/name:revision into org/name. Names of the hub
// contain no colon.
func trimHuggingFace(model string) string {
	name, isHub := strings.CutPrefix(model, "hf://")
	if !isHub {
		return model
	}
	name, _, _ = strings.Cut(name, ":")
	return name
}

// cutConfig takes --config out of argv and returns the flags of its file.
func cutConfig(argv []string) (rest, config []string, err error) {
	for i, word := range argv {
		name, path, attached := strings.Cut(word, "=")
		if name != "--config" {
			continue
		}
		next := i + 1
		if !attached {
			if next == len(argv) {
				return nil, nil, usagef("argument --config: expected one value, which is a YAML file of flags")
			}
			path = argv[next]
			next++
		}
		config, err = readConfig(path)
		return slices.Concat(argv[:i], argv[next:]), config, err
	}
	return argv, nil, nil
}

// readConfig turns a YAML map of flag names to values into flags, sorted by name.
// As in vLLM, false leaves a switch at its default.
func readConfig(path string) ([]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, usagef("argument --config: %v", err)
	}
	var values map[string]any
	if err := yaml.Unmarshal(data, &values); err != nil {
		return nil, usagef("argument --config: %s: expected a map of flag names to values: %v", path, err)
	}
	var flags []string
	for _, name := range slices.Sorted(maps.Keys(values)) {
		flag := "--" + name
		switch value := values[name].(type) {
		case bool:
			if value {
				flags = append(flags, flag)
			}
		case []any:
			flags = append(flags, flag)
			for _, v := range value {
				flags = append(flags, configValue(v))
			}
		default:
			flags = append(flags, flag+"="+configValue(value))
		}
	}
	return flags, nil
}

// configValue spells a YAML value as on the command line: structures as JSON.
func configValue(v any) string {
	if s, ok := v.(string); ok {
		return s
	}
	data, _ := json.Marshal(v) // what YAML decodes to can always be encoded
	return string(data)
}
