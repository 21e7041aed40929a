package apirules

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	kubernetes "k8s.io/component-base/version"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/registry/resource/resourceslice"
	strictjson "sigs.k8s.io/json"
)

// version is the minor version of Kubernetes that this test is built with, like 1.37.
const version = kubernetes.DefaultKubeBinaryVersion

var simgpuctl = flag.String("simgpuctl", "", "the simgpuctl to render slices with; `make apirules` builds it")

// node is what simgpuctl is asked to render.
type node struct {
	model string
	mig   string // "" is dynamic for models that can be divided; with static the layout follows, after a space
	gpus  int
}

func (n node) String() string {
	return fmt.Sprintf("%s/%s/%d", n.model, cmp.Or(n.mig, "default"), n.gpus)
}

// sizes of nodes: the smallest, the usual, one counter set more than a slice can hold, and far more than a machine has.
var sizes = []int{1, 2, 8, 9, 64}

// most is how many GPUs a node can have.
const most = 254

// run has simgpuctl print.
func run(ctx context.Context, args ...string) ([]byte, error) {
	if *simgpuctl == "" {
		return nil, fmt.Errorf("no -simgpuctl given: run this test with `make apirules`")
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, *simgpuctl, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("simgpuctl %s: %w: %s", strings.Join(args, " "), err, stderr.Bytes())
	}
	return stdout.Bytes(), nil
}

// render returns the slices of a node for an API server of that version. A field that the version does not have is an
// error: its API server would ignore it.
func (n node) render(ctx context.Context, version string) ([]resourceapi.ResourceSlice, error) {
	args := []string{"render", "--model", n.model, "--gpus", strconv.Itoa(n.gpus), "--node", "node", "--kubernetes", version, "-o", "json"}
	if n.mig != "" {
		mode, layout, _ := strings.Cut(n.mig, " ")
		args = append(args, "--mig", mode)
		if layout != "" {
			args = append(args, "--partitions", layout)
		}
	}
	out, err := run(ctx, args...)
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, err
	}
	var rendered []resourceapi.ResourceSlice
	for _, item := range list.Items {
		var slice resourceapi.ResourceSlice
		unknown, err := strictjson.UnmarshalStrict(item, &slice)
		if err != nil || len(unknown) > 0 {
			return nil, fmt.Errorf("not a ResourceSlice of Kubernetes %s: %v %w", kubernetes.DefaultKubeBinaryVersion, unknown, err)
		}
		rendered = append(rendered, slice)
	}
	return rendered, nil
}

// mustRender is render for tests that need nothing but the slices.
func (n node) mustRender(t *testing.T, version string) []resourceapi.ResourceSlice {
	t.Helper()
	rendered, err := n.render(t.Context(), version)
	if err != nil {
		t.Fatal(err)
	}
	return rendered
}

// unsourced are models that cannot be simulated, as figures are missing without which there is nothing to publish.
var unsourced = []string{"gh200-144gb"}

// nodes are all that are looked at: every model, as a whole and, if it can be divided, on demand and for good.
func nodes(t *testing.T) []node {
	t.Helper()
	files, err := filepath.Glob("../../../profiles/catalogue/*/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var all []node
	for _, file := range files {
		model := strings.TrimSuffix(filepath.Base(file), ".yaml")
		if model == "vendor" || slices.Contains(unsourced, model) {
			continue
		}
		modes := []string{"", "disabled"}
		if profile := someProfile((node{model, "", 1}).mustRender(t, version)); profile != "" {
			modes = append(modes, "static "+profile)
		}
		for _, mig := range modes {
			for _, gpus := range sizes {
				all = append(all, node{model, mig, gpus})
			}
		}
	}
	if len(all) == 0 {
		t.Fatal("the catalogue has no models")
	}
	return append(all, node{"h100-sxm5-80gb", "static 3g.40gb@4,1g.10gb,1g.10gb", 8}, node{"h100-sxm5-80gb", "", most})
}

// someProfile is that of a partition in the slices, "" if they have none.
func someProfile(rendered []resourceapi.ResourceSlice) string {
	for _, slice := range rendered {
		for _, device := range slice.Spec.Devices {
			if profile := device.Attributes["profile"].StringValue; profile != nil {
				return *profile
			}
		}
	}
	return ""
}

// setGate switches a feature gate on or off for the time of the test.
func setGate(t *testing.T, gate featuregate.Feature, on bool) {
	t.Helper()
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, gate, on)
}

// withPartitions is setGate for the gate of partitions.
func withPartitions(t *testing.T, on bool) {
	t.Helper()
	setGate(t, features.DRAPartitionableDevices, on)
}

// request is the context of a request for ResourceSlices.
func request(t *testing.T) context.Context {
	ctx := genericapirequest.WithNamespace(t.Context(), metav1.NamespaceNone)
	return genericapirequest.WithRequestInfo(ctx, &genericapirequest.RequestInfo{
		IsResourceRequest: true,
		APIGroup:          resourceapi.GroupName,
		APIVersion:        "v1",
		Resource:          "resourceslices",
	})
}

