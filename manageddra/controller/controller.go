package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/simgpu/simgpu/manageddra/annotations"
	"github.com/simgpu/simgpu/manageddra/api"
)

// Options of the controller.
type Options struct {
	// Image serves where a service names none.
	Image string
	// Rediscover is how long after an API was missing the controller looks again. No watch can tell of an API that is not
	// served.
	Rediscover time.Duration
}

// ManagerOptions are what the controller needs of its manager: of all pods the cache keeps those of services, and objects of
// kinds that are read as they come are read from the cache like all others.
func ManagerOptions() manager.Options {
	pods := cache.ByObject{Label: labels.SelectorFromSet(labels.Set{api.LabelPartOf: api.PartOf})}
	return manager.Options{
		Cache:  cache.Options{ByObject: map[client.Object]cache.ByObject{&corev1.Pod{}: pods}},
		Client: client.Options{Cache: &client.CacheOptions{Unstructured: true}},
	}
}

type reconciler struct {
	client.Client
	options  Options
	recorder events.EventRecorder
	kserve   client.Reader // Deployments by the name of KServe's controller, in all namespaces
	apis     *apis
	waiting  waiting
}

// SetupWithManager adds the controller to a manager.
func SetupWithManager(ctx context.Context, mgr manager.Manager, options Options) error {
	if err := waitForAPI(ctx, mgr); err != nil {
		return err
	}
	kserve, err := kserveCache(mgr)
	if err != nil {
		return err
	}
	if err := mgr.GetFieldIndexer().IndexField(ctx, &api.LLMInferenceService{}, templateIndex, func(object client.Object) []string {
		return []string{api.ClaimTemplateName(object.GetName())}
	}); err != nil {
		return err
	}
	r := &reconciler{Client: mgr.GetClient(), options: options, recorder: mgr.GetEventRecorder("managed-dra-controller"), kserve: kserve,
		waiting: waiting{services: map[types.NamespacedName]map[types.UID]string{}}}
	c, err := controller.New("llminferenceservice", mgr, controller.Options{Reconciler: r, MaxConcurrentReconciles: 4})
	if err != nil {
		return err
	}
	owner := handler.EnqueueRequestForOwner(mgr.GetScheme(), mgr.GetRESTMapper(), &api.LLMInferenceService{}, handler.OnlyControllerOwner())
	for _, kind := range []schema.GroupVersionKind{deploymentKind, serviceKind} {
		if err := c.Watch(source.Kind(mgr.GetCache(), client.Object(ofKind(kind)), owner)); err != nil {
			return err
		}
	}
	waits := handler.EnqueueRequestsFromMapFunc(r.waiting.requests)
	all := handler.EnqueueRequestsFromMapFunc(r.allServices)
	r.apis = &apis{controller: c, mapper: mgr.GetRESTMapper(), again: options.Rediscover, missed: map[schema.GroupVersionKind]time.Time{}, sources: map[schema.GroupVersionKind]source.Source{
		claimTemplateKind: source.Kind(mgr.GetCache(), client.Object(&resourceapi.ResourceClaimTemplate{}), handler.EnqueueRequestsFromMapFunc(r.serviceOfTemplate)),
		workerSetKind:     source.Kind(mgr.GetCache(), client.Object(ofKind(workerSetKind)), owner),
		poolKind:          source.Kind(mgr.GetCache(), client.Object(ofKind(poolKind)), owner),
		routeKind:         source.Kind(mgr.GetCache(), client.Object(ofKind(routeKind)), owner),
		// What may let a pod that waits have its devices, or be worse off.
		resourceapi.SchemeGroupVersion.WithKind("ResourceSlice"): source.Kind(mgr.GetCache(), client.Object(&resourceapi.ResourceSlice{}), waits),
		resourceapi.SchemeGroupVersion.WithKind("ResourceClaim"): source.Kind(mgr.GetCache(), client.Object(&resourceapi.ResourceClaim{}), waits),
		resourceapi.SchemeGroupVersion.WithKind("DeviceClass"):   source.Kind(mgr.GetCache(), client.Object(&resourceapi.DeviceClass{}), waits),
	}}
	return errors.Join(
		c.Watch(source.Kind(mgr.GetCache(), client.Object(&api.LLMInferenceService{}), &handler.EnqueueRequestForObject{})),
		c.Watch(source.Kind(mgr.GetCache(), client.Object(&api.LLMInferenceServiceConfig{}), handler.EnqueueRequestsFromMapFunc(r.servicesOfConfig))),
		c.Watch(source.Kind(mgr.GetCache(), client.Object(&corev1.Pod{}), handler.EnqueueRequestsFromMapFunc(serviceOfPod))),
		c.Watch(source.Kind(mgr.GetCache(), client.Object(&corev1.Node{}), waits, placing)),
		c.Watch(source.Kind(kserve, client.Object(&appsv1.Deployment{}), all)),
	)
}

