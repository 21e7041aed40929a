package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/simgpu/simgpu/e2e/internal/network"
	"github.com/simgpu/simgpu/e2e/internal/node"
	"github.com/simgpu/simgpu/e2e/internal/progress"
)

// pollInterval is how often the state of the cluster is looked at while waiting.
const pollInterval = 100 * time.Millisecond

// waitComponents waits until every component of the nodes is ready. One that exits ends the wait with an error that has the end of its log.
func (c *Cluster) waitComponents(ctx context.Context, out *progress.Printer, nodes ...*Node) error {
	return c.wait(ctx, out, nodes, func(string) bool { return true })
}

func (c *Cluster) waitComponent(ctx context.Context, out *progress.Printer, n *Node, component string) error {
	return c.wait(ctx, out, []*Node{n}, func(name string) bool { return name == component })
}

func (c *Cluster) wait(ctx context.Context, out *progress.Printer, nodes []*Node, wanted func(component string) bool) error {
	for {
		var pending []string
		var slowest *Node
		var slowestName string
		for _, n := range nodes {
			client, err := n.client()
			if err != nil {
				return fmt.Errorf("%w\n%s", err, n.logTail(initComponent))
			}
			statuses, err := client.Status(ctx)
			if err != nil {
				if ctx.Err() != nil {
					break
				}
				return err
			}
			for _, s := range statuses {
				if s.State == node.Exited {
					return fmt.Errorf("%s on %s ended (%s); %s", s.Name, n.Name(), s.Exit, n.logTail(s.Name))
				}
				if !wanted(s.Name) || s.State == node.Ready {
					continue
				}
				pending = append(pending, fmt.Sprintf("%s on %s is %s", s.Name, n.Name(), s.State))
				if s.State == node.Starting && slowest == nil {
					slowest, slowestName = n, s.Name
				}
			}
		}
		if len(pending) == 0 && ctx.Err() == nil {
			return nil
		}
		out.Status("  waiting: %s", strings.Join(pending, ", "))
		select {
		case <-ctx.Done():
			err := fmt.Errorf("%w: %s", context.Cause(ctx), strings.Join(pending, ", "))
			if slowest != nil && !errors.Is(context.Cause(ctx), context.Canceled) {
				err = fmt.Errorf("%w; %s", err, slowest.logTail(slowestName))
			}
			return err
		case <-time.After(pollInterval):
		}
	}
}

// RESTConfig is the configuration of a client with every right in the cluster.
func (c *Cluster) RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.KubeconfigPath())
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", c.Name(), err)
	}
	config.QPS, config.Burst = 200, 400
	return config, nil
}

func (c *Cluster) clientset() (*kubernetes.Clientset, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}

// version is the version of the API server, or the reason why it did not tell.
func (c *Cluster) version() string {
	client, err := c.clientset()
	if err != nil {
		return err.Error()
	}
	version, err := client.Discovery().ServerVersion()
	if err != nil {
		return err.Error()
	}
	return version.GitVersion
}

// waitUsable waits until pods can be created, run and found by name.
func (c *Cluster) waitUsable(ctx context.Context, out *progress.Printer) error {
	client, err := c.clientset()
	if err != nil {
		return err
	}
	for {
		missing, err := c.missing(ctx, client)
		if err == nil && missing == "" {
			return nil
		}
		if err != nil {
			missing = err.Error()
		}
		out.Status("  waiting: %s", missing)
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %s", context.Cause(ctx), missing)
		case <-time.After(pollInterval):
		}
	}
}

// missing says what is not there yet.
func (c *Cluster) missing(ctx context.Context, client kubernetes.Interface) (string, error) {
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	ready := map[string]bool{}
	for _, n := range nodes.Items {
		for _, condition := range n.Status.Conditions {
			ready[n.Name] = ready[n.Name] || condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue
		}
		for _, taint := range n.Spec.Taints {
			if taint.Key == corev1.TaintNodeNotReady {
				ready[n.Name] = false
			}
		}
	}
	for _, n := range c.Nodes() {
		if !ready[n.Name()] {
			return fmt.Sprintf("node %s is not Ready", n.Name()), nil
		}
	}
	// Without it no pod is admitted.
	_, err = client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "the default service account does not exist", nil
	}
	return "", err
}

// ensureDNS makes CoreDNS, a process of node 1, known in the cluster as the kube-dns Service, and lets it read what it serves.
func (c *Cluster) ensureDNS(ctx context.Context) error {
	client, err := c.clientset()
	if err != nil {
		return err
	}
	const name = "kube-dns"
	labels := map[string]string{"k8s-app": name, "kubernetes.io/name": "CoreDNS"}
	role := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "system:coredns", Labels: labels},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"services", "pods", "namespaces", "endpoints"}, Verbs: []string{"list", "watch"}},
			{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"list", "watch"}},
		},
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "system:coredns", Labels: labels},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:coredns"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "system:coredns"}},
	}
	udp, tcp := corev1.ProtocolUDP, corev1.ProtocolTCP
	port, dns, dnsTCP := int32(53), "dns", "dns-tcp"
	ready := true
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceSystem, Labels: labels},
		Spec: corev1.ServiceSpec{
			ClusterIP: network.DNSService,
			Ports:     []corev1.ServicePort{{Name: dns, Port: port, Protocol: udp}, {Name: dnsTCP, Port: port, Protocol: tcp}},
		},
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: metav1.NamespaceSystem,
			Labels: map[string]string{discoveryv1.LabelServiceName: name, discoveryv1.LabelManagedBy: "simgpu-cluster"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{network.NodeIP(1).String()}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
		Ports:       []discoveryv1.EndpointPort{{Name: &dns, Port: &port, Protocol: &udp}, {Name: &dnsTCP, Port: &port, Protocol: &tcp}},
	}
	create := metav1.CreateOptions{}
	steps := []func() error{
		func() error { _, err := client.RbacV1().ClusterRoles().Create(ctx, role, create); return err },
		func() error { _, err := client.RbacV1().ClusterRoleBindings().Create(ctx, binding, create); return err },
		func() error {
			services := client.CoreV1().Services(metav1.NamespaceSystem)
			// A second one fails for its address before it fails for its name.
			if _, err := services.Get(ctx, name, metav1.GetOptions{}); err == nil || !apierrors.IsNotFound(err) {
				return err
			}
			_, err := services.Create(ctx, service, create)
			return err
		},
		func() error {
			_, err := client.DiscoveryV1().EndpointSlices(metav1.NamespaceSystem).Create(ctx, slice, create)
			return err
		},
	}
	for _, step := range steps {
		if err := step(); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}
