// Package podresources asks the kubelet which containers use which devices of claims, through its pod
// resources API: a socket in <kubelet root>/pod-resources that belongs to root and needs no more than
// reading. It keeps nothing. A kubelet that is away, or older than what it is asked, is an error of that
// one question.
package podresources

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// maxAnswer is more than a node full of pods needs.
const maxAnswer = 16 << 20

// Use is one device of a claim in one container.
type Use struct {
	Namespace, Pod, Container string
	ClaimNamespace, ClaimName string
	Driver, Pool, Device      string
}

// InUse asks the kubelet on a socket, an absolute path, which devices of an extended resource containers have, by their ID.
func InUse(ctx context.Context, socket, resource string) (map[string]bool, error) {
	used := map[string]bool{}
	err := each(ctx, socket, func(_ *podresourcesapi.PodResources, container *podresourcesapi.ContainerResources) {
		for _, devices := range container.GetDevices() {
			if devices.GetResourceName() == resource {
				for _, id := range devices.GetDeviceIds() {
					used[id] = true
				}
			}
		}
	})
	return used, err
}

// List asks the kubelet on a socket, an absolute path, for the devices of a DRA driver that containers
// use. It returns each once, in the order of the kubelet.
func List(ctx context.Context, socket, driver string) ([]Use, error) {
	var uses []Use
	seen := map[Use]bool{}
	err := each(ctx, socket, func(pod *podresourcesapi.PodResources, container *podresourcesapi.ContainerResources) {
		for _, claim := range container.GetDynamicResources() {
			for _, device := range claim.GetClaimResources() {
				use := Use{
					Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName(),
					ClaimNamespace: claim.GetClaimNamespace(), ClaimName: claim.GetClaimName(),
					Driver: device.GetDriverName(), Pool: device.GetPoolName(), Device: device.GetDeviceName(),
				}
				if use.Driver == driver && !seen[use] {
					seen[use] = true
					uses = append(uses, use)
				}
			}
		}
	})
	return uses, err
}

// each calls do with every container that the kubelet knows.
func each(ctx context.Context, socket string, do func(*podresourcesapi.PodResources, *podresourcesapi.ContainerResources)) error {
	// A connection per question does not care about restarts of the kubelet.
	conn, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return fmt.Errorf("pod resources of the kubelet: %w", err)
	}
	defer conn.Close()
	answer, err := podresourcesapi.NewPodResourcesListerClient(conn).List(ctx, &podresourcesapi.ListPodResourcesRequest{})
	if err != nil {
		return fmt.Errorf("pod resources of the kubelet: %w", err)
	}
	for _, pod := range answer.GetPodResources() {
		for _, container := range pod.GetContainers() {
			do(pod, container)
		}
	}
	return nil
}
