package checkpoint

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
)

const uid = types.UID("8f1c7a54-6c0e-4a55-9a37-0d1d4b1f6f11")

func claimOf(uid types.UID, state State) Claim {
	node := 1
	return Claim{
		Namespace: "default",
		Name:      "llama-<1>",
		UID:       uid,
		State:     state,
		BootID:    "0e8c86e4-8e9a-4b13-90a5-3e1f4d3b8a55",
		Devices: []Device{
			{
				Request: "gpu/big",
				Pool:    "node-1",
				Device:  "gpu-0-mig-3g40gb-9-4",
				Env:     map[string]string{"SHARING": "TimeSlicing"},
				GPU:     GPU{Index: 0, Model: "h100-sxm5-80gb", MIGMode: "dynamic", NUMANode: &node, PCIeRoot: "pci0000:40", DriverVersion: "580.95.05", Seed: "a"},
			},
			{
				Request:     "monitor",
				Pool:        "node-1",
				Device:      "gpu-1",
				AdminAccess: true,
				ShareID:     "5e8c86e4-8e9a-4b13-90a5-3e1f4d3b8a55",
				GPU:         GPU{Index: 1, Model: "h100-sxm5-80gb"},
			},
		},
	}
}

func open(t *testing.T) (*Store, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "checkpoint")
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s, dir
}

func load(t *testing.T, s *Store) ([]Claim, []Unreadable) {
	t.Helper()
	claims, unreadable, err := s.Load()
	if err != nil {
		t.Fatal(err)
	}
	return claims, unreadable
}

func TestClaimsSurvive(t *testing.T) {
	s, dir := open(t)
	first, second := claimOf(uid, Preparing), claimOf("0a", Prepared)
	for _, c := range []Claim{first, second} {
		if err := s.Write(c); err != nil {
			t.Fatal(err)
		}
	}
	first.State = Prepared
	if err := s.Write(first); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "README.md"), nil, 0o600); err != nil {
		t.Fatal(err)
	}

	again, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	claims, unreadable := load(t, again)
	if diff := cmp.Diff([]Claim{second, first}, claims); diff != "" {
		t.Error(diff)
	}
	if len(unreadable) != 0 {
		t.Errorf("unreadable: %v", unreadable)
	}

	for range 2 {
		if err := again.Remove(uid); err != nil {
			t.Fatal(err)
		}
	}
	claims, _ = load(t, again)
	if diff := cmp.Diff([]Claim{second}, claims); diff != "" {
		t.Errorf("after remove: %s", diff)
	}
}

func TestNamesThatLeaveTheFolderAreRefused(t *testing.T) {
	s, dir := open(t)
	for _, bad := range []types.UID{"", "..", "../x", "a/b", "a.b"} {
		c := claimOf(bad, Prepared)
		if err := s.Write(c); err == nil {
			t.Errorf("wrote %q", bad)
		}
		if err := s.Remove(bad); err == nil {
			t.Errorf("removed %q", bad)
		}
	}
	if entries, _ := os.ReadDir(filepath.Dir(dir)); len(entries) != 1 {
		t.Errorf("left %v", entries)
	}
}

// TestReleasesStayReadable reads what releases have written. The files are never edited.
func TestReleasesStayReadable(t *testing.T) {
	for file, want := range map[string]Claim{
		"v0.1-preparing.json": claimOf(uid, Preparing),
		"v0.1-prepared.json":  claimOf(uid, Prepared),
		// As a later release might write it: more fields at each level, another order.
		"later-fields.json": claimOf(uid, Prepared),
	} {
		t.Run(file, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join("testdata", file))
			if err != nil {
				t.Fatal(err)
			}
			got, err := decode(data)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("this release writes the same bytes", func(t *testing.T) {
		want, err := os.ReadFile("testdata/v0.1-prepared.json")
		if err != nil {
			t.Fatal(err)
		}
		got, err := encode(claimOf(uid, Prepared))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("the format changed; see the package documentation (-release +now): %s", diff)
		}
	})
}

