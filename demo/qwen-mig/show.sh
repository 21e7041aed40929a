# Sourced by demo/run.sh.
service=qwen
source demo/managed-dra.sh

next=(
  "kubectl -n $namespace patch llmisvc $service --type merge -p '{\"spec\":{\"replicas\":3}}'   # the third pod waits"
  "kubectl -n $namespace get llmisvc $service -o wide; kubectl -n $namespace get events"
  "bin/simgpuctl explain llmisvc $service -n $namespace   # after: make build"
)
