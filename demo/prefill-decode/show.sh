# Sourced by demo/run.sh: applies the manifests of this folder and shows what one should see. README.md says the same
# in words.
namespace=llm-inference
k() { run kubectl --namespace $namespace "$@"; }
ask() { k exec "deployment/$1" -c main -- vllm chat --url "$2" --model-name "$3" --quick "What is Dynamic Resource Allocation?"; }

source demo/two-nodes.sh

kubectl get namespace $namespace > /dev/null 2>&1 || run kubectl create namespace $namespace
k apply -f demo/prefill-decode/manifests
k wait --for=condition=Ready llminferenceservice/llama llminferenceservice/qwen --timeout 3m

say "the pair with two claims of its own, and beside it the service with a managed claim"
k get llminferenceservice -o wide
k get pods -L llm-d.ai/role -o wide
k get resourceclaims -o custom-columns='CLAIM:.metadata.name,NODE:.status.allocation.devices.results[*].pool,DEVICE:.status.allocation.devices.results[*].device,POD:.status.reservedFor[*].name'
k exec deployment/llama-kserve-prefill -- nvidia-smi -L
k exec deployment/llama-kserve -- nvidia-smi -L
k exec deployment/qwen-kserve -- nvidia-smi -L

say "an answer of each service"
ask llama-kserve http://llama-kserve-workload-svc:8000/v1 meta-llama/Meta-Llama-3.1-8B-Instruct
ask qwen-kserve http://qwen-kserve-workload-svc:8000/v1 Qwen/Qwen2.5-7B-Instruct

next=(
  "kubectl -n $namespace get resourceclaimtemplates -o wide   # two of ours, one of the controller"
  "kubectl -n $namespace annotate llmisvc qwen serving.kserve.io/stop=true   # the pair stays as it is"
)