func TestDamagedFileIsSetAsideAndHarmsNoOther(t *testing.T) {
	good, err := encode(claimOf(uid, Prepared))
	if err != nil {
		t.Fatal(err)
	}
	key := types.NamespacedName{Namespace: "default", Name: "llama-<1>"}
	devices := []string{"gpu-0-mig-3g40gb-9-4", "gpu-1"}

	for name, test := range map[string]struct {
		data    []byte
		want    string
		claim   types.NamespacedName
		devices []string
	}{
		"empty":           {nil, "not a JSON object", types.NamespacedName{}, nil},
		"zeros":           {make([]byte, 512), "not a JSON object", types.NamespacedName{}, nil},
		"cut in half":     {good[:len(good)*2/3], "not a JSON object", key, devices[:1]},
		"changed content": {bytes.Replace(good, []byte("gpu-1"), []byte("gpu-2"), 1), "sum over the claim", key, []string{devices[0], "gpu-2"}},
		"reformatted":     {indent(t, good), "sum over the claim", key, devices},
		"later version":   {bytes.Replace(good, []byte(`"version":1`), []byte(`"version":2`), 1), "version is 2", key, devices},
		"other format":    {[]byte(`{"kind":"Pod"}`), "format is", types.NamespacedName{}, nil},
		"other claim":     {mustEncode(t, claimOf("0b", Prepared)), "about claim 0b", key, devices},
		"unknown state":   {mustEncode(t, claimOf(uid, "Half")), `state is "Half"`, key, devices},
	} {
		t.Run(name, func(t *testing.T) {
			s, dir := open(t)
			other := claimOf("0a", Prepared)
			if err := s.Write(other); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, string(uid)+".json"), test.data, 0o600); err != nil {
				t.Fatal(err)
			}

			claims, unreadable := load(t, s)
			if diff := cmp.Diff([]Claim{other}, claims); diff != "" {
				t.Errorf("readable claims: %s", diff)
			}
			if len(unreadable) != 1 {
				t.Fatalf("unreadable: %v", unreadable)
			}
			u := unreadable[0]
			if u.UID != uid || !strings.Contains(u.Err.Error(), test.want) {
				t.Errorf("reported %s: %v, want %q", u.UID, u.Err, test.want)
			}
			if diff := cmp.Diff(test.claim, u.Claim); diff != "" {
				t.Errorf("salvaged name: %s", diff)
			}
			if diff := cmp.Diff(test.devices, u.Devices); diff != "" {
				t.Errorf("salvaged devices: %s", diff)
			}
			if data, err := os.ReadFile(u.Path); err != nil || !bytes.Equal(data, test.data) {
				t.Errorf("set aside: %v", err)
			}

			// It stays a claim of unknown content over further starts ...
			_, unreadable = load(t, s)
			if len(unreadable) != 1 || unreadable[0].UID != uid || unreadable[0].Claim != test.claim {
				t.Errorf("after another start: %v", unreadable)
			}
			// ... until the claim is written anew ...
			if err := s.Write(claimOf(uid, Prepared)); err != nil {
				t.Fatal(err)
			}
			if claims, unreadable = load(t, s); len(claims) != 2 || len(unreadable) != 0 {
				t.Errorf("after writing anew: %v, %v", claims, unreadable)
			}
			// ... and nothing is left once it is removed.
			if err := s.Remove(uid); err != nil {
				t.Fatal(err)
			}
			if entries, _ := os.ReadDir(dir); len(entries) != 1 {
				t.Errorf("left %v", entries)
			}
		})
	}
}

func TestOpenRemovesUnfinishedWrites(t *testing.T) {
	_, dir := open(t)
	tmp := filepath.Join(dir, "."+string(uid)+".json.7.tmp")
	if err := os.WriteFile(tmp, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("left %v", entries)
	}
	if claims, unreadable := load(t, s); len(claims)+len(unreadable) != 0 {
		t.Errorf("loaded %v, %v", claims, unreadable)
	}
}

func mustEncode(t *testing.T, c Claim) []byte {
	t.Helper()
	data, err := encode(c)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func indent(t *testing.T, data []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := json.Indent(&out, data, "", "  "); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
