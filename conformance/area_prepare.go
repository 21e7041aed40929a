package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
)

const (
	serviceDoc = "k8s.io/kubelet/pkg/apis/dra/v1/api.proto: NodePrepareResources"
	kubeletDRA = "k8s.io/kubernetes pkg/kubelet/cm/dra/manager.go prepareResources"
	keptInSpec = "KEP-4381, kubelet plugin: NodePrepareResources must be idempotent"
)

func prepareChecks() []Check {
	return []Check{
		{
			Name: "prepare/through-kubelet", Level: Must,
			Asserts: "The kubelet can prepare a pod with a claim, and gets a CDI device for its container.",
			Source:  kubeletDRA,
			Fix:     "Start with the failure that the kubelet reports.",
			run:     checkThroughKubelet,
		},
		{
			Name: "prepare/answers-for-the-claim", Level: Must,
			Asserts: "The response has one entry for each claim that was asked for, under its UID, and no other.",
			Source:  kubeletDRA + ": unknown and missing entries fail the pod",
			Fix:     "Key the response by the UID in the request.",
			run:     checkAnswersForTheClaim,
		},
		{
			Name: "prepare/devices-are-the-allocated-ones", Level: Must,
			Asserts: "Each allocated device of the driver is in the response with its pool, and no other device.",
			Source:  serviceDoc + ", Device.pool_name, device_name",
			Fix:     "Return what status.allocation.devices.results has for the driver.",
			run:     checkDevicesAreAllocated,
		},
		{
			Name: "prepare/request-names", Level: Must,
			Asserts: "Each device names the requests in the claim that it was allocated for, so that it reaches the containers that refer to them and no others.",
			Source:  serviceDoc + ", Device.request_names",
			Fix:     "Copy the request name of the allocation result, without a subrequest.",
			run:     checkRequestNames,
		},
		{
			Name: "prepare/cdi-ids", Level: Must,
			Asserts: "Each device has CDI device ids of the form vendor/class=name.",
			Source:  serviceDoc + ", Device.cdi_device_ids; CDI specification, \"CDI device\"",
			Fix:     "Return fully qualified names of devices in the spec that prepare writes.",
			run:     checkCDIIDs,
		},
		{
			Name: "prepare/same-answer-twice", Level: Must,
			Asserts: "Preparing a prepared claim again succeeds with the same answer: a kubelet that was restarted asks again.",
			Source:  keptInSpec,
			Fix:     "Keep the answer for a claim, or make it from the claim alone.",
			run:     checkSameAnswerTwice,
		},
		{
			Name: "prepare/same-answer-concurrently", Level: Must,
			Asserts: "Calls for one claim that run at the same time all succeed with the same answer.",
			Source:  keptInSpec + "; a call that timed out may still run when the kubelet repeats it",
			Fix:     "Serialize the operations on a claim.",
			run:     checkSameAnswerConcurrently,
		},
		{
			Name: "prepare/no-claims", Level: Should,
			Asserts: "A call without claims succeeds.",
			Source:  serviceDoc,
			Fix:     "Do nothing for nothing.",
			run:     checkNoClaims,
		},
		{
			Name: "prepare/batch", Level: Must,
			Asserts: "Several claims in one call are all prepared.",
			Source:  serviceDoc + ": a pod with several claims is prepared in one call",
			Fix:     "Loop over the claims in the request.",
			run:     checkBatch,
		},
		{
			Name: "prepare/several-requests", Level: Must,
			Asserts: "A claim with two requests gets a device for each, told apart by their request names.",
			Source:  serviceDoc + ", Device.request_names",
			Fix:     "Handle every allocation result, not the first one only.",
			run:     checkSeveralRequests,
		},
		{
			Name: "prepare/subrequest", Level: Must,
			Asserts: "A device that was allocated for a subrequest is returned under the name of its request.",
			Source:  "KEP-4816; k8s.io/dynamic-resource-allocation/resourceclaim BaseRequestRef: containers refer to requests only",
			Fix:     "Cut the request name of the allocation result at the slash.",
			run:     checkSubrequest,
		},
		{
			Name: "prepare/unallocated-claim", Level: Must,
			Asserts: "A claim without an allocation is refused, and nothing is left behind.",
			Source:  serviceDoc,
			Fix:     "Check status.allocation before anything else.",
			run:     checkUnallocatedClaim,
		},
		{
			Name: "prepare/missing-claim", Level: Must,
			Asserts: "A claim that does not exist is refused, and nothing is left behind.",
			Source:  kubeletDRA,
			Fix:     "Read the claim from the API server before preparing it.",
			run:     checkMissingClaim,
		},
		{
			Name: "prepare/replaced-claim", Level: Must,
			Asserts: "A claim that was replaced by another of the same name is refused: the UID decides.",
			Source:  "k8s.io/dynamic-resource-allocation/kubeletplugin: \"got replaced\"",
			Fix:     "Compare the UID of the claim that was read with that in the request.",
			run:     checkReplacedClaim,
		},
		{
			Name: "prepare/devices-of-other-drivers", Level: Must,
			Asserts: "Devices of other drivers in the same claim are ignored.",
			Source:  "k8s.io/api/resource/v1 DeviceRequestAllocationResult.Driver",
			Fix:     "Skip allocation results with another driver name.",
			run:     checkOtherDrivers,
		},
		{
			Name: "prepare/unknown-device", Level: Should,
			Asserts: "A device that the driver does not publish is refused with an error that names it.",
			Source:  "allocations outlive devices: a device can vanish between allocation and prepare",
			Fix:     "Look the device up and say which one is missing.",
			run:     checkUnknownDevice,
		},
		{
			Name: "prepare/no-device-twice", Level: Must,
			Asserts: "A device that one claim has is not given to another claim without admin access, even if both are allocated: the controllers are eventually consistent.",
			Source:  "kubernetes/kubernetes#141471, #136269, #131513",
			Fix:     "Remember which claim has which device and refuse the second.",
			run:     checkNoDeviceTwice,
		},
		{
			Name: "prepare/admin-access", Level: Should,
			Asserts: "A claim with admin access is prepared beside the claim that has the device.",
			Source:  "KEP-5018",
			Fix:     "Leave results with adminAccess out of the check for conflicts.",
			run:     checkAdminAccess,
		},
		{
			Name: "prepare/broken-claim-in-batch", Level: Should,
			Asserts: "A claim that cannot be prepared does not keep the others in the same call from being prepared.",
			Source:  serviceDoc + ": failures for individual claims are reported inside the response",
			Fix:     "Report errors for the claim, not for the call.",
			run:     checkBrokenClaimInBatch,
		},
		{
			Name: "prepare/parameters-of-another-driver", Level: Must,
			Asserts: "Opaque parameters for another driver are ignored, whatever they are.",
			Source:  "k8s.io/api/resource/v1 OpaqueDeviceConfiguration.Driver",
			Fix:     "Skip configuration with another driver name.",
			run:     checkParametersOfAnotherDriver,
		},
		{
			Name: "prepare/valid-parameters", Level: Must,
			Asserts: "Opaque parameters that the profile calls valid are accepted.",
			Source:  "the profile",
			Fix:     "Correct the profile or the driver.",
			run:     checkValidParameters,
		},
		{
			Name: "prepare/invalid-parameters", Level: Must,
			Asserts: "Opaque parameters that the profile calls invalid are refused, and nothing is left behind.",
			Source:  "the profile; k8s.io/api/resource/v1 OpaqueDeviceConfiguration: drivers validate their parameters",
			Fix:     "Decode strictly and validate before acting.",
			run:     checkInvalidParameters,
		},
		{
			Name: "prepare/parameters-of-class", Level: Must,
			Asserts: "Opaque parameters in the DeviceClass count like those in the claim: valid ones are accepted and invalid ones refused.",
			Source:  "k8s.io/api/resource/v1 DeviceClassSpec.Config; they are in status.allocation.devices.config with source FromClass",
			Fix:     "Read all of status.allocation.devices.config.",
			run:     checkParametersOfClass,
		},
		{
			Name: "prepare/claim-parameters-over-class", Level: Should,
			Asserts: "Where the DeviceClass and the claim have parameters that set the same, those of the claim count.",
			Source:  "k8s.io/dynamic-resource-allocation/structured: status.allocation.devices.config has those of the class first; what a class has is the default of its administrator",
			Fix:     "Apply status.allocation.devices.config in its order, so that the last one wins.",
			run:     checkClaimParametersOverClass,
		},
		{
			Name: "prepare/parameters-of-one-request", Level: Must,
			Asserts: "Parameters for one request of a claim count for the devices of that request and for no others.",
			Source:  "k8s.io/api/resource/v1 DeviceAllocationConfiguration.Requests",
			Fix:     "Compare the requests of a configuration with that of the allocation result; none means all.",
			run:     checkParametersOfOneRequest,
		},
		{
			Name: "prepare/unknown-parameters", Level: Should,
			Asserts: "Opaque parameters of a kind that nobody knows are refused: a setting that is ignored goes unnoticed.",
			Source:  "k8s.io/api/resource/v1 OpaqueDeviceConfiguration.Parameters",
			Fix:     "Refuse unknown apiVersions and kinds.",
			run:     checkUnknownParameters,
		},
		{
			Name: "prepare/all-devices", Level: Must,
			Asserts: "A claim for all devices (allocationMode All) is prepared with all of them.",
			Source:  "k8s.io/api/resource/v1 DeviceAllocationModeAll",
			Fix:     "Handle every allocation result.",
			run:     checkAllDevices,
		},
		{
			Name: "prepare/shared-device", Level: Must,
			Asserts: "Two claims with a share each of one device (allowMultipleAllocations) are both prepared, each with its share, and the one outlives the other.",
			Source:  "KEP-5075; k8s.io/kubelet/pkg/apis/dra/v1 Device.share_id",
			Fix:     "Tell shares of a device apart by the share id of the allocation result.",
			run:     checkSharedDevice,
		},
		{
			Name: "prepare/every-device", Level: Must,
			Asserts: "As many claims as fit can be prepared one after the other.",
			Source:  "what is published can be used",
			Fix:     "Publish only what can be prepared.",
			takes:   10 * time.Second,
			run:     checkEveryDevice,
		},
		{
			Name: "prepare/canceled-call", Level: Must,
			Asserts: "After a call that the caller gave up, the claim can be prepared and unprepared as if nothing had happened.",
			Source:  "k8s.io/kubernetes pkg/kubelet/cm/dra/plugin: calls have a deadline of 45 seconds",
			Fix:     "End or finish what a canceled call has begun; never keep the claim locked.",
			run:     checkCanceledCall,
		},
		{
			Name: "prepare/claim-deleted-while-prepared", Level: Must,
			Asserts: "Unpreparing works after the claim object is gone.",
			Source:  "k8s.io/kubernetes pkg/kubelet/cm/dra/manager.go: NodeUnprepareResources comes without the claim",
			Fix:     "Keep on the node what unprepare needs.",
			run:     checkClaimDeletedWhilePrepared,
		},
		{
			Name: "prepare/shared-by-pods", Level: Must,
			Asserts: "A second pod that uses a prepared claim starts, and the claim stays prepared until the last pod has ended.",
			Source:  kubeletDRA,
			Fix:     "Nothing of a pod may be in the state of a claim.",
			run:     checkSharedByPods,
		},
	}
}

