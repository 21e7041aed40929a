package scheduler

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"
)

const driver = "gadget.example.com"

func cluster(t *testing.T) (*Scheduler, *fake.Clientset) {
	t.Helper()
	client := fake.NewClientset(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}},
		&resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gadgets"}, Spec: resourceapi.DeviceClassSpec{
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "gadget.example.com"`}}},
		}},
		&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"}, Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: ptr.To("node"), Pool: resourceapi.ResourcePool{Name: "node", Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "one"}, {Name: "two"}},
		}},
	)
	return New(client, "node"), client
}

func claim(t *testing.T, client *fake.Clientset, name, class string) *resourceapi.ResourceClaim {
	t.Helper()
	created, err := client.ResourceV1().ResourceClaims("team").Create(t.Context(), &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name)},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "device", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return created
}

func pod(name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name)}}
}

func TestSchedule(t *testing.T) {
	s, client := cluster(t)
	both, err := s.Schedule(t.Context(), pod("first"), claim(t, client, "a", "gadgets"), claim(t, client, "b", "gadgets"))
	if err != nil {
		t.Fatal(err)
	}
	a, b := both[0].Status.Allocation.Devices.Results[0], both[1].Status.Allocation.Devices.Results[0]
	if a.Driver != driver || a.Pool != "node" || a.Request != "device" || a.Device == b.Device {
		t.Errorf("allocated %+v and %+v", a, b)
	}

	third := claim(t, client, "c", "gadgets")
	if _, err := s.Schedule(t.Context(), pod("second"), third); !errors.Is(err, ErrDoesNotFit) {
		t.Errorf("a third claim for two devices: %v", err)
	}

	// A claim that has an allocation keeps it, and is reserved for one pod more.
	again, err := s.Schedule(t.Context(), pod("second"), both[0])
	if err != nil {
		t.Fatal(err)
	}
	if got := again[0].Status; got.Allocation.Devices.Results[0].Device != a.Device || len(got.ReservedFor) != 2 || got.ReservedFor[1].Name != "second" {
		t.Errorf("the shared claim has status %+v", got)
	}

	if err := client.ResourceV1().ResourceClaims("team").Delete(t.Context(), "b", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	freed, err := s.Schedule(t.Context(), pod("third"), third)
	if err != nil {
		t.Fatal(err)
	}
	if got := freed[0].Status.Allocation.Devices.Results[0].Device; got != b.Device {
		t.Errorf("got device %s; %s is free", got, b.Device)
	}
}

func TestUnknownClass(t *testing.T) {
	s, client := cluster(t)
	if _, err := s.Schedule(t.Context(), pod("pod"), claim(t, client, "a", "widgets")); err == nil || errors.Is(err, ErrDoesNotFit) {
		t.Errorf("a class that does not exist: %v", err)
	}
}
