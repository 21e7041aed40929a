package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	poolv1 "sigs.k8s.io/gateway-api-inference-extension/api/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
)

// ControllerName is what a GatewayClass names for its Gateways to be served by this gateway.
const ControllerName gatewayv1.GatewayController = "simgpu.dev/gateway"

// AddToScheme adds the kinds that the gateway reads.
func AddToScheme(scheme *runtime.Scheme) error {
	return errors.Join(gatewayv1.Install(scheme), poolv1.Install(scheme), corev1.AddToScheme(scheme))
}

type reconciler struct {
	client.Client
	proxy *Proxy
}

// SetupWithManager returns the handler of requests, kept up to date by a controller of the manager.
func SetupWithManager(mgr manager.Manager) (*Proxy, error) {
	r := &reconciler{Client: mgr.GetClient()}
	r.proxy = newProxy(r.endpoints)
	// All of it is one table: whatever changes, it is made anew.
	whole := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return []reconcile.Request{{}} })
	err := builder.ControllerManagedBy(mgr).Named("gateway").
		Watches(&gatewayv1.GatewayClass{}, whole).Watches(&gatewayv1.Gateway{}, whole).Watches(&gatewayv1.HTTPRoute{}, whole).
		Watches(&poolv1.InferencePool{}, whole).Watches(&corev1.Service{}, whole).
		Complete(reconcile.Func(func(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
			return reconcile.Result{}, r.reconcile(ctx)
		}))
	return r.proxy, err
}

// attached is a Gateway of this gateway with the routes that its listeners take.
type attached struct {
	*gatewayv1.Gateway
	routes map[gatewayv1.SectionName]int32
}

func (r *reconciler) reconcile(ctx context.Context) error {
	var classes gatewayv1.GatewayClassList
	var all gatewayv1.GatewayList
	var routes gatewayv1.HTTPRouteList
	var pools poolv1.InferencePoolList
	if err := errors.Join(r.List(ctx, &classes), r.List(ctx, &all), r.List(ctx, &routes), r.List(ctx, &pools)); err != nil {
		return err
	}
	now := &state{pools: map[types.NamespacedName]pool{}}
	pickers := map[string]bool{}
	for i := range pools.Items {
		p := poolOf(&pools.Items[i])
		now.pools[client.ObjectKeyFromObject(&pools.Items[i])] = p
		pickers[p.picker] = true
	}
	var errs []error
	gateways := map[types.NamespacedName]*attached{}
	for i := range classes.Items {
		if class := &classes.Items[i]; class.Spec.ControllerName == ControllerName {
			errs = append(errs, r.acceptClass(ctx, class))
			for j := range all.Items {
				if g := &all.Items[j]; string(g.Spec.GatewayClassName) == class.Name {
					gateways[client.ObjectKeyFromObject(g)] = &attached{g, map[gatewayv1.SectionName]int32{}}
				}
			}
		}
	}
	parents := map[types.NamespacedName][]types.NamespacedName{}       // Gateways by pool
	slices.SortFunc(routes.Items, func(a, b gatewayv1.HTTPRoute) int { // of equal matches the oldest route's counts
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return slices.Compare([]string{a.Namespace, a.Name}, []string{b.Namespace, b.Name})
	})
	for i := range routes.Items {
		errs = append(errs, r.route(ctx, &routes.Items[i], gateways, now, parents))
	}
	now.table.sort()
	r.proxy.state.Store(now)
	r.proxy.pickers.keep(pickers)

	for _, g := range gateways {
		errs = append(errs, r.gatewayStatus(ctx, g))
	}
	for i := range pools.Items {
		errs = append(errs, r.poolStatus(ctx, &pools.Items[i], parents[client.ObjectKeyFromObject(&pools.Items[i])], gateways))
	}
	return errors.Join(errs...)
}

func poolOf(object *poolv1.InferencePool) pool {
	ref := object.Spec.EndpointPickerRef
	p := pool{failOpen: ref.FailureMode == poolv1.EndpointPickerFailOpen}
	if ref.Port != nil {
		p.picker = net.JoinHostPort(fmt.Sprintf("%s.%s.svc", ref.Name, object.Namespace), strconv.Itoa(int(ref.Port.Number)))
	}
	return p
}

