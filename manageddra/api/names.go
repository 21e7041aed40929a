package api

import (
	"crypto/md5" //nolint:gosec // names, as KServe makes them
	"encoding/hex"
)

// Annotations of an LLMInferenceService.
const (
	// AnnotationDeviceClass enables managed DRA, and names the DeviceClass.
	AnnotationDeviceClass = "serving.kserve.io/exp-dra-device-class"
	// AnnotationDeviceCount is the number of devices of each pod, 1 by default.
	AnnotationDeviceCount = "serving.kserve.io/exp-dra-device-count"
	// AnnotationCELSelector has one CEL expression per non-empty line.
	AnnotationCELSelector = "serving.kserve.io/exp-dra-cel-selector"
	// AnnotationContainerName is the container that gets the devices, the first one by default.
	AnnotationContainerName = "serving.kserve.io/exp-dra-container-name"
	// AnnotationStop ends the service when it is "true".
	AnnotationStop = "serving.kserve.io/stop"
)

// What pods of a service have because of managed DRA.
const (
	// ClaimName is the pod's name for its claim.
	ClaimName = "managed-device"
	// RequestName is the one request of the claim.
	RequestName = "device"
)

// Labels and their values.
const (
	LabelName      = "app.kubernetes.io/name"
	LabelPartOf    = "app.kubernetes.io/part-of"
	LabelComponent = "app.kubernetes.io/component"
	LabelWorkload  = "kserve.io/component" // what services and pools select
	LabelRole      = "llm-d.ai/role"

	PartOf            = "llminferenceservice"
	ComponentWorkload = "llminferenceservice-workload"
	ComponentPrefill  = "llminferenceservice-workload-prefill"
	ComponentWorker   = "llminferenceservice-workload-worker"
	ComponentLeader   = "llminferenceservice-workload-leader"
	ComponentRouter   = "llminferenceservice-router"
	Workload          = "workload"

	RoleBoth    = "both"
	RoleDecode  = "decode"
	RolePrefill = "prefill"
)

// Conditions of a service: KServe's, and two that it does not have, ClaimTemplateReady and DevicesAllocated.
const (
	ConditionReady                = "Ready"
	ConditionPresetsCombined      = "PresetsCombined"
	ConditionWorkloadsReady       = "WorkloadsReady"
	ConditionMainWorkloadReady    = "MainWorkloadReady"
	ConditionWorkerWorkloadReady  = "WorkerWorkloadReady"
	ConditionPrefillWorkloadReady = "PrefillWorkloadReady"
	ConditionPrefillWorkerReady   = "PrefillWorkerWorkloadReady"
	ConditionRouterReady          = "RouterReady"
	ConditionInferencePoolReady   = "InferencePoolReady"
	ConditionHTTPRoutesReady      = "HTTPRoutesReady"
	ConditionClaimTemplateReady   = "ClaimTemplateReady"
	ConditionDevicesAllocated     = "DevicesAllocated"
)

// ClaimTemplateName and those below are the names of the objects of a service.
func ClaimTemplateName(service string) string     { return childName(service, "-managed-dra") }
func DeploymentName(service string) string        { return childName(service, "-kserve") }
func PrefillName(service string) string           { return childName(service, "-kserve-prefill") }
func LeaderWorkerSetName(service string) string   { return childName(service, "-kserve-mn") }
func PrefillWorkerSetName(service string) string  { return childName(service, "-kserve-mn-prefill") }
func WorkloadServiceName(service string) string   { return childName(service, "-kserve-workload-svc") }
func InferencePoolName(service string) string     { return childName(service, "-inference-pool") }
func HTTPRouteName(service string) string         { return childName(service, "-kserve-route") }
func EndpointPickerService(service string) string { return childName(service, "-epp-service") }

// childName is the name of an object that belongs to parent. Names that get too long for a label have their end replaced
// by a hash, as knative.dev/pkg/kmeta does it, whose names KServe's users know. The suffixes are those above, all shorter
// than what the hash leaves.
func childName(parent, suffix string) string {
	const longest = 63
	if len(parent) <= longest-len(suffix) {
		return parent + suffix
	}
	sum := md5.Sum([]byte(parent)) //nolint:gosec // no secret
	hash := hex.EncodeToString(sum[:])
	return parent[:longest-len(hash)-len(suffix)] + hash + suffix
}
