package main

import (
	"errors"
	"maps"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/driver/faults"
)

// api is an API server with a node that publishes gpu-0 and a partition of gpu-1.
type api struct {
	*fake.Clientset
	t *testing.T
}

func newAPI(t *testing.T) *api {
	t.Helper()
	node := func(name string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid", Annotations: map[string]string{"other": "kept"}}}
	}
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"}, Spec: resourceapi.ResourceSliceSpec{
		NodeName: ptr.To("a"), Devices: []resourceapi.Device{{Name: "gpu-0"}, {Name: "gpu-1-mig-1g10gb-19-0"}},
	}}
	return &api{fake.NewClientset(node("a"), node("b"), slice), t}
}

// simgpuctl runs the command "fault" and returns what it wrote.
func (a *api) simgpuctl(args ...string) (string, error) {
	var out strings.Builder
	cmd := newFaultCommand(func(*pflag.FlagSet) func() (kubernetes.Interface, error) {
		return func() (kubernetes.Interface, error) { return a, nil }
	})
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(a.t.Context())
	return out.String(), err
}

func (a *api) must(args ...string) string {
	a.t.Helper()
	out, err := a.simgpuctl(args...)
	if err != nil {
		a.t.Fatalf("%v: %v", args, err)
	}
	return out
}

func (a *api) annotations(node string) map[string]string {
	a.t.Helper()
	object, err := a.CoreV1().Nodes().Get(a.t.Context(), node, metav1.GetOptions{})
	if err != nil {
		a.t.Fatal(err)
	}
	return object.Annotations
}

// faults are those on a node, "<fault> on <device>" each.
func (a *api) faults(node string) string {
	a.t.Helper()
	list, err := faults.Decode(a.annotations(node)[faults.Annotation])
	if err != nil {
		a.t.Fatal(err)
	}
	var texts []string
	for _, f := range list {
		text := f.String() + " on " + place(f)
		if f.Effect != "" {
			text += " " + string(f.Effect)
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, "; ")
}

func (a *api) annotate(node, value string) {
	a.t.Helper()
	object, err := a.CoreV1().Nodes().Get(a.t.Context(), node, metav1.GetOptions{})
	if err != nil {
		a.t.Fatal(err)
	}
	object.Annotations = map[string]string{faults.Annotation: value}
	if _, err := a.CoreV1().Nodes().Update(a.t.Context(), object, metav1.UpdateOptions{}); err != nil {
		a.t.Fatal(err)
	}
}

func TestAddFaults(t *testing.T) {
	for name, test := range map[string]struct{ args, want string }{
		"an XID":              {"--device gpu-0 --xid 79", "XID 79 on gpu-0"},
		"a partition":         {"--device gpu-1-mig-1g10gb-19-0 --lost", "GPULost on gpu-1-mig-1g10gb-19-0"},
		"a GPU in partitions": {"--device gpu-1 --lost", "GPULost on gpu-1"},
		"the node":            {"--xid 79", "XID 79 on all devices"},
		"several":             {"--device gpu-0,gpu-1 --xid 79,48 --lost --effect NoExecute", "XID 79 on gpu-0 NoExecute; XID 48 on gpu-0 NoExecute; GPULost on gpu-0 NoExecute; XID 79 on gpu-1 NoExecute; XID 48 on gpu-1 NoExecute; GPULost on gpu-1 NoExecute"},
		"ECC":                 {"--ecc-correctable 3 --ecc-uncorrectable 1", "ECC 3 correctable, 1 uncorrectable on all devices"},
		"operations":          {"--fail-prepare --slow-unprepare 5s --times 2", "FailPrepare 2 times on all devices; SlowUnprepare by 5s 2 times on all devices"},
		"hangs":               {"--hang-prepare --hang-unprepare --fail-unprepare --slow-prepare 1m", "SlowPrepare by 1m0s on all devices; HangPrepare on all devices; HangUnprepare on all devices; FailUnprepare on all devices"},
		"a crash":             {"--crash-at SpecWritten", "Crash at SpecWritten on all devices"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t)
			out := a.must(append([]string{"add", "a"}, strings.Fields(test.args)...)...)
			if got := a.faults("a"); got != test.want {
				t.Errorf("on the node: %s\nwant: %s", got, test.want)
			}
			if !strings.HasPrefix(out, "node/a: fault ") || a.annotations("a")["other"] != "kept" || a.faults("b") != "" {
				t.Errorf("says %q, node a has %v, node b %v", out, a.annotations("a"), a.annotations("b"))
			}
		})
	}
}

