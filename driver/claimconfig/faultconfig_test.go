package claimconfig

import (
	"strings"
	"testing"
)

func faultConfig(times string) string {
	return `{"apiVersion":"simgpu.dev/v1alpha1","kind":"FaultConfig","faults":[{"type":"FailPrepare","times":` + times + `}]}`
}

func TestFaultsInForce(t *testing.T) {
	for name, test := range map[string]struct {
		entries []entry
		want    string // "<place>: <fault>" of each
	}{
		"none":               {nil, ""},
		"of a class":         {[]entry{fromClass(faultConfig("1"))}, "config[0].faults[0]: FailPrepare once"},
		"for all, each once": {[]entry{fromClaim(faultConfig("2"))}, "config[0].faults[0]: FailPrepare 2 times"},
		"claim over class": {
			[]entry{fromClaim(faultConfig("2")), fromClass(faultConfig("1"))}, "config[0].faults[0]: FailPrepare 2 times"},
		"later over earlier": {
			[]entry{fromClaim(faultConfig("2")), fromClaim(faultConfig("3"))}, "config[1].faults[0]: FailPrepare 3 times"},
		"per request": {
			[]entry{fromClaim(faultConfig("2"), "a"), fromClaim(faultConfig("3"), "b")}, "config[0].faults[0]: FailPrepare 2 times, config[1].faults[0]: FailPrepare 3 times"},
		"another request":    {[]entry{fromClaim(faultConfig("2"), "nic")}, ""},
		"beside a GpuConfig": {[]entry{fromClaim(faultConfig("2")), fromClaim(gpu("Long"))}, "config[0].faults[0]: FailPrepare 2 times"},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := Faults(allocated([]string{"a", "b"}, test.entries...), driver)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range list {
				got = append(got, f.ID+": "+f.String())
			}
			if strings.Join(got, ", ") != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestFaultConfigReplacesNoOtherKind(t *testing.T) {
	set, err := Parse(allocated([]string{"a"}, fromClass(gpu("Short")), fromClaim(faultConfig("2"), "a")), driver, kinds)
	if err != nil {
		t.Fatal(err)
	}
	for partition, want := range map[bool]string{false: "strategy=TimeSlicing,interval=Short", true: ""} {
		config, err := set.For("a", partition)
		got := ""
		if config != nil {
			got = config.Sharing.String()
		}
		if err != nil || got != want {
			t.Errorf("partition %t: %q, %v; want %q", partition, got, err, want)
		}
	}
}

func TestFaultyFaultConfigIsRefused(t *testing.T) {
	claim := allocated([]string{"a"}, fromClaim(strings.Replace(faultConfig("2"), "times", "tims", 1), "a"))
	_, parseErr := Parse(claim, driver, kinds)
	_, faultsErr := Faults(claim, driver)
	for _, err := range []error{parseErr, faultsErr} {
		if err == nil {
			t.Fatal("accepted")
		}
		for _, want := range []string{"team/llama", "config[0] (FromClaim, request a)", "FaultConfig", "faults[0].tims: unknown field"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q does not mention %q", err, want)
			}
		}
	}
}
