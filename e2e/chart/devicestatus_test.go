package chart

import (
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/apis/resource"
	"k8s.io/kubernetes/pkg/registry/rbac/validation"
	"k8s.io/kubernetes/pkg/registry/resource/resourceclaim"
	"k8s.io/kubernetes/plugin/pkg/auth/authorizer/rbac"
)

// TestDeviceStatusPermissions asks the API server's own rules for writes of claim status, with the chart's ClusterRole
// in force: the driver may write about its own devices in claims for its own node, and about nothing else.
func TestDeviceStatusPermissions(t *testing.T) {
	const ours, theirs = "gpu.nvidia.com", "nic.example.com"
	for name, test := range map[string]struct {
		values  string
		driver  string // whose entry is written
		node    string // that the claim is allocated for
		mayCall bool   // may call the status subresource at all
		denied  string // part of the message; "": allowed
	}{
		"own device on the own node":        {"", ours, "a", true, ""},
		"own device on another node":        {"", ours, "b", true, "cannot arbitrary-node:patch"},
		"device of another driver":          {"", theirs, "a", true, `resource "resourceclaims/driver"`},
		"another driver name":               {"driverName: gpu.simgpu.example", "gpu.simgpu.example", "a", true, ""},
		"not the default with another name": {"driverName: gpu.simgpu.example", ours, "a", true, `resource "resourceclaims/driver"`},
		"switched off, devices attached":    {"{deviceStatus: {enabled: false}, attachDelay: 1s}", ours, "a", true, ""},
		"switched off":                      {"deviceStatus: {enabled: false}", ours, "a", false, `resource "resourceclaims/driver"`},
	} {
		t.Run(name, func(t *testing.T) {
			rendered := render(t, test.values)
			_, static := validation.NewTestRuleResolver(nil, nil,
				[]*rbacv1.ClusterRole{get[*rbacv1.ClusterRole](t, rendered, "simgpu-kubelet-plugin")},
				[]*rbacv1.ClusterRoleBinding{get[*rbacv1.ClusterRoleBinding](t, rendered, "simgpu-kubelet-plugin")})
			rules := rbac.New(static, static, static, static)
			driver := &user.DefaultInfo{
				Name:  "system:serviceaccount:" + namespace + ":simgpu-kubelet-plugin",
				Extra: map[string][]string{"authentication.kubernetes.io/node-name": {"a"}},
			}
			call := authorizer.AttributesRecord{User: driver, Verb: "patch", APIGroup: "resource.k8s.io", APIVersion: "v1",
				Resource: "resourceclaims", Subresource: "status", Namespace: "team", Name: "claim", ResourceRequest: true}
			decision, _, err := rules.Authorize(t.Context(), call)
			if err != nil {
				t.Fatal(err)
			}
			if mayCall := decision == authorizer.DecisionAllow; mayCall != test.mayCall {
				t.Errorf("may patch resourceclaims/status: %t", mayCall)
			}

			before := allocatedClaim(test.driver, test.node)
			after := before.DeepCopy()
			after.Status.Devices = []resource.AllocatedDeviceStatus{{Driver: test.driver, Pool: test.node, Device: "gpu-0"}}
			ctx := genericapirequest.WithUser(genericapirequest.WithNamespace(t.Context(), "team"), driver)
			ctx = genericapirequest.WithRequestInfo(ctx, &genericapirequest.RequestInfo{IsResourceRequest: true, Verb: "patch",
				APIGroup: "resource.k8s.io", APIVersion: "v1", Resource: "resourceclaims", Subresource: "status", Namespace: "team", Name: "claim"})
			strategy := resourceclaim.NewStatusStrategy(resourceclaim.NewStrategy(nil, rules))
			var refusals field.ErrorList
			for _, problem := range strategy.ValidateUpdate(ctx, after, before) {
				if problem.Type == field.ErrorTypeForbidden {
					refusals = append(refusals, problem)
				}
			}
			switch {
			case test.denied == "" && len(refusals) > 0:
				t.Errorf("refused: %v", refusals)
			case test.denied != "" && (len(refusals) == 0 || !strings.Contains(refusals.ToAggregate().Error(), test.denied)):
				t.Errorf("refused with %v, want one that mentions %q", refusals, test.denied)
			}
		})
	}
}

func allocatedClaim(driver, node string) *resource.ResourceClaim {
	return &resource.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "claim", UID: "uid", ResourceVersion: "1"},
		Status: resource.ResourceClaimStatus{Allocation: &resource.AllocationResult{
			Devices: resource.DeviceAllocationResult{Results: []resource.DeviceRequestAllocationResult{{
				Request: "gpu", Driver: driver, Pool: node, Device: "gpu-0",
			}}},
			NodeSelector: &core.NodeSelector{NodeSelectorTerms: []core.NodeSelectorTerm{{
				MatchFields: []core.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: core.NodeSelectorOpIn, Values: []string{node}}},
			}}},
		}},
	}
}
