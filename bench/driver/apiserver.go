package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes/scheme"
)

// apiServer is as much of an API server as the driver needs, over HTTP and in memory: it stores and shows
// objects, and validates nothing. What the driver waits for is the driver's own work then.
type apiServer struct {
	*httptest.Server

	mu       sync.Mutex
	revision int
	objects  map[string]map[string]runtime.Object // resource -> namespace/name
	watchers map[string][]chan watchEvent
}

type watchEvent struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

func startAPIServer() *apiServer {
	s := &apiServer{objects: map[string]map[string]runtime.Object{}, watchers: map[string][]chan watchEvent{}}
	s.Server = httptest.NewServer(s)
	return s
}

// put stores an object, as a client would.
func (s *apiServer) put(resource string, object runtime.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store(resource, object)
}

func (s *apiServer) store(resource string, object runtime.Object) {
	m, err := meta.Accessor(object)
	if err != nil {
		panic(err)
	}
	s.revision++
	m.SetResourceVersion(strconv.Itoa(s.revision))
	if m.GetName() == "" {
		m.SetName(m.GetGenerateName() + strconv.Itoa(s.revision))
	}
	if m.GetUID() == "" {
		m.SetUID(types.UID(m.GetName()))
	}
	if s.objects[resource] == nil {
		s.objects[resource] = map[string]runtime.Object{}
	}
	key := m.GetNamespace() + "/" + m.GetName()
	event := "MODIFIED"
	if s.objects[resource][key] == nil {
		event = "ADDED"
	}
	s.objects[resource][key] = object
	s.tell(resource, event, object)
}

func (s *apiServer) tell(resource, event string, object runtime.Object) {
	for _, watcher := range s.watchers[resource] {
		watcher <- watchEvent{event, encode(object)}
	}
}

func (s *apiServer) slices() []*resourceapi.ResourceSlice {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*resourceapi.ResourceSlice
	for _, object := range s.objects["resourceslices"] {
		all = append(all, object.(*resourceapi.ResourceSlice))
	}
	slices.SortFunc(all, func(a, b *resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// lists are empty lists of what is listed.
var lists = map[string]func() runtime.Object{
	"nodes":          func() runtime.Object { return &corev1.NodeList{} },
	"resourceslices": func() runtime.Object { return &resourceapi.ResourceSliceList{} },
}

// ServeHTTP implements [http.Handler].
func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	if path[0] == "version" {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(version.Info{Major: "1", Minor: "37", GitVersion: "v1.37.2"})
		return
	}
	if path[0] == "api" {
		path = path[2:]
	} else {
		path = path[3:]
	}
	namespace := ""
	if len(path) > 2 && path[0] == "namespaces" {
		namespace, path = path[1], path[2:]
	}
	resource, name := path[0], ""
	if len(path) > 1 {
		name = path[1]
	}
	if r.URL.Query().Get("watch") != "" && r.URL.Query().Get("watch") != "false" {
		s.watch(w, r, resource)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	stored := s.objects[resource][namespace+"/"+name]
	switch r.Method {
	case http.MethodGet:
		if name == "" {
			answer(w, http.StatusOK, s.list(resource))
			return
		}
	case http.MethodPost, http.MethodPut:
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if r.URL.Query().Get("dryRun") == "" {
			s.store(resource, object)
		}
		answer(w, http.StatusOK, object)
		return
	case http.MethodDelete:
		if stored != nil {
			delete(s.objects[resource], namespace+"/"+name)
			s.tell(resource, "DELETED", stored)
		}
	case http.MethodPatch: // counted, not carried out
	}
	if stored == nil {
		status := apierrors.NewNotFound(schema.GroupResource{Resource: resource}, name).Status()
		answer(w, http.StatusNotFound, &status)
		return
	}
	answer(w, http.StatusOK, stored)
}

func (s *apiServer) list(resource string) runtime.Object {
	list := lists[resource]()
	var items []runtime.Object
	for _, object := range s.objects[resource] {
		items = append(items, object)
	}
	if err := meta.SetList(list, items); err != nil {
		panic(err)
	}
	accessor, err := meta.ListAccessor(list)
	if err != nil {
		panic(err)
	}
	accessor.SetResourceVersion(strconv.Itoa(s.revision))
	return list
}

// watch begins with what there is, and a bookmark, where the client asks for that.
func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, resource string) {
	events := make(chan watchEvent, 10000)
	s.mu.Lock()
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		for _, object := range s.objects[resource] {
			events <- watchEvent{"ADDED", encode(object)}
		}
		mark := metav1.ObjectMeta{ResourceVersion: strconv.Itoa(s.revision), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}
		var bookmark runtime.Object = &corev1.Node{ObjectMeta: mark}
		if resource == "resourceslices" {
			bookmark = &resourceapi.ResourceSlice{ObjectMeta: mark}
		}
		events <- watchEvent{"BOOKMARK", encode(bookmark)}
	}
	s.watchers[resource] = append(s.watchers[resource], events)
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case event := <-events:
			_ = json.NewEncoder(w).Encode(event)
			w.(http.Flusher).Flush()
		}
	}
}

func answer(w http.ResponseWriter, status int, object runtime.Object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(encode(object))
}

func encode(object runtime.Object) []byte {
	data, err := runtime.Encode(scheme.Codecs.LegacyCodec(corev1.SchemeGroupVersion, resourceapi.SchemeGroupVersion, metav1.SchemeGroupVersion), object)
	if err != nil {
		panic(err)
	}
	return data
}
