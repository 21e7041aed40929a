// Package inferencesim pins llm-d-inference-sim, the program that serves the OpenAI
// API of the model server image (package modelserver runs it). It is a module of its
// own so that the simulator's dependencies stay out of simgpu's. It holds no code.
//
// From the root of the repository, to a static binary:
//
//	CGO_ENABLED=0 go build -C modelserver/inferencesim -trimpath -buildvcs=false -ldflags "-s -w" \
//		-o "$PWD/bin/llm-d-inference-sim" github.com/llm-d/llm-d-inference-sim/cmd/llm-d-inference-sim
//
// To move to another version: go get -tool with the path above and the version, then
// go mod tidy. Package modelserver translates vLLM's flags to those of this version;
// an unknown flag ends the simulator at its start, which the tests of cmd/vllm-sim do
// not see, since they run a stand-in.
package inferencesim