// internal is the slice as the API server works with it.
func internal(t *testing.T, slice resourceapi.ResourceSlice) *resource.ResourceSlice {
	t.Helper()
	sent := slice.DeepCopy()
	legacyscheme.Scheme.Default(sent)
	var converted resource.ResourceSlice
	if err := legacyscheme.Scheme.Convert(sent, &converted, nil); err != nil {
		t.Fatal(err)
	}
	rest.FillObjectMetaSystemFields(&converted)
	if converted.Name == "" {
		converted.Name = resourceslice.Strategy.GenerateName(converted.GenerateName)
	}
	return &converted
}

// external is the slice as clients see it.
func external(t *testing.T, slice *resource.ResourceSlice) resourceapi.ResourceSlice {
	t.Helper()
	var converted resourceapi.ResourceSlice
	if err := legacyscheme.Scheme.Convert(slice, &converted, nil); err != nil {
		t.Fatal(err)
	}
	return converted
}

// create does what the API server does with a new slice up to where it would be stored.
func create(t *testing.T, slice resourceapi.ResourceSlice) (resourceapi.ResourceSlice, error) {
	t.Helper()
	created := internal(t, slice)
	if err := rest.BeforeCreate(resourceslice.Strategy, request(t), created); err != nil {
		return resourceapi.ResourceSlice{}, err
	}
	return external(t, created), nil
}

// withoutCounters is what shall be left of a slice where the gate of partitions is off.
func withoutCounters(slice resourceapi.ResourceSlice) resourceapi.ResourceSlice {
	left := *slice.DeepCopy()
	left.Spec.SharedCounters = nil
	for i := range left.Spec.Devices {
		left.Spec.Devices[i].ConsumesCounters = nil
	}
	return left
}

// expectStored creates the slices and compares what would be stored with what is wanted of each.
func expectStored(t *testing.T, rendered []resourceapi.ResourceSlice, want func(resourceapi.ResourceSlice) resourceapi.ResourceSlice) {
	t.Helper()
	for i, slice := range rendered {
		stored, err := create(t, slice)
		if err != nil {
			t.Errorf("slice %d is refused: %v", i, err)
			continue
		}
		if want := want(slice); !equality.Semantic.DeepEqual(want.Spec, stored.Spec) {
			t.Errorf("slice %d is stored otherwise (-want, +stored):\n%s", i, gocmp.Diff(want.Spec, stored.Spec))
		}
	}
}

func asSent(slice resourceapi.ResourceSlice) resourceapi.ResourceSlice { return slice }

// TestStored has all that a node can be stored as it was sent, and without its counters, no more and no less, where
// the gate of partitions is off: that is what the driver looks for in a dry run.
func TestStored(t *testing.T) {
	t.Logf("Kubernetes %s", version)
	for _, n := range nodes(t) {
		t.Run(n.String(), func(t *testing.T) {
			rendered := n.mustRender(t, version)
			t.Run("gate on", func(t *testing.T) {
				withPartitions(t, true)
				expectStored(t, rendered, asSent)
			})
			t.Run("gate off", func(t *testing.T) {
				withPartitions(t, false)
				expectStored(t, rendered, withoutCounters)
			})
		})
	}
}

func TestUnsourced(t *testing.T) {
	for _, model := range unsourced {
		if _, err := (node{model, "", 1}).render(t.Context(), version); err == nil || !strings.Contains(err.Error(), "nobody sourced") {
			t.Errorf("model %s: %v, want an error that says what nobody sourced", model, err)
		}
	}
}