func checkThroughKubelet(t *T) {
	w := t.newWorkload()
	if err := t.kubelet.Prepare(t.ctx, w.pod); err != nil {
		t.Fatalf("%v", err)
	}
	ids, err := t.kubelet.CDIDevices(w.pod, &w.pod.Spec.Containers[0])
	t.must(err)
	t.show("CDI devices of the container", "%s", strings.Join(ids, "\n"))
	if len(ids) == 0 {
		t.Errorf("the container gets no CDI device")
	}
	if err := t.kubelet.Unprepare(t.ctx, w.pod); err != nil {
		t.Errorf("%v", err)
	}
}

func checkAnswersForTheClaim(t *T) {
	w := t.newWorkload()
	answered := t.prepare(w.claim())
	for uid := range answered {
		if uid != string(w.claim().UID) {
			t.Errorf("there is an entry for claim %s, which nobody asked for", uid)
		}
	}
	if answered[string(w.claim().UID)] == nil {
		t.Errorf("there is no entry for claim %s", w.claim().UID)
	}
}

// key names a device in its pool.
func key(pool, device string) string { return pool + "/" + device }

func checkDevicesAreAllocated(t *T) {
	w := t.newWorkload()
	t.compareDevices(w.claim(), t.prepareOne(w.claim()))
}