// waitForAPI waits until LLMInferenceServices are served: right after their definition is created they are not.
func waitForAPI(ctx context.Context, mgr manager.Manager) error {
	kind := api.ServiceKind
	told := false
	return wait.PollUntilContextCancel(ctx, time.Second, true, func(context.Context) (bool, error) {
		_, err := mgr.GetRESTMapper().RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil && !told {
			told = true
			log.FromContext(ctx).Info("Waiting for LLMInferenceServices to be served; the chart's managedDRA.crds.create makes their definition", "reason", err.Error())
		}
		return err == nil, nil
	})
}

func ofKind(kind schema.GroupVersionKind) *unstructured.Unstructured {
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(kind)
	return object
}

// kserveController is the Deployment of KServe's own controller for these objects.
const kserveController = "llmisvc-controller-manager"

// kserveCache sees nothing but that Deployment.
func kserveCache(mgr manager.Manager) (cache.Cache, error) {
	one, err := cache.New(mgr.GetConfig(), cache.Options{
		Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(), HTTPClient: mgr.GetHTTPClient(),
		DefaultFieldSelector: fields.OneTermEqualSelector("metadata.name", kserveController),
	})
	if err != nil {
		return nil, err
	}
	return one, mgr.Add(one)
}

// Reconcile brings what belongs to a service to what it says.
func (r *reconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	service := &api.LLMInferenceService{}
	if err := r.Get(ctx, request.NamespacedName, service); err != nil {
		if apierrors.IsNotFound(err) {
			r.waiting.set(request.NamespacedName, nil)
			return reconcile.Result{}, nil
		}
		return reconcile.Result{}, err
	}
	if service.DeletionTimestamp != nil {
		return reconcile.Result{}, nil // its objects name it as their owner
	}
	if elsewhere, err := r.standAside(ctx, service); elsewhere || err != nil {
		return reconcile.Result{}, err
	}
	missing, err := r.apis.watch()
	if err != nil {
		return reconcile.Result{}, err
	}
	c := &conditions{}
	err = transient(r.reconcile(ctx, service, c)) // the user's problems are in conditions; trying again does not help
	result := reconcile.Result{}
	if service.Annotations[api.AnnotationStop] != "true" {
		again, waitErr := r.devices(ctx, service, c)
		result.RequeueAfter, err = again, errors.Join(err, waitErr)
	}
	if err == nil && missing && asksForMissing(c) {
		result.RequeueAfter = r.options.Rediscover
	}
	return result, errors.Join(err, r.writeStatus(ctx, service, c))
}

// asksForMissing is true if a condition complains of an API that may appear.
func asksForMissing(c *conditions) bool {
	for _, condition := range c.list {
		switch condition.Reason {
		case "ResourceAPINotServed", "LeaderWorkerSetCRDNotFound", "GatewayAPINotServed":
			return true
		}
	}
	return false
}

func (r *reconciler) reconcile(ctx context.Context, service *api.LLMInferenceService, c *conditions) error {
	if service.Annotations[api.AnnotationStop] == "true" {
		err := r.stop(ctx, service)
		for _, kind := range []string{api.ConditionReady, api.ConditionPresetsCombined, api.ConditionWorkloadsReady, api.ConditionMainWorkloadReady, api.ConditionRouterReady} {
			c.set(kind, corev1.ConditionFalse, stopped, "the annotation "+api.AnnotationStop+" ends the service")
		}
		return err
	}
	defer c.complete()
	spec, err := r.merged(ctx, service)
	if err != nil {
		c.fail(api.ConditionPresetsCombined, "CombineBaseError", err)
		return err
	}
	c.ok(api.ConditionPresetsCombined)

	request, invalid := annotations.Parse(service.Annotations)
	if len(invalid) > 0 {
		// The webhook refuses these; an object from before it was there may have them. What runs is left as it is.
		err = &problem{"InvalidAnnotations", invalid.ToAggregate().Error()}
		c.fail(api.ConditionClaimTemplateReady, "", err)
		return err
	}
	if err := r.claimTemplate(ctx, service, request); err != nil {
		c.fail(api.ConditionClaimTemplateReady, "ReconcileError", err)
		return err
	}
	if request != nil {
		c.ok(api.ConditionClaimTemplateReady)
		if names := Containers(spec); request.Container != "" && !slices.Contains(names, request.Container) {
			err := &problem{"ContainerNotFound", fmt.Sprintf("%s is %q, and the pods have the containers %s: name one of them, or none would see the devices",
				api.AnnotationContainerName, request.Container, strings.Join(names, ", "))}
			c.fail(api.ConditionMainWorkloadReady, "", err)
			return err
		}
	}
	return errors.Join(r.workloads(ctx, service, spec, request, c), r.routes(ctx, service, spec, c))
}

