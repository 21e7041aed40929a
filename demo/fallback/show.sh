# Sourced by demo/run.sh: applies the manifest of this folder and shows what one should see. README.md says the same in words.
namespace=llm-inference
k() { run kubectl --namespace $namespace "$@"; }
switch() {
  run helm upgrade $name deployments/helm/simgpu --namespace $name --reuse-values --set devicePlugin.enabled="$1" --wait --timeout 3m
  k rollout restart deployment/server
  k rollout status deployment/server --timeout 3m
}
look() {
  k get pods -l app=server -o custom-columns='POD:.metadata.name,CLAIM:.status.extendedResourceClaimStatus.resourceClaimName,PHASE:.status.phase'
  k exec deployment/server -- nvidia-smi -L
  run kubectl get node -o custom-columns='NODE:.metadata.name,NVIDIA.COM/GPU:.status.allocatable.nvidia\.com/gpu'
  run bin/simgpuctl canary --namespace $namespace -l app=server
}
go build -o bin/simgpuctl ./cmd/simgpuctl

say "nvidia.com/gpu: 1, served by DRA: the scheduler makes a claim for the pod"
kubectl get namespace $namespace > /dev/null 2>&1 || run kubectl create namespace $namespace
k apply -f demo/fallback/manifests
k rollout status deployment/server --timeout 3m
look

say "rolled back to the device plugin, in the same release: the same Deployment, and no claim"
switch true
look

say "and forward again"
switch false
look

next=(
  "bin/simgpuctl canary -n $namespace -o json"
  "kubectl get resourceslices -o yaml   # a GPU that the plugin has given out comes back half a minute after its last container"
)
