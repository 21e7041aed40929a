package api_test

import (
	"strings"
	"testing"

	"github.com/simgpu/simgpu/manageddra/api"
)

// The long name is what KServe's own controller made of that service.
func TestClaimTemplateName(t *testing.T) {
	for parent, want := range map[string]string{
		"qwen":                  "qwen-managed-dra",
		strings.Repeat("a", 51): strings.Repeat("a", 51) + "-managed-dra",
		strings.Repeat("a", 52): "aaaaaaaaaaaaaaaaaaab6fe77c19f0f0f4946c761d62585bfea-managed-dra",
	} {
		if got := api.ClaimTemplateName(parent); got != want {
			t.Errorf("ClaimTemplateName(%q) = %q, want %q", parent, got, want)
		}
	}
}