// workloads of both roles, and the Service.
func (r *reconciler) workloads(ctx context.Context, service *api.LLMInferenceService, spec *api.ServiceSpec, request *annotations.Request, c *conditions) error {
	var errs []error
	if spec.Prefill == nil {
		errs = append(errs, r.remove(ctx, service, deploymentKind, api.PrefillName(service.Name)), r.remove(ctx, service, workerSetKind, api.PrefillWorkerSetName(service.Name)))
	}
	for _, role := range roles(service.Name, spec) {
		ready, workersReady := api.ConditionMainWorkloadReady, api.ConditionWorkerWorkloadReady
		if role.prefill {
			ready, workersReady = api.ConditionPrefillWorkloadReady, api.ConditionPrefillWorkerReady
		}
		if role.spec.Worker != nil {
			errs = append(errs, r.remove(ctx, service, deploymentKind, role.deployment), r.workers(ctx, service, spec, role, request, c, workersReady))
			continue
		}
		errs = append(errs, r.remove(ctx, service, workerSetKind, role.workerSet))
		deployment, err := r.deployment(service, spec, role, request)
		var live *unstructured.Unstructured
		if err == nil {
			live, err = r.apply(ctx, service, deployment)
		}
		if err != nil {
			c.fail(ready, "ReconcileError", err)
			errs = append(errs, err)
			continue
		}
		found := &appsv1.Deployment{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, found); err != nil {
			return err
		}
		c.deploymentReady(ready, found)
	}
	if _, err := r.apply(ctx, service, serviceOf(service)); err != nil {
		c.fail(api.ConditionMainWorkloadReady, "ReconcileError", err)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// workers of a role, as a LeaderWorkerSet.
func (r *reconciler) workers(ctx context.Context, service *api.LLMInferenceService, spec *api.ServiceSpec, role role, request *annotations.Request, c *conditions, ready string) error {
	set, err := r.workerSet(service, spec, role, request)
	if err == nil {
		set, err = r.apply(ctx, service, set)
	}
	if err != nil {
		c.fail(ready, "ReconcileError", err)
		return err
	}
	c.set(ready, corev1.ConditionFalse, "Progressing", "the LeaderWorkerSet is being worked on")
	list, _, _ := unstructured.NestedSlice(set.Object, "status", "conditions")
	for _, item := range list {
		if condition, ok := item.(map[string]any); ok && condition["type"] == "Available" && condition["status"] == "True" {
			c.ok(ready)
		}
	}
	return nil
}

// routes are the InferencePool and the HTTPRoute, where asked for and served.
func (r *reconciler) routes(ctx context.Context, service *api.LLMInferenceService, spec *api.ServiceSpec, c *conditions) error {
	pools, routes := r.apis.served(poolKind), r.apis.served(routeKind)
	wantPool, err := pool(service, spec.Router)
	if err != nil {
		c.fail(api.ConditionInferencePoolReady, "ReconcileError", err)
		return err
	}
	pooled := pools && spec.Router != nil && spec.Router.Scheduler != nil
	wantRoute, err := route(service, spec.Router, pooled)
	if err != nil {
		c.fail(api.ConditionHTTPRoutesReady, "ReconcileError", err)
		return err
	}
	var errs []error
	for _, part := range []struct {
		want      *unstructured.Unstructured
		kind      schema.GroupVersionKind
		name      string
		served    bool
		condition string
	}{
		{wantPool, poolKind, api.InferencePoolName(service.Name), pools, api.ConditionInferencePoolReady},
		{wantRoute, routeKind, api.HTTPRouteName(service.Name), routes, api.ConditionHTTPRoutesReady},
	} {
		switch {
		case part.want == nil:
			errs = append(errs, r.remove(ctx, service, part.kind, part.name))
		case !part.served:
			c.set(api.ConditionRouterReady, corev1.ConditionTrue, "GatewayAPINotServed",
				fmt.Sprintf("this cluster does not serve %s: the service is reached through its Service alone", part.kind.GroupKind()))
		default:
			if _, err := r.apply(ctx, service, part.want); err != nil {
				c.fail(part.condition, "ReconcileError", err)
				errs = append(errs, err)
			} else {
				c.ok(part.condition)
			}
		}
	}
	return errors.Join(errs...)
}

// stop removes everything that a service has.
func (r *reconciler) stop(ctx context.Context, service *api.LLMInferenceService) error {
	var errs []error
	for _, object := range []struct {
		kind schema.GroupVersionKind
		name string
	}{
		{routeKind, api.HTTPRouteName(service.Name)},
		{poolKind, api.InferencePoolName(service.Name)},
		{deploymentKind, api.DeploymentName(service.Name)},
		{deploymentKind, api.PrefillName(service.Name)},
		{workerSetKind, api.LeaderWorkerSetName(service.Name)},
		{workerSetKind, api.PrefillWorkerSetName(service.Name)},
		{serviceKind, api.WorkloadServiceName(service.Name)},
		{claimTemplateKind, api.ClaimTemplateName(service.Name)},
	} {
		errs = append(errs, r.remove(ctx, service, object.kind, object.name))
	}
	return errors.Join(errs...)
}

// standAside is true where KServe's own controller is installed, which does all that this one does.
func (r *reconciler) standAside(ctx context.Context, service *api.LLMInferenceService) (bool, error) {
	var found appsv1.DeploymentList
	if err := r.kserve.List(ctx, &found); err != nil || len(found.Items) == 0 {
		return false, err
	}
	log.FromContext(ctx).V(2).Info("KServe's own controller is installed: standing aside", "deployment", client.ObjectKeyFromObject(&found.Items[0]))
	r.event(service, "StandingAside", "Reconcile", "KServe's own controller (Deployment %s/%s) is installed and manages this service", found.Items[0].Namespace, kserveController)
	return true, nil
}

const templateIndex = "claimTemplate"

// serviceOfTemplate finds whose template it is by its name, since one that was edited or is somebody else's may name no owner.
func (r *reconciler) serviceOfTemplate(ctx context.Context, template client.Object) []reconcile.Request {
	return r.services(ctx, client.InNamespace(template.GetNamespace()), client.MatchingFields{templateIndex: template.GetName()})
}

func (r *reconciler) allServices(ctx context.Context, _ client.Object) []reconcile.Request {
	return r.services(ctx)
}

func (r *reconciler) servicesOfConfig(ctx context.Context, config client.Object) []reconcile.Request {
	var list api.LLMInferenceServiceList
	if err := r.List(ctx, &list, client.InNamespace(config.GetNamespace())); err != nil {
		return nil
	}
	var requests []reconcile.Request
	for i := range list.Items {
		for _, ref := range list.Items[i].Spec.BaseRefs {
			if ref.Name == config.GetName() {
				requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
				break
			}
		}
	}
	return requests
}

func (r *reconciler) services(ctx context.Context, options ...client.ListOption) []reconcile.Request {
	var list api.LLMInferenceServiceList
	if err := r.List(ctx, &list, options...); err != nil {
		log.FromContext(ctx).Error(err, "Listing services")
		return nil
	}
	requests := make([]reconcile.Request, 0, len(list.Items))
	for i := range list.Items {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
	}
	return requests
}

// event tells of something that was done to a service. Events that differ in nothing but their text are counted as one:
// the action tells them apart.
func (r *reconciler) event(service *api.LLMInferenceService, reason, action, format string, args ...any) {
	r.recorder.Eventf(service, nil, corev1.EventTypeNormal, reason, action, format, args...)
}

func (r *reconciler) warn(service *api.LLMInferenceService, reason, action, format string, args ...any) {
	r.recorder.Eventf(service, nil, corev1.EventTypeWarning, reason, action, format, args...)
}

var _ reconcile.Reconciler = (*reconciler)(nil)
