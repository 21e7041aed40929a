package controlplane

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

func TestServesResourceAPI(t *testing.T) {
	c, err := Start(t.Context(), t.TempDir(), Options{FeatureGates: map[string]bool{"DRAListTypeAttributes": true}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Stop()
	client, err := kubernetes.NewForConfig(c.Admin)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Error(err)
	}
}
