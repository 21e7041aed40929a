package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/uuid"
	apiversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/simgpu/simgpu/conformance/internal/apiproxy"
	"github.com/simgpu/simgpu/conformance/internal/controlplane"
	"github.com/simgpu/simgpu/conformance/internal/kubelet"
	"github.com/simgpu/simgpu/conformance/internal/process"
	"github.com/simgpu/simgpu/conformance/internal/scheduler"
)

const (
	nodeName  = "conformance-node"
	namespace = "dra-conformance"
	// account is the service account that the driver works with.
	account = "driver"
)

// gates are the feature gates that a driver may need and that are off by default.
var gates = map[string]bool{
	"DRADerivedAttributes":         true,
	"DRADeviceCompatibilityGroups": true,
	"DRAListTypeAttributes":        true,
	"DRAOptionalNodeOperations":    true,
	"DRAPartitionableDevicesType":  true,
	"DRAResourcePoolStatus":        true,
}

// times are how long things may take.
type times struct {
	// patience is for what a driver should do at once.
	patience time.Duration
	// late is for what it may see late: the library looks at its slices 30 seconds after somebody has changed them.
	late time.Duration
	// quiet is how long an idle driver is watched.
	quiet time.Duration
	// claims are how many exist at the same time, and cycles how many come and go, under load.
	claims, cycles int
}

func defaultTimes() times {
	return times{patience: 30 * time.Second, late: 75 * time.Second, quiet: 5 * time.Second, claims: 256, cycles: 200}
}

// testbed is the node that the driver under test is on.
type testbed struct {
	control   *controlplane.ControlPlane
	proxy     *apiproxy.Proxy
	admin     kubernetes.Interface
	scheduler *scheduler.Scheduler
	command   *process.Command
	log       io.Writer // everything the driver says
	roles     []rbacv1.ClusterRole

	dir     string
	times   times
	vars    process.Vars
	kubelet *kubelet.Kubelet
	driver  *process.Process
	// since is when the driver's requests begin to count for its rights; zero: from the start.
	since time.Time
	// generation counts how often everything on the node was made anew.
	generation int
}

// startTestbed starts everything but the kubelet and the driver.
func startTestbed(ctx context.Context, dir string, command *process.Command, opts Options) (_ *testbed, err error) {
	b := &testbed{command: command, log: opts.Log, roles: opts.Roles, dir: dir, times: defaultTimes()}
	defer func() {
		if err != nil {
			b.stop()
		}
	}()
	if b.control, err = controlplane.Start(ctx, filepath.Join(dir, "control-plane"), controlplane.Options{
		FeatureGates:  gates,
		RuntimeConfig: map[string]string{"resource.k8s.io/v1alpha3": "true"},
	}); err != nil {
		return nil, err
	}
	if b.admin, err = kubernetes.NewForConfig(b.control.Admin); err != nil {
		return nil, err
	}
	if b.proxy, err = apiproxy.Start(b.control.Admin, kubernetesVersion()); err != nil {
		return nil, err
	}
	b.scheduler = scheduler.New(b.admin, nodeName)
	b.vars = process.Vars{
		Kubeconfig: filepath.Join(dir, "kubeconfig"), NodeName: nodeName, Namespace: namespace, DriverName: opts.Profile.DriverName,
		AdminKubeconfig: filepath.Join(dir, "admin.kubeconfig"),
	}
	return b, b.populate(ctx)
}

// kubernetesVersion is the version of the Kubernetes code in this program: the API server itself knows its version only in
// official builds.
func kubernetesVersion() *apiversion.Info {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	for _, module := range info.Deps {
		if module.Path != "k8s.io/kubernetes" {
			continue
		}
		numbers := strings.SplitN(strings.TrimPrefix(module.Version, "v"), ".", 3)
		if len(numbers) == 3 {
			return &apiversion.Info{Major: numbers[0], Minor: numbers[1], GitVersion: module.Version, GitTreeState: "clean"}
		}
	}
	return nil
}

// populate makes the objects that every check needs, and the kubeconfig of the driver.
func (b *testbed) populate(ctx context.Context) error {
	meta := metav1.ObjectMeta{Name: namespace, Labels: map[string]string{"resource.kubernetes.io/admin-access": "true"}}
	if _, err := b.admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: meta}, metav1.CreateOptions{}); err != nil {
		return err
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{corev1.LabelHostname: nodeName, corev1.LabelOSStable: "linux"}}}
	node, err := b.admin.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if _, err := b.admin.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{}); err != nil {
		return err
	}
	if err := b.authorize(ctx); err != nil {
		return fmt.Errorf("give the driver its roles: %w", err)
	}
	if err := writeKubeconfig(b.vars.AdminKubeconfig, b.control.Admin); err != nil {
		return err
	}
	// Bound to the node, like the token of a pod that runs on it.
	token, err := b.admin.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID},
	}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("token for the driver: %w", err)
	}
	return writeKubeconfig(b.vars.Kubeconfig, &rest.Config{
		Host: b.proxy.URL, BearerToken: token.Status.Token, TLSClientConfig: rest.TLSClientConfig{CAData: b.proxy.CA},
	})
}

