package driver

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	draapi "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
)

// TestHostileNamesLeadNowhere sends claims that no API server would have stored, through the real helper:
// nothing is written or removed anywhere.
func TestHostileNamesLeadNowhere(t *testing.T) {
	t.Parallel()
	victim := claimOf("victim", []string{right0})
	hostile := []string{
		"../victim", "../../../../escape", "..", ".", "/", "/etc/passwd", "a/b/c", "a\x00b", "a\nb", "*", "uid-*", "?", "[a-z]", "",
		"-a", "A", "a b", "a\\..\\b", "..%2f", strings.Repeat("a", 300), "ﬁle",
	}
	type change struct {
		what string
		make func(*resourceapi.ResourceClaim, string)
	}
	result := func(c *resourceapi.ResourceClaim) *resourceapi.DeviceRequestAllocationResult {
		return &c.Status.Allocation.Devices.Results[0]
	}
	changes := []change{
		{"UID", func(c *resourceapi.ResourceClaim, s string) { c.UID = types.UID(s) }},
		{"namespace", func(c *resourceapi.ResourceClaim, s string) { c.Namespace = s }},
		{"name", func(c *resourceapi.ResourceClaim, s string) { c.Name = s }},
		{"request", func(c *resourceapi.ResourceClaim, s string) { result(c).Request = s }},
		{"subrequest", func(c *resourceapi.ResourceClaim, s string) { result(c).Request = "r0/" + s }},
		{"device", func(c *resourceapi.ResourceClaim, s string) { result(c).Device = s }},
		{"pool", func(c *resourceapi.ResourceClaim, s string) { result(c).Pool = s }},
	}
	n := newWholeNode(t, victim)
	m := n.startMachinery()
	m.mustPrepare(t, victim)
	before := tree(t, n.root)

	for _, change := range changes {
		for _, s := range hostile {
			claim := claimOf("evil", []string{left0})
			change.make(claim, s)
			// The helper asks the API for the claim by name: it is past that.
			if claim.Name == "evil" && claim.Namespace == namespace {
				if err := n.api.Tracker().Add(claim); err != nil {
					t.Fatal(err)
				}
			}
			response, err := m.client.NodePrepareResources(t.Context(), &draapi.NodePrepareResourcesRequest{Claims: requestFor(claim)})
			if err == nil && response.Claims[string(claim.UID)].GetError() == "" {
				t.Errorf("%s %q: prepared", change.what, s)
			}
			if diff := cmp.Diff(before, tree(t, n.root)); diff != "" {
				t.Fatalf("%s %q: prepare changed files: %s", change.what, s, diff)
			}
			// What comes of it does not matter, only that it touches nothing.
			_, _ = m.client.NodeUnprepareResources(t.Context(), &draapi.NodeUnprepareResourcesRequest{Claims: requestFor(claim)})
			if diff := cmp.Diff(before, tree(t, n.root)); diff != "" {
				t.Fatalf("%s %q: unprepare changed files: %s", change.what, s, diff)
			}
			_ = n.api.Tracker().Delete(resourceapi.SchemeGroupVersion.WithResource("resourceclaims"), claim.Namespace, claim.Name)
		}
	}

	// A share is part of no path.
	claim := claimOf("evil", []string{left0}, firstResult(func(r *resourceapi.DeviceRequestAllocationResult) { r.ShareID = ptr.To(types.UID("../../escape")) }))
	if err := n.api.Tracker().Add(claim); err != nil {
		t.Fatal(err)
	}
	_, _ = m.client.NodePrepareResources(t.Context(), &draapi.NodePrepareResourcesRequest{Claims: requestFor(claim)})
	_, _ = m.client.NodeUnprepareResources(t.Context(), &draapi.NodeUnprepareResourcesRequest{Claims: requestFor(claim)})
	if diff := cmp.Diff(before, tree(t, n.root)); diff != "" {
		t.Errorf("share: %s", diff)
	}
}

// tree lists all files below a folder, and beside it what an escape by a few steps would reach.
func tree(t *testing.T, root string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		all = append(all, path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"escape", "victim"} {
		for dir := root; dir != "/"; dir = filepath.Dir(dir) {
			if _, err := os.Lstat(filepath.Join(filepath.Dir(dir), name)); err == nil {
				all = append(all, filepath.Join(filepath.Dir(dir), name))
			}
		}
	}
	slices.Sort(all)
	return all
}
