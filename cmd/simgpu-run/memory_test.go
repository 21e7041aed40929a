package main

import (
	"math"
	"strings"
	"testing"
)

func TestParseAmount(t *testing.T) {
	const total = 40448 << 20
	tests := map[string]struct {
		text string
		want int64 // on a device of total bytes
	}{
		"MiB":                {"15023MiB", 15023 << 20},
		"a Kubernetes unit":  {"15023Mi", 15023 << 20},
		"GiB with a point":   {"14.5GiB", 29 << 29},
		"GiB, rounded down":  {"0.000000001GiB", 1},
		"decimal gigabytes":  {"15GB", 15_000_000_000},
		"decimal megabytes":  {"1.5 MB", 1_500_000},
		"kilobytes":          {"2kB", 2000},
		"KiB":                {"2KiB", 2048},
		"TiB":                {"1TiB", 1 << 40},
		"bytes":              {"12345", 12345},
		"bytes with a unit":  {"12345B", 12345},
		"lower case":         {"1gib", 1 << 30},
		"nothing":            {"0", 0},
		"a share":            {"90%", 38171521843}, // 38171521843.2 rounded down
		"a share in full":    {"100%", total},
		"a share in part":    {"33.3%", 14123463081}, // 14123463081.9 rounded down
		"a share of nothing": {"0%", 0},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			a, err := parseAmount(test.text)
			if err != nil {
				t.Fatal(err)
			}
			if got := a.of(total); got != test.want {
				t.Errorf("%s is %d bytes, want %d", test.text, got, test.want)
			}
		})
	}
}

func TestParseAmountRefuses(t *testing.T) {
	tests := map[string]struct{ text, want string }{
		"nothing":                {"", "want a number and a unit"},
		"no number":              {"MiB", "want a number and a unit"},
		"a negative number":      {"-1MiB", "want a number and a unit"},
		"two points":             {"1.2.3GiB", "want a number and a unit"},
		"an exponent":            {"1e3", "want a number and a unit"},
		"an unknown unit":        {"1PiB", `unit "PiB" is not known`},
		"bits":                   {"1Mibit", `unit "Mibit" is not known`},
		"more than all":          {"101%", "only 100%"},
		"more than a number can": {"9223372036854775807TiB", "out of range"},
		"a very long number":     {strings.Repeat("9", 50), "want a number and a unit"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if _, err := parseAmount(test.text); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("parseAmount(%q) gives %v, want an error that says %q", test.text, err, test.want)
			}
		})
	}
}

func FuzzParseAmount(f *testing.F) {
	for _, seed := range []string{"15023MiB", "90%", "1.5 GB", "9223372036854775807", "0.000000001TiB", "12k"} {
		f.Add(seed, int64(40448<<20))
	}
	f.Fuzz(func(t *testing.T, text string, total int64) {
		a, err := parseAmount(text)
		if err != nil || total < 0 {
			return
		}
		bytes := a.of(total)
		if bytes < 0 || bytes > math.MaxInt64/2 && a.share == nil || a.share != nil && bytes > total {
			t.Errorf("parseAmount(%q).of(%d) = %d", text, total, bytes)
		}
	})
}
