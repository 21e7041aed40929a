package main

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"
)

func run(t *testing.T, args ...string) (stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := newCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	return out.String(), errs.String()
}

func TestQuickRun(t *testing.T) {
	table, progress := run(t, "--quick", "--times=0")
	for _, want := range []string{"vendor", "NVIDIA", "packed", "adaptive", "offline", "repacking", "bimodal", "packed lists the devices of each kind in the same order as NVIDIA"} {
		if !strings.Contains(table, want) {
			t.Errorf("the table does not mention %q:\n%s", want, table)
		}
	}
	if !strings.Contains(progress, "mix uniform") {
		t.Errorf("progress: %q", progress)
	}
	if again, _ := run(t, "--quick", "--times=0"); again != table {
		t.Error("other figures for the same seed")
	}
}

func TestJSON(t *testing.T) {
	out, _ := run(t, "--quick", "-o", "json")
	var r report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Large) != 6 || len(r.Small) != 6 || len(r.Timing) != 4 || r.Skipped != 0 {
		t.Errorf("%d large, %d small cells, %d times, %d skipped", len(r.Large), len(r.Small), len(r.Timing), r.Skipped)
	}
	for _, c := range append(r.Large, r.Small...) {
		for name, f := range c.Acceptance {
			if f.Mean <= 0 || f.Mean > 100 || math.IsNaN(f.GainCI) {
				t.Errorf("%s, %s: %+v", c.Mix, name, f)
			}
		}
	}
	for _, c := range r.Small {
		for name, f := range c.Acceptance {
			if best := c.Acceptance[offline]; f.Mean > best.Mean+1e-9 {
				t.Errorf("%s: %s accepts %v, more than the optimum %v", c.Mix, name, f.Mean, best.Mean)
			}
		}
	}
}

func TestSpread(t *testing.T) {
	mean, ci := spread([]float64{1, 2, 3, 4, 5})
	if mean != 3 || math.Abs(ci-2.776*math.Sqrt(2.5/5)) > 1e-9 {
		t.Errorf("got %v ± %v", mean, ci)
	}
}

func TestMixesThatAModelCannotServeAreLeftOut(t *testing.T) {
	out, progress := run(t, "--quick", "--times=0", "--small-claims=0", "--model=a100-40gb")
	if !strings.Contains(progress, "left out: mix bimodal: a GPU of model a100-40gb that is partitioned does not offer itself as a whole") || strings.Contains(out, "bimodal") {
		t.Errorf("progress:\n%s\ntable:\n%s", progress, out)
	}
}

func TestBadFlags(t *testing.T) {
	for want, args := range map[string][]string{
		"known: json, table": {"-o", "xml"},
		"at least 2":         {"--seeds=1"},
		"unknown model":      {"--model=abacus"},
	} {
		cmd := newCommand()
		cmd.SetArgs(args)
		cmd.SetOut(&bytes.Buffer{})
		cmd.SetErr(&bytes.Buffer{})
		if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: got %v, want %q", args, err, want)
		}
	}
}
