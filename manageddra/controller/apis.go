package controller

import (
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// apis are the kinds that the API server may not serve when the controller starts. No watch tells when one appears: who
// needs it asks again after a while.
type apis struct {
	controller controller.Controller
	mapper     meta.RESTMapper
	again      time.Duration

	mutex   sync.Mutex
	missed  map[schema.GroupVersionKind]time.Time
	sources map[schema.GroupVersionKind]source.Source // watches that have not started
}

// served is true if the API server serves the kind. That it does not is believed for a while: asking costs requests.
func (a *apis) served(kind schema.GroupVersionKind) bool {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if when, missed := a.missed[kind]; missed && time.Since(when) < a.again {
		return false
	}
	if _, err := a.mapper.RESTMapping(kind.GroupKind(), kind.Version); meta.IsNoMatchError(err) {
		a.missed[kind] = time.Now()
		return false
	}
	delete(a.missed, kind)
	return true
}

// watch starts the watches on what is served by now, and is true if something is still missing.
func (a *apis) watch() (missing bool, err error) {
	for kind, src := range a.waiting() {
		if !a.served(kind) {
			missing = true
			continue
		}
		a.mutex.Lock()
		_, still := a.sources[kind]
		delete(a.sources, kind)
		a.mutex.Unlock()
		if still {
			if err := a.controller.Watch(src); err != nil {
				return missing, err
			}
		}
	}
	return missing, nil
}

func (a *apis) waiting() map[schema.GroupVersionKind]source.Source {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return maps.Clone(a.sources)
}
