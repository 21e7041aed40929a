package checkpoint

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func addSeeds(f *testing.F) {
	f.Helper()
	good, err := encode(claimOf(uid, Prepared))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:len(good)/2])
	for _, seed := range []string{"", "null", "{}", "[[[", `{"format":"simgpu.dev/checkpoint","version":1,"sum":"sha256:","claim":{}}`,
		`{"format":"simgpu.dev/checkpoint","version":2,"claim":{"namespace":"a","name":"b","devices":[{"device":"gpu-0"}]}}`, "\x00\x00"} {
		f.Add([]byte(seed))
	}
}

// FuzzDecode checks that what is read is what would be written, and that names are made out of anything else
// without harm. The sum of a claim is corrected, so that its content is looked at.
func FuzzDecode(f *testing.F) {
	addSeeds(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		salvage(data)
		var e envelope
		if json.Unmarshal(data, &e) == nil {
			e.Sum = sum(e.Claim)
			data = fmt.Appendf(nil, "{\"format\":%q,\"version\":%d,\"sum\":%q,\"claim\":%s}\n", e.Format, e.Version, e.Sum, e.Claim)
		}
		claim, err := decode(data)
		if err != nil {
			return
		}
		written, err := encode(claim)
		if err != nil {
			t.Fatal(err)
		}
		again, err := decode(written)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(claim, again); diff != "" {
			t.Errorf("written and read again: %s", diff)
		}
	})
}

// FuzzLoad puts a file of any content where the checkpoint of a claim is. What is read must be what was
// written; anything else is set aside, whole, and is gone once the claim is removed.
func FuzzLoad(f *testing.F) {
	addSeeds(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		s, dir := open(t)
		if err := os.WriteFile(filepath.Join(dir, string(uid)+".json"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		claims, unreadable := load(t, s)
		if len(claims)+len(unreadable) != 1 {
			t.Fatalf("%v and %v", claims, unreadable)
		}
		for _, claim := range claims {
			if claim.UID != uid {
				t.Errorf("read %v", claim)
			}
			if err := s.Write(claim); err != nil {
				t.Fatal(err)
			}
			again, _ := load(t, s)
			if diff := cmp.Diff(claims, again); diff != "" {
				t.Errorf("written and read again: %s", diff)
			}
		}
		for _, u := range unreadable {
			kept, err := os.ReadFile(u.Path)
			if u.UID != uid || u.Stray || u.Err == nil || err != nil || string(kept) != string(data) {
				t.Errorf("set aside %+v, %v", u, err)
			}
		}
		if err := s.Remove(uid); err != nil {
			t.Fatal(err)
		}
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("left %v", left)
		}
	})
}