func TestAddSaysWhatIsKnownOfAnXID(t *testing.T) {
	out := newAPI(t).must("add", "a", "--xid", "79,999")
	for _, want := range []string{"XID 79: GPU has fallen off the bus (action: restart the node) on all devices\n", ": XID 999 on all devices\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q does not say %q", out, want)
		}
	}
}

func TestBadFaultsChangeNothing(t *testing.T) {
	for name, test := range map[string]struct{ args, want string }{
		"no fault":           {"a", "no fault is given"},
		"no such node":       {"c --lost", `"c" not found`},
		"no such device":     {"a --device gpu-7 --lost", "node a has no device gpu-7; it has gpu-0, gpu-1-mig-1g10gb-19-0"},
		"XID out of range":   {"a --xid 0", "xid: must be from 1"},
		"no such effect":     {"a --lost --effect Evict", "effect: must be one of NoSchedule, NoExecute, None"},
		"effect of an error": {"a --fail-prepare --effect NoExecute", "--effect needs a fault that makes a taint"},
		"times of a taint":   {"a --lost --times 2", "--times needs a fault of prepare"},
		"negative times":     {"a --fail-prepare --times -1", "times: must be from 1"},
		"no such step":       {"a --crash-at Lunch", "at: must be one of IntentWritten"},
		"negative delay":     {"a --slow-prepare -1s", "delay: must be a duration above 0"},
		"negative ECC":       {"a --ecc-correctable -1", "correctable: must be from 0"},
		"no such form":       {"a --lost -o table", `--output "table" is not known`},
		"two nodes":          {"a b --lost", "accepts 1 arg"},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t)
			before := a.annotations("a")
			_, err := a.simgpuctl(append([]string{"add"}, strings.Fields(test.args)...)...)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
			if after := a.annotations("a"); !maps.Equal(before, after) {
				t.Errorf("the node has %v", after)
			}
		})
	}
}

func TestUnreadableFaultsAreNotOverwritten(t *testing.T) {
	a := newAPI(t)
	a.annotate("a", "what?")
	a.must("add", "b", "--lost")
	for _, args := range [][]string{{"add", "a", "--lost"}, {"clear", "a"}, {"list", "a"}, {"list"}} {
		_, err := a.simgpuctl(args...)
		if err == nil || !strings.Contains(err.Error(), "kubectl annotate node a simgpu.dev/faults-") {
			t.Errorf("%v: %v", args, err)
		}
	}
	if got := a.annotations("a")[faults.Annotation]; got != "what?" {
		t.Errorf("overwritten by %q", got)
	}
	if out, _ := a.simgpuctl("list"); !strings.Contains(out, "GPULost") {
		t.Errorf("the other nodes are not listed: %q", out)
	}
}

func TestDevicesAreCheckedAsFarAsPossible(t *testing.T) {
	a := newAPI(t)
	if out := a.must("add", "b", "--device", "gpu-7", "--lost"); !strings.Contains(out, "Warning: node b publishes no devices") || a.faults("b") == "" {
		t.Errorf("says %q, node has %q", out, a.faults("b"))
	}
	a.PrependReactor("list", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(resourceapi.Resource("resourceslices"), "", errors.New("no"))
	})
	if out := a.must("add", "a", "--device", "gpu-7", "--lost"); !strings.Contains(out, "Warning: not checked") || a.faults("a") == "" {
		t.Errorf("says %q, node has %q", out, a.faults("a"))
	}
}

