# simgpu: everything a developer runs. `make help` lists the targets.
#
# On a fresh Debian machine with Go and root, `make demo` and `make test` need nothing else: what they use they build
# from Go modules or install from Debian packages, once.

SHELL := /usr/bin/env bash -euo pipefail

# One set of build flags for every module: packages compiled for one are found in the build cache by all others.
export GOFLAGS := -trimpath -buildvcs=false
export CGO_ENABLED ?= 0

VERSION := $(shell sed -n 's/^appVersion: *"\{0,1\}\([^"]*\)"\{0,1\}$$/\1/p' deployments/helm/simgpu/Chart.yaml)
BIN     := bin
DEMO    ?= two-llamas
# whom `make conformance` tests
DRIVER  ?= simgpu
# auto: kind where a Docker engine and kind answer, else the embedded local cluster
CLUSTER ?= auto

LDFLAGS := -s -w
# Without the debug pages of gRPC, which nothing serves, the programs are a quarter smaller and more.
TAGS    := grpcnotrace
TOOL    := go tool -modfile=$(CURDIR)/.ci/tools/go.mod

MODULES := . e2e driver/slices/apirules conformance routing

.DEFAULT_GOAL := help

##@ The two commands

.PHONY: demo
demo: $(BIN)/simgpu-cluster ## Run a demo on a real cluster and leave it up (DEMO=two-llamas|llama-two-slices|qwen-mig|..., CLUSTER=auto|kind|local)
	@demo/run.sh up $(DEMO) $(CLUSTER)

.PHONY: test
test: ## Run everything: vet, lint, unit tests with the race detector, cluster tests; ends with a summary
	@.ci/test

##@ Demo and local cluster

.PHONY: demo-down
demo-down: $(BIN)/simgpu-cluster ## Remove everything that `make demo` made
	@demo/run.sh down $(DEMO) $(CLUSTER)

.PHONY: cluster-up cluster-down
cluster-up: $(BIN)/simgpu-cluster ## Start an empty local cluster (ARGS="--nodes 3" and more, see bin/simgpu-cluster up --help)
	@$(BIN)/simgpu-cluster up $(ARGS)
cluster-down: $(BIN)/simgpu-cluster ## Stop the local cluster and remove every trace of it
	@$(BIN)/simgpu-cluster down $(ARGS)

##@ Build

.PHONY: build
build: ## Build all programs into bin/
	go build -tags $(TAGS) -ldflags "$(LDFLAGS)" -o $(BIN)/ ./cmd/...
	go build -C e2e -ldflags "$(LDFLAGS)" -o ../$(BIN)/simgpu-cluster ./cmd/simgpu-cluster

.PHONY: $(BIN)/simgpu-cluster
$(BIN)/simgpu-cluster:
	@go build -C e2e -ldflags "$(LDFLAGS)" -o ../$(BIN)/simgpu-cluster ./cmd/simgpu-cluster

.PHONY: images
images: $(BIN)/simgpu-cluster ## Build the container images without Docker and print the archives
	$(BIN)/simgpu-cluster build-image simgpu vllm-sim

.PHONY: docker-images
docker-images: ## Build the same container images with Docker
	docker build --target simgpu -t simgpu/simgpu:$(VERSION) .
	docker build --target vllm-sim -t simgpu/vllm-sim:$(VERSION) .

.PHONY: generate
generate: ## Regenerate the device API's Go code from its .proto file
	go generate ./...

##@ Checks, each a part of `make test`

.PHONY: fmt
fmt: ## Format all Go code
	gofmt -w $$(git ls-files '*.go')

.PHONY: vet
vet: ## go vet over all modules
	@for module in $(MODULES); do (set -x; go -C $$module vet ./...) || exit; done

.PHONY: lint
lint: ## golangci-lint over all modules, with .golangci.yml
	@for module in $(MODULES); do (set -x; cd $$module && $(TOOL) golangci-lint run --config $(CURDIR)/.golangci.yml ./...) || exit; done

.PHONY: unit
unit: ## Unit tests with the race detector
	CGO_ENABLED=1 go test -race ./...
	cd routing && CGO_ENABLED=1 go test -race ./...

.PHONY: apirules
apirules: ## Have the API server code of Kubernetes 1.34 to 1.37 judge what nodes publish (minutes once, then seconds)
	go build -o $(BIN)/simgpuctl ./cmd/simgpuctl
	cd driver/slices/apirules && for requirements in go.mod kubernetes-*.mod; do \
	  go test -modfile=$$requirements -count=1 . -args -simgpuctl $(CURDIR)/$(BIN)/simgpuctl || exit; done

.PHONY: conformance
conformance: ## Run the conformance kit on simgpu's driver (DRIVER=example or kubernetes: on theirs; ARGS="--focus prepare/")
	@.ci/conformance $(DRIVER) $(ARGS)

.PHONY: e2e
e2e: ## Cluster tests on real local clusters, a few side by side (RUN=regexp picks some, RETAIN=1 leaves the clusters up)
	cd e2e && go test -p 4 -count=1 -timeout 60m $(if $(RUN),-run '$(RUN)') -v ./...

##@ Measurements

.PHONY: bench
bench: $(BIN)/simgpu-cluster ## Measure the driver, the orders of devices and the controller of managed DRA (QUICK=1 for a glance; go run ./bench/driver --help)
	@go run ./bench/driver $(if $(QUICK),--quick)
	@go run ./bench/acceptance $(if $(QUICK),--quick)
	@bench/manageddra/run.sh $(if $(QUICK),--quick)

.PHONY: clean
clean: ## Remove what was built in the tree (the build cache outside it stays)
	rm -rf $(BIN)

##@ Help

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-zA-Z0-9_\/ -]+:.*## / { printf "  %-26s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
