// Package docs tests that the documentation is true where that can be told.
package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	// row is a line of the table: number, reports, what goes wrong, what simgpu does, tests.
	row = regexp.MustCompile(`(?m)^\| (\d+) \|(.*)\|(.*)\|(.*)\|(.*)\|$`)
	// named is a test with its file.
	named = regexp.MustCompile("`([^`]+_test\\.go):((?:Test|Fuzz)\\w+)`")
)

// TestFieldReports checks that each kind of fault in the table has at least one test, and that each test named there
// exists.
func TestFieldReports(t *testing.T) {
	text, err := os.ReadFile("field-reports.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := row.FindAllStringSubmatch(string(text), -1)
	if len(rows) != 32 {
		t.Errorf("%d kinds of faults, want 32", len(rows))
	}
	for i, r := range rows {
		if r[1] != fmt.Sprint(i+1) {
			t.Errorf("row %s is in the place of %d", r[1], i+1)
		}
		for column, cell := range r[2:] {
			if strings.TrimSpace(cell) == "" {
				t.Errorf("row %s: column %d is empty", r[1], column+2)
			}
		}
		if !named.MatchString(r[5]) {
			t.Errorf("row %s names no test", r[1])
		}
	}
	for _, test := range named.FindAllStringSubmatch(string(text), -1) {
		code, err := os.ReadFile(filepath.Join("..", test[1]))
		if err != nil {
			t.Error(err)
			continue
		}
		if !strings.Contains(string(code), "\nfunc "+test[2]+"(") {
			t.Errorf("%s has no %s", test[1], test[2])
		}
	}
}
