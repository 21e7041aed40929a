# Sourced by demo/run.sh, which has given the node the GPUs that the features need (values.yaml): says how to go on.
# README.md says the same in words.
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
