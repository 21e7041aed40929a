// Package routing pins the endpoint picker of the Gateway API Inference Extension, which decides for each request which
// replica of a pool serves it, and has what the demos need around it: a gateway (package gateway). It is a module of its own
// so that their dependencies stay out of simgpu's. It holds no code itself.
//
// The images epp and gateway are made from it (e2e/image); the definitions of InferencePool, Gateway and HTTPRoute come from
// the modules that it requires:
//
//	go list -C routing -m -f '{{.Dir}}' sigs.k8s.io/gateway-api-inference-extension   # config/crd/bases
//	go list -C routing -m -f '{{.Dir}}' sigs.k8s.io/gateway-api                       # config/crd/standard
package routing
