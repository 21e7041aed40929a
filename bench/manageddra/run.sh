#!/usr/bin/env bash
# A local cluster of its own for the bench of managed DRA: first with nothing but the definitions of its objects, then with
# the chart for the time to the first token. Arguments go to both.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=simgpu-bench cluster=bin/simgpu-cluster

trap '"$cluster" down --name $name > /dev/null' EXIT
"$cluster" up --name $name
eval "$("$cluster" env --name $name)"

helm template $name deployments/helm/simgpu --set managedDRA.enabled=true --show-only templates/managed-dra-crds.yaml | kubectl apply -f -
kubectl wait --for condition=Established crd/llminferenceservices.serving.kserve.io crd/llminferenceserviceconfigs.serving.kserve.io
echo "# requests and time per service"
go run ./bench/manageddra "$@"
kubectl delete crd llminferenceservices.serving.kserve.io llminferenceserviceconfigs.serving.kserve.io

driver=$("$cluster" build-image simgpu)
server=$("$cluster" build-image vllm-sim --as vllm/vllm-openai:v0.19.1)
"$cluster" load-image --name $name "$driver" "$server"
helm install $name deployments/helm/simgpu --namespace $name --create-namespace --values demo/qwen-mig/values.yaml --wait --timeout 3m
kubectl get resourceslices
echo "# qwen-mig: from its creation to the first token, images loaded"
go run ./bench/manageddra --first-token demo/qwen-mig/manifests/qwen.yaml "$@"
