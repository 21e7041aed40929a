package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func writeFile(t *testing.T, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "file.yaml")
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestProfile(t *testing.T) {
	p, err := ReadProfile(writeFile(t, `
driverName: gpu.example.com
selector: device.attributes["gpu.example.com"].size == "small"
parameters:
  valid: [{mode: shared}]
  invalid: [{mode: 3}]
health: {break: "break it", repair: "repair it"}
knownFailures: [{check: unprepare/twice, reason: issue 7}]
`))
	if err != nil {
		t.Fatal(err)
	}
	if p.DriverName != "gpu.example.com" || string(p.Parameters.Valid[0]) != `{"mode":"shared"}` || len(p.Parameters.Invalid) != 1 ||
		p.Health.Repair != "repair it" || p.KnownFailures[0].Check != "unprepare/twice" {
		t.Errorf("read %+v", p)
	}
	if empty, err := ReadProfile(writeFile(t, "")); err != nil || empty.DriverName != "" {
		t.Errorf("an empty profile: %+v, %v", empty, err)
	}
}

func TestProfileFaults(t *testing.T) {
	for content, want := range map[string]string{
		"driver: x":                                             "driver",
		"parameters: {vaild: []}":                               "vaild",
		"driverName: a\ndriverName: b":                          "driverName",
		"knownFailures: [{check: unprepare/twice}]":             "knownFailures[0]: a reason is required",
		"knownFailures: [{check: unprepare/thrice, reason: x}]": `there is no check "unprepare/thrice"`,
	} {
		if _, err := ReadProfile(writeFile(t, content)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, which does not say %q", content, err, want)
		}
	}
	if _, err := ReadProfile(filepath.Join(t.TempDir(), "missing")); err == nil {
		t.Error("a profile that is not there was read")
	}
}

// The profiles that come with the kit are right, and their commands can be parsed.
func TestProfilesOfDrivers(t *testing.T) {
	files, err := filepath.Glob("drivers/*/profile.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("found %v, %v", files, err)
	}
	for _, file := range files {
		if _, err := ReadProfile(file); err != nil {
			t.Error(err)
		}
	}
}

func TestRoles(t *testing.T) {
	roles, err := ReadRoles(writeFile(t, `
apiVersion: v1
kind: ServiceAccount
metadata: {name: driver}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: driver}
rules:
- {apiGroups: [resource.k8s.io], resources: [resourceslices], verbs: [get, list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: driver, namespace: system}
rules:
- {apiGroups: [""], resources: [events], verbs: [create]}
---
apiVersion: example.com/v1
kind: Gadget
metadata: nothing that is known here
`))
	if err != nil {
		t.Fatal(err)
	}
	if len(roles) != 2 || roles[0].Rules[0].Verbs[1] != "list" || roles[1].Rules[0].Resources[0] != "events" {
		t.Errorf("read %+v", roles)
	}
	if _, err := ReadRoles(writeFile(t, "kind: ConfigMap\n")); err == nil {
		t.Error("a manifest without roles was accepted")
	}
}