// compareDevices compares what was prepared with what is allocated.
func (t *T) compareDevices(claim *resourceapi.ResourceClaim, devices []*drapb.Device) {
	want := map[string]bool{}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == t.vars.DriverName {
			want[key(result.Pool, result.Device)] = true
		}
	}
	got := map[string]bool{}
	for _, device := range devices {
		got[key(device.PoolName, device.DeviceName)] = true
	}
	if !maps.Equal(want, got) {
		t.Errorf("claim %s was allocated %v, and prepared are %v", claim.Name, slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(got)))
	}
}

func checkRequestNames(t *T) {
	w := t.newWorkload(t.withRequests("compute"))
	for _, device := range t.prepareOne(w.claim()) {
		if !slices.Equal(device.RequestNames, []string{"compute"}) {
			t.Errorf("device %s has request names %q; it was allocated for request \"compute\"", device.DeviceName, device.RequestNames)
		}
	}
}

func checkCDIIDs(t *T) {
	w := t.newWorkload()
	ids := 0
	for _, device := range t.prepareOne(w.claim()) {
		for _, id := range device.CdiDeviceIds {
			ids++
			if err := qualified(id); err != nil {
				t.Errorf("CDI device id %q of device %s: %v", id, device.DeviceName, err)
			}
		}
	}
	if ids == 0 {
		t.Errorf("no device has a CDI device id: the container gets nothing")
	}
}

