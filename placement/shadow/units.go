package shadow

import (
	"cmp"
	"encoding/json"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/simgpu/simgpu/manageddra/annotations"
	"github.com/simgpu/simgpu/manageddra/api"
	"github.com/simgpu/simgpu/placement"
)

// ReadUnits reads what is to be placed from manifests: claims, pods, and Deployments, StatefulSets, Jobs and
// LLMInferenceServices with as many pods as they ask for. Claim templates are taken from the same files, else from the
// snapshot. Objects without a namespace are of the given one, as with kubectl. Objects of other kinds are returned by name as
// skipped. "-" is standard input.
func ReadUnits(s *placement.Snapshot, namespace string, paths ...string) (units []Unit, skipped []string, err error) {
	r := &reader{snapshot: s, namespace: namespace, templates: map[string]*resourceapi.ResourceClaimTemplate{}, claims: map[string]*resourceapi.ResourceClaim{}, used: map[string]bool{}}
	for _, path := range paths {
		if err := placement.EachDocument(path, r.document); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	for _, build := range r.later {
		made, err := build()
		if err != nil {
			return nil, nil, err
		}
		units = append(units, made...)
	}
	// Claims that no pod of the files uses stand for themselves, where they are in the files.
	units = append(units, r.rest()...)
	return units, r.skipped, nil
}

type reader struct {
	snapshot  *placement.Snapshot
	namespace string // of objects that name none
	templates map[string]*resourceapi.ResourceClaimTemplate
	claims    map[string]*resourceapi.ResourceClaim
	order     []string // of claims
	used      map[string]bool
	later     []func() ([]Unit, error) // once all templates are known
	skipped   []string
}

func (r *reader) document(document []byte) error {
	var meta metav1.PartialObjectMetadata
	if err := json.Unmarshal(document, &meta); err != nil {
		return err
	}
	if meta.GroupVersionKind().GroupKind() == api.ServiceKind.GroupKind() {
		service := &api.LLMInferenceService{}
		if err := json.Unmarshal(document, service); err != nil {
			return err
		}
		service.Namespace = cmp.Or(service.Namespace, r.namespace)
		return r.service(service)
	}
	object, _, err := scheme.Codecs.UniversalDeserializer().Decode(document, nil, nil)
	if runtime.IsNotRegisteredError(err) {
		r.skipped = append(r.skipped, meta.Kind+"/"+meta.Name)
		return nil
	}
	if err != nil {
		return err
	}
	if named, ok := object.(metav1.Object); ok {
		named.SetNamespace(cmp.Or(named.GetNamespace(), r.namespace))
	}
	switch object := object.(type) {
	case *resourceapi.ResourceClaimTemplate:
		r.templates[object.Namespace+"/"+object.Name] = object
	case *resourceapi.ResourceClaim:
		key := object.Namespace + "/" + object.Name
		r.claims[key] = object
		r.order = append(r.order, key)
	case *corev1.Pod:
		r.pods(object.ObjectMeta, 1, object.Name, &object.Spec)
	case *appsv1.Deployment:
		r.pods(object.ObjectMeta, replicas(object.Spec.Replicas), object.Name, &object.Spec.Template.Spec)
	case *appsv1.StatefulSet:
		r.pods(object.ObjectMeta, replicas(object.Spec.Replicas), object.Name, &object.Spec.Template.Spec)
	case *batchv1.Job:
		r.pods(object.ObjectMeta, replicas(object.Spec.Parallelism), object.Name, &object.Spec.Template.Spec)
	default:
		r.skipped = append(r.skipped, meta.Kind+"/"+meta.Name)
	}
	return nil
}

func replicas(n *int32) int {
	if n == nil {
		return 1
	}
	return int(*n)
}

// pods that are alike.
func (r *reader) pods(meta metav1.ObjectMeta, count int, name string, spec *corev1.PodSpec) {
	r.later = append(r.later, func() ([]Unit, error) {
		var units []Unit
		for i := range count {
			podName := name
			if count > 1 {
				podName = fmt.Sprintf("%s-%d", name, i+1)
			}
			unit := Unit{Name: podName, Pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: meta.Namespace, Name: podName}, Spec: *spec}}
			for _, ref := range spec.ResourceClaims {
				claim, err := r.claim(meta.Namespace, podName, ref)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", podName, err)
				}
				if claim != nil {
					unit.Claims = append(unit.Claims, claim)
				}
			}
			if len(unit.Claims) > 0 {
				units = append(units, unit)
			} else {
				r.skipped = append(r.skipped, podName+" (no claims)")
			}
		}
		return units, nil
	})
}

// claim of a pod; nil if the pods before have it already.
func (r *reader) claim(namespace, pod string, ref corev1.PodResourceClaim) (*resourceapi.ResourceClaim, error) {
	if ref.ResourceClaimName != nil {
		key := namespace + "/" + *ref.ResourceClaimName
		claim := r.claims[key]
		if claim == nil {
			claim = r.snapshot.Claim(namespace, *ref.ResourceClaimName)
		}
		switch {
		case claim == nil:
			return nil, fmt.Errorf("ResourceClaim %q is neither in the files nor in the cluster", *ref.ResourceClaimName)
		case r.used[key] || claim.Status.Allocation != nil:
			return nil, nil
		}
		r.used[key] = true
		return claim, nil
	}
	if ref.ResourceClaimTemplateName == nil {
		return nil, fmt.Errorf("spec.resourceClaims %q names neither a claim nor a template", ref.Name)
	}
	template := r.templates[namespace+"/"+*ref.ResourceClaimTemplateName]
	if template == nil {
		template = r.snapshot.Template(namespace, *ref.ResourceClaimTemplateName)
	}
	if template == nil {
		return nil, fmt.Errorf("ResourceClaimTemplate %q is neither in the files nor in the cluster", *ref.ResourceClaimTemplateName)
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pod + "-" + ref.Name},
		Spec:       template.Spec.Spec,
	}, nil
}

// service is what managed DRA makes of it.
func (r *reader) service(service *api.LLMInferenceService) error {
	request, errs := annotations.Parse(service.Annotations)
	if len(errs) > 0 {
		return fmt.Errorf("LLMInferenceService %s: %w", service.Name, errs.ToAggregate())
	}
	if request == nil {
		r.skipped = append(r.skipped, "LLMInferenceService/"+service.Name+" (no managed DRA)")
		return nil
	}
	name := api.ClaimTemplateName(service.Name)
	r.templates[service.Namespace+"/"+name] = &resourceapi.ResourceClaimTemplate{Spec: resourceapi.ResourceClaimTemplateSpec{Spec: request.ClaimSpec()}}
	for _, part := range []struct {
		pod  string
		spec *api.WorkloadSpec
	}{{api.DeploymentName(service.Name), &service.Spec.WorkloadSpec}, {api.PrefillName(service.Name), service.Spec.Prefill}} {
		spec := part.spec
		if spec == nil {
			continue
		}
		podSpec := corev1.PodSpec{}
		if spec.Template != nil {
			podSpec = *spec.Template
		}
		podSpec.ResourceClaims = append(podSpec.ResourceClaims, corev1.PodResourceClaim{Name: api.ClaimName, ResourceClaimTemplateName: &name})
		r.pods(service.ObjectMeta, replicas(spec.Replicas), part.pod, &podSpec)
	}
	return nil
}

func (r *reader) rest() []Unit {
	var units []Unit
	for _, key := range r.order {
		if claim := r.claims[key]; !r.used[key] && claim.Status.Allocation == nil {
			units = append(units, Unit{Name: claim.Name, Claims: []*resourceapi.ResourceClaim{claim}})
		}
	}
	return units
}
