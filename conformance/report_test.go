package conformance

import (
	"bytes"
	"flag"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the files that tests compare with")

// everyOutcome is a report with each outcome once.
func everyOutcome() *Report {
	return &Report{
		Driver: "gadget.example.com", Kubernetes: "v1.37.2", Duration: 83 * time.Second,
		Results: []Result{
			{Check: "registration/get-info", Level: Must, Outcome: Passed, Duration: 120 * time.Millisecond},
			{Check: "prepare/same-answer-twice", Level: Must, Outcome: Failed, Duration: 2 * time.Second,
				Messages: []string{"the answers for one claim differ:\na\nand\nb", "and <more> & worse"},
				Evidence: []Evidence{{"10:00:00.000 NodePrepareResources request", `{"claims":[]}`}}},
			{Check: "cdi/injects", Level: Must, Outcome: Skipped, Messages: []string{"no devices"}},
			{Check: "unprepare/twice", Level: Should, Outcome: Known, Messages: []string{"known: issue 7", "it fails"}},
			{Check: "unprepare/after-prepare", Level: Must, Outcome: Fixed},
			{Check: "load/cycles", Level: Should, Outcome: Passed, Notes: []string{"200 cycles: prepare takes 3ms (50%)"}},
		},
	}
}

func TestReports(t *testing.T) {
	report := everyOutcome()
	for file, write := range map[string]func(io.Writer) error{
		"report.txt": report.WriteTable, "report.json": report.WriteJSON, "junit.xml": report.WriteJUnit,
	} {
		t.Run(file, func(t *testing.T) {
			var got bytes.Buffer
			if err := write(&got); err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", file)
			if *update {
				if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got.String() != string(want) {
				t.Errorf("got\n%s\nwant\n%s\ngo test -run %s -update writes it", got.String(), want, t.Name())
			}
		})
	}
}

func TestConformsUnlessAMustFails(t *testing.T) {
	for outcome, conforms := range map[Outcome]bool{Passed: true, Failed: false, Skipped: true, Known: true, Fixed: true} {
		if got := (&Report{Results: []Result{{Level: Must, Outcome: outcome}}}).Conforms(); got != conforms {
			t.Errorf("%s: %t", outcome, got)
		}
	}
	if !(&Report{Results: []Result{{Level: Should, Outcome: Failed}}}).Conforms() {
		t.Error("a SHOULD that fails counts")
	}
}
