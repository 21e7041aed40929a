package podresources

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

type kubelet struct {
	podresourcesapi.UnimplementedPodResourcesListerServer
	pods []*podresourcesapi.PodResources
}

func (k *kubelet) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	return &podresourcesapi.ListPodResourcesResponse{PodResources: k.pods}, nil
}

// start serves the kubelet's socket until stop is called.
func (k *kubelet) start(t *testing.T, socket string) (stop func()) {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(server, k)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	return func() {
		server.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func device(driver, name string) *podresourcesapi.ClaimResource {
	return &podresourcesapi.ClaimResource{DriverName: driver, PoolName: "node-1", DeviceName: name}
}

func TestList(t *testing.T) {
	dir, err := os.MkdirTemp("", "sg") //nolint:usetesting // the path of t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "kubelet.sock")
	if uses, err := List(t.Context(), socket, "gpu.nvidia.com"); err == nil {
		t.Fatalf("without a kubelet the answer is %v", uses)
	}

	both := &podresourcesapi.DynamicResource{ClaimNamespace: "team", ClaimName: "both", ClaimResources: []*podresourcesapi.ClaimResource{
		device("gpu.nvidia.com", "gpu-0"), device("nic.example", "eth1"), device("gpu.nvidia.com", "gpu-0"), // two requests, one device
	}}
	k := &kubelet{pods: []*podresourcesapi.PodResources{
		{Namespace: "team", Name: "none", Containers: []*podresourcesapi.ContainerResources{{Name: "main"}}},
		{Namespace: "team", Name: "server", Containers: []*podresourcesapi.ContainerResources{
			{Name: "main", DynamicResources: []*podresourcesapi.DynamicResource{both}},
			{Name: "sidecar", DynamicResources: []*podresourcesapi.DynamicResource{both}},
		}},
	}}
	use := func(container string) Use {
		return Use{Namespace: "team", Pod: "server", Container: container, ClaimNamespace: "team", ClaimName: "both",
			Driver: "gpu.nvidia.com", Pool: "node-1", Device: "gpu-0"}
	}
	// The second time the kubelet has been restarted.
	for range 2 {
		stop := k.start(t, socket)
		got, err := List(t.Context(), socket, "gpu.nvidia.com")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]Use{use("main"), use("sidecar")}, got); diff != "" {
			t.Error(diff)
		}
		stop()
	}
}