func checkSameAnswerTwice(t *T) {
	w := t.newWorkload()
	first := t.prepareOne(w.claim())
	t.compareAnswers(first, t.prepareOne(w.claim()))
}

func (t *T) compareAnswers(first, second []*drapb.Device) {
	if a, b := describe(first), describe(second); a != b {
		t.Errorf("the answers for one claim differ:\n%s\nand\n%s", a, b)
	}
}

// describe is an answer in an order of its own.
func describe(devices []*drapb.Device) string {
	var lines []string
	for _, d := range devices {
		lines = append(lines, fmt.Sprintf("%s/%s requests=%v cdi=%v share=%s", d.PoolName, d.DeviceName, d.RequestNames, d.CdiDeviceIds, d.GetShareId()))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func checkSameAnswerConcurrently(t *T) {
	w := t.newWorkload()
	plugin := t.plugin()
	const calls = 8
	answers := make([]*drapb.NodePrepareResourcesResponse, calls)
	errs := make([]error, calls)
	var all sync.WaitGroup
	for i := range calls {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.ctx, kubeletCallTimeout)
			defer cancel()
			answers[i], errs[i] = plugin.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{reference(w.claim())}})
		})
	}
	all.Wait()
	uid := string(w.claim().UID)
	for i := range calls {
		switch {
		case errs[i] != nil:
			t.Errorf("call %d of %d failed: %v", i+1, calls, errs[i])
		case answers[i].GetClaims()[uid].GetError() != "":
			t.Errorf("call %d of %d failed for the claim: %s", i+1, calls, answers[i].Claims[uid].Error)
		case i > 0 && errs[0] == nil:
			t.compareAnswers(answers[0].GetClaims()[uid].GetDevices(), answers[i].GetClaims()[uid].GetDevices())
		}
	}
}

func checkNoClaims(t *T) {
	response, err := t.tryPrepare(t.plugin())
	if err != nil {
		t.Errorf("%v", err)
	}
	if len(response.GetClaims()) > 0 {
		t.Errorf("there are entries for claims that nobody asked for")
	}
}

func checkBatch(t *T) {
	first, second := t.newWorkload().claim(), t.newWorkload().claim()
	answered := t.prepare(first, second)
	for _, claim := range []*resourceapi.ResourceClaim{first, second} {
		switch result := answered[string(claim.UID)]; {
		case result == nil:
			t.Errorf("there is no entry for claim %s", claim.UID)
		case result.Error != "":
			t.Errorf("claim %s: %s", claim.Name, result.Error)
		default:
			t.compareDevices(claim, result.Devices)
		}
	}
}

func checkSeveralRequests(t *T) {
	w := t.newWorkload(t.withRequests("one", "two"))
	devices := t.prepareOne(w.claim())
	t.compareDevices(w.claim(), devices)
	for _, name := range []string{"one", "two"} {
		if !slices.ContainsFunc(devices, func(d *drapb.Device) bool { return slices.Contains(d.RequestNames, name) }) {
			t.Errorf("no device is for request %q", name)
		}
	}
}

func checkSubrequest(t *T) {
	w := t.newWorkload(func(claim *resourceapi.ResourceClaim) {
		exact := t.request()
		claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "any", FirstAvailable: []resourceapi.DeviceSubRequest{
			{Name: "first", DeviceClassName: exact.DeviceClassName, AllocationMode: exact.AllocationMode, Count: 1},
		}}}
	})
	if got := w.claim().Status.Allocation.Devices.Results[0].Request; got != "any/first" {
		t.Fatalf("the check could not be made: the allocation is for request %q", got)
	}
	for _, device := range t.prepareOne(w.claim()) {
		if !slices.Equal(device.RequestNames, []string{"any"}) {
			t.Errorf("device %s has request names %q; containers refer to \"any\"", device.DeviceName, device.RequestNames)
		}
	}
}

