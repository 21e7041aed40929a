// Package kind tests what the configurations of kind clusters have to say.
package kind

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// TestConfigs checks that each cluster is the Kubernetes version that it is for, always the same, with all that
// partitions need there. CDI needs nothing: it is always on in the containerd 2 of these images.
func TestConfigs(t *testing.T) {
	files, err := filepath.Glob("*.yaml")
	if err != nil || len(files) < 3 {
		t.Fatalf("configurations %v, %v", files, err)
	}
	image := regexp.MustCompile(`^kindest/node:v1\.(\d+)\.\d+@sha256:[0-9a-f]{64}$`)
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var config struct {
			FeatureGates            map[string]bool `json:"featureGates"`
			ContainerdConfigPatches []string        `json:"containerdConfigPatches"`
			Nodes                   []struct {
				Image string `json:"image"`
			} `json:"nodes"`
		}
		if err := yaml.Unmarshal(data, &config); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, node := range config.Nodes {
			found := image.FindStringSubmatch(node.Image)
			if found == nil {
				t.Errorf("%s: image %q is not pinned", file, node.Image)
				continue
			}
			if _, version, ok := strings.Cut(strings.TrimSuffix(file, ".yaml"), "-1."); ok && version != found[1] {
				t.Errorf("%s has image %s", file, node.Image)
			}
			needsGate := found[1] == "34" || found[1] == "35"
			if config.FeatureGates["DRAPartitionableDevices"] != needsGate {
				t.Errorf("%s: feature gates %v with %s", file, config.FeatureGates, node.Image)
			}
		}
		if len(config.Nodes) == 0 || len(config.ContainerdConfigPatches) > 0 {
			t.Errorf("%s: %d nodes, containerd patches %q", file, len(config.Nodes), config.ContainerdConfigPatches)
		}
	}
}