func TestSomebodyElseChangesTheNode(t *testing.T) {
	a := newAPI(t)
	conflicts := 0
	a.PrependReactor("patch", "nodes", func(action clienttesting.Action) (bool, runtime.Object, error) {
		patch := string(action.(clienttesting.PatchAction).GetPatch())
		if !strings.Contains(patch, `"resourceVersion"`) || !strings.Contains(patch, `"uid":"uid"`) {
			t.Errorf("unconditional patch %s", patch)
		}
		if conflicts++; conflicts > 1 {
			return false, nil, nil
		}
		// Not through the client, which has its lock here.
		theirs := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "uid", Annotations: map[string]string{
			faults.Annotation: `{"apiVersion":"simgpu.dev/v1alpha1","kind":"NodeFaults","faults":[{"id":"theirs","type":"GPULost"}]}`,
		}}}
		if err := a.Tracker().Update(action.GetResource(), theirs, ""); err != nil {
			t.Error(err)
		}
		return true, nil, apierrors.NewConflict(corev1.Resource("nodes"), "a", errors.New("changed"))
	})
	a.must("add", "a", "--xid", "79")
	if got, want := a.faults("a"), "GPULost on all devices; XID 79 on all devices"; got != want {
		t.Errorf("the node has %q, want %q", got, want)
	}
}

func TestListFaults(t *testing.T) {
	a := newAPI(t)
	if out := a.must("list"); out != "No faults.\n" {
		t.Errorf("got %q", out)
	}
	a.must("add", "a", "--device", "gpu-0", "--xid", "79,31")
	a.must("add", "b", "--fail-prepare", "--times", "2")
	out := a.must("list")
	for _, want := range []string{
		`(?m)^NODE +ID +DEVICE +EFFECT +AGE +FAULT$`,
		`(?m)^a +[a-z0-9]{5} +gpu-0 +NoSchedule +\d+s +XID 79: GPU has fallen off the bus \(action: restart the node\)$`,
		`(?m)^a +[a-z0-9]{5} +gpu-0 +None +\d+s +XID 31: GPU memory page fault \(action: restart the application\)$`,
		`(?m)^b +[a-z0-9]{5} +all devices +- +\d+s +FailPrepare 2 times$`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("no line %s in\n%s", want, out)
		}
	}
	if out := a.must("list", "b"); strings.Contains(out, "XID") {
		t.Errorf("another node is listed:\n%s", out)
	}
	for format, want := range map[string]string{"json": `"xid": 79`, "yaml": "xid: 79"} {
		if out := a.must("list", "-o", format); !strings.Contains(out, want) || !strings.Contains(out, "gpu-0") {
			t.Errorf("%s: %s", format, out)
		}
	}
	if out := a.must("clear", "a"); strings.Count(out, "cleared: XID") != 2 {
		t.Errorf("clear says %q", out)
	}
	if out := a.must("list", "a", "-o", "json"); out != "[]\n" {
		t.Errorf("a node without faults is %q", out)
	}
}

func TestClearFaults(t *testing.T) {
	for name, test := range map[string]struct{ args, want, err string }{
		"all":            {"a", "", ""},
		"by device":      {"a --device gpu-0", "GPULost on gpu-1; FailPrepare on all devices", ""},
		"by id":          {"a id2", "XID 79 on gpu-0; FailPrepare on all devices", ""},
		"by either":      {"a id3 --device gpu-1", "XID 79 on gpu-0", ""},
		"no such id":     {"a id1 id9", "XID 79 on gpu-0; GPULost on gpu-1; FailPrepare on all devices", "node a has no fault id9"},
		"no such device": {"a --device gpu-5", "XID 79 on gpu-0; GPULost on gpu-1; FailPrepare on all devices", "node a has no fault on device gpu-5"},
		"none there":     {"b", "XID 79 on gpu-0; GPULost on gpu-1; FailPrepare on all devices", ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAPI(t)
			a.annotate("a", `{"apiVersion":"simgpu.dev/v1alpha1","kind":"NodeFaults","faults":[`+
				`{"id":"id1","device":"gpu-0","type":"XID","xid":79},{"id":"id2","device":"gpu-1","type":"GPULost"},{"id":"id3","type":"FailPrepare"}]}`)
			_, err := a.simgpuctl(append([]string{"clear"}, strings.Fields(test.args)...)...)
			if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Errorf("ends with %v, want %q", err, test.err)
			}
			if got := a.faults("a"); got != test.want {
				t.Errorf("the node has %q, want %q", got, test.want)
			}
			if _, there := a.annotations("a")[faults.Annotation]; there != (test.want != "") {
				t.Errorf("the annotation is there: %t", there)
			}
		})
	}
}
