package cluster

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/simgpu/simgpu/e2e/internal/build"
	"github.com/simgpu/simgpu/e2e/internal/kubernetes"
	"github.com/simgpu/simgpu/e2e/internal/progress"
)

// Names of the programs of a cluster.
const (
	programKube       = "kube"
	programContainerd = "containerd"
	programShim       = "containerd-shim-runc-v2"
	programInit       = "simgpu-node"
)

// personalities are the names by which the program kube is called.
var personalities = []string{
	kubernetes.CoreDNS, kubernetes.Etcd, "helm", kubernetes.APIServer, kubernetes.ControllerManager, kubernetes.Proxy,
	kubernetes.Scheduler, "kubectl", kubernetes.Kubelet,
}

// clientPrograms are those of the personalities that people use on the machine.
var clientPrograms = []string{"helm", "kubectl"}

// programs are all programs of a cluster.
func programs() []build.Program {
	return []build.Program{
		{Name: programKube, Package: "./cmd/kube", Stamp: kubeVersions},
		{Name: programContainerd, Package: "github.com/containerd/containerd/v2/cmd/containerd", Stamp: containerdVersion},
		{Name: programShim, Package: "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", Stamp: containerdVersion},
		{Name: programInit, Package: "./cmd/simgpu-node"},
	}
}

// kubeVersions makes the components know their version, without which they refuse feature gates and API versions.
// A module tells neither commit nor build date; the time of its release stands in for the latter.
func kubeVersions(m build.Modules) map[string]string {
	kubernetes := m["k8s.io/kubernetes"]
	version := strings.SplitN(strings.TrimPrefix(kubernetes.Version, "v"), ".", 3)
	const server, library = "k8s.io/component-base/version", "k8s.io/client-go/pkg/version"
	return map[string]string{
		server + ".gitVersion":   kubernetes.Version,
		server + ".gitMajor":     version[0],
		server + ".gitMinor":     version[1],
		server + ".gitTreeState": "clean",
		server + ".gitCommit":    "unknown",
		server + ".buildDate":    kubernetes.Time.UTC().Format(time.RFC3339),
		library + ".gitVersion":  kubernetes.Version,
		library + ".gitCommit":   "unknown",

		"helm.sh/helm/v4/internal/version.version": m["helm.sh/helm/v4"].Version,
	}
}

func containerdVersion(m build.Modules) map[string]string {
	const module = "github.com/containerd/containerd/v2"
	return map[string]string{module + "/version.Version": strings.TrimPrefix(m[module].Version, "v")}
}

// buildPrograms returns the executable of every program, building what is missing.
func buildPrograms(ctx context.Context, dirs Dirs, out *progress.Printer) (map[string]string, error) {
	if dirs.Source == "" {
		return nil, fmt.Errorf("build the programs of the cluster: the source of %s was not found: run inside a checkout of simgpu", ModulePath)
	}
	builder := &build.Builder{Module: dirs.Source, Cache: filepath.Join(dirs.Cache, "programs"), Progress: out}
	return builder.Build(ctx, programs()...)
}