// endpoints of a pool are its pods that are ready.
func (r *reconciler) endpoints(ctx context.Context, name types.NamespacedName) ([]string, error) {
	var p poolv1.InferencePool
	if err := r.Get(ctx, name, &p); err != nil {
		return nil, err
	}
	labels := client.MatchingLabels{}
	for key, value := range p.Spec.Selector.MatchLabels {
		labels[string(key)] = string(value)
	}
	var pods corev1.PodList
	if err := r.List(ctx, &pods, client.InNamespace(name.Namespace), labels); err != nil {
		return nil, err
	}
	var list []string
	for i := range pods.Items {
		pod := &pods.Items[i]
		ready := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue })
		if ready && pod.DeletionTimestamp == nil {
			for _, port := range p.Spec.TargetPorts {
				list = append(list, net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(int(port.Number))))
			}
		}
	}
	return list, nil
}

// route adds the entries of a route to the table, and says in its status what became of it at each Gateway that it names.
func (r *reconciler) route(ctx context.Context, route *gatewayv1.HTTPRoute, gateways map[types.NamespacedName]*attached, now *state, parents map[types.NamespacedName][]types.NamespacedName) error {
	var statuses []gatewayv1.RouteParentStatus
	for _, ref := range route.Spec.ParentRefs {
		name := types.NamespacedName{Namespace: string(ptr.Deref(ref.Namespace, gatewayv1.Namespace(route.Namespace))), Name: string(ref.Name)}
		gateway := gateways[name]
		if gateway == nil || ptr.Deref(ref.Kind, "Gateway") != "Gateway" || ptr.Deref(ref.Group, gatewayv1.GroupName) != gatewayv1.GroupName {
			continue // somebody else's
		}
		status := gatewayv1.RouteParentStatus{ParentRef: ref, ControllerName: ControllerName}
		if old := slices.IndexFunc(route.Status.Parents, func(s gatewayv1.RouteParentStatus) bool {
			return s.ControllerName == ControllerName && equality.Semantic.DeepEqual(s.ParentRef, ref)
		}); old >= 0 {
			status.Conditions = slices.Clone(route.Status.Parents[old].Conditions)
		}
		set := func(kind gatewayv1.RouteConditionType, ok bool, reason gatewayv1.RouteConditionReason, message string) {
			setCondition(&status.Conditions, string(kind), ok, string(reason), message, route.Generation)
		}
		list, reason, err := attach(route, ref, gateway)
		if err != nil {
			set(gatewayv1.RouteConditionAccepted, false, reason, err.Error())
		} else {
			set(gatewayv1.RouteConditionAccepted, true, gatewayv1.RouteReasonAccepted, "")
		}
		missing, err := r.resolve(ctx, list, now, func(pool types.NamespacedName) {
			if !slices.Contains(parents[pool], name) {
				parents[pool] = append(parents[pool], name)
			}
		})
		if err != nil {
			return err
		}
		if missing != "" {
			set(gatewayv1.RouteConditionResolvedRefs, false, gatewayv1.RouteReasonBackendNotFound, missing)
		} else {
			set(gatewayv1.RouteConditionResolvedRefs, true, gatewayv1.RouteReasonResolvedRefs, "")
		}
		now.table = append(now.table, list...)
		statuses = append(statuses, status)
	}
	changed := route.DeepCopy()
	changed.Status.Parents = slices.DeleteFunc(changed.Status.Parents, func(s gatewayv1.RouteParentStatus) bool { return s.ControllerName == ControllerName })
	changed.Status.Parents = append(changed.Status.Parents, statuses...)
	return r.patchStatus(ctx, changed, route, equality.Semantic.DeepEqual(changed.Status, route.Status))
}

