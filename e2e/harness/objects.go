package harness

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/simgpu/simgpu/e2e/image"
)

// Claim is a ResourceClaim with these requests.
func Claim(name string, requests ...resourceapi.DeviceRequest) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: requests}},
	}
}

// Partition requests one partition of that profile.
func Partition(name, profile string) resourceapi.DeviceRequest {
	r := GPU(name)
	r.Exactly.DeviceClassName = "mig.nvidia.com"
	r.Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.attributes['%s'].profile == '%s'", DriverName, profile),
	}}}
	return r
}

// GPU requests a whole GPU.
func GPU(name string) resourceapi.DeviceRequest {
	return resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}}
}

// Use is what a container takes of a pod's claim: one of its requests, or all of them.
type Use struct{ Claim, Request string }

// Pod sleeps in one container per element of containers, each with the claims it names. The pod's claims are existing
// ResourceClaims of the same name.
func Pod(name string, containers ...[]Use) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{TerminationGracePeriodSeconds: new(int64(5))},
	}
	seen := map[string]bool{}
	for i, uses := range containers {
		c := corev1.Container{
			Name:            fmt.Sprintf("c%d", i),
			Image:           image.Test.Reference,
			ImagePullPolicy: corev1.PullNever,
			Command:         []string{"sleep", "infinity"},
			Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1m")},
			},
		}
		for _, u := range uses {
			c.Resources.Claims = append(c.Resources.Claims, corev1.ResourceClaim{Name: u.Claim, Request: u.Request})
			if !seen[u.Claim] {
				seen[u.Claim] = true
				p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: u.Claim, ResourceClaimName: &u.Claim})
			}
		}
		p.Spec.Containers = append(p.Spec.Containers, c)
	}
	return p
}
