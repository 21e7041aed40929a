package chart

import (
	"maps"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

const managedDRAOn = "managedDRA: {enabled: true}"

// TestManagedDRAIsOff by default: nothing of it is there before somebody wants it.
func TestManagedDRAIsOff(t *testing.T) {
	for name := range render(t, "") {
		if strings.Contains(name, "managed-dra") || strings.Contains(name, "kserve") {
			t.Errorf("there is %s", name)
		}
	}
	var more []string
	before := render(t, "")
	for _, name := range slices.Sorted(maps.Keys(render(t, managedDRAOn))) {
		if before[name] == nil {
			more = append(more, name)
		}
	}
	want := []string{
		"ClusterRole/simgpu-managed-dra", "ClusterRoleBinding/simgpu-managed-dra",
		"CustomResourceDefinition/llminferenceserviceconfigs.serving.kserve.io", "CustomResourceDefinition/llminferenceservices.serving.kserve.io",
		"Deployment/simgpu-managed-dra", "Role/simgpu-managed-dra", "RoleBinding/simgpu-managed-dra", "Service/simgpu-managed-dra",
		"ServiceAccount/simgpu-managed-dra", "ValidatingWebhookConfiguration/simgpu-managed-dra",
	}
	if !slices.Equal(more, want) {
		t.Errorf("got  %v\nwant %v", more, want)
	}
}

// TestManagedDRAMayReadNoSecrets but its own, and nothing is granted with a wildcard.
func TestManagedDRAMayReadNoSecrets(t *testing.T) {
	rendered := render(t, managedDRAOn)
	rules := slices.Concat(get[*rbacv1.ClusterRole](t, rendered, "simgpu-managed-dra").Rules, get[*rbacv1.Role](t, rendered, "simgpu-managed-dra").Rules)
	for _, rule := range rules {
		if slices.Contains(rule.Verbs, "*") || slices.Contains(rule.Resources, "*") || slices.Contains(rule.APIGroups, "*") {
			t.Errorf("wildcard in %+v", rule)
		}
		if slices.Contains(rule.Resources, "secrets") && !slices.Equal(rule.Verbs, []string{"create"}) && !slices.Equal(rule.ResourceNames, []string{"simgpu-managed-dra"}) {
			t.Errorf("more than its own Secret: %+v", rule)
		}
	}
	pod := get[*appsv1.Deployment](t, rendered, "simgpu-managed-dra").Spec.Template.Spec
	if c := pod.Containers[0].SecurityContext; *c.Privileged || *c.AllowPrivilegeEscalation || !*c.ReadOnlyRootFilesystem || !*pod.SecurityContext.RunAsNonRoot {
		t.Errorf("the controller may more than it needs: %+v %+v", c, pod.SecurityContext)
	}
}
