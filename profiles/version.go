package profiles

import (
	"cmp"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// dotted is a version of one to three numbers, such as 580, 525.125 or 580.95.05.
var dotted = regexp.MustCompile(`^[0-9]{1,9}(\.[0-9]{1,9}){0,2}$`)

// numbers splits a dotted version.
func numbers(version string) []int {
	var parts []int
	for part := range strings.SplitSeq(version, ".") {
		n, _ := strconv.Atoi(part) // dotted has matched
		parts = append(parts, n)
	}
	return parts
}

// compareVersions compares as many numbers as both versions have, so that 580.95.05 equals 580.
func compareVersions(a, b string) int {
	left, right := numbers(a), numbers(b)
	for i := range min(len(left), len(right)) {
		if c := cmp.Compare(left[i], right[i]); c != 0 {
			return c
		}
	}
	return 0
}

// SemanticVersion is a dotted version as the API wants version attributes: three numbers without
// leading zeros. 580.95.05 becomes 580.95.5, and 13.0 becomes 13.0.0.
func SemanticVersion(version string) string {
	parts := append(numbers(version), 0, 0)
	return fmt.Sprintf("%d.%d.%d", parts[0], parts[1], parts[2])
}
