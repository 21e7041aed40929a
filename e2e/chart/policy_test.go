package chart

import (
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	defaults "k8s.io/kubernetes/pkg/apis/admissionregistration/v1"
	"k8s.io/utils/ptr"
)

func policyOf(t *testing.T, rendered objects) *admissionv1.ValidatingAdmissionPolicy {
	t.Helper()
	return get[*admissionv1.ValidatingAdmissionPolicy](t, rendered, "simgpu-kubelet-plugin-own-node")
}

// TestPolicyKeepsDriversToTheirOwnNode asks the API server's own admission plugin.
func TestPolicyKeepsDriversToTheirOwnNode(t *testing.T) {
	driver := func(node string) *user.DefaultInfo {
		info := &user.DefaultInfo{Name: "system:serviceaccount:simgpu:simgpu-kubelet-plugin"}
		if node != "" {
			info.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {node}}
		}
		return info
	}
	slice := func(driver, node string) *resourceapi.ResourceSlice {
		slice := &resourceapi.ResourceSlice{}
		slice.Name = "s"
		slice.Spec.Driver = driver
		slice.Spec.Pool.Name = "pool"
		if node == "" {
			slice.Spec.AllNodes = ptr.To(true)
		} else {
			slice.Spec.NodeName = &node
		}
		return slice
	}
	const ours = "gpu.nvidia.com"
	server := newPolicyServer(t, render(t, ""))

	for name, test := range map[string]struct {
		user     *user.DefaultInfo
		old, new *resourceapi.ResourceSlice
		denied   []string // parts of the message; none: allowed
	}{
		"create on its own node":    {driver("a"), nil, slice(ours, "a"), nil},
		"update on its own node":    {driver("a"), slice(ours, "a"), slice(ours, "a"), nil},
		"delete on its own node":    {driver("a"), slice(ours, "a"), nil, nil},
		"create on another node":    {driver("a"), nil, slice(ours, "b"), []string{"CREATE of a ResourceSlice of node 'b' by the driver on node 'a'", "only the ResourceSlices of node 'a'"}},
		"update on another node":    {driver("a"), slice(ours, "b"), slice(ours, "b"), []string{"UPDATE of a ResourceSlice of node 'b' by the driver on node 'a'"}},
		"delete on another node":    {driver("a"), slice(ours, "b"), nil, []string{"DELETE of a ResourceSlice of node 'b' by the driver on node 'a'"}},
		"create for all nodes":      {driver("a"), nil, slice(ours, ""), []string{"CREATE of a ResourceSlice that belongs to no single node by the driver on node 'a'"}},
		"create for another driver": {driver("a"), nil, slice("gpu.other.example", "a"), []string{"DRA driver 'gpu.other.example'", "only those of DRA driver 'gpu.nvidia.com'"}},
		"delete of another driver":  {driver("a"), slice("gpu.other.example", "a"), nil, []string{"DELETE of a ResourceSlice of DRA driver 'gpu.other.example'"}},
		"token without a node":      {driver(""), nil, slice(ours, "a"), []string{"the token is not bound to a pod on a node"}},
		"no node at all":            {driver(""), nil, slice(ours, ""), []string{"the token is not bound to a pod on a node"}},
		"somebody else":             {&user.DefaultInfo{Name: "admin"}, nil, slice(ours, "b"), nil},
		"same account name in another namespace": {
			&user.DefaultInfo{Name: "system:serviceaccount:other:simgpu-kubelet-plugin"}, nil, slice(ours, "b"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			err := server.request(t, test.user, test.old, test.new)
			if denied := err != nil; denied != (test.denied != nil) {
				t.Fatalf("denied: %t: %v", denied, err)
			}
			for _, want := range test.denied {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the message lacks %q:\n%v", want, err)
				}
			}
		})
	}
}

func TestPolicyFollowsTheDriverName(t *testing.T) {
	server := newPolicyServer(t, render(t, "driverName: gpu.simgpu.example"))
	info := &user.DefaultInfo{
		Name:  "system:serviceaccount:simgpu:simgpu-kubelet-plugin",
		Extra: map[string][]string{"authentication.kubernetes.io/node-name": {"a"}},
	}
	slice := &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Driver: "gpu.simgpu.example", NodeName: ptr.To("a")}}
	if err := server.request(t, info, nil, slice); err != nil {
		t.Errorf("its own driver name: %v", err)
	}
	slice.Spec.Driver = "gpu.nvidia.com"
	if err := server.request(t, info, nil, slice); err == nil {
		t.Error("may publish for gpu.nvidia.com")
	}
}

// policyServer is the admission plugin of the API server with the chart's policy and binding in force.
type policyServer struct{ plugin *validating.Plugin }

func newPolicyServer(t *testing.T, rendered objects) policyServer {
	t.Helper()
	policy := policyOf(t, rendered)
	defaults.SetObjectDefaults_ValidatingAdmissionPolicy(policy)
	binding := get[*admissionv1.ValidatingAdmissionPolicyBinding](t, rendered, "simgpu-kubelet-plugin-own-node")
	defaults.SetObjectDefaults_ValidatingAdmissionPolicyBinding(binding)
	client := fake.NewClientset(policy, binding)
	factory := informers.NewSharedInformerFactory(client, 0)
	plugin, err := validating.NewPlugin(nil)
	if err != nil {
		t.Fatal(err)
	}
	plugin.SetExternalKubeClientSet(client)
	plugin.SetExternalKubeInformerFactory(factory)
	plugin.SetRESTMapper(meta.NewDefaultRESTMapper(nil))
	plugin.SetDynamicClient(dynamicfake.NewSimpleDynamicClient(scheme.Scheme))
	plugin.SetDrainedNotification(t.Context().Done())
	plugin.SetUnconditionalAuthorizer(authorizerfactory.NewAlwaysAllowAuthorizer())
	if err := plugin.ValidateInitialization(); err != nil {
		t.Fatal(err)
	}
	factory.Start(t.Context().Done())
	t.Cleanup(factory.Shutdown)
	return policyServer{plugin}
}

// request asks for a create where old is nil, for a delete where object is nil, else for an update.
func (s policyServer) request(t *testing.T, info user.Info, old, object *resourceapi.ResourceSlice) error {
	t.Helper()
	operation, options := admission.Update, runtime.Object(&metav1.UpdateOptions{})
	var oldObject, newObject runtime.Object
	if old != nil {
		oldObject = old
	} else {
		operation, options = admission.Create, &metav1.CreateOptions{}
	}
	if object != nil {
		newObject = object
	} else {
		operation, options = admission.Delete, &metav1.DeleteOptions{}
	}
	attributes := admission.NewAttributesRecord(newObject, oldObject,
		resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"), "", "s",
		resourceapi.SchemeGroupVersion.WithResource("resourceslices"), "", operation, options, false, info)
	return s.plugin.Validate(t.Context(), attributes, admission.NewObjectInterfacesFromScheme(scheme.Scheme))
}
