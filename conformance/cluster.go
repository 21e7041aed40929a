package conformance

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/simgpu/simgpu/conformance/internal/controlplane"
	"github.com/simgpu/simgpu/conformance/internal/process"
)

// account is the service account that the driver works with.
const account = "driver"

// gates are the feature gates that a driver may need and that are off by default.
var gates = map[string]bool{
	"DRADerivedAttributes":         true,
	"DRADeviceCompatibilityGroups": true,
	"DRAListTypeAttributes":        true,
	"DRAOptionalNodeOperations":    true,
	"DRAPartitionableDevicesType":  true,
	"DRAResourcePoolStatus":        true,
}

// cluster is what the nodes of a run have in common: the API server, and what drivers may do there.
type cluster struct {
	control *controlplane.ControlPlane
	admin   kubernetes.Interface
	roles   []rbacv1.ClusterRole
	// slicesTo is where published slices go that are looked at later, once.
	slicesTo string
	slicesOf sync.Once
	// boundTo are the names of the roles of a driver.
	boundTo  []string
	testbeds []*testbed
}

// startCluster starts the API server and makes so many nodes, all for the same driver.
func startCluster(ctx context.Context, dir string, nodes int, command *process.Command, opts Options) (_ *cluster, err error) {
	c := &cluster{roles: opts.Roles, slicesTo: opts.Slices}
	defer func() {
		if err != nil {
			c.stop()
		}
	}()
	if c.control, err = controlplane.Start(ctx, filepath.Join(dir, "control-plane"), controlplane.Options{
		FeatureGates:  gates,
		RuntimeConfig: map[string]string{"resource.k8s.io/v1alpha3": "true"},
	}); err != nil {
		return nil, err
	}
	if c.admin, err = kubernetes.NewForConfig(c.control.Admin); err != nil {
		return nil, err
	}
	if err := c.makeRoles(ctx); err != nil {
		return nil, fmt.Errorf("make the roles of the driver: %w", err)
	}
	for i := range nodes {
		b, err := newTestbed(ctx, c, filepath.Join(dir, fmt.Sprint(i+1)), i+1, command, opts)
		if err != nil {
			return nil, err
		}
		c.testbeds = append(c.testbeds, b)
	}
	return c, nil
}

func (c *cluster) stop() {
	for _, b := range c.testbeds {
		b.stop()
	}
	if c.control != nil {
		c.control.Stop()
	}
}

// makeRoles makes the roles that the driver asks for. Without any it may do everything.
func (c *cluster) makeRoles(ctx context.Context) error {
	if len(c.roles) == 0 {
		c.boundTo = []string{"cluster-admin"}
		return nil
	}
	for i, role := range c.roles {
		role = rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("dra-conformance-driver-%d", i)}, Rules: role.Rules}
		if _, err := c.admin.RbacV1().ClusterRoles().Create(ctx, &role, metav1.CreateOptions{}); err != nil {
			return err
		}
		c.boundTo = append(c.boundTo, role.Name)
	}
	return nil
}

// authorize gives the driver's account in the namespace the roles.
func (c *cluster) authorize(ctx context.Context, namespace string) error {
	for i, role := range c.boundTo {
		binding := &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-driver-%d", namespace, i)},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: account}},
		}
		if _, err := c.admin.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
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

func writeKubeconfig(file, namespace string, config *rest.Config) error {
	const name = "dra-conformance"
	c := clientcmdapi.NewConfig()
	c.Clusters[name] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData}
	c.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: config.BearerToken}
	c.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name, Namespace: namespace}
	c.CurrentContext = name
	return clientcmd.WriteToFile(*c, file)
}
