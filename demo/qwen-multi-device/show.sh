# Sourced by demo/run.sh.
service=qwen2-7b-instruct-dra-multi-device
source demo/managed-dra.sh

next=(
  "kubectl -n $namespace annotate llmisvc $service serving.kserve.io/exp-dra-device-count=3 --overwrite   # more than there are"
  "kubectl -n $namespace describe llmisvc $service                                                        # says so"
  "bin/simgpuctl explain llmisvc $service -n $namespace                                                   # after: make build"
)
