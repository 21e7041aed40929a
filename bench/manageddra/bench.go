package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/simgpu/simgpu/manageddra/api"
	"github.com/simgpu/simgpu/manageddra/controller"
)

const namespace = "bench-managed-dra"

// bench plays the users of the services and watches what they would.
type bench struct {
	config  *rest.Config
	scheme  *runtime.Scheme
	client  client.Client
	clients int
}

func newBench(config *rest.Config, clients int) (*bench, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), api.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	return &bench{config: config, scheme: scheme, client: c, clients: clients}, err
}

// measure creates, disturbs, changes and deletes that many services.
func (b *bench) measure(ctx context.Context, services int) (rows []row, err error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	if err := b.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
		return nil, fmt.Errorf("the namespace, which has to be new: %w", err)
	}
	defer func() { err = errors.Join(err, b.clean(context.WithoutCancel(ctx))) }()
	seen, err := b.observe(ctx)
	if err != nil {
		return nil, err
	}
	running, err := b.start(ctx)
	if err != nil {
		return nil, err
	}
	phase := func(name string, act func(context.Context, int) error, done func(int) bool) error {
		row, err := b.phase(ctx, running, seen, name, services, act, done)
		rows = append(rows, row)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}
	err = errors.Join(
		phase("create", func(ctx context.Context, i int) error { return b.client.Create(ctx, service(i)) }, seen.made),
		phase("no-op", func(ctx context.Context, i int) error { return b.annotate(ctx, i, "example.com/note", "1") }, nil),
		phase("change", func(ctx context.Context, i int) error { return b.annotate(ctx, i, api.AnnotationDeviceCount, "2") }, seen.changed),
	)
	if err := errors.Join(err, running.stop()); err != nil {
		return rows, err
	}
	// Another controller finds everything as it should be.
	if running, err = b.start(ctx); err != nil {
		return rows, err
	}
	return rows, errors.Join(phase("restart", nil, nil), running.stop())
}

// service is one as in demo/qwen-mig, without pods: they would be the cluster's work, and not the controller's.
func service(i int) *api.LLMInferenceService {
	s := &api.LLMInferenceService{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name(i), Annotations: map[string]string{
		api.AnnotationDeviceClass: "mig.nvidia.com",
		api.AnnotationCELSelector: "device.attributes['gpu.nvidia.com'].profile == '3g.40gb'",
	}}}
	s.Spec.Model.URI = "hf://Qwen/Qwen2.5-7B-Instruct"
	s.Spec.Replicas = ptr.To[int32](0)
	return s
}

func name(i int) string { return fmt.Sprintf("qwen-%04d", i) }

func (b *bench) annotate(ctx context.Context, i int, key, value string) error {
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, key, value)
	s := &api.LLMInferenceService{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name(i)}}
	return b.client.Patch(ctx, s, client.RawPatch("application/merge-patch+json", patch))
}

// clean removes the namespace and waits until it is gone.
func (b *bench) clean(ctx context.Context) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if err := b.client.DeleteAllOf(ctx, &api.LLMInferenceService{}, client.InNamespace(namespace)); err != nil {
		return err
	}
	if err := b.client.Delete(ctx, ns); err != nil {
		return err
	}
	return wait.PollUntilContextTimeout(ctx, time.Second, 10*time.Minute, false, func(ctx context.Context) (bool, error) {
		err := b.client.Get(ctx, client.ObjectKeyFromObject(ns), ns)
		return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	})
}

// instance is a running controller.
type instance struct {
	counter
	cancel context.CancelFunc
	ended  chan error
}

func (b *bench) start(ctx context.Context) (*instance, error) {
	ctx, cancel := context.WithCancel(ctx)
	i := &instance{cancel: cancel, ended: make(chan error, 1)}
	config := rest.CopyConfig(b.config)
	config.Wrap(i.wrap)
	options := controller.ManagerOptions()
	options.Scheme = b.scheme
	options.Metrics = server.Options{BindAddress: "0"}
	options.Controller = ctrlconfig.Controller{SkipNameValidation: ptr.To(true)} // one after the other
	mgr, err := ctrl.NewManager(config, options)
	if err == nil {
		err = controller.SetupWithManager(ctx, mgr, controller.Options{Image: "vllm/vllm-openai:v0.19.1", Rediscover: 15 * time.Second})
	}
	if err != nil {
		cancel()
		return nil, err
	}
	go func() { i.ended <- mgr.Start(ctx) }()
	return i, nil
}

func (i *instance) stop() error {
	i.cancel()
	return <-i.ended
}

// reconciles are how many there were in this process, and the time they took.
func reconciles() (number uint64, took time.Duration, err error) {
	families, err := metrics.Registry.Gather()
	if err != nil {
		return 0, 0, err
	}
	for _, family := range families {
		if family.GetName() == "controller_runtime_reconcile_time_seconds" {
			for _, metric := range family.GetMetric() {
				number += metric.GetHistogram().GetSampleCount()
				took += time.Duration(metric.GetHistogram().GetSampleSum() * float64(time.Second))
			}
		}
	}
	return number, took, nil
}

