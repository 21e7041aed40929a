package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/simgpu/simgpu/e2e/harness"
)

// TestMetricsNameThePod has a pod hold memory of a partition: the metrics of the GPU say how much, and which pod it is.
// The driver, root without capabilities, learns that from the kubelet.
func TestMetricsNameThePod(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("slice", harness.Partition("slice", "3g.40gb")))
	server := harness.Pod("server", []harness.Use{{Claim: "slice"}})
	server.Spec.Containers[0].Command = []string{"simgpu-run", "--memory", "15023MiB", "--utilization", "60", "--", "sleep", "infinity"}
	suite.Running(t, suite.CreatePod(t, ns, server))

	suite.Eventually(t, "the memory to show", func(ctx context.Context) error {
		page, err := suite.Scrape(ctx, t, 9400)
		if err != nil {
			return err
		}
		for line := range strings.Lines(page) {
			if !strings.HasPrefix(line, "DCGM_FI_DEV_FB_USED{") || !strings.HasSuffix(line, " 15023\n") {
				continue
			}
			for _, label := range []string{
				`pod="server"`, `namespace="` + ns + `"`, `container="c0"`, `GPU_I_PROFILE="3g.40gb"`, `dra_claim_name="slice"`,
				`dra_driver_name="gpu.nvidia.com"`, `modelName="NVIDIA H100 80GB HBM3"`,
			} {
				if !strings.Contains(line, label) {
					return fmt.Errorf("%s is missing in %s", label, line)
				}
			}
			if !strings.Contains(page, "\nDCGM_FI_PROF_GR_ENGINE_ACTIVE{") || strings.Contains(page, "\nDCGM_FI_DEV_GPU_UTIL{") {
				return fmt.Errorf("a GPU in MIG mode has a utilization, or its partition has no activity:\n%s", page)
			}
			return nil
		}
		return fmt.Errorf("nothing has 15023 MiB in use:\n%s", page)
	})

	page, err := suite.Scrape(t.Context(), t, 8080)
	if err != nil {
		t.Fatal(err)
	}
	for _, series := range []string{"simgpu_claims_prepared 1", "simgpu_devices_prepared 1", `simgpu_api_feature_missing{feature="DRAPartitionableDevices"} 0`, `simgpu_api_requests_total{code="200",resource="resourceclaims",verb="get"}`} {
		if !strings.Contains(page, "\n"+series) {
			t.Errorf("the driver's metrics lack %s", series)
		}
	}
}

// TestToolShowsThePartition asks nvidia-smi in the container and on the node about a partition in use.
func TestToolShowsThePartition(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("slice", harness.Partition("slice", "3g.40gb")))
	server := harness.Pod("server", []harness.Use{{Claim: "slice"}})
	server.Spec.Containers[0].Command = []string{"simgpu-run", "--memory", "15023MiB", "--", "sleep", "infinity"}
	server = suite.Running(t, suite.CreatePod(t, ns, server))
	inContainer := func(args ...string) func() string {
		return func() string { return suite.Exec(t, server, "c0", append([]string{"nvidia-smi"}, args...)...) }
	}
	onNode := func(args ...string) func() string {
		return func() string { return suite.OnNode(t, append([]string{"nvidia-smi"}, args...)...) }
	}
	for name, test := range map[string]struct {
		run  func() string
		want string
	}{
		"log in the container":     {inContainer("-q"), "Used                                       : 15023 MiB\n"},
		"XML in the container":     {inContainer("-q", "-x"), "<used_memory>15023 MiB</used_memory>"},
		"instance on the node":     {onNode("mig", "-lgi"), "MIG 3g.40gb"},
		"profiles on the node":     {onNode("mig", "-lgip"), "|   0  MIG 3g.40gb          9     1/2        39.50      No     60     3     0   |"},
		"placements on the node":   {onNode("mig", "-lgipp"), "GPU  0 Profile ID  9 Placements: {0,4}:4"},
		"processes of the node":    {onNode("pmon", "-c", "1"), "    sleep"},
		"a GPU in MIG mode has no": {onNode("dmon", "-c", "1"), "      -      -      -      -      -      -      -      - \n"},
	} {
		suite.Eventually(t, name, func(context.Context) error {
			if got := test.run(); !strings.Contains(got, test.want) {
				return fmt.Errorf("%q is missing in\n%s", test.want, got)
			}
			return nil
		})
	}
}
