package controller

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/google/shlex"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/simgpu/simgpu/manageddra/annotations"
	"github.com/simgpu/simgpu/manageddra/api"
)

const (
	// servingPort is where model servers listen, as in KServe.
	servingPort = 8000
	// modelFolder is where a model from a volume is seen in the container, as in KServe.
	modelFolder = "/mnt/models"
	// requestAnnotation has a hash of what the pods' claims ask for: a changed request rolls the workload.
	requestAnnotation = "simgpu.dev/device-request"
	mainContainer     = "main"
)

// The kinds of what every service has.
var (
	deploymentKind = appsv1.SchemeGroupVersion.WithKind("Deployment")
	serviceKind    = corev1.SchemeGroupVersion.WithKind("Service")
)

// role is one of the two parts of a service: its main workload, and prefill.
type role struct {
	prefill    bool
	spec       *api.WorkloadSpec
	deployment string
	workerSet  string
}

// roles of a specification; without prefill there is one.
func roles(service string, spec *api.ServiceSpec) []role {
	list := []role{{spec: &spec.WorkloadSpec, deployment: api.DeploymentName(service), workerSet: api.LeaderWorkerSetName(service)}}
	if spec.Prefill != nil {
		list = append(list, role{prefill: true, spec: spec.Prefill, deployment: api.PrefillName(service), workerSet: api.PrefillWorkerSetName(service)})
	}
	return list
}

// selection are the labels that a Service or pool selects all pods of a service by.
func selection(service string) map[string]string {
	return map[string]string{api.LabelName: service, api.LabelPartOf: api.PartOf, api.LabelWorkload: api.Workload}
}

// labelsOf are those of the objects of a role, and what its Deployment selects pods by.
func labelsOf(service string, spec *api.ServiceSpec, r role) map[string]string {
	labels := selection(service)
	labels[api.LabelComponent], labels[api.LabelRole] = api.ComponentWorkload, api.RoleBoth
	switch {
	case r.prefill:
		labels[api.LabelComponent], labels[api.LabelRole] = api.ComponentPrefill, api.RolePrefill
	case spec.Prefill != nil:
		labels[api.LabelRole] = api.RoleDecode
	}
	return labels
}

// deployment of a role.
func (r *reconciler) deployment(service *api.LLMInferenceService, spec *api.ServiceSpec, role role, request *annotations.Request) (*appsv1.Deployment, error) {
	labels := labelsOf(service.Name, spec, role)
	template, err := r.podTemplate(service, spec, role, role.spec.Template, labels, request)
	if err != nil {
		return nil, err
	}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: role.deployment, Labels: labels},
		Spec: appsv1.DeploymentSpec{
			Replicas: role.spec.Replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Strategy: strategy(role.spec.RolloutStrategy, template.Spec.ResourceClaims),
			Template: *template,
		},
	}, nil
}

// strategy of updates. Devices are scarce: a pod beyond the wanted number may find none and hold up the update for ever,
// so that by default one pod at a time makes place for its successor.
func strategy(rollout *api.RolloutStrategy, claims []corev1.PodResourceClaim) appsv1.DeploymentStrategy {
	update := &appsv1.RollingUpdateDeployment{}
	switch {
	case rollout != nil:
		update.MaxSurge, update.MaxUnavailable = rollout.MaxSurge, rollout.MaxUnavailable
	case len(claims) > 0:
		none, one := intstr.FromInt32(0), intstr.FromInt32(1)
		update.MaxSurge, update.MaxUnavailable = &none, &one
	default:
		return appsv1.DeploymentStrategy{}
	}
	return appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType, RollingUpdate: update}
}

// podTemplate completes what the user wrote: the container that serves, if it says nothing of how, and the claim.
func (r *reconciler) podTemplate(service *api.LLMInferenceService, spec *api.ServiceSpec, role role, pod *corev1.PodSpec, labels map[string]string,
	request *annotations.Request) (*corev1.PodTemplateSpec, error) {
	template := &corev1.PodTemplateSpec{}
	template.Labels = maps.Clone(role.spec.Labels)
	if template.Labels == nil {
		template.Labels = map[string]string{}
	}
	maps.Copy(template.Labels, labels)
	template.Annotations = maps.Clone(role.spec.Annotations)
	if pod != nil {
		template.Spec = *pod.DeepCopy()
	}
	if err := r.serve(&template.Spec, service, spec, role.spec.Parallelism); err != nil {
		return nil, err
	}
	if request == nil {
		return template, nil
	}
	if !inject(&template.Spec, api.ClaimTemplateName(service.Name), request.Container) {
		return template, nil // another pod of the service has the container: devices here would be seen by nobody
	}
	if template.Annotations == nil {
		template.Annotations = map[string]string{}
	}
	template.Annotations[requestAnnotation] = hashOf(request.ClaimSpec())
	return template, nil
}

