package conformance

import (
	"encoding/json"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/conformance/internal/process"
)

// catches says which check is for which fault of the mutant driver. A driver that cannot even be registered fails the check
// that looks closer, like all others.
var catches = map[string]string{
	"slow-get-info":                   "registration/get-info",
	"wrong-type":                      "registration/get-info",
	"relative-endpoint":               "registration/endpoint",
	"old-version-first":               "registration/supported-versions",
	"unknown-service":                 "registration/known-services-only",
	"service-twice":                   "registration/known-services-only",
	"stale-sockets":                   "registration/registers-again-after-kill",
	"registers-once":                  "registration/kubelet-restart",
	"keeps-socket":                    "registration/deregisters",
	"ignores-sigterm":                 "registration/stops-in-time",
	"fails-on-sigterm":                "registration/stops-in-time",
	"exits-on-second-notification":    "registration/stays-registered",
	"removes-foreign-sockets":         "registration/foreign-sockets",
	"takes-sockets-of-other-instance": "registration/rolling-update",
	"long-socket-name":                "registration/socket-paths",
	"name-in-every-path":              "registration/long-driver-name",

	"no-devices":                    "resourceslices/has-devices",
	"incomplete-pool":               "resourceslices/complete-pools",
	"old-generation":                "resourceslices/no-old-generation",
	"other-node":                    "resourceslices/own-node",
	"no-owner":                      "resourceslices/owner",
	"device-in-two-slices":          "resourceslices/unique-devices",
	"counter-set-missing":           "resourceslices/counter-sets-exist",
	"consumes-too-much":             "resourceslices/consumption-fits",
	"counter-set-twice":             "resourceslices/unique-counter-sets",
	"unknown-standard-attribute":    "resourceslices/standard-attributes",
	"malformed-standard-attribute":  "resourceslices/standard-attributes",
	"inconsistent-attribute":        "resourceslices/attributes-consistent",
	"writes-when-idle":              "resourceslices/no-write-when-idle",
	"unstable-names":                "resourceslices/stable-over-restart",
	"publishes-once":                "resourceslices/recreated-when-deleted",
	"watches-all-slices":            "resourceslices/watches",
	"deletes-slices-on-stop":        "resourceslices/stay-after-stop",
	"overlaps-without-counters":     "resourceslices/dropped-counters",
	"writes-dropped-counters-again": "resourceslices/dropped-counters",

	"wrong-claim-uid":             "prepare/answers-for-the-claim",
	"extra-device":                "prepare/devices-are-the-allocated-ones",
	"missing-device":              "prepare/devices-are-the-allocated-ones",
	"no-request-names":            "prepare/request-names",
	"wrong-request-names":         "prepare/request-names",
	"unqualified-cdi-id":          "prepare/cdi-ids",
	"no-cdi-id":                   "prepare/cdi-ids",
	"not-idempotent":              "prepare/same-answer-twice",
	"other-answer-again":          "prepare/same-answer-twice",
	"not-concurrent":              "prepare/same-answer-concurrently",
	"first-of-batch":              "prepare/batch",
	"first-request-only":          "prepare/several-requests",
	"subrequest-names":            "prepare/subrequest",
	"accepts-missing-claims":      "prepare/missing-claim",
	"fails-for-other-drivers":     "prepare/devices-of-other-drivers",
	"accepts-unknown-device":      "prepare/unknown-device",
	"device-twice":                "prepare/no-device-twice",
	"refuses-admin-access":        "prepare/admin-access",
	"fails-whole-batch":           "prepare/broken-claim-in-batch",
	"reads-parameters-of-others":  "prepare/parameters-of-another-driver",
	"refuses-parameters":          "prepare/valid-parameters",
	"accepts-all-parameters":      "prepare/invalid-parameters",
	"canceled-call-locks":         "prepare/canceled-call",
	"trusts-classes":              "prepare/parameters-of-class",
	"first-few-of-all":            "prepare/all-devices",
	"refuses-shares":              "prepare/shared-device",
	"no-share-id":                 "prepare/shared-device",
	"class-over-claim":            "prepare/claim-parameters-over-class",
	"parameters-for-all-requests": "prepare/parameters-of-one-request",

	"no-spec":                   "cdi/resolves",
	"invalid-spec":              "cdi/valid",
	"newest-cdi-version":        "cdi/minimal-version",
	"relative-mount":            "cdi/absolute-paths",
	"missing-mount":             "cdi/absolute-paths",
	"spec-not-restored":         "cdi/restored-by-prepare",
	"world-writable-spec":       "cdi/not-world-writable",
	"metadata-of-another-claim": "cdi/device-metadata",
	"keeps-metadata":            "cdi/device-metadata",

	"leaks-spec":                  "unprepare/removes-cdi-spec",
	"unprepare-fails-for-unknown": "unprepare/unknown-claim",
	"first-of-unprepare-batch":    "unprepare/answers-for-the-claim",
	"device-not-freed":            "unprepare/frees-the-device",
	"unprepare-reads-claim":       "unprepare/without-api-server",

	"no-checkpoint":              "recovery/no-device-twice-after-restart",
	"removes-specs-on-stop":      "recovery/cdi-specs-outlive-restart",
	"keeps-claims-that-are-gone": "recovery/claim-deleted-while-down",
	"exits-without-api-server":   "recovery/api-server-away",
	"does-not-start-twice":       "recovery/restart-with-prepared-claim",
	"fails-on-torn-checkpoint":   "recovery/state-truncated",
	"first-call-fails":           "recovery/killed-before-prepare",
	"half-prepare-locks":         "recovery/killed-while-preparing",
	"half-unprepare-locks":       "recovery/killed-while-unpreparing",
	"unprepares-later":           "recovery/killed-after-unprepare",
	"ignores-write-errors":       "recovery/state-read-only",
	"forgets-old-claims":         "recovery/clock-jumped",

	"health-fails":           "health/as-declared",
	"old-health-version":     "health/newest-version",
	"health-late":            "health/first-report",
	"health-of-strangers":    "health/known-devices",
	"health-once":            "health/repeated-in-time",
	"health-for-one":         "health/watched-again",
	"health-does-not-change": "health/change",
	"offers-broken-devices":  "health/dropped-taints",

	"refuses-concurrent-claims": "load/concurrent-claims",
	"at-most-thirty-claims":     "load/many-claims",
	"leaks-open-files":          "load/cycles",
	"leaks-files":               "load/cycles",
	"leaks-memory":              "load/cycles",

	"deletes-foreign-slices":    "security/foreign-slices",
	"world-writable-checkpoint": "security/files-not-world-writable",
	"reads-secrets":             "security/modest-verbs",
	"writes-config-maps":        "security/modest-verbs",
	"needs-undeclared-rights":   "security/declared-rbac",
}

