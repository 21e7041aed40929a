package conformance

import (
	"slices"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
)

func role(group, resource string, verbs ...string) rbacv1.ClusterRole {
	return rbacv1.ClusterRole{Rules: []rbacv1.PolicyRule{{APIGroups: []string{group}, Resources: []string{resource}, Verbs: verbs}}}
}

func request(verb, group, resource, subresource string, code int32) auditv1.Event {
	return auditv1.Event{
		Verb: verb, ObjectRef: &auditv1.ObjectReference{APIGroup: group, Resource: resource, Subresource: subresource},
		ResponseStatus: &metav1.Status{Code: code},
	}
}

func TestRights(t *testing.T) {
	const group = "resource.k8s.io"
	got := rights([]rbacv1.ClusterRole{
		role(group, "resourceclaims", "get", "list"),
		role(group, "resourceclaims/status", "patch"),
		role(group, "resourceclaims/driver", "associated-node:patch", "associated-node:update"),
		role(group, "resourceslices", "*"),
		role("", "nodes", "get"),
	}, []auditv1.Event{
		request("get", group, "resourceclaims", "", 200), request("get", group, "resourceclaims", "", 404),
		request("patch", group, "resourceclaims", "status", 200),
		request("create", group, "resourceslices", "", 201),
		request("list", "", "pods", "", 403),
		{Verb: "get", RequestURI: "/version"},
	})
	want := []Right{
		{"nodes", "get", true, false, false},
		{"pods", "list", false, true, true},
		{"resourceclaims.resource.k8s.io", "get", true, true, false},
		{"resourceclaims.resource.k8s.io", "list", true, false, false},
		{"resourceclaims/driver.resource.k8s.io", "associated-node:patch", true, true, false},
		{"resourceclaims/driver.resource.k8s.io", "associated-node:update", true, false, false},
		{"resourceclaims/status.resource.k8s.io", "patch", true, true, false},
		{"resourceslices.resource.k8s.io", "*", true, true, false},
		{"resourceslices.resource.k8s.io", "create", true, true, false},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%+v\nwant\n%+v", got, want)
	}
}

func TestImmodest(t *testing.T) {
	for _, test := range []struct {
		role rbacv1.ClusterRole
		says string
	}{
		{role("resource.k8s.io", "resourceslices", "create", "delete"), ""},
		{role("resource.k8s.io", "resourceclaims/driver", "associated-node:patch"), ""},
		{role("", "pods", "list", "watch"), ""},
		{role("", "nodes", "patch"), ""},
		{role("", "secrets", "get"), "secrets (get)"},
		{role("", "pods", "delete"), "writes pods (delete)"},
		{role("resource.k8s.io", "resourceslices", "deletecollection"), "deletes collections of resourceslices.resource.k8s.io"},
		{role("resource.k8s.io", "resourceslices", "*"), "every verb on resourceslices.resource.k8s.io"},
		{role("resource.k8s.io", "*", "get"), "get on everything (*.resource.k8s.io)"},
		{role("*", "pods", "get"), "get on everything (pods.*)"},
	} {
		var said string
		for _, right := range rights([]rbacv1.ClusterRole{test.role}, nil) {
			said = immodest(right)
		}
		if said != test.says {
			t.Errorf("%+v: says %q, want %q", test.role.Rules[0], said, test.says)
		}
	}
}
