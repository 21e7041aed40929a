// Package strictyaml decodes the YAML files people write for simgpu and collects everything that is
// wrong with one, so that a person corrects it in one go. It owns the comparison of a document with a
// Go type; what the values mean is for the caller, who adds its own findings to the same [Faults].
package strictyaml

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// Fault is one thing wrong with a document.
type Fault struct {
	Path    string // of the field, e.g. rules[0].gpus[1].count; "" for the document as a whole
	Problem string
}

func (f Fault) String() string {
	if f.Path == "" {
		return f.Problem
	}
	return f.Path + ": " + f.Problem
}

// Faults collects what is wrong with a document, in the order found.
type Faults []Fault

// Add notes a fault. A field keeps its first fault only: what follows from it is noise.
func (f *Faults) Add(path, format string, args ...any) {
	if f.At(path) {
		return
	}
	*f = append(*f, Fault{Path: path, Problem: fmt.Sprintf(format, args...)})
}

// At is true when a fault of exactly that field was noted.
func (f *Faults) At(path string) bool {
	return slices.ContainsFunc(*f, func(g Fault) bool { return g.Path == path })
}

// Err returns nil without faults, and otherwise one error that lists them all after the name of the
// document.
func (f Faults) Err(document string) error {
	switch len(f) {
	case 0:
		return nil
	case 1:
		return fmt.Errorf("%s: %s", document, f[0])
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d faults:", document, len(f))
	for _, fault := range f {
		fmt.Fprintf(&b, "\n- %s", fault)
	}
	return errors.New(b.String())
}

// separator starts a further document. YAML allows it at the start of a line only.
var separator = regexp.MustCompile(`(?m)^---(\s|$)`)

// Decode reads the one YAML document in data into v, a pointer to a struct with json tags. Unknown
// and repeated fields, values of another type and further documents are faults; what is right is
// decoded all the same, so that the caller can look for more. Field names are case-sensitive.
// Structs, pointers, slices, maps, strings, booleans and signed integers are supported.
func Decode(data []byte, v any) Faults {
	var faults Faults
	if start := separator.FindAllIndex(data, 2); len(start) == 2 || len(start) == 1 && hasContent(data[:start[0][0]]) {
		faults.Add("", "more than one YAML document; a file holds exactly one")
		return faults
	}
	asJSON, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		faults.Add("", "not valid YAML: %v", err)
		return faults
	}
	decoder := json.NewDecoder(bytes.NewReader(asJSON))
	decoder.UseNumber()
	var tree any
	if err := decoder.Decode(&tree); err != nil && !errors.Is(err, io.EOF) {
		faults.Add("", "not valid YAML: %v", err)
		return faults
	}

	tree = fit(tree, reflect.TypeOf(v).Elem(), "", &faults)
	fitting, err := json.Marshal(tree)
	if err == nil {
		err = json.Unmarshal(fitting, v)
	}
	if err != nil {
		faults.Add("", "cannot be decoded: %v", err)
	}
	return faults
}

// hasContent is true when something other than comments and blank lines stands in data.
func hasContent(data []byte) bool {
	for line := range bytes.Lines(data) {
		if line = bytes.TrimSpace(line); len(line) > 0 && line[0] != '#' {
			return true
		}
	}
	return false
}

// fit returns the part of value that has type t and notes the rest. Null fits everything: it is how
// a template writes "not set".
func fit(value any, t reflect.Type, path string, faults *Faults) any {
	if value == nil {
		return nil
	}
	switch t.Kind() {
	case reflect.Pointer:
		return fit(value, t.Elem(), path, faults)
	case reflect.Struct:
		if object, ok := value.(map[string]any); ok {
			return fitStruct(object, t, path, faults)
		}
	case reflect.Map:
		if object, ok := value.(map[string]any); ok {
			return fitMap(object, t, path, faults)
		}
	case reflect.Slice:
		if list, ok := value.([]any); ok {
			for i := range list {
				list[i] = fit(list[i], t.Elem(), fmt.Sprintf("%s[%d]", path, i), faults)
			}
			return list
		}
	case reflect.String:
		if text, ok := value.(string); ok {
			return text
		}
	case reflect.Bool:
		if truth, ok := value.(bool); ok {
			return truth
		}
	case reflect.Int, reflect.Int64:
		if number, ok := value.(json.Number); ok {
			if n, err := strconv.ParseInt(number.String(), 10, t.Bits()); err == nil {
				return n
			}
		}
	default:
		panic(fmt.Sprintf("strictyaml: type %v is not supported", t))
	}
	faults.Add(path, "must be %s, not %s", wanted(t), found(value, t))
	return nil
}

func fitStruct(object map[string]any, t reflect.Type, path string, faults *Faults) any {
	fields := map[string]reflect.Type{}
	for i := range t.NumField() {
		if name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ","); name != "" {
			fields[name] = t.Field(i).Type
		}
	}
	fitting := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(object)) {
		at := join(path, name)
		if t, known := fields[name]; known {
			fitting[name] = fit(object[name], t, at, faults)
		} else {
			faults.Add(at, "unknown field; known here: %s", strings.Join(slices.Sorted(maps.Keys(fields)), ", "))
		}
	}
	return fitting
}

func fitMap(object map[string]any, t reflect.Type, path string, faults *Faults) any {
	fitting := map[string]any{}
	for _, key := range slices.Sorted(maps.Keys(object)) {
		at := join(path, key)
		if t.Key().Kind() == reflect.Int {
			if _, err := strconv.Atoi(key); err != nil {
				faults.Add(at, "key must be an integer")
				continue
			}
		}
		fitting[key] = fit(object[key], t.Elem(), at, faults)
	}
	return fitting
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		return "an object"
	case reflect.Slice:
		return "a list"
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	}
	return "an integer"
}

func found(value any, t reflect.Type) string {
	quote := ""
	if t.Kind() == reflect.String {
		quote = " (put it in quotes)"
	}
	switch value := value.(type) {
	case map[string]any:
		return "an object"
	case []any:
		return "a list"
	case string:
		return fmt.Sprintf("the string %q", value)
	case bool:
		return fmt.Sprintf("the boolean %t%s", value, quote)
	}
	return fmt.Sprintf("the number %v%s", value, quote)
}
