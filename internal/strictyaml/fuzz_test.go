package strictyaml

import (
	"encoding/json"
	"reflect"
	"testing"
)

type fuzzed struct {
	Text    string            `json:"text"`
	Number  int64             `json:"number"`
	Pointer *int              `json:"pointer"`
	Truth   bool              `json:"truth"`
	List    []fuzzed          `json:"list"`
	Map     map[string]string `json:"map"`
	ByIndex map[int]bool      `json:"byIndex"`
}

// FuzzDecode checks that what is accepted without faults loses nothing: written as JSON and read again it is the same.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		"", "---", "null", "text: a", "text: 1", "number: 1e3", "number: 9223372036854775808", "number: 0x10", "pointer: ~",
		"list: [{text: a}, {list: [{}]}]", "map: {a: b, a: c}", "byIndex: {1: true, x: false}", "a: &a [*a]", "text: !!binary aGk=",
		"text: a\n---\ntext: b", "# only a comment", "? {a: b} : c", "text: \"\\ud800\"", "&a text: *a",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var v fuzzed
		if faults := Decode(data, &v); len(faults) > 0 {
			if faults.Err("document") == nil {
				t.Error("faults without an error")
			}
			return
		}
		written, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		var again fuzzed
		if faults := Decode(written, &again); len(faults) > 0 {
			t.Fatalf("%s: %v", written, faults)
		}
		rewritten, err := json.Marshal(again)
		if err != nil || !reflect.DeepEqual(written, rewritten) {
			t.Errorf("%s became %s: %v", written, rewritten, err)
		}
	})
}
