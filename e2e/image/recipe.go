package image

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/simgpu/simgpu/e2e/internal/build"
	"github.com/simgpu/simgpu/e2e/internal/progress"
)

// Recipe says how an image is made from this repository.
type Recipe struct {
	// Name is how people call it.
	Name string
	// Reference is the name under which pods use it.
	Reference string
	// Programs go into /usr/bin under the last element of their package's path.
	Programs []Source
	// Spec has everything but the files.
	Spec Spec
}

// Source is where a program comes from.
type Source struct {
	// Module is the folder of its module in the repository.
	Module string
	// Package is its import path, or its path relative to the module (./cmd/x).
	Package string
	// Tags are build tags, separated by commas. May be empty.
	Tags string
}

// noTrace leaves out the debug pages of gRPC, which make a program larger by a third and more. Nothing serves them.
const noTrace = "grpcnotrace"

// binDir is where programs are in an image.
const binDir = "/usr/bin"

// recipes are all images that are made from this repository.
var recipes = []Recipe{
	{
		Name:      "simgpu",
		Reference: "simgpu/simgpu:0.1.0",
		Programs:  []Source{{".", "./cmd/simgpu-kubelet-plugin", noTrace}, {".", "./cmd/nvidia-smi", noTrace}, {".", "./cmd/simgpu-run", noTrace}, {".", "./cmd/managed-dra-controller", noTrace}},
		Spec: Spec{
			Entrypoint: []string{"simgpu-kubelet-plugin"},
			Labels: map[string]string{
				"org.opencontainers.image.title":       "simgpu",
				"org.opencontainers.image.description": "Node driver of the simulated GPU, the tools that it gives to containers, and the managed-DRA controller",
			},
		},
	},
	{
		Name:      "vllm-sim",
		Reference: "simgpu/vllm-sim:0.1.0",
		Programs: []Source{
			{".", "./cmd/vllm-sim", noTrace},
			{"modelserver/inferencesim", "github.com/llm-d/llm-d-inference-sim/cmd/llm-d-inference-sim", ""},
		},
		Spec: Spec{
			Links:      map[string]string{binDir + "/vllm": "vllm-sim"},
			Entrypoint: []string{"vllm", "serve"},
			Labels: map[string]string{
				"org.opencontainers.image.title":       "vllm-sim",
				"org.opencontainers.image.description": "Stand-in for vllm/vllm-openai on simulated GPUs",
			},
		},
	},
	{
		Name: "epp",
		// The name of the image that the program comes in: it is the same program.
		Reference: "registry.k8s.io/gateway-api-inference-extension/epp:v1.5.0",
		Programs:  []Source{{"routing", "sigs.k8s.io/gateway-api-inference-extension/cmd/epp", noTrace}},
		Spec: Spec{
			Entrypoint: []string{"epp"},
			User:       "65532:65532",
			Labels: map[string]string{
				"org.opencontainers.image.title":       "epp",
				"org.opencontainers.image.description": "Endpoint picker of the Gateway API Inference Extension",
			},
		},
	},
	{
		Name:      "gateway",
		Reference: "simgpu/gateway:0.1.0",
		Programs:  []Source{{"routing", "./cmd/gateway", noTrace}},
		Spec: Spec{
			Entrypoint: []string{"gateway"},
			User:       "65532:65532",
			Labels: map[string]string{
				"org.opencontainers.image.title":       "gateway",
				"org.opencontainers.image.description": "Gateway for demos and tests",
			},
		},
	},
	Test,
	Pause,
}

// Test is an image for pods of tests: sleep, cat, ls and the like in one small program.
var Test = Recipe{
	Name:      "testimage",
	Reference: "simgpu/testimage:0.1.0",
	Programs:  []Source{{"e2e", "./testimage", ""}},
	Spec: Spec{
		Links:   testLinks("cat", "env", "id", "lookup", "ls", "serve", "sleep", "tar", "wget"),
		Command: []string{"sleep", "infinity"},
	},
}

// testLinks lets the programs of the test image be called by their own names.
func testLinks(names ...string) map[string]string {
	links := map[string]string{}
	for _, name := range names {
		links[path.Join(binDir, name)] = "testimage"
	}
	return links
}

// Pause is the image that holds the namespaces of every pod.
var Pause = Recipe{
	Name:      "pause",
	Reference: "simgpu.dev/pause:1",
	Programs:  []Source{{"e2e", "./cmd/pause", ""}},
	Spec:      Spec{Entrypoint: []string{"pause"}, User: "65535:65535"},
}

// Names returns the names of all recipes in their order.
func Names() []string {
	var names []string
	for _, r := range recipes {
		names = append(names, r.Name)
	}
	return names
}

// Find returns the recipe with this name.
func Find(name string) (Recipe, error) {
	for _, r := range recipes {
		if r.Name == name {
			return r, nil
		}
	}
	return Recipe{}, fmt.Errorf("no image %q; known are %s", name, strings.Join(Names(), ", "))
}

// Builder makes images from recipes and keeps them.
type Builder struct {
	// Repository is the folder of the checkout.
	Repository string
	// Cache is where programs and images are kept.
	Cache string
	// Progress is told what is going on. It may be nil.
	Progress *progress.Printer
}

// Build returns a docker-archive with the image of the recipe, making it where it is not there yet.
// References replace the recipe's own name when given.
func (b *Builder) Build(ctx context.Context, r Recipe, references ...string) (string, error) {
	if len(references) == 0 {
		references = []string{r.Reference}
	}
	spec := r.Spec
	spec.Files = map[string]string{}
	type together struct{ module, tags string } // what is built in one go
	programs := map[together][]build.Program{}
	var order []together
	for _, source := range r.Programs {
		at := together{source.Module, source.Tags}
		if _, ok := programs[at]; !ok {
			order = append(order, at)
		}
		programs[at] = append(programs[at], build.Program{Name: path.Base(source.Package), Package: source.Package})
	}
	for _, at := range order {
		builder := &build.Builder{
			Module: filepath.Join(b.Repository, at.module), Tags: at.tags,
			Cache: filepath.Join(b.Cache, "programs"), Progress: b.Progress,
		}
		executables, err := builder.Build(ctx, programs[at]...)
		if err != nil {
			return "", fmt.Errorf("image %s: %w", r.Name, err)
		}
		for program, executable := range executables {
			spec.Files[path.Join(binDir, program)] = executable
		}
	}
	file, err := b.place(r.Name, spec, references)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(file); err == nil {
		build.MarkUsed(file)
		return file, nil
	} else if !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	return file, b.save(file, spec, references)
}

// place is where the image is kept: the paths of the executables name their content already.
func (b *Builder) place(name string, spec Spec, references []string) (string, error) {
	content, err := json.Marshal(struct {
		Spec       Spec
		References []string
	}{spec, references})
	if err != nil {
		return "", err
	}
	return filepath.Join(b.Cache, "images", name, fmt.Sprintf("%x", sha256.Sum256(content))[:16]+".tar"), nil
}

// save writes the image, and removes old ones of the recipe.
func (b *Builder) save(file string, spec Spec, references []string) error {
	image, err := Assemble(spec)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	temporary := fmt.Sprintf("%s.%d", file, os.Getpid())
	defer os.Remove(temporary)
	if err := Save(temporary, image, references...); err != nil {
		return err
	}
	if err := os.Rename(temporary, file); err != nil {
		return err
	}
	build.RemoveUnused(filepath.Dir(file))
	return nil
}
