package controller

import (
	"context"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/simgpu/simgpu/manageddra/api"
)

const rediscover = 7 * time.Second

// testCluster has one service, serves the kinds that it is told to, and counts writes.
type testCluster struct {
	*reconciler
	t       *testing.T
	mapper  *meta.DefaultRESTMapper
	watched []schema.GroupVersionKind
	writes  int
}

// watcher notes which watches have been started.
type watcher struct {
	controller.Controller
	cluster *testCluster
}

func (w *watcher) Watch(src source.Source) error {
	w.cluster.watched = append(w.cluster.watched, src.(*testSource).kind)
	return nil
}

type testSource struct{ kind schema.GroupVersionKind }

func (*testSource) Start(context.Context, workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	return nil
}

func newTestCluster(t *testing.T, change func(*api.LLMInferenceService)) *testCluster {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, api.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	for _, kind := range []schema.GroupVersionKind{workerSetKind, poolKind, routeKind} {
		scheme.AddKnownTypeWithName(kind, &unstructured.Unstructured{})
		scheme.AddKnownTypeWithName(kind.GroupVersion().WithKind(kind.Kind+"List"), &unstructured.UnstructuredList{})
	}
	c := &testCluster{t: t, mapper: meta.NewDefaultRESTMapper(nil)}
	c.serve(api.ServiceKind, deploymentKind, serviceKind)
	service := newService(change)
	service.Namespace, service.UID = "ns", "uid"
	counted := func() { c.writes++ }
	fakes := fake.NewClientBuilder().WithScheme(scheme).WithRESTMapper(c.mapper).WithObjects(service).WithStatusSubresource(service).
		WithInterceptorFuncs(interceptor.Funcs{
			Create: func(ctx context.Context, w client.WithWatch, o client.Object, options ...client.CreateOption) error {
				counted()
				if template, ok := o.(*resourceapi.ResourceClaimTemplate); ok { // as the API server does
					template.Spec.Spec = withDefaults(template.Spec.Spec)
				}
				return w.Create(ctx, o, options...)
			},
			Apply: func(ctx context.Context, w client.WithWatch, o runtime.ApplyConfiguration, options ...client.ApplyOption) error {
				counted()
				return w.Apply(ctx, o, options...)
			},
			Delete: func(ctx context.Context, w client.WithWatch, o client.Object, options ...client.DeleteOption) error {
				counted()
				return w.Delete(ctx, o, options...)
			},
			SubResourcePatch: func(ctx context.Context, w client.Client, name string, o client.Object, patch client.Patch, options ...client.SubResourcePatchOption) error {
				counted()
				return w.SubResource(name).Patch(ctx, o, patch, options...)
			},
		}).Build()
	c.reconciler = &reconciler{
		Client: fakes, kserve: fakes, options: Options{Image: "default", Rediscover: rediscover}, recorder: events.NewFakeRecorder(1000),
		waiting: waiting{services: map[types.NamespacedName]map[types.UID]string{}},
	}
	c.apis = &apis{controller: &watcher{cluster: c}, mapper: c.mapper, missed: map[schema.GroupVersionKind]time.Time{}, sources: map[schema.GroupVersionKind]source.Source{}}
	for _, kind := range []schema.GroupVersionKind{claimTemplateKind, workerSetKind, poolKind, routeKind} {
		c.apis.sources[kind] = &testSource{kind}
	}
	return c
}

// serve these kinds from now on.
func (c *testCluster) serve(kinds ...schema.GroupVersionKind) {
	for _, kind := range kinds {
		c.mapper.Add(kind, meta.RESTScopeNamespace)
	}
}

// once reconciles the service and returns after how long to come back, and what was written.
func (c *testCluster) once() (again time.Duration, writes int) {
	c.t.Helper()
	before := c.writes
	result, err := c.Reconcile(c.t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Namespace: "ns", Name: "qwen"}})
	if err != nil {
		c.t.Fatal(err)
	}
	return result.RequeueAfter, c.writes - before
}

func (c *testCluster) service() *api.LLMInferenceService {
	c.t.Helper()
	service := &api.LLMInferenceService{}
	if err := c.Get(c.t.Context(), client.ObjectKey{Namespace: "ns", Name: "qwen"}, service); err != nil {
		c.t.Fatal(err)
	}
	return service
}

func (c *testCluster) expect(condition string, status corev1.ConditionStatus, reason string) {
	c.t.Helper()
	for _, found := range c.service().Status.Conditions {
		if found.Type == condition && found.Status == status && found.Reason == reason {
			return
		}
	}
	c.t.Errorf("no condition %s is %s (%s): %+v", condition, status, reason, c.service().Status.Conditions)
}

func (c *testCluster) exists(object client.Object, name string) bool {
	c.t.Helper()
	err := c.Get(c.t.Context(), client.ObjectKey{Namespace: "ns", Name: name}, object)
	if err != nil && !apierrors.IsNotFound(err) && !meta.IsNoMatchError(err) {
		c.t.Fatal(err)
	}
	return err == nil
}

func managed(service *api.LLMInferenceService) {
	service.Annotations = map[string]string{api.AnnotationDeviceClass: "gpu.example.com"}
}

