# Sourced by demo/run.sh: applies the manifests of this folder and shows what one should see. README.md says the same
# in words.
namespace=llm-inference
model=meta-llama/Meta-Llama-3.1-8B-Instruct
k() { run kubectl --namespace $namespace "$@"; }

say "the APIs that route requests, and a gateway that serves them"
run routing/apis.sh

say "model servers on two slices of one GPU, a pool of them, and its endpoint picker"
kubectl get namespace $namespace > /dev/null 2>&1 || run kubectl create namespace $namespace
k apply -f demo/llama-two-slices/manifests
k rollout status deployment/optimized-baseline-nvidia-gpu-vllm-decode --timeout 3m
k rollout status deployment/optimized-baseline-epp --timeout 3m
k wait --for=condition=Programmed gateway/inference-gateway --timeout 1m
k get pods -o wide
k get resourceclaims -o custom-columns='CLAIM:.metadata.name,DEVICE:.status.allocation.devices.results[*].device,POD:.status.reservedFor[*].name'
k get gateways,httproutes,inferencepools

say "eight questions that have nothing in common, and eight that begin with the same long text"
pod=$(kubectl --namespace $namespace get pods -l llm-d.ai/guide=optimized-baseline -o name | head -1)
url=http://gateway.simgpu-gateway/v1
ask() { kubectl --namespace $namespace exec "$pod" -- vllm chat --url $url --model-name $model --quick "$1" > /dev/null; }
text() { local line; for line in {1..40}; do printf '%s: line %d of a text that is long enough to be cached in several blocks. ' "$1" "$line"; done; }
served() { kubectl --namespace simgpu-gateway logs deployment/gateway | sed -n 's/.*"Served".* endpoint="\([^"]*\)".*/\1/p'; }
for i in {1..8}; do ask "$(text "Document $i")"; done
first=$(served | wc -l)
common=$(text "The same document")
for i in {1..8}; do ask "$common Question $i: what does it say?"; done

say "who served them, by the gateway's log: first all of them, then those with the common text"
served | sort | uniq -c
echo
served | tail -n +$((first + 1)) | sort | uniq -c

next=(
  "kubectl -n $namespace get pods,resourceclaims,inferencepools -o wide"
  "kubectl -n simgpu-gateway logs deployment/gateway"
  "kubectl -n $namespace scale deployment/optimized-baseline-epp --replicas 0   # the pool fails open: any replica serves"
)
