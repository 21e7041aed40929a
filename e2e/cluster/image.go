package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/simgpu/simgpu/e2e/image"
	"github.com/simgpu/simgpu/e2e/internal/kubernetes"
	"github.com/simgpu/simgpu/e2e/internal/progress"
)

// LoadImage puts the images of a docker-archive or OCI archive on every node, where pods find them by their names, and returns these.
func (c *Cluster) LoadImage(ctx context.Context, archive string) ([]string, error) {
	var names []string
	for _, n := range c.Nodes() {
		var err error
		if names, err = n.LoadImage(ctx, archive); err != nil {
			return nil, err
		}
	}
	return names, nil
}

// LoadImage puts the images of an archive on this node and returns when the kubelet can use them.
func (n *Node) LoadImage(ctx context.Context, archive string) (names []string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("load %s on %s: %w", archive, n.Name(), err)
		}
	}()
	file, err := os.Open(archive)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	client, err := n.containerd()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	ctx = namespaces.WithNamespace(ctx, "k8s.io")
	imported, err := client.Import(ctx, file)
	if err != nil {
		return nil, err
	}
	if len(imported) == 0 {
		return nil, errors.New("it has no image with a name")
	}
	for _, one := range imported {
		if err := n.unpack(ctx, client, one); err != nil {
			return nil, fmt.Errorf("image %s: %w", one.Name, err)
		}
		names = append(names, one.Name)
	}
	return names, nil
}

// unpack makes the image ready to start containers from, and waits until the part of containerd that serves the kubelet knows it.
func (n *Node) unpack(ctx context.Context, client *containerd.Client, one images.Image) error {
	snapshotter, err := snapshotterFor(n.cluster.dirs.State)
	if err != nil {
		return err
	}
	if err := containerd.NewImage(client, one).Unpack(ctx, snapshotter); err != nil {
		return err
	}
	connection, ok := client.Conn().(grpc.ClientConnInterface)
	if !ok {
		return errors.New("the connection to containerd is not one of gRPC")
	}
	kubeletSide := runtimeapi.NewImageServiceClient(connection)
	for {
		answer, err := kubeletSide.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: one.Name}})
		if err == nil && answer.GetImage() != nil {
			return nil
		}
		if status.Code(err) == codes.Unimplemented {
			// containerd offers what could be started when it was: waiting does not help.
			return fmt.Errorf("containerd does not serve the kubelet: %w; %s", err, n.logTail(kubernetes.Containerd))
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// containerd connects to the node's containerd.
func (n *Node) containerd() (*containerd.Client, error) {
	root, err := n.Root()
	if err != nil {
		return nil, err
	}
	return containerd.New(filepath.Join(root, kubernetes.ContainerdSocket), containerd.WithTimeout(10*time.Second))
}

// BuildImage makes the archive of an image of this repository, under the recipe's name or under the references given.
func BuildImage(ctx context.Context, dirs Dirs, out *progress.Printer, recipe image.Recipe, references ...string) (string, error) {
	if dirs.Source == "" {
		return "", fmt.Errorf("build image %s: the source of %s was not found: run inside a checkout of simgpu", recipe.Name, ModulePath)
	}
	builder := &image.Builder{Repository: filepath.Dir(dirs.Source), Cache: dirs.Cache, Progress: out}
	return builder.Build(ctx, recipe, references...)
}
