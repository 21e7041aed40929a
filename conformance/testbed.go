package conformance

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"

	"github.com/simgpu/simgpu/conformance/internal/apiproxy"
	"github.com/simgpu/simgpu/conformance/internal/kubelet"
	"github.com/simgpu/simgpu/conformance/internal/process"
	"github.com/simgpu/simgpu/conformance/internal/scheduler"
)

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

func defaultTimes(cycles int) times {
	return times{patience: 30 * time.Second, late: 75 * time.Second, quiet: 5 * time.Second, claims: 256, cycles: cmp.Or(cycles, 200)}
}

// testbed is a node that the driver under test is on: a Node, a namespace for its claims, a service account for the
// driver and a way of its own to the API server, and folders. Nothing that happens on one concerns another.
type testbed struct {
	*cluster
	proxy     *apiproxy.Proxy
	scheduler *scheduler.Scheduler
	command   *process.Command
	log       io.Writer // everything the driver says
	nodeName  string
	namespace string

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

// newTestbed makes the node. Neither a kubelet nor a driver run on it yet.
func newTestbed(ctx context.Context, c *cluster, dir string, number int, command *process.Command, opts Options) (*testbed, error) {
	b := &testbed{
		cluster: c, command: command, log: opts.Log, dir: dir, times: defaultTimes(opts.Cycles),
		nodeName: fmt.Sprintf("conformance-node-%d", number), namespace: fmt.Sprintf("dra-conformance-%d", number),
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	b.scheduler = scheduler.New(b.admin, b.nodeName)
	b.vars = process.Vars{
		Kubeconfig: filepath.Join(dir, "kubeconfig"), NodeName: b.nodeName, Namespace: b.namespace, DriverName: opts.Profile.DriverName,
		AdminKubeconfig: filepath.Join(dir, "admin.kubeconfig"),
	}
	var err error
	if b.proxy, err = apiproxy.Start(b.control.Admin, kubernetesVersion()); err != nil {
		return nil, err
	}
	if err := b.populate(ctx); err != nil {
		b.stop()
		return nil, err
	}
	return b, nil
}

// neighbour is the name of a node that does not exist, for slices that are none of the driver's business.
func (b *testbed) neighbour() string { return b.nodeName + ".neighbour" }

// concerns is true for slices that are for this node or for no node of the run.
func (b *testbed) concerns(slice *resourceapi.ResourceSlice) bool {
	if slice.Spec.NodeName == nil {
		return true
	}
	for _, other := range b.testbeds {
		if other != b && (*slice.Spec.NodeName == other.nodeName || *slice.Spec.NodeName == other.neighbour()) {
			return false
		}
	}
	return true
}

// populate makes the objects that every check needs, and the kubeconfig of the driver.
func (b *testbed) populate(ctx context.Context) error {
	meta := metav1.ObjectMeta{Name: b.namespace, Labels: map[string]string{"resource.kubernetes.io/admin-access": "true"}}
	if _, err := b.admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: meta}, metav1.CreateOptions{}); err != nil {
		return err
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: b.nodeName, Labels: map[string]string{corev1.LabelHostname: b.nodeName, corev1.LabelOSStable: "linux"}}}
	node, err := b.admin.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	accounts := b.admin.CoreV1().ServiceAccounts(b.namespace)
	if _, err := accounts.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{}); err != nil {
		return err
	}
	if err := b.authorize(ctx, b.namespace); err != nil {
		return fmt.Errorf("give the driver its roles: %w", err)
	}
	if err := writeKubeconfig(b.vars.AdminKubeconfig, b.namespace, b.control.Admin); err != nil {
		return err
	}
	// Bound to the node, like the token of a pod that runs on it.
	token, err := accounts.CreateToken(ctx, account, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID},
	}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("token for the driver: %w", err)
	}
	return writeKubeconfig(b.vars.Kubeconfig, b.namespace, &rest.Config{
		Host: b.proxy.URL, BearerToken: token.Status.Token, TLSClientConfig: rest.TLSClientConfig{CAData: b.proxy.CA},
	})
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
	b.vars.RegistryDir = filepath.Join(now, "reg")
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
	if err := b.deleteSlices(ctx, ""); err != nil {
		return err
	}
	if err := b.deleteClaims(ctx); err != nil {
		return err
	}
	return b.startKubelet(ctx)
}

// deleteSlices removes the slices that concern this node and that the field selector picks.
func (b *testbed) deleteSlices(ctx context.Context, selector string) error {
	published := b.admin.ResourceV1().ResourceSlices()
	list, err := published.List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return err
	}
	for i := range list.Items {
		if !b.concerns(&list.Items[i]) {
			continue
		}
		if err := published.Delete(ctx, list.Items[i].Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// deleteClaims removes every claim, whatever holds it back.
func (b *testbed) deleteClaims(ctx context.Context) error {
	claims := b.admin.ResourceV1().ResourceClaims(b.namespace)
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
	claims := b.admin.ResourceV1().ResourceClaims(b.namespace)
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

// startKubelet starts a kubelet and waits until it has removed the slices of its node, as every kubelet that starts does: it
// would take what is published meanwhile, too.
func (b *testbed) startKubelet(ctx context.Context, pods ...*corev1.Pod) error {
	published := b.admin.ResourceV1().ResourceSlices()
	// The last one in the order in which they are removed.
	last, err := published.Create(ctx, &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: uniqueName("zz-kubelet")},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "dra-conformance.example.com", NodeName: &b.nodeName, Devices: []resourceapi.Device{{Name: "none"}},
			Pool: resourceapi.ResourcePool{Name: b.nodeName, Generation: 1, ResourceSliceCount: 1},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	b.kubelet, err = kubelet.Start(ctx, kubelet.Config{
		NodeName: b.nodeName, Client: b.admin, RegistryDir: b.vars.RegistryDir, StateDir: filepath.Join(filepath.Dir(b.vars.RegistryDir), "kubelet"),
	}, pods...)
	if err != nil {
		return err
	}
	return eventually(ctx, b.times.late, func() error {
		_, err := published.Get(ctx, last.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(errors.New("the kubelet has not removed the slices of its node"), err)
	})
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
	b.proxy.Stop()
}

// keepSlices writes what the driver publishes into the file that the options name, if it has not been written yet.
func (b *testbed) keepSlices(ctx context.Context) (err error) {
	if b.slicesTo == "" {
		return nil
	}
	b.slicesOf.Do(func() {
		var published []resourceapi.ResourceSlice
		if published, err = b.slices(ctx); err != nil {
			return
		}
		list := resourceapi.ResourceSliceList{Items: published}
		list.APIVersion, list.Kind = resourceapi.SchemeGroupVersion.String(), "ResourceSliceList"
		var data []byte
		if data, err = json.MarshalIndent(list, "", "  "); err == nil {
			err = os.WriteFile(b.slicesTo, data, 0o644)
		}
	})
	return err
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
	list, err := b.admin.ResourceV1().ResourceClaims(b.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	claims := make([]*resourceapi.ResourceClaim, len(list.Items))
	for i := range list.Items {
		claims[i] = &list.Items[i]
	}
	return claims, nil
}
