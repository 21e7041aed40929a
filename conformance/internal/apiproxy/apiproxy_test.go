package apiproxy

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

func TestHoldsRequestsBack(t *testing.T) {
	p, client := start(t)
	hold := p.Hold(func(r Request) bool { return r.Resource == "resourceclaims" })
	answered := make(chan error, 1)
	go func() {
		answered <- client.ResourceV1().ResourceClaims("team").Delete(t.Context(), "llama", metav1.DeleteOptions{})
	}()
	<-hold.Held
	if _, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("another request: %v", err)
	}
	select {
	case err := <-answered:
		t.Fatalf("answered while it is held back: %v", err)
	default:
	}
	hold.Release()
	if err := <-answered; err != nil {
		t.Error(err)
	}
	if err := client.ResourceV1().ResourceClaims("team").Delete(t.Context(), "llama", metav1.DeleteOptions{}); err != nil {
		t.Errorf("after the release: %v", err)
	}
}

func TestDropsFields(t *testing.T) {
	for _, contentType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		t.Run(contentType, func(t *testing.T) {
			var stored resourceapi.ResourceSlice
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", runtime.ContentTypeJSON)
				if err := json.NewDecoder(r.Body).Decode(&stored); err != nil {
					t.Error(err)
				}
				_ = json.NewEncoder(w).Encode(stored)
			}))
			defer s.Close()
			p, err := Start(&rest.Config{Host: s.URL}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Stop()
			client, err := kubernetes.NewForConfig(&rest.Config{
				Host: p.URL, TLSClientConfig: rest.TLSClientConfig{CAData: p.CA},
				ContentConfig: rest.ContentConfig{ContentType: contentType, AcceptContentTypes: runtime.ContentTypeJSON},
			})
			if err != nil {
				t.Fatal(err)
			}
			p.Drop(func(s *resourceapi.ResourceSlice) { s.Spec.SharedCounters = nil })
			_, err = client.ResourceV1().ResourceSlices().Create(t.Context(), &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: "slice"},
				Spec:       resourceapi.ResourceSliceSpec{Driver: "gadget.example.com", SharedCounters: []resourceapi.CounterSet{{Name: "set"}}},
			}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if stored.Spec.Driver != "gadget.example.com" || len(stored.Spec.SharedCounters) > 0 {
				t.Errorf("stored is %+v", stored.Spec)
			}
		})
	}
}
