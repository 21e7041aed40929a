# Sourced by demo/run.sh: applies the manifests of this folder and shows what one should see. README.md says the same in words.
namespace=llm-inference
k() { run kubectl --namespace $namespace "$@"; }
look() {
  k get pods -o custom-columns='POD:.metadata.name,NODE:.spec.nodeName,PHASE:.status.phase'
  k get resourceclaims -o custom-columns='CLAIM:.metadata.name,NODE:.status.allocation.devices.results[*].pool,DEVICE:.status.allocation.devices.results[*].device'
}
both() { k wait --for=condition=Ready llminferenceservice/qwen llminferenceservice/qwen-small --timeout 3m; for s in qwen qwen-small; do k rollout status deployment/$s-kserve --timeout 3m; done; }

kubectl get namespace $namespace > /dev/null 2>&1 || run kubectl create namespace $namespace
k apply -f demo/drain/manifests
both
look

say "questions to both services, without a pause, from a pod on the node that stays"
node=$(kubectl --namespace $namespace get pods -l app.kubernetes.io/name=qwen -o jsonpath='{.items[0].spec.nodeName}')
k apply -f demo/drain/asker.yaml
k patch deployment asker --patch "{\"spec\":{\"template\":{\"spec\":{\"affinity\":{\"nodeAffinity\":{\"requiredDuringSchedulingIgnoredDuringExecution\":{\"nodeSelectorTerms\":[{\"matchExpressions\":[{\"key\":\"kubernetes.io/hostname\",\"operator\":\"NotIn\",\"values\":[\"$node\"]}]}]}}}}}}}"
k rollout status deployment/asker --timeout 1m
asked=$(mktemp -d)
ask() { # SERVICE MODEL: until told to stop
  while [ ! -e "$asked/stop" ]; do
    if kubectl --namespace $namespace exec deployment/asker -- vllm chat --url "http://$1-kserve-workload-svc:8000/v1" --model-name "$2" --quick "Are you there?" >> "$asked/$1.answers" 2>> "$asked/$1.errors"
    then echo yes; else echo no; fi >> "$asked/$1"
  done
}
ask qwen Qwen/Qwen2.5-7B-Instruct & ask qwen-small Qwen/Qwen2.5-0.5B-Instruct &

say "drain $node: its pods leave one by one, and get devices of the other node"
run kubectl drain "$node" --ignore-daemonsets --delete-emptydir-data --timeout 3m
both
look

say "$node is replaced: another Node object of that name, with slices of its own"
run kubectl get node "$node" -o custom-columns='NODE:.metadata.name,UID:.metadata.uid'
run kubectl delete node "$node"
"${kind}_restart_kubelet" "$node"
run kubectl wait --for=condition=Ready "node/$node" --timeout 2m
run kubectl --namespace "$DRIVER_NAMESPACE" rollout status daemonset simgpu-kubelet-plugin --timeout 3m
run kubectl get node "$node" -o custom-columns='NODE:.metadata.name,UID:.metadata.uid'
for _ in {1..60}; do [ -z "$(kubectl get resourceslices --field-selector spec.nodeName="$node" -o name)" ] || break; sleep 1; done
run kubectl get resourceslices --field-selector spec.nodeName="$node" -o custom-columns='SLICE:.metadata.name,OWNER:.metadata.ownerReferences[0].uid'

touch "$asked/stop"; wait
say "questions that were answered, and were not"
for service in qwen qwen-small; do printf '%s: %d answered, %d not\n' $service "$(grep -c yes "$asked/$service")" "$(grep -c no "$asked/$service" || true)"; done
rm -r "$asked"
k delete deployment asker

next=(
  "kubectl -n $namespace get pods -o wide; kubectl get resourceslices"
  "kubectl -n $namespace rollout restart deployment/qwen-kserve   # spreads over both nodes again"
)
