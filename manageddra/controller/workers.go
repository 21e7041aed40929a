package controller

import (
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/simgpu/simgpu/manageddra/annotations"
	"github.com/simgpu/simgpu/manageddra/api"
)

// workerSetKind is the API of the LeaderWorkerSet project (lws.sigs.k8s.io). Its Go types are not needed for so little.
var workerSetKind = schema.GroupVersionKind{Group: "leaderworkerset.x-k8s.io", Version: "v1", Kind: "LeaderWorkerSet"}

// workerSet of a role: replicas of a leader with workers.
func (r *reconciler) workerSet(service *api.LLMInferenceService, spec *api.ServiceSpec, role role, request *annotations.Request) (*unstructured.Unstructured, error) {
	if !r.apis.served(workerSetKind) {
		return nil, &problem{"LeaderWorkerSetCRDNotFound", "spec.worker needs LeaderWorkerSets, which this cluster does not serve: install LeaderWorkerSet (lws.sigs.k8s.io), or remove spec.worker"}
	}
	leaderLabels := labelsOf(service.Name, spec, role)
	workerLabels := labelsOf(service.Name, spec, role)
	delete(workerLabels, api.LabelWorkload) // requests go to leaders
	leaderLabels[api.LabelComponent], workerLabels[api.LabelComponent] = api.ComponentLeader, api.ComponentWorker
	if role.prefill {
		leaderLabels[api.LabelComponent] += "-prefill"
		workerLabels[api.LabelComponent] += "-prefill"
	}
	leader, err := r.podTemplate(service, spec, role, role.spec.Template, leaderLabels, request)
	if err != nil {
		return nil, err
	}
	worker, err := r.podTemplate(service, spec, role, role.spec.Worker, workerLabels, request)
	if err != nil {
		return nil, err
	}
	leaderMap, err := runtime.DefaultUnstructuredConverter.ToUnstructured(leader)
	if err != nil {
		return nil, err
	}
	workerMap, err := runtime.DefaultUnstructuredConverter.ToUnstructured(worker)
	if err != nil {
		return nil, err
	}
	set := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"startupPolicy": "LeaderCreated",
		"leaderWorkerTemplate": map[string]any{
			"size":           groupSize(role.spec.Parallelism),
			"restartPolicy":  "RecreateGroupOnPodRestart",
			"leaderTemplate": leaderMap,
			"workerTemplate": workerMap,
		},
	}}}
	if role.spec.Replicas != nil {
		set.Object["spec"].(map[string]any)["replicas"] = int64(*role.spec.Replicas)
	}
	set.SetGroupVersionKind(workerSetKind)
	set.SetName(role.workerSet)
	set.SetLabels(leaderLabels)
	return set, nil
}

// groupSize is the number of pods of a replica, as KServe counts it.
func groupSize(p *api.Parallelism) int64 {
	switch {
	case p == nil:
		return 1
	case p.Data != nil:
		local := int32(1)
		if p.DataLocal != nil {
			local = max(*p.DataLocal, 1)
		}
		return int64(max(*p.Data/local, 1))
	case p.Pipeline != nil:
		return int64(*p.Pipeline)
	default:
		return 1
	}
}
