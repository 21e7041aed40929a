package strictyaml

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

type document struct {
	Name   string            `json:"name"`
	Count  *int              `json:"count"`
	Labels map[string]string `json:"labels"`
	ByID   map[int]item      `json:"byID"`
	Items  []item            `json:"items"`
}

type item struct {
	Set  bool  `json:"set"`
	Size int64 `json:"size"`
}

func TestDecodeFaults(t *testing.T) {
	for name, test := range map[string]struct {
		yaml string
		want []string
	}{
		"nothing wrong":        {yaml: "# comment\n---\nname: a\ncount: 3\nlabels: {a: b}\nbyID: {7: {size: 1}}\nitems: [{set: true}]\n"},
		"empty file":           {yaml: ""},
		"null is not set":      {yaml: "name: null\nitems:\nlabels: ~\n"},
		"unknown field":        {yaml: "nam: a", want: []string{"nam: unknown field; known here: byID, count, items, labels, name"}},
		"wrong case":           {yaml: "Name: a", want: []string{"Name: unknown field; known here: byID, count, items, labels, name"}},
		"unknown nested field": {yaml: "items: [{}, {sise: 1}]", want: []string{"items[1].sise: unknown field; known here: set, size"}},
		"repeated field":       {yaml: "name: a\nname: b", want: []string{"not valid YAML: yaml: unmarshal errors:\n  line 2: key \"name\" already set in map"}},
		"number for a string":  {yaml: "name: 13.0", want: []string{"name: must be a string, not the number 13 (put it in quotes)"}},
		"boolean for a label":  {yaml: "labels: {gpu: true}", want: []string{"labels.gpu: must be a string, not the boolean true (put it in quotes)"}},
		"string for a number":  {yaml: "count: two", want: []string{`count: must be an integer, not the string "two"`}},
		"fraction":             {yaml: "count: 1.5", want: []string{"count: must be an integer, not the number 1.5"}},
		"number too large":     {yaml: "items: [{size: 9223372036854775808}]", want: []string{"items[0].size: must be an integer, not the number 9223372036854775808"}},
		"list for an object":   {yaml: "labels: [a]", want: []string{"labels: must be an object, not a list"}},
		"object for a list":    {yaml: "items: {set: true}", want: []string{"items: must be a list, not an object"}},
		"string for a boolean": {yaml: `items: [{set: "true"}]`, want: []string{`items[0].set: must be true or false, not the string "true"`}},
		"key is no integer":    {yaml: "byID: {x: {}}", want: []string{"byID.x: key must be an integer"}},
		"list as document":     {yaml: "- name: a", want: []string{"must be an object, not a list"}},
		"second document":      {yaml: "name: a\n---\nname: b\n", want: []string{"more than one YAML document; a file holds exactly one"}},
		"all at once": {yaml: "items: [{size: x, sise: 1}]\nname: 5\nfoo: 1", want: []string{
			"foo: unknown field; known here: byID, count, items, labels, name",
			"items[0].sise: unknown field; known here: set, size",
			`items[0].size: must be an integer, not the string "x"`,
			"name: must be a string, not the number 5 (put it in quotes)",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, fault := range Decode([]byte(test.yaml), &document{}) {
				got = append(got, fault.String())
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("faults (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDecodeKeepsWhatIsRight(t *testing.T) {
	var got document
	faults := Decode([]byte("name: a\ncount: x\nitems: [{size: 4, set: 1}]\nbyID: {3: {size: 9}}"), &got)
	if len(faults) != 2 {
		t.Errorf("got faults %v, want two", faults)
	}
	want := document{Name: "a", Items: []item{{Size: 4}}, ByID: map[int]item{3: {Size: 9}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("document (-want +got):\n%s", diff)
	}
}

func TestFaults(t *testing.T) {
	var faults Faults
	if err := faults.Err("file"); err != nil {
		t.Errorf("without faults: got %v", err)
	}
	faults.Add("a", "is %s", "bad")
	faults.Add("a", "follows from the first")
	if got, want := faults.Err("file").Error(), "file: a: is bad"; got != want {
		t.Errorf("one fault: got %q, want %q", got, want)
	}
	faults.Add("", "is incomplete")
	if got, want := faults.Err("file").Error(), "file: 2 faults:\n- a: is bad\n- is incomplete"; got != want {
		t.Errorf("two faults: got %q, want %q", got, want)
	}
}