// refused asserts that a claim is not prepared and that nothing new is in the CDI folder. It returns the error.
func (t *T) refused(why string, claim *drapb.Claim) string {
	before := t.cdiFiles()
	response, err := t.tryPrepare(t.plugin(), claim)
	after := t.cdiFiles()
	for name := range after {
		if _, was := before[name]; !was {
			t.Errorf("%s: the CDI spec %s was written", why, name)
		}
	}
	if err != nil {
		return err.Error()
	}
	result := response.GetClaims()[claim.Uid]
	if result == nil {
		return "" // the kubelet fails the pod, but nobody learns why
	}
	if result.Error == "" {
		t.Errorf("%s: the claim was prepared", why)
	}
	return result.Error
}

func checkUnallocatedClaim(t *T) {
	t.refused("a claim without allocation", reference(t.newClaim()))
}

func checkMissingClaim(t *T) {
	t.refused("a claim that does not exist", &drapb.Claim{Namespace: t.namespace, Name: uniqueName("missing"), Uid: string(uuid.NewUUID())})
}

func checkReplacedClaim(t *T) {
	claim := reference(t.newWorkload().claim())
	claim.Uid = string(uuid.NewUUID())
	t.refused("a claim of another UID", claim)
}

func checkOtherDrivers(t *T) {
	w := t.newWorkload()
	claim := w.claim()
	claim.Status.Allocation.Devices.Results = append([]resourceapi.DeviceRequestAllocationResult{{
		Request: claim.Status.Allocation.Devices.Results[0].Request, Driver: "other.example.com", Pool: "other", Device: "other",
	}}, claim.Status.Allocation.Devices.Results...)
	claim = t.rewriteAllocation(claim)
	t.compareDevices(claim, t.prepareOne(claim))
}

// rewriteAllocation replaces the allocation of a claim. The API allows no change, so it is removed first.
func (t *T) rewriteAllocation(claim *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	claims := t.admin.ResourceV1().ResourceClaims(t.namespace)
	current, err := claims.Get(t.ctx, claim.Name, metav1.GetOptions{})
	t.must(err)
	reserved := current.Status.ReservedFor
	current.Status.Allocation, current.Status.ReservedFor = nil, nil
	current, err = claims.UpdateStatus(t.ctx, current, metav1.UpdateOptions{})
	t.must(err)
	current.Status.Allocation, current.Status.ReservedFor = claim.Status.Allocation, reserved
	current, err = claims.UpdateStatus(t.ctx, current, metav1.UpdateOptions{})
	t.must(err)
	return current
}

func checkUnknownDevice(t *T) {
	claim := t.newWorkload().claim()
	claim.Status.Allocation.Devices.Results[0].Device = "no-such-device"
	claim = t.rewriteAllocation(claim)
	if message := t.refused("an unknown device", reference(claim)); !strings.Contains(message, "no-such-device") {
		t.Errorf("the error does not name the device: %q", message)
	}
}

func checkNoDeviceTwice(t *T) {
	first := t.newWorkload().claim()
	if first.Status.Allocation.Devices.Results[0].ShareID != nil {
		t.Skipf("the device may be shared")
	}
	t.prepareOne(first)
	second := t.newClaim()
	second.Status.Allocation = first.Status.Allocation.DeepCopy()
	second, err := t.admin.ResourceV1().ResourceClaims(t.namespace).UpdateStatus(t.ctx, second, metav1.UpdateOptions{})
	t.must(err)
	t.refused("a second claim for the device", reference(second))
	// The first one must not have suffered.
	t.prepareOne(first)
	t.unprepare(first)
	t.prepareOne(second)
}

func checkAdminAccess(t *T) {
	first := t.newWorkload().claim()
	t.prepareOne(first)
	second := t.newClaim(withAdminAccess())
	second.Status.Allocation = first.Status.Allocation.DeepCopy()
	for i := range second.Status.Allocation.Devices.Results {
		second.Status.Allocation.Devices.Results[i].AdminAccess = ptr.To(true)
	}
	second, err := t.admin.ResourceV1().ResourceClaims(t.namespace).UpdateStatus(t.ctx, second, metav1.UpdateOptions{})
	t.must(err)
	t.compareDevices(second, t.prepareOne(second))
	t.unprepare(second)
	t.compareDevices(first, t.prepareOne(first))
}

