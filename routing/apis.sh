#!/usr/bin/env bash
# Applies the definitions of the APIs that route requests, as the modules that routing/go.mod requires have them, and the
# gateway.
set -euo pipefail
cd "$(dirname "$0")"
go mod download sigs.k8s.io/gateway-api sigs.k8s.io/gateway-api-inference-extension
gateway=$(go list -m -f '{{.Dir}}' sigs.k8s.io/gateway-api)/config/crd/standard
extension=$(go list -m -f '{{.Dir}}' sigs.k8s.io/gateway-api-inference-extension)/config/crd/bases
# HTTPRoute is larger than the annotation that a client-side apply would keep it in.
kubectl apply --server-side -f "$gateway/gateway.networking.k8s.io_gatewayclasses.yaml" \
  -f "$gateway/gateway.networking.k8s.io_gateways.yaml" -f "$gateway/gateway.networking.k8s.io_httproutes.yaml" -f "$extension"
kubectl wait --for condition=Established crd/gatewayclasses.gateway.networking.k8s.io crd/httproutes.gateway.networking.k8s.io \
  crd/gateways.gateway.networking.k8s.io crd/inferencepools.inference.networking.k8s.io
kubectl apply -f deploy.yaml
kubectl --namespace simgpu-gateway rollout status deployment/gateway --timeout 2m
