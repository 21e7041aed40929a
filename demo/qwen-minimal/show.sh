# Sourced by demo/run.sh.
service=qwen2-7b-instruct-dra-minimal
source demo/managed-dra.sh

next=(
  "kubectl -n $namespace annotate llmisvc $service serving.kserve.io/exp-dra-device-count=0 --overwrite   # refused"
  "kubectl -n $namespace annotate llmisvc $service serving.kserve.io/stop=true   # the pods and the template go"
)