// neverStart are faults with which a driver never gets ready, so that all checks fail before they begin.
var neverStart = []string{"slow-get-info", "wrong-type", "relative-endpoint", "incomplete-pool"}

// mutantProfile is what to know about the mutant driver.
var mutantProfile = Profile{
	DriverName: "gadget.example.com",
	// Halves, so that there are enough of them.
	Selector: `device.attributes["gadget.example.com"].size == "half"`,
	Parameters: Parameters{
		Valid:     raw(`{"apiVersion":"gadget.example.com/v1","kind":"Gadget","speed":3}`),
		Invalid:   raw(`{"apiVersion":"gadget.example.com/v1","kind":"Gadget","sped":3}`, `{"apiVersion":"gadget.example.com/v1","kind":"Gadget","speed":"fast"}`),
		Different: raw(`{"apiVersion":"gadget.example.com/v1","kind":"Gadget","speed":1}`, `{"apiVersion":"gadget.example.com/v1","kind":"Gadget","speed":2}`),
	},
	Health: HealthCommands{Break: "touch {{.PluginDir}}/broken-{{.Device}}", Repair: "rm -f {{.PluginDir}}/broken-{{.Device}}"},
}

// mutantRoles are what the mutant driver declares.
var mutantRoles = []rbacv1.ClusterRole{{Rules: []rbacv1.PolicyRule{
	{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceclaims"}, Verbs: []string{"get"}},
	{APIGroups: []string{"resource.k8s.io"}, Resources: []string{"resourceslices"}, Verbs: []string{"list", "watch", "create", "update", "patch", "delete"}},
	{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get"}},
}}}

func buildMutant(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "mutant")
	if out, err := exec.Command("go", "build", "-o", program, "./internal/mutant").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

func mutantCommand(program, fault string) string {
	return program + " --fault='" + fault + "' --name={{.DriverName}} --kubeconfig={{.Kubeconfig}} --node={{.NodeName}} --plugins={{.PluginsDir}} --registry={{.RegistryDir}} --cdi={{.CDIDir}}"
}

func silence() {
	flags := flag.NewFlagSet("klog", flag.PanicOnError)
	klog.InitFlags(flags)
	_ = flags.Parse([]string{"-logtostderr=false", "-alsologtostderr=false", "-stderrthreshold=FATAL"})
	klog.SetOutput(io.Discard)
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
}

// shortDir is a folder with a path that leaves room for the names of sockets.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dra") //nolint:usetesting // t.TempDir is too long for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// quick is less of what takes time; impatient gives up soon as well, for drivers that fail.
var (
	quick     = times{patience: 30 * time.Second, late: 75 * time.Second, quiet: 2 * time.Second, claims: 40, cycles: 40}
	impatient = times{patience: 6 * time.Second, late: 8 * time.Second, quiet: 2 * time.Second, claims: 40, cycles: 40}
)

// nodes are on how many nodes mutants are tested side by side. They wait most of the time, so there are more of them than
// processors.
const nodes = 8

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", strconv.Itoa(nodes)); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// One test, so that the API server is started once.
func TestMutants(t *testing.T) {
	silence()
	program := buildMutant(t)
	command := func(fault string) *process.Command {
		parsed, err := process.Parse(mutantCommand(program, fault))
		if err != nil {
			t.Fatal(err)
		}
		return parsed
	}
	opts := Options{Profile: mutantProfile, Roles: mutantRoles, Progress: io.Discard}
	c, err := startCluster(t.Context(), shortDir(t), nodes, command(""), opts)
	if err != nil {
		t.Fatal(err)
	}
	defer c.stop()

	t.Run("none", func(t *testing.T) {
		for _, bed := range c.testbeds {
			bed.times = quick
		}
		results, err := c.runAll(t.Context(), Checks(), opts)
		if err != nil {
			t.Fatal(err)
		}
		for _, result := range results {
			t.Logf("%5.1fs %s", result.Duration.Seconds(), result.Check)
			if result.Outcome != Passed {
				t.Errorf("%s %s: %s", result.Check, result.Outcome, strings.Join(result.Messages, "\n"))
			}
		}
	})

	listed, err := exec.Command(program, "-list").Output()
	if err != nil {
		t.Fatal(err)
	}
	faults := strings.Fields(string(listed))
	for fault := range catches {
		if !slices.Contains(faults, fault) {
			t.Errorf("the mutant driver has no fault %s", fault)
		}
	}
	free := make(chan *testbed, nodes)
	for _, bed := range c.testbeds {
		bed.times = impatient
		free <- bed
	}
	t.Run("faults", func(t *testing.T) { // ends when all that are parallel have ended
		for _, fault := range faults {
			t.Run(fault, func(t *testing.T) {
				t.Parallel()
				name, known := catches[fault]
				if !known {
					t.Fatal("no check is named for this fault")
				}
				check, err := FindCheck(name)
				if err != nil {
					t.Fatal(err)
				}
				bed := <-free
				defer func() { free <- bed }()
				bed.command = command(fault)
				bed.since = time.Now()
				r := &runner{bed: bed, opts: opts, fresh: true}
				result, err := r.run(t.Context(), check)
				if err != nil {
					t.Fatal(err)
				}
				messages := strings.Join(result.Messages, "\n")
				switch starts := !strings.Contains(messages, "does not start on an empty node"); {
				case result.Outcome != Failed:
					t.Errorf("%s %s %s", name, result.Outcome, messages)
				case !starts && !slices.Contains(neverStart, fault):
					t.Errorf("%s did not get to see the fault: %s", name, messages)
				}
				t.Log(messages)
			})
		}
	})
}

func raw(objects ...string) []json.RawMessage {
	var all []json.RawMessage
	for _, object := range objects {
		all = append(all, json.RawMessage(object))
	}
	return all
}
