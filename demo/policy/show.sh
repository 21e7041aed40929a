# Sourced by demo/run.sh: applies what is allowed, and shows how the rest is refused. README.md says the same in words.
run kubectl apply -f demo/policy/manifests
say "asking for more than is allowed"
for file in demo/policy/denied/*.yaml; do
  run kubectl apply -f "$file" || true
done
next=(
  "kubectl get validatingadmissionpolicies"
  "kubectl -n tenant-a describe quota"
)