// serve has the container "main" serve the model. One that says how it is started is left as it is.
func (r *reconciler) serve(pod *corev1.PodSpec, service *api.LLMInferenceService, spec *api.ServiceSpec, parallelism *api.Parallelism) error {
	if needsMain(pod) {
		pod.Containers = append(pod.Containers, corev1.Container{Name: mainContainer})
	}
	index := slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == mainContainer })
	if index < 0 {
		return nil // the user's own containers, complete as they are
	}
	main := &pod.Containers[index]
	if main.Image == "" {
		main.Image = r.options.Image
	}
	if len(main.Command) == 0 && len(main.Args) == 0 {
		model, err := modelOf(pod, main, spec.Model.URI)
		if err != nil {
			return err
		}
		name := service.Name
		if spec.Model.Name != nil {
			name = *spec.Model.Name
		}
		more, err := additionalArgs(main)
		if err != nil {
			return err
		}
		main.Args = slices.Concat([]string{model, "--served-model-name", name, "--port", strconv.Itoa(servingPort)}, parallelArgs(parallelism), more)
	}
	if len(main.Ports) == 0 {
		main.Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: servingPort, Protocol: corev1.ProtocolTCP}}
	}
	if main.ReadinessProbe == nil {
		main.ReadinessProbe = &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/health", Port: intstr.FromInt32(servingPort)}},
			PeriodSeconds: 5,
		}
	}
	// KServe's model servers speak TLS with certificates of KServe. Here they do not: a probe of that port must not either.
	for _, probe := range []*corev1.Probe{main.LivenessProbe, main.ReadinessProbe, main.StartupProbe} {
		if probe != nil && probe.HTTPGet != nil && probe.HTTPGet.Port.IntValue() == servingPort {
			probe.HTTPGet.Scheme = corev1.URISchemeHTTP
		}
	}
	return nil
}

// modelOf is how vLLM is told which model to load. A model on a volume is mounted.
func modelOf(pod *corev1.PodSpec, main *corev1.Container, uri string) (string, error) {
	scheme, rest, found := strings.Cut(uri, "://")
	switch {
	case found && scheme == "hf" && rest != "":
		return rest, nil
	case found && scheme == "pvc" && rest != "":
		claim, path, _ := strings.Cut(rest, "/")
		const volume = "model"
		pod.Volumes = append(pod.Volumes, corev1.Volume{Name: volume, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim, ReadOnly: true},
		}})
		main.VolumeMounts = append(main.VolumeMounts, corev1.VolumeMount{Name: volume, MountPath: modelFolder, SubPath: path, ReadOnly: true})
		return modelFolder, nil
	default:
		return "", &problem{"UnsupportedModelURI", fmt.Sprintf("spec.model.uri is %q: without KServe models come from hf://OWNER/NAME or pvc://CLAIM/PATH, "+
			"or a container says itself with command or args what it serves", uri)}
	}
}

// additionalArgs are what the user adds to vLLM's command line, in the variable that KServe's presets read.
func additionalArgs(main *corev1.Container) ([]string, error) {
	const name = "VLLM_ADDITIONAL_ARGS"
	at := slices.IndexFunc(main.Env, func(e corev1.EnvVar) bool { return e.Name == name })
	if at < 0 {
		return nil, nil
	}
	args, err := shlex.Split(main.Env[at].Value)
	if err != nil {
		return nil, &problem{"InvalidArguments", fmt.Sprintf("%s of container %s is %q, which a shell could not take apart: %v", name, main.Name, main.Env[at].Value, err)}
	}
	return args, nil
}

// parallelArgs are vLLM's arguments for how a replica spreads a model.
func parallelArgs(p *api.Parallelism) []string {
	if p == nil {
		return nil
	}
	var args []string
	for _, flag := range []struct {
		name  string
		value *int32
	}{
		{"--tensor-parallel-size", p.Tensor},
		{"--pipeline-parallel-size", p.Pipeline},
		{"--data-parallel-size", p.Data},
		{"--data-parallel-size-local", p.DataLocal},
		{"--data-parallel-rpc-port", p.DataRPCPort},
	} {
		if flag.value != nil {
			args = append(args, flag.name, strconv.Itoa(int(*flag.value)))
		}
	}
	if p.Expert {
		args = append(args, "--enable-expert-parallel")
	}
	return args
}

// inject gives the pod its claim and the container access to it, and is false if the pod has no such container. Claims of
// other names stay as they are, and so does one of this name that the user wrote.
func inject(pod *corev1.PodSpec, template, container string) bool {
	target := 0
	if container != "" {
		target = slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == container })
	}
	if target < 0 || target >= len(pod.Containers) {
		return false
	}
	if !slices.ContainsFunc(pod.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.Name == api.ClaimName }) {
		pod.ResourceClaims = append(pod.ResourceClaims, corev1.PodResourceClaim{Name: api.ClaimName, ResourceClaimTemplateName: &template})
	}
	resources := &pod.Containers[target].Resources
	if !slices.ContainsFunc(resources.Claims, func(c corev1.ResourceClaim) bool { return c.Name == api.ClaimName }) {
		resources.Claims = append(resources.Claims, corev1.ResourceClaim{Name: api.ClaimName})
	}
	return true
}

// Containers are the names of the containers that the pods of a specification have, of which one may be named in
// serving.kserve.io/exp-dra-container-name. Sorted.
func Containers(spec *api.ServiceSpec) []string {
	found := map[string]bool{}
	for _, role := range roles("", spec) {
		for _, pod := range []*corev1.PodSpec{role.spec.Template, role.spec.Worker} {
			if pod == nil || needsMain(pod) {
				found[mainContainer] = true
			}
			if pod != nil {
				for _, c := range pod.Containers {
					found[c.Name] = true
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// needsMain is true if the pod has no container that can serve as it is.
func needsMain(pod *corev1.PodSpec) bool {
	return !slices.ContainsFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == mainContainer || c.Image != "" })
}

// serviceOf is the Service in front of all pods.
func serviceOf(service *api.LLMInferenceService) *corev1.Service {
	labels := selection(service.Name)
	delete(labels, api.LabelWorkload)
	labels[api.LabelComponent] = api.ComponentWorkload
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: api.WorkloadServiceName(service.Name), Labels: labels},
		Spec: corev1.ServiceSpec{
			Selector: selection(service.Name),
			Ports:    []corev1.ServicePort{{Name: "http", Port: servingPort, TargetPort: intstr.FromInt32(servingPort), Protocol: corev1.ProtocolTCP}},
		},
	}
}
