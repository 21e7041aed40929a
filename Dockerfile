# The images of simgpu, static binaries and nothing else. `simgpu-cluster build-image` makes the same ones without Docker.
#
#   docker build --target simgpu   -t simgpu/simgpu:0.1.0 .
#   docker build --target vllm-sim -t simgpu/vllm-sim:0.1.0 .

FROM golang:1.26 AS build
ENV CGO_ENABLED=0 GOFLAGS="-trimpath -buildvcs=false"
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
# Without the debug pages of gRPC, which nothing serves, the programs are a quarter smaller and more.
RUN go build -tags grpcnotrace -ldflags "-s -w" -o /out/ ./cmd/... && ln -s vllm-sim /out/vllm

# The real llm-d-inference-sim, in a stage of its own: it changes with its go.mod alone.
FROM golang:1.26 AS inference-sim
ENV CGO_ENABLED=0 GOFLAGS="-trimpath -buildvcs=false"
WORKDIR /src
COPY modelserver/inferencesim/ ./
RUN go build -ldflags "-s -w" -o /out/llm-d-inference-sim github.com/llm-d/llm-d-inference-sim/cmd/llm-d-inference-sim

# The model server that stands in for vllm/vllm-openai.
FROM scratch AS vllm-sim
COPY --from=build /out/vllm-sim /out/vllm /usr/bin/
COPY --from=inference-sim /out/llm-d-inference-sim /usr/bin/
ENV PATH=/usr/bin
ENTRYPOINT ["vllm", "serve"]

# The node driver, what it puts into containers, and the managed-DRA controller. The last stage, so that a plain `docker build .` makes it.
FROM scratch AS simgpu
COPY --from=build /out/simgpu-kubelet-plugin /out/nvidia-smi /out/simgpu-run /out/managed-dra-controller /usr/bin/
ENV PATH=/usr/bin
ENTRYPOINT ["simgpu-kubelet-plugin"]