// phase does something to each service, waits until all of it is done, and until nothing happens any more.
func (b *bench) phase(ctx context.Context, controller *instance, seen *sightings, name string, services int, act func(context.Context, int) error, done func(int) bool) (row, error) {
	before := controller.total()
	numberBefore, tookBefore, err := reconciles()
	if err != nil {
		return row{}, err
	}
	begun := time.Now()
	times, err := b.forAll(ctx, seen, services, act, done)
	if err != nil {
		return row{}, err
	}
	if err := quiet(ctx, numberBefore+uint64(services)); err != nil { //nolint:gosec // small
		return row{}, err
	}
	number, took, err := reconciles()
	r := row{Services: services, Phase: name, Requests: controller.total().minus(before), Reconciles: int(number - numberBefore), Times: times} //nolint:gosec // small
	r.Mean = (took - tookBefore) / time.Duration(max(1, r.Reconciles))
	if len(times) > 0 {
		r.All = seen.last().Sub(begun)
	}
	return r, err
}

// forAll acts on every service, a few at a time, and returns how long each took to be done.
func (b *bench) forAll(ctx context.Context, seen *sightings, services int, act func(context.Context, int) error, done func(int) bool) ([]time.Duration, error) {
	if act == nil {
		return nil, nil
	}
	started := make([]time.Time, services)
	next := make(chan int)
	errs := make([]error, b.clients)
	var group sync.WaitGroup
	for worker := range b.clients {
		group.Go(func() {
			for i := range next {
				started[i] = time.Now()
				errs[worker] = errors.Join(errs[worker], act(ctx, i))
			}
		})
	}
	for i := range services {
		next <- i
	}
	close(next)
	group.Wait()
	if err := errors.Join(errs...); err != nil || done == nil {
		return nil, err
	}
	times := make([]time.Duration, services)
	for i := range services {
		if err := seen.wait(ctx, func() bool { return done(i) }); err != nil {
			return nil, fmt.Errorf("service %s is not done: %w", name(i), err)
		}
		times[i] = seen.when[name(i)].Sub(started[i])
	}
	return times, nil
}

// quiet waits until there were that many reconciles and there have been no more for two seconds.
func quiet(ctx context.Context, atLeast uint64) error {
	var last uint64
	since := time.Now()
	return wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(context.Context) (bool, error) {
		number, _, err := reconciles()
		if number != last {
			last, since = number, time.Now()
		}
		return number >= atLeast && time.Since(since) > 2*time.Second, err
	})
}

// sightings are what the users of the services see.
type sightings struct {
	mutex     sync.Mutex
	news      *sync.Cond
	ready     map[string]bool      // services with conditions
	templates map[string]int64     // devices in the claim template, by service
	rolled    map[string]int64     // generation of the Deployment, by service
	when      map[string]time.Time // the last news of a service
}

func (b *bench) observe(ctx context.Context) (*sightings, error) {
	s := &sightings{ready: map[string]bool{}, templates: map[string]int64{}, rolled: map[string]int64{}, when: map[string]time.Time{}}
	s.news = sync.NewCond(&s.mutex)
	watched, err := cache.New(b.config, cache.Options{Scheme: b.scheme, DefaultNamespaces: map[string]cache.Config{namespace: {}}})
	if err != nil {
		return nil, err
	}
	for _, object := range []client.Object{&api.LLMInferenceService{}, &resourceapi.ResourceClaimTemplate{}, &appsv1.Deployment{}} {
		informer, err := watched.GetInformer(ctx, object, cache.BlockUntilSynced(false))
		if err != nil {
			return nil, err
		}
		if _, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc: s.see, UpdateFunc: func(_, now any) { s.see(now) },
		}); err != nil {
			return nil, err
		}
	}
	go func() { _ = watched.Start(ctx) }()
	context.AfterFunc(ctx, s.news.Broadcast)
	watched.WaitForCacheSync(ctx)
	return s, nil
}

func (s *sightings) see(object any) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	var of string
	switch object := object.(type) {
	case *api.LLMInferenceService:
		of = object.Name
		if ready := len(object.Status.Conditions) > 0; ready == s.ready[of] {
			return
		}
		s.ready[of] = true
	case *resourceapi.ResourceClaimTemplate:
		of = metav1.GetControllerOf(object).Name
		s.templates[of] = object.Spec.Spec.Devices.Requests[0].Exactly.Count
	case *appsv1.Deployment:
		of = metav1.GetControllerOf(object).Name
		if s.rolled[of] == object.Generation {
			return
		}
		s.rolled[of] = object.Generation
	}
	s.when[of] = time.Now()
	s.news.Broadcast()
}

// wait until something has been seen.
func (s *sightings) wait(ctx context.Context, seen func() bool) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for !seen() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		s.news.Wait()
	}
	return nil
}

func (s *sightings) made(i int) bool {
	return s.ready[name(i)] && s.templates[name(i)] == 1 && s.rolled[name(i)] == 1
}

func (s *sightings) changed(i int) bool {
	return s.templates[name(i)] == 2 && s.rolled[name(i)] == 2
}

func (s *sightings) last() time.Time {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	var last time.Time
	for _, when := range s.when {
		if when.After(last) {
			last = when
		}
	}
	return last
}

// row of the table.
type row struct {
	Services   int
	Phase      string
	Reconciles int
	Requests   requests
	Mean       time.Duration   // of a reconcile
	Times      []time.Duration // until each service was as it should be
	All        time.Duration   // from the first to the last
}

func perService(number, services int) string {
	return strconv.FormatFloat(float64(number)/float64(services), 'f', 2, 64)
}