// TestResourceAPIAppears: a cluster that does not serve resource.k8s.io/v1 is a condition that heals by itself.
func TestResourceAPIAppears(t *testing.T) {
	c := newTestCluster(t, managed)
	again, _ := c.once()
	if again != rediscover {
		t.Errorf("it comes back after %v, want %v", again, rediscover)
	}
	c.expect(api.ConditionClaimTemplateReady, corev1.ConditionFalse, "ResourceAPINotServed")
	c.expect(api.ConditionReady, corev1.ConditionFalse, "ResourceAPINotServed")
	if c.exists(&appsv1.Deployment{}, api.DeploymentName("qwen")) {
		t.Error("there are pods without the devices that they are to have")
	}
	if _, writes := c.once(); writes > 0 {
		t.Errorf("%d writes while nothing has changed", writes)
	}

	c.serve(claimTemplateKind)
	c.once()
	c.expect(api.ConditionClaimTemplateReady, corev1.ConditionTrue, "")
	if !c.exists(&resourceapi.ResourceClaimTemplate{}, api.ClaimTemplateName("qwen")) || !c.exists(&appsv1.Deployment{}, api.DeploymentName("qwen")) {
		t.Error("no claim template or no Deployment")
	}
	if !slices.Contains(c.watched, claimTemplateKind) {
		t.Errorf("claim templates are not watched, but %v", c.watched)
	}
	if again, writes := c.once(); writes > 0 || again != 0 {
		t.Errorf("%d writes, comes back after %v", writes, again)
	}
}

// TestStopWithoutTheResourceAPI: what cannot exist need not be removed.
func TestStopWithoutTheResourceAPI(t *testing.T) {
	c := newTestCluster(t, func(s *api.LLMInferenceService) {
		managed(s)
		s.Annotations[api.AnnotationStop] = "true"
	})
	c.once()
	c.expect(api.ConditionReady, corev1.ConditionFalse, stopped)
}

// TestWorkers: LeaderWorkerSets where they are served, and a condition until they are.
func TestWorkers(t *testing.T) {
	c := newTestCluster(t, func(s *api.LLMInferenceService) {
		managed(s)
		s.Spec.Replicas = new(int32(2))
		s.Spec.Parallelism = &api.Parallelism{Pipeline: new(int32(3))}
		s.Spec.Worker = &corev1.PodSpec{}
	})
	c.serve(claimTemplateKind)
	if again, _ := c.once(); again != rediscover {
		t.Errorf("it comes back after %v, want %v", again, rediscover)
	}
	c.expect(api.ConditionWorkerWorkloadReady, corev1.ConditionFalse, "LeaderWorkerSetCRDNotFound")

	c.serve(workerSetKind)
	c.once()
	c.expect(api.ConditionWorkerWorkloadReady, corev1.ConditionFalse, "Progressing")
	set := ofKind(workerSetKind)
	if !c.exists(set, api.LeaderWorkerSetName("qwen")) {
		t.Fatal("no LeaderWorkerSet")
	}
	if replicas, _, _ := unstructured.NestedInt64(set.Object, "spec", "replicas"); replicas != 2 {
		t.Errorf("%d replicas", replicas)
	}
	if size, _, _ := unstructured.NestedInt64(set.Object, "spec", "leaderWorkerTemplate", "size"); size != 3 {
		t.Errorf("a replica has %d pods, want 3", size)
	}
	for _, template := range []string{"leaderTemplate", "workerTemplate"} {
		claims, _, _ := unstructured.NestedSlice(set.Object, "spec", "leaderWorkerTemplate", template, "spec", "resourceClaims")
		if len(claims) != 1 || claims[0].(map[string]any)["name"] != api.ClaimName {
			t.Errorf("%s has the claims %v", template, claims)
		}
	}
	if c.exists(&appsv1.Deployment{}, api.DeploymentName("qwen")) {
		t.Error("there is a Deployment, too")
	}
	if _, writes := c.once(); writes > 0 {
		t.Errorf("%d writes while nothing has changed", writes)
	}

	// The set is available; then the workers are no longer wanted.
	if err := unstructured.SetNestedSlice(set.Object, []any{map[string]any{"type": "Available", "status": "True"}}, "status", "conditions"); err != nil {
		t.Fatal(err)
	}
	if err := c.Update(t.Context(), set); err != nil {
		t.Fatal(err)
	}
	c.once()
	c.expect(api.ConditionWorkerWorkloadReady, corev1.ConditionTrue, "")
	service := c.service()
	service.Spec.Worker, service.Spec.Parallelism = nil, nil
	if err := c.Update(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	c.once()
	if c.exists(ofKind(workerSetKind), api.LeaderWorkerSetName("qwen")) || !c.exists(&appsv1.Deployment{}, api.DeploymentName("qwen")) {
		t.Error("the LeaderWorkerSet is there still, or there is no Deployment")
	}
}

// TestDeletedServicesAreForgotten: what was remembered of pods that wait goes with their service.
func TestDeletedServicesAreForgotten(t *testing.T) {
	c := newTestCluster(t, managed)
	key := types.NamespacedName{Namespace: "ns", Name: "qwen"}
	c.waiting.set(key, map[types.UID]string{"pod": "waits"})
	if err := c.Delete(t.Context(), &api.LLMInferenceService{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "qwen"}}); err != nil {
		t.Fatal(err)
	}
	c.once()
	if left := c.waiting.requests(t.Context(), nil); len(left) > 0 {
		t.Errorf("there are %v", left)
	}
}
