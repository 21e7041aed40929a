package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/simgpu/simgpu/e2e/harness"
)

// TestUnknownClaimParameters has a claim carry parameters that the driver does not know: the pod says so, and nothing
// of the claim is prepared.
func TestUnknownClaimParameters(t *testing.T) {
	for name, tc := range map[string]struct{ parameters, says string }{
		"kind":  {`{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuWish"}`, "GpuWish"},
		"field": {`{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "MigDeviceConfig", "colour": "blue"}`, "colour"},
	} {
		t.Run(name, func(t *testing.T) {
			ns := suite.Namespace(t)
			c := harness.Claim("odd", harness.Partition("slice", "1g.10gb"), harness.Partition("other", "1g.10gb"))
			c.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{
				Requests: []string{"slice"},
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: harness.DriverName, Parameters: runtime.RawExtension{Raw: []byte(tc.parameters)},
				}},
			}}
			suite.CreateClaim(t, ns, c)
			p := suite.CreatePod(t, ns, harness.Pod("odd", []harness.Use{{Claim: "odd"}}))
			message := suite.Event(t, ns, "FailedPrepareDynamicResources", p.Name).Message
			for _, want := range []string{tc.says, "odd", "slice"} {
				if !strings.Contains(message, want) {
					t.Errorf("the event does not name %q: %s", want, message)
				}
			}
			if files := suite.OnDisk(t); len(files) > 0 {
				t.Errorf("the claim left %v on the node", files)
			}
			suite.DeletePod(t, p)
		})
	}
}

// TestBadInventory puts a faulty inventory into the ConfigMap under a running driver, which keeps what it had, and
// then has a driver start with it, which stays up, is not ready, and recovers. It says why on the Node and in the log.
func TestBadInventory(t *testing.T) {
	const key = "inventory.yaml"
	maps := suite.Client.CoreV1().ConfigMaps(harness.DriverNamespace)
	list, err := maps.List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=simgpu"})
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("%d ConfigMaps, %v", len(list.Items), err)
	}
	good := list.Items[0].Data[key]
	put := func(ctx context.Context, data string) {
		t.Helper()
		current, err := maps.Get(ctx, list.Items[0].Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		current.Data[key] = data
		if _, err := maps.Update(ctx, current, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		put(context.WithoutCancel(t.Context()), good)
	})
	node := suite.Cluster.Node(1).Name()
	devices := func() int {
		slices, err := suite.Client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, s := range slices.Items {
			n += len(s.Spec.Devices)
		}
		return n
	}
	const header = "apiVersion: simgpu.dev/v1alpha1\nkind: NodeInventory\nrules:\n- gpus:\n  - "

	for name, tc := range map[string]struct{ gpu, says string }{
		"unknown model":  {"{model: h1000, count: 1}", "h1000"},
		"negative count": {"{model: h100-sxm5-80gb, count: -1}", "count"},
		"unknown field":  {"{model: h100-sxm5-80gb, count: 1, colour: blue}", "colour"},
	} {
		t.Run(name, func(t *testing.T) {
			put(t.Context(), header+tc.gpu+"\n")
			message := suite.Event(t, metav1.NamespaceDefault, "InvalidInventory", node, tc.says).Message
			if !strings.Contains(message, tc.says) {
				t.Errorf("the event does not name %q: %s", tc.says, message)
			}
			if log := suite.Kubectl(t, "-n", harness.DriverNamespace, "logs", "daemonset/"+harness.DaemonSet); !strings.Contains(log, tc.says) {
				t.Errorf("the log does not name %q", tc.says)
			}
			if got := devices(); got != 26 {
				t.Errorf("%d devices are published, want the 26 from before", got)
			}
		})
	}

	t.Run("at the start", func(t *testing.T) {
		put(t.Context(), header+"{model: h1000}\n")
		old := suite.DriverPod(t)
		suite.DeletePod(t, &old)
		suite.Eventually(t, "a new driver that says what is wrong and is not ready", func(ctx context.Context) error {
			pods, err := suite.Client.CoreV1().Pods(harness.DriverNamespace).List(ctx, metav1.ListOptions{})
			if err != nil || len(pods.Items) != 1 {
				return fmt.Errorf("%d pods, %w", len(pods.Items), err)
			}
			p := pods.Items[0]
			if len(p.Status.ContainerStatuses) != 1 || p.Status.ContainerStatuses[0].State.Running == nil {
				return fmt.Errorf("containers %+v", p.Status.ContainerStatuses)
			}
			if s := p.Status.ContainerStatuses[0]; s.Ready || s.RestartCount > 0 {
				t.Fatalf("ready %t after %d restarts, want an unready driver that stays up", s.Ready, s.RestartCount)
			}
			log, err := suite.Command(ctx, "kubectl", "-n", harness.DriverNamespace, "logs", p.Name)
			if err == nil && !strings.Contains(log, "h1000") {
				err = fmt.Errorf("the log is\n%s", log)
			}
			return err
		})
		put(t.Context(), good)
		suite.Kubectl(t, "-n", harness.DriverNamespace, "rollout", "status", "daemonset", harness.DaemonSet, "--timeout", harness.Patience.String())
		if got := devices(); got != 26 {
			t.Errorf("%d devices are published once the inventory is good again, want 26", got)
		}
	})
}

// TestDriverIsKeptToItsNode writes slices as the driver's service account: only a token of a pod on the node may, and
// only slices of that node.
func TestDriverIsKeptToItsNode(t *testing.T) {
	driver := suite.DriverPod(t)
	bound := &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: driver.Name, UID: driver.UID}

	for name, tc := range map[string]struct {
		bound    *authenticationv1.BoundObjectReference
		nodeName *string
		allowed  bool
	}{
		"own node":         {bound, &driver.Spec.NodeName, true},
		"another node":     {bound, new("another-node"), false},
		"no node":          {bound, nil, false},
		"token of no node": {nil, &driver.Spec.NodeName, false},
	} {
		t.Run(name, func(t *testing.T) {
			token, err := suite.Client.CoreV1().ServiceAccounts(harness.DriverNamespace).CreateToken(t.Context(), driver.Spec.ServiceAccountName,
				&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: tc.bound}}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			config := rest.AnonymousClientConfig(suite.RESTConfig)
			config.BearerToken = token.Status.Token
			client, err := kubernetes.NewForConfig(config)
			if err != nil {
				t.Fatal(err)
			}
			slice := &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"},
				Spec: resourceapi.ResourceSliceSpec{
					Driver:   harness.DriverName,
					Pool:     resourceapi.ResourcePool{Name: "e2e", Generation: 1, ResourceSliceCount: 1},
					NodeName: tc.nodeName,
				},
			}
			if tc.nodeName == nil {
				slice.Spec.AllNodes = new(true)
			}
			// A dry run goes through admission and stores nothing.
			_, err = client.ResourceV1().ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			switch {
			case tc.allowed && err != nil:
				t.Errorf("refused: %v", err)
			case !tc.allowed && err == nil:
				t.Error("not refused")
			case !tc.allowed && !strings.Contains(err.Error(), "ValidatingAdmissionPolicy"):
				t.Errorf("refused by something else: %v", err)
			}
		})
	}
}