func checkBrokenClaimInBatch(t *T) {
	good := t.newWorkload().claim()
	broken := t.newWorkload().claim()
	broken.Status.Allocation.Devices.Results[0].Device = "no-such-device"
	broken = t.rewriteAllocation(broken)
	response, err := t.tryPrepare(t.plugin(), reference(broken), reference(good))
	if err != nil {
		t.Fatalf("the whole call failed: %v", err)
	}
	if response.GetClaims()[string(broken.UID)].GetError() == "" {
		t.Errorf("the claim with a device that does not exist was prepared")
	}
	result := response.GetClaims()[string(good.UID)]
	if result == nil || result.Error != "" {
		t.Fatalf("the good claim was not prepared: %s", result.GetError())
	}
	t.compareDevices(good, result.Devices)
}

func checkParametersOfAnotherDriver(t *T) {
	w := t.newWorkload(t.withParameters("other.example.com", []byte(`{"kind":"Nonsense","apiVersion":"other.example.com/v1"}`)))
	t.prepareOne(w.claim())
}

func checkValidParameters(t *T) {
	if len(t.profile.Parameters.Valid) == 0 {
		t.Skipf("the profile has no valid parameters")
	}
	for i, parameters := range t.profile.Parameters.Valid {
		claim := t.newWorkload(t.withParameters(t.vars.DriverName, parameters)).claim()
		if result := t.prepare(claim)[string(claim.UID)]; result.GetError() != "" {
			t.Errorf("parameters.valid[%d] are refused: %s", i, result.Error)
		}
		t.unprepare(claim)
		t.must(t.deleteClaim(t.ctx, claim.Name))
	}
}

func checkInvalidParameters(t *T) {
	if len(t.profile.Parameters.Invalid) == 0 {
		t.Skipf("the profile has no invalid parameters")
	}
	for i, parameters := range t.profile.Parameters.Invalid {
		claim := t.newWorkload(t.withParameters(t.vars.DriverName, parameters)).claim()
		t.refused(fmt.Sprintf("parameters.invalid[%d]", i), reference(claim))
		t.unprepare(claim)
		t.must(t.deleteClaim(t.ctx, claim.Name))
	}
}

// classWith makes a class like the one for all checks, with parameters. Its claims are newWorkload(ofClass(...)).
func (t *T) classWith(parameters json.RawMessage) string {
	classes := t.admin.ResourceV1().DeviceClasses()
	t.makeClass()
	plain, err := classes.Get(t.ctx, className, metav1.GetOptions{})
	t.must(err)
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: uniqueName("class")}, Spec: *plain.Spec.DeepCopy()}
	class.Spec.Config = []resourceapi.DeviceClassConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: t.vars.DriverName, Parameters: runtime.RawExtension{Raw: parameters}},
	}}}
	_, err = classes.Create(t.ctx, class, metav1.CreateOptions{})
	t.must(err)
	return class.Name
}

// ofClass asks for devices of another class.
func ofClass(name string) claimOption {
	return func(claim *resourceapi.ResourceClaim) { claim.Spec.Devices.Requests[0].Exactly.DeviceClassName = name }
}

func checkParametersOfClass(t *T) {
	if len(t.profile.Parameters.Valid)+len(t.profile.Parameters.Invalid) == 0 {
		t.Skipf("the profile has no parameters")
	}
	for i, parameters := range t.profile.Parameters.Valid {
		claim := t.newWorkload(ofClass(t.classWith(parameters))).claim()
		if err := errorOf(t.prepare(claim)[string(claim.UID)]); err != nil {
			t.Errorf("parameters.valid[%d] in a class are refused: %v", i, err)
		}
		t.unprepare(claim)
		t.must(t.deleteClaim(t.ctx, claim.Name))
	}
	for i, parameters := range t.profile.Parameters.Invalid {
		claim := t.newWorkload(ofClass(t.classWith(parameters))).claim()
		t.refused(fmt.Sprintf("parameters.invalid[%d] in a class", i), reference(claim))
		t.unprepare(claim)
		t.must(t.deleteClaim(t.ctx, claim.Name))
	}
}

