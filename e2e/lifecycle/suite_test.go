// Package lifecycle holds the tests that update and remove the driver while pods use it. They have a cluster of their own,
// since they leave nothing of an installed driver as it was.
package lifecycle

import (
	"testing"

	"github.com/simgpu/simgpu/e2e/harness"
)

// suite is a cluster with one node and one simulated H100.
var suite *harness.Suite

func TestMain(m *testing.M) { harness.Main(m, &suite, harness.Config{Name: "lifecycle"}) }
