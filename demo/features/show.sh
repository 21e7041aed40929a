# Sourced by demo/run.sh: gives the node the GPUs that the features need, and says how to go on. README.md says the same in
# words.
say "the GPUs that the features need: two H100s that can be partitioned, and an A100 that claims share"
run helm upgrade $name deployments/helm/simgpu --namespace "$DRIVER_NAMESPACE" --reuse-values --values demo/features/values.yaml --wait --timeout 3m
# The driver would see the new inventory within a minute or two.
run kubectl --namespace "$DRIVER_NAMESPACE" rollout restart daemonset simgpu-kubelet-plugin
run kubectl --namespace "$DRIVER_NAMESPACE" rollout status daemonset simgpu-kubelet-plugin --timeout 3m
run kubectl --namespace "$DRIVER_NAMESPACE" exec daemonset/simgpu-kubelet-plugin -- nvidia-smi -L

say "the image with the few programs that two of the features use"
"${kind}_load" "$(run "$cluster" build-image testimage)"

say "the features: each one's README.md says what to do and what one should see"
for readme in demo/features/*/README.md; do
  printf '  %-50s %s\n' "$readme" "$(sed -n '1s/^# //p' "$readme")"
done

next=(
  "kubectl apply -f demo/features/shared-gpu/manifests.yaml     # and as its README.md says"
  "kubectl delete -f demo/features/shared-gpu/manifests.yaml    # before the next: they want the same GPUs"
)
