#!/usr/bin/env bash
# make demo, make demo-down: a cluster, the chart, a demo's manifests, and the demo's own show.sh.
#
#   demo/run.sh up|down DEMO [auto|kind|local]
#
# A demo is a folder with a show.sh. It may have a values.yaml for the chart, and a demo.env that sets `nodes`, how many
# it needs, `values`, where another demo has the same, or `images`, which it needs beside those of every demo.
#
# The kinds of cluster differ in the functions <kind>_up, _load, _restart_kubelet and _down below and in nothing else.
# Every command that a user could type is shown before it runs.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { echo "usage: demo/run.sh up|down DEMO [auto|kind|local]; demos: $(cd demo && printf '%s ' */ | tr -d /)" >&2; exit 2; }
[ $# -ge 2 ] || usage
action=$1 demo=$2 kind=${3:-auto}
[ -f "demo/$demo/show.sh" ] || { echo "there is no demo named '$demo'" >&2; usage; }

name=simgpu                                      # of the cluster, the namespace and the Helm release
cluster=bin/simgpu-cluster
nodes=1 values=demo/$demo/values.yaml images=
# shellcheck disable=SC1090 # the demo's own settings
[ ! -f "demo/$demo/demo.env" ] || source "demo/$demo/demo.env"

bold='' dim='' plain=''
if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'; fi
say() { printf '\n%s# %s%s\n' "$bold" "$*" "$plain"; }
# Shows a command as one could type it, then runs it.
run() {
  local word line='$'
  for word; do
    case $word in *[!A-Za-z0-9_./:=,@%+-]*) word="'$word'" ;; esac
    line+=" $word"
  done
  printf '%s%s%s\n' "$dim" "$line" "$plain" >&2
  "$@"
}

has_docker() { command -v docker > /dev/null && docker info > /dev/null 2>&1; }

pick() {
  case $kind in
    auto) if has_docker && command -v kind > /dev/null; then kind=kind; else kind=local; fi ;;
    local) ;;
    kind)
      command -v kind > /dev/null || { echo "CLUSTER=kind needs the kind command in the PATH; CLUSTER=local needs nothing" >&2; exit 1; }
      has_docker || { echo "CLUSTER=kind needs a Docker engine, and 'docker info' finds none; CLUSTER=local needs nothing" >&2; exit 1; } ;;
    *) usage ;;
  esac
}

local_up() {
  run "$cluster" up --name $name --nodes "$nodes"
  eval "$("$cluster" env --name $name)"
}
local_load() { run "$cluster" load-image --name $name "$@"; }
local_restart_kubelet() { run "$cluster" restart --name $name "$1" kubelet; }
local_down() { run "$cluster" down --name $name; }
local_again='eval "$(bin/simgpu-cluster env --name simgpu)"'

kind_up() {
  for tool in kubectl helm; do
    command -v $tool > /dev/null || { echo "CLUSTER=kind needs $tool in the PATH; CLUSTER=local brings its own" >&2; exit 1; }
  done
  kind get clusters 2> /dev/null | grep -qx $name ||
    kind_config | run kind create cluster --name $name --config - --wait 120s
  KUBECONFIG=$(mktemp) && export KUBECONFIG
  trap 'rm -f "$KUBECONFIG"' EXIT
  kind get kubeconfig --name $name > "$KUBECONFIG"
  # kind calls a cluster ready before its DNS is.
  kubectl --namespace kube-system rollout status deployment/coredns --timeout 3m
}
# The configuration for one node, or with as many workers: beside them the control plane runs no pods.
kind_config() {
  local config=${KIND_CONFIG:-deployments/kind/cluster.yaml} image i
  cat "$config"
  [ "$nodes" -gt 1 ] || return 0
  image=$(sed -n 's/^ *image: *//p' "$config" | head -1)
  for ((i = 0; i < nodes; i++)); do printf '  - role: worker\n    image: %s\n' "$image"; done
}
kind_load() { for archive; do run kind load image-archive --name $name "$archive"; done; }
kind_restart_kubelet() { run docker exec "$1" systemctl restart kubelet; }
kind_down() { run kind delete cluster --name $name; }
kind_again="kind export kubeconfig --name $name"

up() {
  say "a Kubernetes cluster ($kind)"
  "${kind}_up"

  say "the images: simgpu, and the model server under the name of the one it stands in for"
  local archives=() image
  archives+=("$(run "$cluster" build-image vllm-sim --as vllm/vllm-openai:v0.19.1)")
  for image in simgpu $images; do archives+=("$(run "$cluster" build-image "$image")"); done
  "${kind}_load" "${archives[@]}"

  say "the driver: every node now has a GPU"
  local settings=()
  [ ! -f "$values" ] || settings=(--values "$values")
  run helm upgrade --install $name deployments/helm/simgpu --namespace $name --create-namespace "${settings[@]}" --wait --timeout 3m
  if [ ${#settings[@]} -gt 0 ]; then
    # A driver that runs already would see another inventory within a minute or two.
    run kubectl --namespace $name rollout restart daemonset simgpu-kubelet-plugin
    run kubectl --namespace $name rollout status daemonset simgpu-kubelet-plugin --timeout 3m
  fi
  run kubectl get resourceslices

  say "the demo: $demo"
  # shellcheck disable=SC1090 # the demo's own script
  DRIVER_NAMESPACE=$name source "demo/$demo/show.sh"

  again=${kind}_again
  say "the cluster stays up. Go on with:"
  printf '  %s\n' "${!again}" "${next[@]}" "make demo-down      # removes everything"
}

pick
case $action in
  up) up ;;
  down) "${kind}_down" ;;
  *) usage ;;
esac
