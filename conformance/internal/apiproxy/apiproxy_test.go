package apiproxy

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// server answers every request with an empty list, and watches with nothing until they end.
func server(t *testing.T) *rest.Config {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Has("watch") {
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		}
		_, _ = w.Write([]byte(`{"kind":"ResourceSliceList","apiVersion":"resource.k8s.io/v1"}`))
	}))
	t.Cleanup(s.Close)
	return &rest.Config{Host: s.URL}
}

func start(t *testing.T) (*Proxy, kubernetes.Interface) {
	p, err := Start(server(t), &apiversion.Info{GitVersion: "v1.99.0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: p.URL, TLSClientConfig: rest.TLSClientConfig{CAData: p.CA}})
	if err != nil {
		t.Fatal(err)
	}
	return p, client
}

func TestNotesRequests(t *testing.T) {
	p, client := start(t)
	before := time.Now()
	if _, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := client.ResourceV1().ResourceClaims("team").Delete(t.Context(), "llama", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	got := p.Requests(before)
	if len(got) != 2 {
		t.Fatalf("%d requests noted: %+v", len(got), got)
	}
	list, remove := got[0], got[1]
	if list.Verb != "list" || list.Group != "resource.k8s.io" || list.Resource != "resourceslices" || list.Status != http.StatusOK || list.Writes() {
		t.Errorf("list noted as %+v", list)
	}
	if remove.Verb != "delete" || remove.Resource != "resourceclaims" || remove.Namespace != "team" || remove.Name != "llama" || !remove.Writes() {
		t.Errorf("delete noted as %+v", remove)
	}
	if later := p.Requests(time.Now()); len(later) != 0 {
		t.Errorf("noted since now: %+v", later)
	}
}

func TestSaysTheVersionItIsTold(t *testing.T) {
	_, client := start(t)
	version, err := client.Discovery().ServerVersion()
	if err != nil || version.GitVersion != "v1.99.0" {
		t.Errorf("version %v, error %v", version, err)
	}
}

func TestOutageCutsWatchesAndRefusesRequests(t *testing.T) {
	p, client := start(t)
	watch, err := client.ResourceV1().ResourceSlices().Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p.Outage()
	for range watch.ResultChan() { // ends when the watch does
	}
	if _, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{}); err == nil {
		t.Error("answered during the outage")
	}
	p.Recover()
	if _, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("after the outage: %v", err)
	}
}
