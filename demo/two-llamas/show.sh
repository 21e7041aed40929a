# Sourced by demo/run.sh: applies the manifests of this folder and shows what one should see. README.md says the same
# in words.
namespace=llm-inference
model=meta-llama/Meta-Llama-3.1-8B-Instruct
k() { run kubectl --namespace $namespace "$@"; }
ask() { k exec "$1" -- vllm chat --url "$2" --model-name $model --quick "$3"; }

kubectl get namespace $namespace > /dev/null 2>&1 || run kubectl create namespace $namespace
k apply -f demo/two-llamas/manifests
k rollout status deployment/llama --timeout 3m

say "two pods, two claims, two slices of one GPU"
k get pods -l app=llama -o wide
k get resourceclaims
k get resourceclaims -o custom-columns='CLAIM:.metadata.name,DEVICE:.status.allocation.devices.results[*].device,POD:.status.reservedFor[*].name'

pods=($(kubectl --namespace $namespace get pods -l app=llama --field-selector status.phase=Running -o name))
for pod in "${pods[@]}"; do
  say "what ${pod#pod/} sees"
  k exec "$pod" -- nvidia-smi
done

say "what the node sees"
run kubectl --namespace "$DRIVER_NAMESPACE" exec daemonset/simgpu-kubelet-plugin -- nvidia-smi

say "a completion from each of them at the same time, and one through the Service"
asking=()
for pod in "${pods[@]}"; do
  ask "$pod" http://localhost:8000/v1 "What is NVIDIA MIG in one sentence?" &
  asking+=($!)
done
for job in "${asking[@]}"; do wait "$job"; done
ask "${pods[0]}" http://llama:8000/v1 "What is Kubernetes Dynamic Resource Allocation in one sentence?"

next=(
  "kubectl -n $namespace get pods,resourceclaims"
  "kubectl -n $namespace scale deployment/llama --replicas 3      # the third waits: both slices are taken"
  "kubectl -n $namespace exec deployment/llama -- nvidia-smi"
)
