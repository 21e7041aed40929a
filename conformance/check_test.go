package conformance

import (
	"regexp"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

func TestChecksAreDocumented(t *testing.T) {
	name := regexp.MustCompile(`^[a-z]+/[a-z0-9-]+$`)
	seen := map[string]bool{}
	for _, check := range Checks() {
		if !name.MatchString(check.Name) || seen[check.Name] {
			t.Errorf("the name %q is not area/rule or is there twice", check.Name)
		}
		seen[check.Name] = true
		if _, err := ParseLevel(string(check.Level)); err != nil {
			t.Errorf("%s: %v", check.Name, err)
		}
		if !strings.HasSuffix(check.Asserts, ".") && !strings.HasSuffix(check.Asserts, ")") {
			t.Errorf("%s asserts %q, which is no sentence", check.Name, check.Asserts)
		}
		if check.Source == "" || check.Fix == "" || check.run == nil {
			t.Errorf("%s has no source, no fix or no function", check.Name)
		}
	}
}

func TestLevels(t *testing.T) {
	for _, test := range []struct {
		asked Level
		runs  []Level
		not   []Level
	}{
		{Must, []Level{Must}, []Level{Should, May}},
		{Should, []Level{Must, Should}, []Level{May}},
		{May, []Level{Must, Should, May}, nil},
	} {
		for _, level := range test.runs {
			if !test.asked.includes(level) {
				t.Errorf("%s does not include %s", test.asked, level)
			}
		}
		for _, level := range test.not {
			if test.asked.includes(level) {
				t.Errorf("%s includes %s", test.asked, level)
			}
		}
	}
	if level, err := ParseLevel("should"); err != nil || level != Should {
		t.Errorf("should is %q, %v", level, err)
	}
	if _, err := ParseLevel("shall"); err == nil {
		t.Error("there is no level shall")
	}
}

func TestSelect(t *testing.T) {
	names := func(opts Options) (names []string) {
		for _, check := range opts.selected() {
			names = append(names, check.Name)
		}
		return names
	}
	all := len(Checks())
	if got := names(Options{Level: May}); len(got) != all {
		t.Errorf("%d of %d checks", len(got), all)
	}
	focus, skip := regexp.MustCompile("^unprepare/"), regexp.MustCompile("twice")
	got := names(Options{Level: May, Focus: focus, Skip: skip})
	if len(got) < 5 || strings.Contains(strings.Join(got, " "), "twice") || !strings.HasPrefix(got[0], "unprepare/") {
		t.Errorf("focus and skip select %v", got)
	}
	for _, check := range (Options{Level: Must}).selected() {
		if check.Level != Must {
			t.Errorf("%s runs with level must", check.Name)
		}
	}
	if _, err := Run(t.Context(), Options{DriverCommand: "true", Focus: regexp.MustCompile("nothing")}); err == nil {
		t.Error("a run without checks succeeds")
	}
	if _, err := Run(t.Context(), Options{DriverCommand: "driver {{.Kubeconfg}}"}); err == nil || !strings.Contains(err.Error(), "Kubeconfg") {
		t.Errorf("a command with an unknown name: %v", err)
	}
}

func TestStringLike(t *testing.T) {
	for value, ok := range map[string]bool{"pci0000:3a": true, "pci0000": false, "0000:3a": false} {
		if err := stringLike(stringAttribute(value), "pci", "pci0000:3a"); (err == nil) != ok {
			t.Errorf("%q: %v", value, err)
		}
	}
}

func stringAttribute(value string) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{StringValue: &value}
}
