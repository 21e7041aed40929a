package chart

import (
	"os"
	"testing"
)

// The conformance kit gives the driver the rights that the chart gives it.
func TestRolesOfTheConformanceTest(t *testing.T) {
	const file = "../conformance/simgpu/rbac.yaml"
	files, err := templates(t, "")
	if err != nil {
		t.Fatal(err)
	}
	want := "# What the chart renders for RBAC; go test ./e2e/chart -update writes it.\n" + files["rbac.yaml"]
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s is not what the chart renders: (cd e2e && go test ./chart -update -run %s)", file, t.Name())
	}
}
