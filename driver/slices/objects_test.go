package slices

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2/ktesting"

	"github.com/simgpu/simgpu/driver/hardware"
)

// TestObjects compares with what the library that the driver publishes with writes into an API.
func TestObjects(t *testing.T) {
	for name, node := range map[string]*hardware.Node{
		"no GPU":    newNode(t),
		"nine GPUs": newNode(t, dynamic("h100-sxm5-80gb", 8), disabled("l4-24gb", 1)),
	} {
		for _, layout := range []Layout{Combined, Split} {
			t.Run(fmt.Sprintf("%s, %s", name, layout), func(t *testing.T) {
				resources, err := Resources(node, layout)
				if err != nil {
					t.Fatal(err)
				}
				got := Objects(node, resources)
				want := stored(t, node, resources, len(got))
				for i := range want {
					if generated := want[i].GenerateName; generated != got[i].GenerateName {
						t.Errorf("slice %d: got the name %s..., want %s...", i, got[i].GenerateName, generated)
					}
					if diff := cmp.Diff(want[i].Spec, got[i].Spec); diff != "" {
						t.Errorf("slice %d (-want +got):\n%s", i, diff)
					}
					if kind := got[i].GroupVersionKind().String(); kind != "resource.k8s.io/v1, Kind=ResourceSlice" {
						t.Errorf("slice %d is a %s", i, kind)
					}
				}
			})
		}
	}
}

// stored publishes the resources into an API of which nothing is known, and returns them from there.
func stored(t *testing.T, node *hardware.Node, resources resourceslice.DriverResources, n int) []resourceapi.ResourceSlice {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	client := fake.NewClientset()
	names := 0
	client.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		slice := action.(clienttesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		names++
		slice.Name = fmt.Sprintf("%s%05d", slice.GenerateName, names)
		return false, nil, nil
	})
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: node.DriverName,
		KubeClient: client,
		Owner:      &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: "uid"},
		Resources:  &resources,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer controller.Stop()
	for {
		list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(list.Items) == n {
			slices.SortFunc(list.Items, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
			return list.Items
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%d slices were written, want %d", len(list.Items), n)
		case <-time.After(10 * time.Millisecond):
		}
	}
}
