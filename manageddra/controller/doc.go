// Package controller makes of each LLMInferenceService what runs it on a plain cluster: the claim template that its
// annotations ask for, Deployments (LeaderWorkerSets where replicas have workers), a Service, and where those APIs are
// served and asked for an InferencePool and an HTTPRoute. It reports in the conditions that KServe's users know.
//
//	controller.go     one reconcile, what is watched, standing aside for KServe's own controller
//	config.go         the specification with everything that baseRefs add
//	claimtemplate.go  the ResourceClaimTemplate
//	workload.go       pods, Deployments, the Service
//	workers.go        LeaderWorkerSets
//	routing.go        InferencePool and HTTPRoute
//	apply.go          writing an object only if something would change
//	status.go         conditions
//	waiting.go        why pods wait for their devices
//
// A claim template cannot be changed. One that has to is replaced under the same name, and pods carry a hash of the request
// in an annotation, so that the workload rolls as its strategy says: running pods keep their claims until their turn comes.
//
// Everything made has the service as its owner: deleting the service takes all of it away, with the controller or without.
package controller