// different are the parameters that the container shows, and what it shows of either and not of the other, for the container
// that uses one of the requests of such a claim.
func (t *T) different(request string, options ...claimOption) (parameters []json.RawMessage, shown [2]map[string]bool) {
	parameters = t.profile.Parameters.Different
	if len(parameters) != 2 {
		t.Skipf("the profile has no parameters that show in the container (parameters.different)")
	}
	var all [2]map[string]bool
	for i := range parameters {
		// Twice: what claims with the same parameters do not have in common is not from the parameters.
		mine := func() map[string]bool {
			return t.effect(request, append(slices.Clone(options), t.withParameters(t.vars.DriverName, parameters[i]))...)
		}
		second := mine()
		all[i] = without(mine(), func(line string) bool { return !second[line] })
	}
	for i := range all {
		shown[i] = without(all[i], func(line string) bool { return all[1-i][line] })
		t.show(fmt.Sprintf("what only parameters.different[%d] do to the container for request %q", i, request), "%s",
			strings.Join(slices.Sorted(maps.Keys(shown[i])), "\n"))
	}
	if len(shown[0])+len(shown[1]) == 0 {
		t.Skipf("parameters.different do the same to the container")
	}
	return parameters, shown
}

// without is the set without what is to be left out.
func without(set map[string]bool, leaveOut func(string) bool) map[string]bool {
	rest := maps.Clone(set)
	maps.DeleteFunc(rest, func(line string, _ bool) bool { return leaveOut(line) })
	return rest
}

// effect is what a claim gives the container that uses one of its requests. The claim is gone then.
func (t *T) effect(request string, options ...claimOption) map[string]bool {
	claim := t.newWorkload(options...).claim()
	var ids []string
	for _, device := range t.prepareOne(claim) {
		if slices.Contains(device.RequestNames, request) {
			ids = append(ids, device.CdiDeviceIds...)
		}
	}
	lines := t.edits(ids)
	t.unprepare(claim)
	t.must(t.deleteClaim(t.ctx, claim.Name))
	return lines
}

// counted asserts that of the different parameters those with the index were applied, and the others were not.
func (t *T) counted(what string, got map[string]bool, shown [2]map[string]bool, index int) {
	for _, line := range slices.Sorted(maps.Keys(shown[index])) {
		if !got[line] {
			t.Errorf("%s: the container does not have %s, from parameters.different[%d]", what, line, index)
		}
	}
	for _, line := range slices.Sorted(maps.Keys(shown[1-index])) {
		if got[line] {
			t.Errorf("%s: the container has %s, from parameters.different[%d]", what, line, 1-index)
		}
	}
}

func checkClaimParametersOverClass(t *T) {
	parameters, shown := t.different("device")
	for ofClaim := range parameters {
		class := t.classWith(parameters[1-ofClaim])
		got := t.effect("device", ofClass(class), t.withParameters(t.vars.DriverName, parameters[ofClaim]))
		t.counted(fmt.Sprintf("parameters.different[%d] in the claim, [%d] in its class", ofClaim, 1-ofClaim), got, shown, ofClaim)
	}
}

func checkParametersOfOneRequest(t *T) {
	names := []string{"zero", "one"}
	for i, name := range names {
		parameters, shown := t.different(name, t.withRequests(names...))
		each := func(claim *resourceapi.ResourceClaim) {
			for i, name := range names {
				t.withParameters(t.vars.DriverName, parameters[i])(claim)
				claim.Spec.Devices.Config[i].Requests = []string{name}
			}
		}
		got := t.effect(name, t.withRequests(names...), each)
		t.counted(fmt.Sprintf("request %q of a claim with parameters.different[0] for \"zero\" and [1] for \"one\"", name), got, shown, i)
	}
}

func checkUnknownParameters(t *T) {
	parameters := []byte(`{"apiVersion":"dra-conformance.example.com/v1","kind":"NoDriverKnowsThis"}`)
	t.refused("parameters of an unknown kind", reference(t.newWorkload(t.withParameters(t.vars.DriverName, parameters)).claim()))
}

func checkAllDevices(t *T) {
	w := t.newWorkload(func(claim *resourceapi.ResourceClaim) {
		exactly := claim.Spec.Devices.Requests[0].Exactly
		exactly.AllocationMode, exactly.Count = resourceapi.DeviceAllocationModeAll, 0
	})
	devices := t.prepareOne(w.claim())
	t.compareDevices(w.claim(), devices)
	for _, device := range devices {
		t.resolves(device.CdiDeviceIds)
	}
}

// smallest asks for as little of a device that can be shared as there can be asked for. Without it a claim may get all.
func smallest(device resourceapi.Device) *resourceapi.CapacityRequirements {
	requests := map[resourceapi.QualifiedName]resource.Quantity{}
	for name, capacity := range device.Capacity {
		policy := capacity.RequestPolicy
		switch {
		case policy == nil:
		case policy.ValidRange != nil && policy.ValidRange.Min != nil && policy.ValidRange.Min.Sign() > 0:
			requests[name] = *policy.ValidRange.Min
		case len(policy.ValidValues) > 0:
			requests[name] = policy.ValidValues[0]
		}
	}
	if len(requests) == 0 {
		return nil
	}
	return &resourceapi.CapacityRequirements{Requests: requests}
}

