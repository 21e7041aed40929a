package lifecycle

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/e2e/harness"
)

// TestUninstall is refused while a pod uses a device, leaves nothing behind after that, and the chart can be installed
// again.
func TestUninstall(t *testing.T) {
	ns := suite.Namespace(t)
	suite.CreateClaim(t, ns, harness.Claim("held", harness.Partition("slice", "1g.10gb")))
	pod := suite.Running(t, suite.CreatePod(t, ns, harness.Pod("user", []harness.Use{{Claim: "held"}})))
	uninstall := func() (string, error) {
		return suite.Command(t.Context(), "helm", "uninstall", "simgpu", "--namespace", harness.DriverNamespace, "--wait", "--timeout", "3m")
	}

	out, err := uninstall()
	if err == nil {
		t.Fatal("the driver was taken from a pod that uses it")
	}
	if said := out + err.Error(); !strings.Contains(said, "pods "+ns+"/user has claim held") || !strings.Contains(said, "delete these pods first") {
		t.Errorf("refused with %s", said)
	}
	suite.DriverReady(t)
	if left := suite.Kubectl(t, "get", "clusterroles,clusterrolebindings", "-o", "name"); strings.Contains(left, "simgpu-in-use") {
		t.Errorf("left of the refused attempt:\n%s", left)
	}

	suite.DeletePod(t, pod)
	if out, err := uninstall(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() { // for the tests after this one
		if err := suite.InstallChart(context.WithoutCancel(t.Context()), nil); err != nil {
			t.Error(err)
		}
	})
	suite.Eventually(t, "the slices to be gone", func(ctx context.Context) error {
		slices, err := suite.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
		if err == nil && len(slices.Items) > 0 {
			err = fmt.Errorf("%d are there", len(slices.Items))
		}
		return err
	})
	if left := append(suite.OnDisk(t), sockets(t)...); len(left) > 0 {
		t.Errorf("left on the node: %v", left)
	}
	if left := suite.Kubectl(t, "-n", harness.DriverNamespace, "get", "pods,jobs,serviceaccounts,configmaps", "-o", "name"); strings.Contains(left, "simgpu") {
		t.Errorf("left in the namespace:\n%s", left)
	}

	if err := suite.InstallChart(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	suite.DeletePod(t, suite.Running(t, suite.CreatePod(t, ns, harness.Pod("again", []harness.Use{{Claim: "held"}}))))
}

// sockets lists the sockets of drivers on the node.
func sockets(t *testing.T) []string {
	t.Helper()
	var found []string
	for _, dir := range []string{"plugins", "plugins_registry"} {
		root := filepath.Join(suite.NodeRoot(t), "var/lib/kubelet", dir)
		err := filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
			if err == nil && entry.Type()&os.ModeSocket != 0 {
				found = append(found, strings.TrimPrefix(path, root))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}
