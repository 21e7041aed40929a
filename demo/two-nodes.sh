# Sourced by the show.sh of demos that want two kinds of nodes, as demo/qwen-mig/values.yaml has them.
say "one node with two A100s, one with an H100"
last=$(kubectl get nodes --selector '!node-role.kubernetes.io/control-plane' -o name | tail -1)
run kubectl label --overwrite "${last:-$(kubectl get nodes -o name | tail -1)}" gpu=a100
run kubectl --namespace "$DRIVER_NAMESPACE" rollout restart daemonset simgpu-kubelet-plugin
run kubectl --namespace "$DRIVER_NAMESPACE" rollout status daemonset simgpu-kubelet-plugin --timeout 3m