// authorize gives the driver the roles that it asks for, or else all rights.
func (b *testbed) authorize(ctx context.Context) error {
	roles := []string{"cluster-admin"}
	if len(b.roles) > 0 {
		roles = nil
	}
	for i, role := range b.roles {
		role = rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("dra-conformance-driver-%d", i)}, Rules: role.Rules}
		if _, err := b.admin.RbacV1().ClusterRoles().Create(ctx, &role, metav1.CreateOptions{}); err != nil {
			return err
		}
		roles = append(roles, role.Name)
	}
	for i, role := range roles {
		binding := &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("dra-conformance-driver-%d", i)},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: account}},
		}
		if _, err := b.admin.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

func writeKubeconfig(file string, config *rest.Config) error {
	const name = "dra-conformance"
	c := clientcmdapi.NewConfig()
	c.Clusters[name] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData}
	c.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: config.BearerToken}
	c.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name, Namespace: namespace}
	c.CurrentContext = name
	return clientcmd.WriteToFile(*c, file)
}

// renew gives the driver an empty node: no driver runs, no folder holds anything, no slice and claim is in the API.
func (b *testbed) renew(ctx context.Context) error {
	b.stopNode()
	old := filepath.Join(b.dir, fmt.Sprint("n", b.generation))
	b.generation++
	// Short, since the path of a socket is.
	now := filepath.Join(b.dir, fmt.Sprint("n", b.generation))
	b.vars.PluginsDir = filepath.Join(now, "plugins")
	b.vars.PluginDir = filepath.Join(b.vars.PluginsDir, b.vars.DriverName)
	b.vars.RegistryDir = filepath.Join(now, "registry")
	b.vars.CDIDir = filepath.Join(now, "cdi")
	b.vars.StateDir = filepath.Join(now, "state")
	b.vars.PodUID = string(uuid.NewUUID())
	for _, dir := range []string{b.vars.PluginDir, b.vars.RegistryDir, b.vars.CDIDir, b.vars.StateDir} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	b.proxy.Recover()
	if err := os.RemoveAll(old); err != nil {
		return err
	}
	if err := b.admin.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		return err
	}
	if err := b.deleteClaims(ctx); err != nil {
		return err
	}
	return b.startKubelet(ctx)
}

// deleteClaims removes every claim, whatever holds it back.
func (b *testbed) deleteClaims(ctx context.Context) error {
	claims := b.admin.ResourceV1().ResourceClaims(namespace)
	list, err := claims.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range list.Items {
		if err := b.deleteClaim(ctx, list.Items[i].Name); err != nil {
			return err
		}
	}
	return nil
}

// deleteClaim does what the controller for claims and the garbage collector do once no pod uses a claim.
func (b *testbed) deleteClaim(ctx context.Context, name string) error {
	claims := b.admin.ResourceV1().ResourceClaims(namespace)
	for {
		claim, err := claims.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		claim.Status.ReservedFor, claim.Status.Allocation, claim.Status.Devices = nil, nil, nil
		if claim, err = claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err == nil {
			claim.Finalizers = nil
			_, err = claims.Update(ctx, claim, metav1.UpdateOptions{})
		}
		if apierrors.IsConflict(err) {
			continue // the driver writes too
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		if err := claims.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
}

func (b *testbed) startKubelet(ctx context.Context, pods ...*corev1.Pod) (err error) {
	b.kubelet, err = kubelet.Start(ctx, kubelet.Config{
		NodeName: nodeName, Client: b.admin, RegistryDir: b.vars.RegistryDir, StateDir: filepath.Join(filepath.Dir(b.vars.RegistryDir), "kubelet"),
	}, pods...)
	return err
}

func (b *testbed) startDriver() (err error) {
	if b.driver != nil {
		return errors.New("the driver runs already")
	}
	b.driver, err = b.command.Start(b.vars, b.log)
	return err
}

// stopNode ends the driver and the kubelet.
func (b *testbed) stopNode() {
	if b.driver != nil {
		b.driver.Kill()
		b.driver = nil
	}
	if b.kubelet != nil {
		b.kubelet.Stop()
		b.kubelet = nil
	}
}

func (b *testbed) stop() {
	b.stopNode()
	if b.proxy != nil {
		b.proxy.Stop()
	}
	if b.control != nil {
		b.control.Stop()
	}
}

// uniqueName returns a name that no other object of the run has.
func uniqueName(prefix string) string { return prefix + "-" + rand.String(6) }

// eventually calls check until it returns nil, and returns its last error after the time.
func eventually(ctx context.Context, within time.Duration, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 250*time.Millisecond) {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %v: %w", within, err)
		case <-time.After(pause):
		}
	}
}

// claims are all claims that checks have made and that are still in the API.
func (b *testbed) claims(ctx context.Context) ([]*resourceapi.ResourceClaim, error) {
	list, err := b.admin.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	claims := make([]*resourceapi.ResourceClaim, len(list.Items))
	for i := range list.Items {
		claims[i] = &list.Items[i]
	}
	return claims, nil
}