// attach finds the listeners that take a route, and makes its entries.
func attach(route *gatewayv1.HTTPRoute, ref gatewayv1.ParentReference, gateway *attached) (table, gatewayv1.RouteConditionReason, error) {
	var list table
	found, allowed := false, false
	for _, listener := range gateway.Spec.Listeners {
		if listener.Protocol != gatewayv1.HTTPProtocolType || ref.SectionName != nil && *ref.SectionName != listener.Name || ref.Port != nil && *ref.Port != listener.Port {
			continue
		}
		found = true
		if !allows(listener, gateway.Namespace, route.Namespace) {
			continue
		}
		allowed = true
		names, ok := hosts(route.Spec.Hostnames, string(ptr.Deref(listener.Hostname, "")))
		if !ok {
			continue
		}
		more, err := entries(route, names)
		if err != nil {
			return nil, gatewayv1.RouteReasonUnsupportedValue, err
		}
		gateway.routes[listener.Name]++
		list = append(list, more...)
	}
	switch {
	case !found:
		return nil, gatewayv1.RouteReasonNoMatchingParent, errors.New("the Gateway has no HTTP listener of this name and port")
	case !allowed:
		return nil, gatewayv1.RouteReasonNotAllowedByListeners, errors.New("the Gateway's listeners take no routes of this namespace")
	case len(list) == 0:
		return nil, gatewayv1.RouteReasonNoMatchingListenerHostname, errors.New("no listener has one of the route's hostnames")
	}
	return list, "", nil
}

// allows says whether a listener takes routes of a namespace. Selectors of namespaces are not looked at, and take none.
func allows(listener gatewayv1.Listener, own, namespace string) bool {
	from := gatewayv1.NamespacesFromSame
	if listener.AllowedRoutes != nil && listener.AllowedRoutes.Namespaces != nil {
		from = ptr.Deref(listener.AllowedRoutes.Namespaces.From, from)
	}
	return from == gatewayv1.NamespacesFromAll || from == gatewayv1.NamespacesFromSame && own == namespace
}

// resolve marks the backends that do not exist, and says which one is the first of them.
func (r *reconciler) resolve(ctx context.Context, list table, now *state, uses func(pool types.NamespacedName)) (missing string, err error) {
	for _, e := range list {
		for i := range e.rule.backends {
			b := &e.rule.backends[i]
			kind := kindPool
			if b.pool {
				_, found := now.pools[b.name]
				b.missing = !found
				uses(b.name)
			} else {
				kind = kindService
				err := r.Get(ctx, b.name, &corev1.Service{})
				if client.IgnoreNotFound(err) != nil {
					return "", err
				}
				b.missing = apierrors.IsNotFound(err)
			}
			if b.missing && missing == "" {
				missing = fmt.Sprintf("%s %s does not exist", kind, b.name)
			}
		}
	}
	return missing, nil
}

func (r *reconciler) acceptClass(ctx context.Context, class *gatewayv1.GatewayClass) error {
	changed := class.DeepCopy()
	setCondition(&changed.Status.Conditions, string(gatewayv1.GatewayClassConditionStatusAccepted), true, string(gatewayv1.GatewayClassReasonAccepted), "", class.Generation)
	return r.patchStatus(ctx, changed, class, equality.Semantic.DeepEqual(changed.Status, class.Status))
}

