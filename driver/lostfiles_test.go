package driver

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	draapi "k8s.io/kubelet/pkg/apis/dra/v1"
)

// TestLostCheckpoint is about a checkpoint that somebody removes while the driver is away.
func TestLostCheckpoint(t *testing.T) {
	a, rival := uuidClaim("a", left0), uuidClaim("rival", whole0)
	for name, test := range map[string]struct {
		inAPI []runtime.Object
		lose  func(*wholeNode) error
		kept  bool
	}{
		"is rebuilt from the API":      {[]runtime.Object{a, rival}, nil, true},
		"of a claim that is gone":      {[]runtime.Object{rival}, nil, false},
		"of a claim that was replaced": {[]runtime.Object{func() runtime.Object { s := a.DeepCopy(); s.UID = "0000000b-6c0e-4a55-9a37-0d1d4b1f6f11"; return s }(), rival}, nil, false},
		"together with all that tells its name": {[]runtime.Object{a, rival}, func(n *wholeNode) error {
			return os.RemoveAll(filepath.Join(n.pluginDir(), "dra-device-metadata"))
		}, false},
		"together with a usable spec": {[]runtime.Object{a, rival}, func(n *wholeNode) error {
			return os.Truncate(filepath.Join(n.opts.CDIDir, "k8s."+driverName+"-claim_"+string(a.UID)+".yaml"), 10)
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newWholeNode(t, a.DeepCopy())
			first := n.startMachinery()
			answer := first.mustPrepare(t, a)
			first.stop()
			if err := os.Remove(filepath.Join(n.pluginDir(), "checkpoint", string(a.UID)+".json")); err != nil {
				t.Fatal(err)
			}
			if test.lose != nil {
				if err := test.lose(n); err != nil {
					t.Fatal(err)
				}
			}

			n.api = newFakeAPI(test.inAPI...)
			n.opts.KubeClient = n.api
			m := n.startMachinery()
			if test.kept {
				// Before the API is asked, too.
				_, err := m.prepareAll(t.Context(), rival)
				expectError(t, err, string(a.UID))
			}
			m.reconciler.run(n.quiet())
			if test.kept {
				m.events.expect(t, reasonCheckpointRebuilt, "team/a")
				m.expectAnswers(t, answer, a)
				m.mustUnprepare(t, a)
			}
			m.expectConsistent(t, "settled")
			m.mustPrepare(t, rival)
			m.mustUnprepare(t, rival)
			if left := n.contents(); len(left) > 0 {
				t.Errorf("left %v", left)
			}
		})
	}
}

// TestFilesRemovedByHandComeBack removes all that a prepared claim has on the node under a running driver and under one
// that is away. Neither the kubelet nor the pod notices.
func TestFilesRemovedByHandComeBack(t *testing.T) {
	for name, remove := range map[string]func(*wholeNode) error{
		"checkpoint":           func(n *wholeNode) error { return removeAll(n.pluginDir(), "checkpoint/*") },
		"CDI folder":           func(n *wholeNode) error { return os.RemoveAll(n.opts.CDIDir) },
		"sockets":              func(n *wholeNode) error { return removeAll(n.pluginDir(), "dev/*/*") },
		"device folders":       func(n *wholeNode) error { return removeAll(n.pluginDir(), "dev/*") },
		"spec of the metadata": func(n *wholeNode) error { return removeAll(n.opts.CDIDir, "*metadata*") },
	} {
		for _, restart := range []bool{false, true} {
			t.Run(name+map[bool]string{false: " of a running driver", true: " of a driver that is away"}[restart], func(t *testing.T) {
				t.Parallel()
				a := uuidClaim("a", left0, whole1)
				n := newWholeNode(t, a)
				m := n.startMachinery()
				m.mustPrepare(t, a)
				before := n.contents()
				if restart {
					m.stop()
				}
				if err := remove(n); err != nil {
					t.Fatal(err)
				}
				if restart {
					m = n.startMachinery()
				}
				m.reconciler.run(n.quiet())
				m.expectConsistent(t, "afterwards")
				if now := n.contents(); len(now) != len(before) {
					t.Errorf("there was %v and is %v", before, now)
				}
				for _, r := range []string{"r0", "r1"} {
					n.inject(driverName + "/metadata=" + string(a.UID) + "_" + r)
				}
			})
		}
	}
}

func removeAll(dir, pattern string) error {
	files, err := filepath.Glob(filepath.Join(dir, pattern))
	if err == nil && len(files) == 0 {
		err = errors.New("there is no " + pattern)
	}
	for _, file := range files {
		err = errors.Join(err, os.RemoveAll(file))
	}
	return err
}

// TestStrayFilesHarmNobody puts files that are no claims' where checkpoints are.
func TestStrayFilesHarmNobody(t *testing.T) {
	n := newTestNode(t)
	n.start()
	for name, content := range map[string]string{"notes.json": "remember the milk", "empty.json": "", "claim.unreadable": "set aside by an earlier release"} {
		if err := os.WriteFile(filepath.Join(n.checkpointDir(), name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(n.checkpointDir(), "folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	p := n.start()
	if len(p.found.unreadable) != 3 {
		t.Errorf("reported %v", p.found.unreadable)
	}
	claim := claimOf("a", []string{whole0})
	p.mustPrepare(t, claim)
	p.mustUnprepare(t, claim)
	if left := n.files(); len(left) != 4 {
		t.Errorf("they were %v", left)
	}
}

// TestMetadataOutlivesAPredecessor unprepares a claim after another of its name has been prepared, as after a forced
// deletion.
func TestMetadataOutlivesAPredecessor(t *testing.T) {
	old := uuidClaim("a", left0)
	n := newWholeNode(t, old)
	m := n.startMachinery()
	m.mustPrepare(t, old)
	successor := uuidClaim("a", right0)
	successor.UID = "0000000b-6c0e-4a55-9a37-0d1d4b1f6f11"
	if err := n.api.Tracker().Update(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), successor, namespace); err != nil {
		t.Fatal(err)
	}
	answer := m.mustPrepare(t, successor)
	m.mustUnprepare(t, old)
	m.expectConsistent(t, "after the late unprepare")
	if _, err := os.Stat(filepath.Join(n.pluginDir(), "dra-device-metadata", "team_a", "r0", "metadata.json")); err != nil {
		t.Error(err)
	}
	m.expectAnswers(t, answer, successor)
	m.mustUnprepare(t, successor)
	if left := n.contents(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// TestNoSuccessWithoutMetadata lets the device metadata fail.
func TestNoSuccessWithoutMetadata(t *testing.T) {
	a := uuidClaim("a", left0)
	n := newWholeNode(t, a)
	m := n.startMachinery()
	blocker := filepath.Join(n.pluginDir(), "dra-device-metadata")
	if err := os.WriteFile(blocker, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	response, err := m.client.NodePrepareResources(t.Context(), &draapi.NodePrepareResourcesRequest{Claims: requestFor(a)})
	if err != nil {
		t.Fatal(err)
	}
	if answer := response.Claims[string(a.UID)]; answer.Error == "" || len(answer.Devices) > 0 {
		t.Errorf("answered %v", answer)
	}
	if err := os.Remove(blocker); err != nil {
		t.Fatal(err)
	}
	m.mustPrepare(t, a)
	m.mustUnprepare(t, a)
}
