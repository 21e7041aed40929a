// Package gateway is a small gateway for demos and tests: it routes HTTP requests as HTTPRoutes of the Gateway API say, and
// asks the endpoint picker of an InferencePool which replica gets a request, in Envoy's external processing protocol
// (ext-proc, both bodies in mode FULL_DUPLEX_STREAMED), as the gateways do that are made for production. Envoy is such a
// gateway, and what the inference extension's own chart deploys; this one exists because it is a single static binary.
//
//	table.go       which backend a request is for
//	extproc.go     the conversation with an endpoint picker about one request
//	proxy.go       the way of a request
//	controller.go  Gateways, HTTPRoutes and InferencePools of the cluster, and what their status says
//
// What it does not do:
//
//   - It is one listener of plain HTTP on one port, whatever port the Gateway's listeners name. TLS and other protocols are
//     refused in the listener's status.
//   - Routes match by hostname, path (Exact, PathPrefix), method and exact headers. Of the filters there is URLRewrite of
//     the path alone. A route that asks for anything else is refused in its status, apart from timeouts, which are ignored.
//   - Backends are Services and InferencePools of the route's own namespace. ReferenceGrants are not looked at.
//   - A request's body is held in memory, up to 32 MiB.
//   - An endpoint picker is reached over TLS without verifying its certificate, which is self-signed by default.
package gateway
