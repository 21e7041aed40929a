package driver

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

const writeStatus = "patch resourceclaims/status"

// statusNode is a node whose driver writes the status of claims.
type statusNode struct {
	*process
	*plugin
	api *fakeAPI
}

// newStatusNode starts the driver; writes fail as fail says, which may be nil.
func newStatusNode(t *testing.T, n *testNode, api *fakeAPI) *statusNode {
	t.Helper()
	s := &statusNode{process: n.start(), api: api}
	s.plugin, _ = n.withAPI(s.process, api)
	status := newDeviceStatus(s.process.claims, api, s.metrics)
	status.queue = workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[claimRef](time.Millisecond, time.Millisecond))
	s.status, s.reconciler.status = status, status
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		status.run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
	return s
}

func (s *statusNode) current(t *testing.T, claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	t.Helper()
	current, err := s.api.ResourceV1().ResourceClaims(claim.Namespace).Get(t.Context(), claim.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return current
}

// prepareCurrent prepares the claim as it is in the API, as the helper does.
func (s *statusNode) prepareCurrent(t *testing.T, claim *resourceapi.ResourceClaim) {
	t.Helper()
	results, err := s.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{s.current(t, claim)})
	if err = errors.Join(err, results[claim.UID].Err); err != nil {
		t.Fatal(err)
	}
}

func (s *statusNode) unprepareNow(t *testing.T, claim *resourceapi.ResourceClaim) {
	t.Helper()
	key := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
	results, err := s.UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{NamespacedName: key, UID: claim.UID}})
	if err = errors.Join(err, results[claim.UID]); err != nil {
		t.Fatal(err)
	}
}

// says waits until the status of the claim has these devices, of whatever driver.
func (s *statusNode) says(t *testing.T, claim *resourceapi.ResourceClaim, want ...string) {
	t.Helper()
	eventually(t, "the devices in the status of the claim", func() (bool, any) {
		names := []string{}
		for _, d := range s.current(t, claim).Status.Devices {
			names = append(names, d.Device)
		}
		return cmp.Equal(append([]string{}, want...), names), names
	})
}

func foreignStatus(claim *resourceapi.ResourceClaim) {
	claim.Status.Devices = append(claim.Status.Devices, resourceapi.AllocatedDeviceStatus{
		Driver: "nic.example.com", Pool: "pool", Device: "nic-1",
		Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Up"}},
	})
}

func TestStatusFollowsTheClaim(t *testing.T) {
	node := newTestNode(t)
	claim := claimOf("a", []string{whole1, left0}, foreignStatus)
	s := newStatusNode(t, node, newFakeAPI(claim))

	s.prepareCurrent(t, claim)
	s.says(t, claim, "nic-1", whole1, left0)
	current := s.current(t, claim)
	for i, wholeGPU := range []bool{true, false} {
		entry := current.Status.Devices[i+1]
		var data deviceData
		if err := json.Unmarshal(entry.Data.Raw, &data); err != nil {
			t.Fatal(err)
		}
		device := s.stock.device(entry.Device)
		want := deviceData{UUID: device.UUID, Memory: "81559Mi"}
		if !wholeGPU {
			want = deviceData{UUID: device.UUID, ParentUUID: device.GPU.UUID, Profile: "3g.40gb", Memory: "40448Mi"}
		}
		if diff := cmp.Diff(want, data); diff != "" {
			t.Errorf("data of %s: %s", entry.Device, diff)
		}
		if len(entry.Conditions) != 1 || entry.Conditions[0].Type != "Ready" || entry.Conditions[0].Status != metav1.ConditionTrue || entry.Conditions[0].LastTransitionTime.IsZero() {
			t.Errorf("conditions of %s: %+v", entry.Device, entry.Conditions)
		}
	}

	s.unprepareNow(t, claim)
	s.says(t, claim, "nic-1")
}

// TestStatusIsNotWrittenTwice: preparing again, restarting, and looking at all claims cost no write where the
// API says what it should.
func TestStatusIsNotWrittenTwice(t *testing.T) {
	node := newTestNode(t)
	claim := claimOf("a", []string{left0})
	api := newFakeAPI(claim)
	s := newStatusNode(t, node, api)
	s.prepareCurrent(t, claim)
	s.says(t, claim, left0)

	s.prepareCurrent(t, claim)
	s.reconciler.run(t.Context())
	s = newStatusNode(t, node, api)
	s.prepareCurrent(t, claim)
	s.reconciler.run(t.Context())
	if n := s.status.queue.Len() + api.count(writeStatus); n != 1 {
		t.Errorf("%d writes, want 1", n)
	}
}

// TestStatusSurvivesFailures: whatever becomes of a write, the claim is prepared, and a later round makes good.
func TestStatusSurvivesFailures(t *testing.T) {
	node := newTestNode(t)
	claim := claimOf("a", []string{left0})
	api := newFakeAPI(claim)
	away := true
	api.PrependReactor("patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		api.mu.Lock()
		defer api.mu.Unlock()
		if !away {
			return false, nil, nil
		}
		api.requests[writeStatus]++
		return true, nil, apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), claim.Name, errors.New("no rule for resourceclaims/driver"))
	})
	s := newStatusNode(t, node, api)
	s.prepareCurrent(t, claim)
	eventually(t, "the driver to give up", func() (bool, any) {
		n := s.metrics.value(t, "simgpu_device_status_errors_total")
		return n == 1, n
	})
	if n := api.count(writeStatus); n != statusAttempts {
		t.Errorf("%d attempts, want %d", n, statusAttempts)
	}

	api.mu.Lock()
	away = false
	api.mu.Unlock()
	s.reconciler.run(t.Context())
	s.says(t, claim, left0)
}

func TestStatusOfAClaimThatIsGone(t *testing.T) {
	node := newTestNode(t)
	claim := claimOf("a", []string{left0})
	s := newStatusNode(t, node, newFakeAPI())
	for name, err := range map[string]error{
		"gone":     apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), claim.Name),
		"replaced": apierrors.NewConflict(resourceapi.Resource("resourceclaims"), claim.Name, errors.New("uid mismatch")),
	} {
		s.api.PrependReactor("patch", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, err })
		if err := s.status.write(t.Context(), claimRef{types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}, claim.UID}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestStatusNamesShares tells shares of one device apart, and has one entry for a device that was allocated twice.
func TestStatusNamesShares(t *testing.T) {
	node := newTestNode(t)
	claim := claimOf("a", []string{whole0, whole0, whole1, whole1}, adminAccess)
	for i := range 2 {
		claim.Status.Allocation.Devices.Results[i].ShareID = new(types.UID([]string{"share-1", "share-2"}[i]))
	}
	s := newStatusNode(t, node, newFakeAPI(claim))
	s.prepareCurrent(t, claim)
	s.says(t, claim, whole0, whole0, whole1)
}
