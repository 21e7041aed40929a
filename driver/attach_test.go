package driver

import (
	"context"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// toAttach has the scheduler wait for the devices of a claim, since so long ago.
func toAttach(ago time.Duration) option {
	return func(claim *resourceapi.ResourceClaim) {
		claim.Status.Allocation.AllocationTimestamp = &metav1.Time{Time: time.Now().Add(-ago)}
		for i := range claim.Status.Allocation.Devices.Results {
			r := &claim.Status.Allocation.Devices.Results[i]
			r.BindingConditions, r.BindingFailureConditions = []string{conditionAttached}, []string{conditionAttachFailed}
		}
	}
}

func startAttacher(t *testing.T, api *fakeAPI, delay time.Duration) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		newAttacher(api, driverName, nodeName, delay).run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
}

func deviceCondition(t *testing.T, api *fakeAPI, claim *resourceapi.ResourceClaim, device, condition string) *metav1.Condition {
	t.Helper()
	current, err := api.ResourceV1().ResourceClaims(claim.Namespace).Get(t.Context(), claim.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range current.Status.Devices {
		if d.Driver == driverName && d.Device == device {
			return meta.FindStatusCondition(d.Conditions, condition)
		}
	}
	return nil
}

func TestDevicesAreAttached(t *testing.T) {
	elsewhere := claimOf("elsewhere", []string{whole0}, toAttach(time.Hour), firstResult(func(r *resourceapi.DeviceRequestAllocationResult) { r.Pool = "node-2" }))
	soon := claimOf("soon", []string{whole1}, toAttach(-time.Hour))
	plain := claimOf("plain", []string{whole1})
	failing := claimOf("failing", []string{whole1}, toAttach(time.Hour), func(c *resourceapi.ResourceClaim) {
		c.Annotations = map[string]string{failAttachAnnotation: "the switch has no free port"}
	})
	both := claimOf("both", []string{left0, right0}, toAttach(time.Hour), foreignStatus)
	api := newFakeAPI(elsewhere, soon, plain, failing, both)
	startAttacher(t, api, time.Millisecond)

	for _, device := range []string{left0, right0} {
		eventually(t, device+" to be attached", func() (bool, any) {
			c := deviceCondition(t, api, both, device, conditionAttached)
			return c != nil && c.Status == metav1.ConditionTrue, c
		})
	}
	eventually(t, "the failure to be told", func() (bool, any) {
		c := deviceCondition(t, api, failing, whole1, conditionAttachFailed)
		return c != nil && c.Status == metav1.ConditionTrue && c.Message == "the switch has no free port", c
	})
	if c := deviceCondition(t, api, failing, whole1, conditionAttached); c != nil {
		t.Errorf("what failed is attached: %+v", c)
	}
	for name, claim := range map[string]*resourceapi.ResourceClaim{"of another node": elsewhere, "before its time": soon, "without conditions": plain} {
		if c := deviceCondition(t, api, claim, claim.Status.Allocation.Devices.Results[0].Device, conditionAttached); c != nil {
			t.Errorf("a claim %s is attached: %+v", name, c)
		}
	}
	if n := api.count(writeStatus); n != 2 {
		t.Errorf("%d writes, want one per claim", n)
	}
}

// TestAttachedAndPrepared: what the driver says about a device at two times stands side by side.
func TestAttachedAndPrepared(t *testing.T) {
	claim := claimOf("a", []string{left0}, toAttach(time.Hour))
	api := newFakeAPI(claim)
	startAttacher(t, api, time.Millisecond)
	eventually(t, "the device to be attached", func() (bool, any) {
		c := deviceCondition(t, api, claim, left0, conditionAttached)
		return c != nil, c
	})
	s := newStatusNode(t, newTestNode(t), api)
	s.prepareCurrent(t, claim)
	eventually(t, "the device to be ready", func() (bool, any) {
		c := deviceCondition(t, api, claim, left0, conditionReady)
		return c != nil, c
	})
	s.unprepareNow(t, claim)
	eventually(t, "the device not to be ready any more", func() (bool, any) {
		c := deviceCondition(t, api, claim, left0, conditionReady)
		return c == nil, c
	})
	if c := deviceCondition(t, api, claim, left0, conditionAttached); c == nil {
		t.Error("the device is not attached any more")
	}
}

func TestPublishedWithBindingConditions(t *testing.T) {
	t.Parallel()
	n := newWholeNode(t)
	n.opts.AttachDelay = time.Second
	d := n.run()
	n.register()
	d.expectReady(t)
	list, err := n.api.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	devices := 0
	for _, slice := range list.Items {
		for _, device := range slice.Spec.Devices {
			devices++
			if device.BindsToNode == nil || !*device.BindsToNode || len(device.BindingConditions) != 1 || len(device.BindingFailureConditions) != 1 {
				t.Errorf("device %s: %+v", device.Name, device)
			}
		}
	}
	if devices != 52 {
		t.Errorf("%d devices, want 52", devices)
	}
	if err := d.stop(); err != nil {
		t.Fatal(err)
	}
}
