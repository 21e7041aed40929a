// Package manageddra is the home of managed DRA: users say with four annotations of an LLMInferenceService which devices
// its pods need, and get the ResourceClaimTemplate, the workloads and, where pods wait, the reason.
//
// The contract is KServe's (docs/samples/llmisvc/managed-dra in its repository): the same annotations, names, defaults and
// validation. What users of the original trip over works here: a changed annotation takes effect, an edited template is
// repaired at once, a container that does not exist is an error, and a pod that waits says why.
//
//	api          the objects of serving.kserve.io, the names and labels that KServe gives to what it makes
//	annotations  the four annotations: reading and validating them
//	controller   LLMInferenceService -> claim template, workloads, routing objects, status
//	webhook      admission, and the certificates that it needs
//
// cmd/managed-dra-controller runs controller and webhook. Nothing here knows which driver publishes the devices.
package manageddra
