package conformance

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Level says how binding a rule is.
type Level string

const (
	// Must is for rules without which workloads fail, or get what is not theirs.
	Must Level = "MUST"
	// Should is for rules without which operating the driver is harder than it has to be.
	Should Level = "SHOULD"
	// May is for what a driver is free to do, and better does.
	May Level = "MAY"
)

// ParseLevel returns the level of that name in upper or lower case.
func ParseLevel(name string) (Level, error) {
	level := Level(strings.ToUpper(name))
	if !slices.Contains([]Level{Must, Should, May}, level) {
		return "", fmt.Errorf("unknown level %q; known: must, should, may", name)
	}
	return level, nil
}

// includes is true if checks of level o run where l is asked for.
func (l Level) includes(o Level) bool {
	order := []Level{Must, Should, May}
	return slices.Index(order, o) <= slices.Index(order, l)
}

// Check is one rule.
type Check struct {
	// Name is area/rule, in lower case with hyphens. It never changes once it has been released: results are compared by it.
	Name  string
	Level Level
	// Asserts says in a sentence what is true of a driver that passes.
	Asserts string
	// Source is where the rule is written: a document, a KEP, a comment in the API, the code that depends on it.
	Source string
	// Fix says what the author of a driver that fails should look at.
	Fix string

	// takes is roughly how long a driver that passes keeps the check waiting, where that is long.
	takes time.Duration
	// last is for checks that look at what the driver has done all the time: they are made when the others are done.
	last bool
	run  func(*T)
}

// Checks returns all checks in the order in which they run: by area, and within an area from what others rest on to what
// is special.
func Checks() []Check {
	return slices.Concat(registrationChecks(), resourceSliceChecks(), prepareChecks(), cdiChecks(), unprepareChecks(), recoveryChecks(),
		healthChecks(), loadChecks(), securityChecks())
}

// FindCheck returns the check of that name.
func FindCheck(name string) (Check, error) {
	for _, check := range Checks() {
		if check.Name == name {
			return check, nil
		}
	}
	return Check{}, fmt.Errorf("there is no check %q; \"dra-conformance list\" shows all", name)
}
