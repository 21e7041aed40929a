package api

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// GroupVersion is the version in which objects are stored and read.
var GroupVersion = schema.GroupVersion{Group: "serving.kserve.io", Version: "v1alpha2"}

// ServiceKind is what everything that a service has names as its owner.
var ServiceKind = GroupVersion.WithKind("LLMInferenceService")

// AddToScheme registers the types.
func AddToScheme(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion, &LLMInferenceService{}, &LLMInferenceServiceList{}, &LLMInferenceServiceConfig{}, &LLMInferenceServiceConfigList{})
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}

// LLMInferenceService is one model, served by one or more replicas.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
type LLMInferenceService struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   ServiceSpec   `json:"spec"`
	Status ServiceStatus `json:"status,omitempty"`
}

// LLMInferenceServiceList is a list of services.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
type LLMInferenceServiceList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []LLMInferenceService `json:"items"`
}

// LLMInferenceServiceConfig is a part of a specification that services take over by naming it in baseRefs.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
type LLMInferenceServiceConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec ServiceSpec `json:"spec"`
}

// LLMInferenceServiceConfigList is a list of configurations.
//
// +k8s:deepcopy-gen:interfaces=k8s.io/apimachinery/pkg/runtime.Object
type LLMInferenceServiceConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []LLMInferenceServiceConfig `json:"items"`
}

// ServiceSpec is what a user asks for.
type ServiceSpec struct {
	Model Model `json:"model,omitempty"`
	// WorkloadSpec serves the model, or with Prefill set its decode phase.
	WorkloadSpec `json:",inline"`
	Prefill      *WorkloadSpec                 `json:"prefill,omitempty"`
	Router       *Router                       `json:"router,omitempty"`
	BaseRefs     []corev1.LocalObjectReference `json:"baseRefs,omitempty"`
}

// Model says what is served.
type Model struct {
	// URI is where the weights are: hf://OWNER/NAME, pvc://..., s3://..., oci://...
	URI string `json:"uri,omitempty"`
	// Name is what clients call the model; the name of the service by default.
	Name *string `json:"name,omitempty"`
}

// WorkloadSpec describes pods that are alike.
type WorkloadSpec struct {
	// Replicas is left to whoever scales the workload when it is not set.
	Replicas    *int32            `json:"replicas,omitempty"`
	Parallelism *Parallelism      `json:"parallelism,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Template    *corev1.PodSpec   `json:"template,omitempty"`
	// Worker makes each replica a group of pods: a leader, made from Template, and workers.
	Worker          *corev1.PodSpec  `json:"worker,omitempty"`
	RolloutStrategy *RolloutStrategy `json:"rolloutStrategy,omitempty"`
}

// Parallelism is how a replica spreads the model over devices.
type Parallelism struct {
	Tensor      *int32 `json:"tensor,omitempty"`
	Pipeline    *int32 `json:"pipeline,omitempty"`
	Data        *int32 `json:"data,omitempty"`
	DataLocal   *int32 `json:"dataLocal,omitempty"`
	DataRPCPort *int32 `json:"dataRPCPort,omitempty"`
	Expert      bool   `json:"expert,omitempty"`
}

// RolloutStrategy bounds how many pods an update takes away and adds.
type RolloutStrategy struct {
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
	MaxSurge       *intstr.IntOrString `json:"maxSurge,omitempty"`
}

// Router is how requests get to the pods.
type Router struct {
	Route     *Route     `json:"route,omitempty"`
	Gateway   *Gateway   `json:"gateway,omitempty"`
	Scheduler *Scheduler `json:"scheduler,omitempty"`
}

// Route asks for an HTTPRoute, or names those that there are.
type Route struct {
	HTTP *HTTPRoute `json:"http,omitempty"`
}

// HTTPRoute names routes of the user, or what a route of ours says.
type HTTPRoute struct {
	Refs []corev1.LocalObjectReference `json:"refs,omitempty"`
	Spec *runtime.RawExtension         `json:"spec,omitempty"`
}

// Gateway names the Gateways that the route attaches to.
type Gateway struct {
	Refs []GatewayRef `json:"refs,omitempty"`
}

// GatewayRef names a Gateway.
type GatewayRef struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace,omitempty"`
}

// Scheduler asks for an InferencePool.
type Scheduler struct {
	Pool *Pool `json:"pool,omitempty"`
}

// Pool names an InferencePool of the user, or what one of ours says.
type Pool struct {
	Ref  *corev1.LocalObjectReference `json:"ref,omitempty"`
	Spec *runtime.RawExtension        `json:"spec,omitempty"`
}

// ServiceStatus is what was found.
type ServiceStatus struct {
	URL                string      `json:"url,omitempty"`
	ObservedGeneration int64       `json:"observedGeneration,omitempty"`
	Conditions         []Condition `json:"conditions,omitempty"`
}

// Condition is one aspect of a service, in the shape that Knative gave to KServe's objects.
type Condition struct {
	Type               string                 `json:"type"`
	Status             corev1.ConditionStatus `json:"status"`
	LastTransitionTime metav1.Time            `json:"lastTransitionTime,omitempty"`
	Reason             string                 `json:"reason,omitempty"`
	Message            string                 `json:"message,omitempty"`
}