// TestDryRun has one device with a field of each feature that the driver asks for: it is stored as it was sent with all
// gates on, and without the field of any gate that is off.
func TestDryRun(t *testing.T) {
	rendered := node{"h100-sxm5-80gb", "", 1}.mustRender(t, version)
	slice := rendered[len(rendered)-1]
	slice.Spec.Devices = slice.Spec.Devices[:1]
	device := &slice.Spec.Devices[0]
	device.AllowMultipleAllocations = new(true)
	device.Taints = []resourceapi.DeviceTaint{{Key: "example.com/taint", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	for name, gates := range map[string]struct{ partitions, taints, shares bool }{
		"all on":         {true, true, true},
		"all off":        {false, false, false},
		"partitions off": {false, true, true},
		"taints off":     {true, false, true},
		"shares off":     {true, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			const rules = "DRADeviceTaintRules" // needs the gate of taints, where there is such a gate
			if _, known := utilfeature.DefaultMutableFeatureGate.GetAll()[rules]; known {
				setGate(t, rules, false)
			}
			setGate(t, features.DRAPartitionableDevices, gates.partitions)
			setGate(t, features.DRADeviceTaints, gates.taints)
			setGate(t, features.DRAConsumableCapacity, gates.shares)
			stored, err := create(t, slice)
			if err != nil {
				t.Fatal(err)
			}
			kept := stored.Spec.Devices[0]
			if len(kept.ConsumesCounters) > 0 != gates.partitions || len(kept.Taints) > 0 != gates.taints || kept.AllowMultipleAllocations != nil != gates.shares {
				t.Errorf("kept are counters %v, taints %v, shares %v", kept.ConsumesCounters, kept.Taints, kept.AllowMultipleAllocations)
			}
		})
	}
}

// TestUpdateKeepsCounters is why the driver's dry run is a creation: an update of a slice that has counters keeps them
// although the gate is off.
func TestUpdateKeepsCounters(t *testing.T) {
	withPartitions(t, false)
	for i, slice := range (node{"h100-sxm5-80gb", "", 1}).mustRender(t, version) {
		old := internal(t, slice)
		old.ResourceVersion = "1"
		updated := old.DeepCopy()
		updated.Labels = map[string]string{"changed": "true"}
		if err := rest.BeforeUpdate(resourceslice.Strategy, request(t), updated, old); err != nil {
			t.Fatalf("slice %d: %v", i, err)
		}
		if stored := external(t, updated); !equality.Semantic.DeepEqual(slice.Spec, stored.Spec) {
			t.Errorf("slice %d is stored otherwise (-sent, +stored):\n%s", i, gocmp.Diff(slice.Spec, stored.Spec))
		}
	}
}

// rules are those that a version does not share with all others.
type rules struct {
	// other is a version whose layout is refused, and refusal what is said then.
	other, refusal string
	// devices with counters, and counter sets of an H100, that fit into a slice, and what is said of more.
	devices    int
	crowded    string
	sets       int
	overloaded string
}

var (
	combined = rules{
		other: "1.35", refusal: "must reference a counterSet defined in the ResourceSlice",
		devices: 128, crowded: "must have at most 128 items",
		sets: 2, overloaded: "the total number of shared counters must not exceed 32",
	}
	split = rules{
		other: "1.34", refusal: "only one of `sharedCounters` or `devices` is allowed",
		devices: 64, crowded: "must have at most 64 items",
		sets: 8, overloaded: "must have at most 8 items",
	}
	rulesOf = map[string]rules{"1.34": combined, "1.35": split, "1.36": split, "1.37": split}
)

// TestRefused has the version refuse what its layout avoids, and accept what is just within.
func TestRefused(t *testing.T) {
	rules, known := rulesOf[version]
	if !known {
		t.Fatalf("this test does not know the rules of Kubernetes %s", version)
	}
	withPartitions(t, true)
	h100 := node{"h100-sxm5-80gb", "", 1}
	// crowd has copies of one device.
	crowd := func(count int) []resourceapi.ResourceSlice {
		rendered := h100.mustRender(t, version)
		devices := &rendered[len(rendered)-1].Spec.Devices
		one := (*devices)[0]
		*devices = nil
		for i := range count {
			device := *one.DeepCopy()
			device.Name = fmt.Sprintf("gpu-%d", i)
			for n := range device.ConsumesCounters {
				// Kubernetes 1.34 limits the counters of all devices together as well.
				for name := range device.ConsumesCounters[n].Counters {
					if len(device.ConsumesCounters[n].Counters) > 8 {
						delete(device.ConsumesCounters[n].Counters, name)
					}
				}
			}
			*devices = append(*devices, device)
		}
		return rendered
	}
	// sets has the counter sets of that many GPUs in one slice.
	sets := func(count int) []resourceapi.ResourceSlice {
		rendered := node{h100.model, h100.mig, count}.mustRender(t, version)
		slice := rendered[0]
		slice.Spec.Devices, slice.Spec.SharedCounters = nil, nil
		for _, s := range rendered {
			slice.Spec.SharedCounters = append(slice.Spec.SharedCounters, s.Spec.SharedCounters...)
		}
		return []resourceapi.ResourceSlice{slice}
	}
	for name, test := range map[string]struct {
		slices []resourceapi.ResourceSlice
		says   string // "" where all are accepted
	}{
		"layout of other versions":         {h100.mustRender(t, rules.other), rules.refusal},
		"most devices with counters":       {crowd(rules.devices), ""},
		"too many devices with counters":   {crowd(rules.devices + 1), rules.crowded},
		"most counter sets in a slice":     {sets(rules.sets), ""},
		"too many counter sets in a slice": {sets(rules.sets + 1), rules.overloaded},
	} {
		t.Run(name, func(t *testing.T) {
			var refused []error
			for _, slice := range test.slices {
				if _, err := create(t, slice); err != nil {
					refused = append(refused, err)
				}
			}
			switch {
			case test.says == "" && len(refused) > 0:
				t.Errorf("refused: %v", refused)
			case test.says != "" && len(refused) == 0:
				t.Error("accepted")
			}
			for _, err := range refused {
				if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), test.says) {
					t.Errorf("refused for another reason: %v", err)
				}
			}
		})
	}
}
