package controller

import (
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/simgpu/simgpu/manageddra/api"
)

// The APIs that route requests (gateway-api.sigs.k8s.io and its inference extension). A cluster may serve both, one or none.
var (
	poolKind  = schema.GroupVersionKind{Group: "inference.networking.k8s.io", Version: "v1", Kind: "InferencePool"}
	routeKind = schema.GroupVersionKind{Group: "gateway.networking.k8s.io", Version: "v1", Kind: "HTTPRoute"}
)

// pool of the pods of a service, whose endpoint picker is <name>-epp-service; nil if none is asked for.
func pool(service *api.LLMInferenceService, router *api.Router) (*unstructured.Unstructured, error) {
	if router == nil || router.Scheduler == nil || router.Scheduler.Pool != nil && router.Scheduler.Pool.Ref != nil {
		return nil, nil
	}
	labels := map[string]any{}
	for key, value := range selection(service.Name) {
		labels[key] = value
	}
	spec := map[string]any{
		"selector":          map[string]any{"matchLabels": labels},
		"targetPorts":       []any{map[string]any{"number": int64(servingPort)}},
		"endpointPickerRef": map[string]any{"name": api.EndpointPickerService(service.Name), "port": map[string]any{"number": int64(9002)}, "failureMode": "FailOpen"},
	}
	if router.Scheduler.Pool != nil {
		if err := override(spec, router.Scheduler.Pool.Spec, "spec.router.scheduler.pool.spec"); err != nil {
			return nil, err
		}
	}
	return routing(poolKind, api.InferencePoolName(service.Name), service, spec), nil
}

// route sends requests for /NAMESPACE/NAME to the pool, or without one to the Service; nil if none is asked for.
func route(service *api.LLMInferenceService, router *api.Router, pooled bool) (*unstructured.Unstructured, error) {
	if router == nil || router.Route == nil || router.Route.HTTP != nil && len(router.Route.HTTP.Refs) > 0 {
		return nil, nil
	}
	backend := map[string]any{"name": api.WorkloadServiceName(service.Name), "port": int64(servingPort)}
	if pooled {
		name := api.InferencePoolName(service.Name)
		if router.Scheduler.Pool != nil && router.Scheduler.Pool.Ref != nil {
			name = router.Scheduler.Pool.Ref.Name
		}
		backend = map[string]any{"group": poolKind.Group, "kind": poolKind.Kind, "name": name}
	}
	var parents []any
	if router.Gateway != nil {
		for _, ref := range router.Gateway.Refs {
			parent := map[string]any{"name": ref.Name}
			if ref.Namespace != "" {
				parent["namespace"] = ref.Namespace
			}
			parents = append(parents, parent)
		}
	}
	spec := map[string]any{"rules": []any{map[string]any{
		"matches": []any{map[string]any{"path": map[string]any{"type": "PathPrefix", "value": "/" + service.Namespace + "/" + service.Name}}},
		"filters": []any{map[string]any{"type": "URLRewrite", "urlRewrite": map[string]any{
			"path": map[string]any{"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}}},
		"backendRefs": []any{backend},
	}}}
	if len(parents) > 0 {
		spec["parentRefs"] = parents
	}
	if router.Route.HTTP != nil {
		if err := override(spec, router.Route.HTTP.Spec, "spec.router.route.http.spec"); err != nil {
			return nil, err
		}
	}
	return routing(routeKind, api.HTTPRouteName(service.Name), service, spec), nil
}

// override has the user's fields replace those of the default, one by one.
func override(spec map[string]any, users *runtime.RawExtension, path string) error {
	if users == nil {
		return nil
	}
	if err := json.Unmarshal(users.Raw, &spec); err != nil {
		return &problem{"InvalidRouter", fmt.Sprintf("%s is no object: %v", path, err)}
	}
	return nil
}

func routing(kind schema.GroupVersionKind, name string, service *api.LLMInferenceService, spec map[string]any) *unstructured.Unstructured {
	object := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	object.SetGroupVersionKind(kind)
	object.SetName(name)
	object.SetLabels(map[string]string{api.LabelName: service.Name, api.LabelPartOf: api.PartOf, api.LabelComponent: api.ComponentRouter})
	return object
}