func checkSharedDevice(t *T) {
	published := devicesOf(t.published())
	at := slices.IndexFunc(published, func(d poolDevice) bool { return ptr.Deref(d.AllowMultipleAllocations, false) })
	if at < 0 {
		t.Skipf("no device has allowMultipleAllocations")
	}
	// Whatever the profile selects.
	class, err := t.admin.ResourceV1().DeviceClasses().Create(t.ctx, &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: uniqueName("shared")},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == %q && device.allowMultipleAllocations == true", t.vars.DriverName),
		}}}},
	}, metav1.CreateOptions{})
	t.must(err)
	shares := func(claim *resourceapi.ResourceClaim) {
		ofClass(class.Name)(claim)
		claim.Spec.Devices.Requests[0].Exactly.Capacity = smallest(published[at].Device)
	}
	// The allocator may spread claims over devices before it shares one.
	var first, second *resourceapi.ResourceClaim
	allocated := map[string]*resourceapi.ResourceClaim{}
	for range 16 {
		var w workload
		if w, err = t.tryWorkload(shares); err != nil {
			break
		}
		result := w.claim().Status.Allocation.Devices.Results[0]
		if first = allocated[key(result.Pool, result.Device)]; first != nil {
			second = w.claim()
			break
		}
		allocated[key(result.Pool, result.Device)] = w.claim()
	}
	if second == nil {
		t.Skipf("of %d claims no two share a device, and there is no room for another: %v", len(allocated), err)
	}
	for _, claim := range []*resourceapi.ResourceClaim{first, second} {
		devices := t.prepareOne(claim)
		t.compareDevices(claim, devices)
		want := string(ptr.Deref(claim.Status.Allocation.Devices.Results[0].ShareID, ""))
		for _, device := range devices {
			if got := device.GetShareId(); got != want {
				t.Errorf("device %s of claim %s has share id %q; allocated was %q", device.DeviceName, claim.Name, got, want)
			}
		}
	}
	t.unprepare(first)
	for _, device := range t.prepareOne(second) {
		t.resolves(device.CdiDeviceIds)
	}
	t.unprepare(second)
}

func checkEveryDevice(t *T) {
	const most = 256
	prepared := 0
	for ; prepared < most; prepared++ {
		w, err := t.tryWorkload()
		if err != nil {
			break
		}
		t.compareDevices(w.claim(), t.prepareOne(w.claim()))
	}
	t.show("claims prepared at the same time", "%d", prepared)
	if prepared == 0 {
		t.Errorf("the driver publishes no device that a claim can be given")
	}
}

func checkCanceledCall(t *T) {
	claim := t.newWorkload().claim()
	plugin := t.plugin()
	if _, err := t.tryPrepare(plugin); err != nil { // so that there is a connection
		t.Fatalf("%v", err)
	}
	for _, after := range []time.Duration{time.Millisecond, 3 * time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond, time.Second} {
		ctx, cancel := context.WithTimeout(t.ctx, after)
		_, _ = plugin.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{reference(claim)}})
		cancel()
	}
	t.prepareOne(claim)
	t.unprepare(claim)
	t.prepareOne(claim)
}

func checkClaimDeletedWhilePrepared(t *T) {
	claim := t.newWorkload().claim()
	t.prepareOne(claim)
	t.must(t.deleteClaim(t.ctx, claim.Name))
	t.unprepare(claim)
}

func checkSharedByPods(t *T) {
	first := t.newWorkload()
	second, err := t.schedule(first.claim())
	t.must(err)
	for _, w := range []workload{first, second} {
		if err := t.kubelet.Prepare(t.ctx, w.pod); err != nil {
			t.Fatalf("%v", err)
		}
	}
	if err := t.kubelet.Unprepare(t.ctx, first.pod); err != nil {
		t.Fatalf("the first pod: %v", err)
	}
	ids, err := t.kubelet.CDIDevices(second.pod, &second.pod.Spec.Containers[0])
	t.must(err)
	for _, id := range ids {
		if _, err := t.resolve(id); err != nil {
			t.Errorf("after the first of two pods has ended, the devices of the second are gone: %v", err)
		}
	}
	if err := t.kubelet.Unprepare(t.ctx, second.pod); err != nil {
		t.Errorf("the second pod: %v", err)
	}
}