func (r *reconciler) gatewayStatus(ctx context.Context, gateway *attached) error {
	changed := gateway.DeepCopy()
	set := func(kind gatewayv1.GatewayConditionType, reason gatewayv1.GatewayConditionReason) {
		setCondition(&changed.Status.Conditions, string(kind), true, string(reason), "", gateway.Generation)
	}
	set(gatewayv1.GatewayConditionAccepted, gatewayv1.GatewayReasonAccepted)
	set(gatewayv1.GatewayConditionProgrammed, gatewayv1.GatewayReasonProgrammed)
	changed.Status.Listeners = nil
	for _, listener := range gateway.Spec.Listeners {
		status := gatewayv1.ListenerStatus{Name: listener.Name, AttachedRoutes: gateway.routes[listener.Name], SupportedKinds: []gatewayv1.RouteGroupKind{}}
		if old := slices.IndexFunc(gateway.Status.Listeners, func(s gatewayv1.ListenerStatus) bool { return s.Name == listener.Name }); old >= 0 {
			status.Conditions = slices.Clone(gateway.Status.Listeners[old].Conditions)
		}
		set := func(kind gatewayv1.ListenerConditionType, ok bool, reason gatewayv1.ListenerConditionReason, message string) {
			setCondition(&status.Conditions, string(kind), ok, string(reason), message, gateway.Generation)
		}
		if listener.Protocol == gatewayv1.HTTPProtocolType {
			group := gatewayv1.Group(gatewayv1.GroupName)
			status.SupportedKinds = append(status.SupportedKinds, gatewayv1.RouteGroupKind{Group: &group, Kind: "HTTPRoute"})
			set(gatewayv1.ListenerConditionAccepted, true, gatewayv1.ListenerReasonAccepted, "")
			set(gatewayv1.ListenerConditionProgrammed, true, gatewayv1.ListenerReasonProgrammed, "")
			set(gatewayv1.ListenerConditionResolvedRefs, true, gatewayv1.ListenerReasonResolvedRefs, "")
		} else {
			message := fmt.Sprintf("protocol %s: this gateway serves HTTP alone", listener.Protocol)
			set(gatewayv1.ListenerConditionAccepted, false, gatewayv1.ListenerReasonUnsupportedProtocol, message)
			set(gatewayv1.ListenerConditionProgrammed, false, gatewayv1.ListenerReasonInvalid, message)
		}
		changed.Status.Listeners = append(changed.Status.Listeners, status)
	}
	return r.patchStatus(ctx, changed, gateway.Gateway, equality.Semantic.DeepEqual(changed.Status, gateway.Status))
}

// poolStatus says through which Gateways a pool is used. Those of other gateways are left as they are.
func (r *reconciler) poolStatus(ctx context.Context, p *poolv1.InferencePool, used []types.NamespacedName, gateways map[types.NamespacedName]*attached) error {
	changed := p.DeepCopy()
	ours := map[types.NamespacedName][]metav1.Condition{}
	changed.Status.Parents = slices.DeleteFunc(changed.Status.Parents, func(s poolv1.ParentStatus) bool {
		name := types.NamespacedName{Namespace: string(s.ParentRef.Namespace), Name: string(s.ParentRef.Name)}
		if gateways[name] == nil && string(s.ControllerName) != string(ControllerName) {
			return false
		}
		ours[name] = s.Conditions
		return true
	})
	for _, name := range used {
		status := poolv1.ParentStatus{
			ParentRef:      poolv1.ParentReference{Kind: "Gateway", Namespace: poolv1.Namespace(name.Namespace), Name: poolv1.ObjectName(name.Name)},
			ControllerName: poolv1.ControllerName(ControllerName), Conditions: slices.Clone(ours[name]),
		}
		group := poolv1.Group(gatewayv1.GroupName)
		status.ParentRef.Group = &group
		setCondition(&status.Conditions, string(poolv1.InferencePoolConditionAccepted), true, string(poolv1.InferencePoolReasonAccepted), "", p.Generation)
		picker := types.NamespacedName{Namespace: p.Namespace, Name: string(p.Spec.EndpointPickerRef.Name)}
		switch err := r.Get(ctx, picker, &corev1.Service{}); {
		case apierrors.IsNotFound(err):
			setCondition(&status.Conditions, string(poolv1.InferencePoolConditionResolvedRefs), false, string(poolv1.InferencePoolReasonInvalidExtensionRef), fmt.Sprintf("Service %s does not exist", picker), p.Generation)
		case err != nil:
			return err
		default:
			setCondition(&status.Conditions, string(poolv1.InferencePoolConditionResolvedRefs), true, string(poolv1.InferencePoolReasonResolvedRefs), "", p.Generation)
		}
		changed.Status.Parents = append(changed.Status.Parents, status)
	}
	return r.patchStatus(ctx, changed, p, equality.Semantic.DeepEqual(changed.Status, p.Status))
}

func (r *reconciler) patchStatus(ctx context.Context, changed, was client.Object, same bool) error {
	if same {
		return nil
	}
	err := r.Status().Patch(ctx, changed, client.MergeFromWithOptions(was, client.MergeFromWithOptimisticLock{}))
	return client.IgnoreNotFound(err)
}

func setCondition(list *[]metav1.Condition, kind string, ok bool, reason, message string, generation int64) {
	status := metav1.ConditionFalse
	if ok {
		status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(list, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: generation})
}
