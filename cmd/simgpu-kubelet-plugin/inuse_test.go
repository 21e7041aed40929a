package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func TestUsers(t *testing.T) {
	claim := func(name, driver string, pods ...string) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}}
		if driver != "" {
			c.Status.Allocation = &resourceapi.AllocationResult{}
			c.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Driver: "other.example.com"}, {Driver: driver}}
		}
		for _, pod := range pods {
			c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod})
		}
		return c
	}
	unused := []*resourceapi.ResourceClaim{
		claim("pending", ""), claim("allocated", "gpu.example.com"), claim("foreign", "net.example.com", "pod-9"),
	}
	used := claim("used", "gpu.example.com", "pod-1", "pod-2")

	client := fake.NewClientset(unused[0], unused[1], unused[2])
	var out bytes.Buffer
	if err := waitUntilUnused(t.Context(), client, "gpu.example.com", 0, &out); err != nil {
		t.Error(err)
	}
	if err := client.Tracker().Add(used); err != nil {
		t.Fatal(err)
	}
	out.Reset()
	err := waitUntilUnused(t.Context(), client, "gpu.example.com", 0, &out)
	if err == nil || !strings.Contains(err.Error(), "2 users of devices of gpu.example.com") {
		t.Errorf("got %v", err)
	}
	if diff := cmp.Diff("pods team/pod-1 has claim used\npods team/pod-2 has claim used\n", out.String()); diff != "" {
		t.Error(diff)
	}

	// They end while it waits.
	ended := make(chan error, 1)
	go func() { ended <- waitUntilUnused(t.Context(), client, "gpu.example.com", time.Minute, &out) }()
	if err := client.ResourceV1().ResourceClaims("team").Delete(t.Context(), "used", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
