package chart

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	goyaml "sigs.k8s.io/yaml/goyaml.v3"
)

var update = flag.Bool("update", false, "rewrite the values table of the chart's README.md")

const (
	tableBegin = "<!-- values: made from values.yaml by `go test ./chart -update` in e2e/ -->\n"
	tableEnd   = "<!-- end of values -->\n"
)

func TestReadmeHasTheValues(t *testing.T) {
	path := filepath.Join(chartDir, "README.md")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), tableBegin)
	table, after, ended := strings.Cut(rest, tableEnd)
	if !found || !ended {
		t.Fatalf("%s has no lines %q and %q to put the table between", path, tableBegin, tableEnd)
	}
	want := valuesTable(t)
	if *update {
		if err := os.WriteFile(path, []byte(before+tableBegin+want+tableEnd+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if table != want {
		t.Errorf("the values table of %s is not that of values.yaml; `cd e2e && go test ./chart -update` rewrites it. Want:\n%s", path, want)
	}
}

func valuesTable(t *testing.T) string {
	t.Helper()
	var table strings.Builder
	table.WriteString("| value | default | meaning |\n|---|---|---|\n")
	for _, value := range chartValues(t) {
		if value.meaning == "" {
			t.Errorf("%s has no comment in values.yaml", value.key)
		}
		fmt.Fprintf(&table, "| `%s` | `%s` | %s |\n", value.key, value.def, value.meaning)
	}
	return table.String()
}

// chartValue is one key of values.yaml that can be set.
type chartValue struct {
	key     string // image.tag
	def     string // in YAML's flow style
	meaning string // its comment
}

// valueKeys are the keys of values.yaml in the order of the file.
func valueKeys(t *testing.T) []string {
	t.Helper()
	var keys []string
	for _, value := range chartValues(t) {
		keys = append(keys, value.key)
	}
	return keys
}

func chartValues(t *testing.T) []chartValue {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(chartDir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var document goyaml.Node
	if err := goyaml.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	return flatten(t, "", document.Content[0])
}

func flatten(t *testing.T, prefix string, mapping *goyaml.Node) []chartValue {
	t.Helper()
	var values []chartValue
	for i := 0; i < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		if value.Kind == goyaml.MappingNode && len(value.Content) > 0 {
			values = append(values, flatten(t, prefix+key.Value+".", value)...)
			continue
		}
		values = append(values, chartValue{prefix + key.Value, flow(t, value), prose(key.HeadComment)})
	}
	return values
}

// flow writes a value on one line.
func flow(t *testing.T, value *goyaml.Node) string {
	t.Helper()
	plain := *value
	if plain.Kind != goyaml.ScalarNode {
		plain.Style = goyaml.FlowStyle
	}
	text, err := goyaml.Marshal(&plain)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(text)), " ")
}

func prose(comment string) string {
	var words []string
	for line := range strings.Lines(comment) {
		words = append(words, strings.Fields(strings.TrimPrefix(line, "#"))...)
	}
	return strings.ReplaceAll(strings.Join(words, " "), "|", `\|`)
}
