package controlplane

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Twice, since much of Kubernetes is in globals of the process.
func TestServesResourceAPI(t *testing.T) {
	for range 2 {
		c, err := Start(t.Context(), t.TempDir(), Options{FeatureGates: map[string]bool{"DRAListTypeAttributes": true}})
		if err != nil {
			t.Fatal(err)
		}
		client, err := kubernetes.NewForConfig(c.Admin)
		if err != nil {
			t.Error(err)
		} else if _, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{}); err != nil {
			t.Error(err)
		}
		c.Stop()
	}
}
