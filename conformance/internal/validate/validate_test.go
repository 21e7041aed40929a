package validate

import (
	"encoding/json"
	"flag"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

var kubernetes = flag.String("kubernetes", "", "another version to test with, like 1.36.3: its code is built, which takes minutes")

func slice(name string, change func(*resourceapi.ResourceSliceSpec)) resourceapi.ResourceSlice {
	s := resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: "7"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: "gadget.example.com", NodeName: ptr.To("node"), Pool: resourceapi.ResourcePool{Name: "node", Generation: 1, ResourceSliceCount: 1},
		Devices: []resourceapi.Device{{Name: "one"}},
	}}
	change(&s.Spec)
	return s
}

func judge(t *testing.T, v *Validator, slices []resourceapi.ResourceSlice, gates ...string) []Verdict {
	t.Helper()
	list, err := json.Marshal(resourceapi.ResourceSliceList{Items: slices})
	if err != nil {
		t.Fatal(err)
	}
	verdicts, err := v.Judge(t.Context(), list, gates...)
	if err != nil {
		t.Fatal(err)
	}
	return verdicts
}

func TestJudge(t *testing.T) {
	built := filepath.Join(t.TempDir(), "program")
	if out, err := exec.Command("go", "build", "-o", built, "./program").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	test(t, &Validator{built})
}

func TestJudgeByAnotherVersion(t *testing.T) {
	if *kubernetes == "" {
		t.Skip("-kubernetes names no version")
	}
	v, err := Build(t.Context(), *kubernetes, t.TempDir(), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	test(t, v)
}

func test(t *testing.T, v *Validator) {
	t.Helper()
	verdicts := judge(t, v, []resourceapi.ResourceSlice{
		slice("good", func(*resourceapi.ResourceSliceSpec) {}),
		slice("bad", func(s *resourceapi.ResourceSliceSpec) { s.Devices[0].Name = "Not_A_Label" }),
		slice("tainted", func(s *resourceapi.ResourceSliceSpec) {
			s.Devices[0].Taints = []resourceapi.DeviceTaint{{Key: "example.com/broken", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		}),
		slice("counted", func(s *resourceapi.ResourceSliceSpec) {
			s.Devices = nil
			s.SharedCounters = []resourceapi.CounterSet{{Name: "set", Counters: map[string]resourceapi.Counter{"parts": {Value: resource.MustParse("2")}}}}
		}),
	}, "DRADeviceTaints=false", "DRADeviceTaintRules=false", "DRAPartitionableDevices=true")
	var names []string
	for _, v := range verdicts {
		names = append(names, v.Name)
	}
	if !slices.Equal(names, []string{"good", "bad", "tainted", "counted"}) {
		t.Fatalf("verdicts on %v", names)
	}
	for i, v := range verdicts {
		if (v.Refused != "") != (i == 1) {
			t.Errorf("%s: refused: %q", v.Name, v.Refused)
		}
		if want := []string{"spec.devices[].taints"}; i == 2 && !slices.Equal(v.Dropped, want) || i != 2 && len(v.Dropped) > 0 {
			t.Errorf("%s: dropped: %v", v.Name, v.Dropped)
		}
	}
	if !strings.Contains(verdicts[1].Refused, "spec.devices[0].name") {
		t.Errorf("the refusal does not name the field: %s", verdicts[1].Refused)
	}
}

func TestVersions(t *testing.T) {
	for _, version := range []string{"", "1.36", "latest", "2.0.0"} {
		if _, err := Build(t.Context(), version, t.TempDir(), io.Discard); err == nil {
			t.Errorf("version %q is accepted", version)
		}
	}
}
