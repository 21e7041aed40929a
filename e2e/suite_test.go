// Package e2e holds the tests that run on a real cluster with the default feature gates. `make e2e` runs them, and those
// of the packages below that have a cluster of their own.
package e2e

import (
	"testing"

	"github.com/simgpu/simgpu/e2e/harness"
)

// suite is a cluster with one node and one simulated H100.
var suite *harness.Suite

func TestMain(m *testing.M) { harness.Main(m, &suite, harness.Config{Name: "e2e"}) }
