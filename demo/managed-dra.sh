# Sourced by the show.sh of the managed-DRA demos, which set $service: applies the manifests of the demo and shows what one
# should see. Its README.md says the same in words.
namespace=llm-inference
k() { run kubectl --namespace $namespace "$@"; }

source demo/two-nodes.sh

kubectl get namespace $namespace > /dev/null 2>&1 || run kubectl create namespace $namespace
k apply -f "demo/$demo/manifests"
k wait --for=condition=Ready llminferenceservice/$service --timeout 3m

say "what the annotations have become"
k get llminferenceservice -o wide
k get resourceclaimtemplate $service-managed-dra -o yaml
k get pods -l app.kubernetes.io/name=$service -o wide
k get resourceclaims -o custom-columns='CLAIM:.metadata.name,NODE:.status.allocation.devices.results[*].pool,DEVICE:.status.allocation.devices.results[*].device,POD:.status.reservedFor[*].name'
pod=$(kubectl --namespace $namespace get pods -l app.kubernetes.io/name=$service -o name | head -1)
k get "$pod" -o jsonpath='{range .spec.containers[*]}{.name}: {.resources.claims}{"\n"}{end}'

say "what the pod sees, and an answer through the Service"
k exec "$pod" -c main -- nvidia-smi -L
k exec "$pod" -c main -- vllm chat --url http://$service-kserve-workload-svc:8000/v1 --model-name Qwen/Qwen2.5-7B-Instruct --quick "What is Dynamic Resource Allocation?"
