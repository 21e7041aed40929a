package lifecycle

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/simgpu/simgpu/e2e/harness"
)

// TestDriverHasNoPrivileges looks at the process itself, as the kernel sees it.
func TestDriverHasNoPrivileges(t *testing.T) {
	dir := driverProcess(t)
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		t.Fatal(err)
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		fields[name] = strings.TrimSpace(value)
	}
	for name, want := range map[string]string{
		"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000",
		"CapBnd": "0000000000000000", "CapAmb": "0000000000000000",
		"NoNewPrivs": "1", "Seccomp": "2",
	} {
		if fields[name] != want {
			t.Errorf("%s is %q, not %q", name, fields[name], want)
		}
	}
	mounts, err := os.ReadFile(filepath.Join(dir, "mountinfo"))
	if err != nil {
		t.Fatal(err)
	}
	writable := []string{}
	for line := range strings.Lines(string(mounts)) {
		// id parent major:minor root mount-point options ... - type source super-options
		fields := strings.Fields(line)
		point, options := fields[4], strings.Split(fields[5], ",")
		if strings.HasPrefix(point, "/proc") || strings.HasPrefix(point, "/dev") || strings.HasPrefix(point, "/sys") {
			continue
		}
		if !slices.Contains(options, "ro") {
			writable = append(writable, point)
		}
	}
	slices.Sort(writable)
	want := []string{
		"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/run/cdi", "/var/run/cdi",
		"/var/lib/kubelet/plugins/" + harness.DriverName, "/var/lib/kubelet/plugins_registry",
	}
	for _, point := range writable {
		if !slices.Contains(want, point) && !strings.HasSuffix(point, "/termination-log") {
			t.Errorf("%s is writable", point)
		}
	}
	// A namespace of its own of each kind but the one for users, which Kubernetes does not make by default.
	for _, kind := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		own, err := os.Readlink(filepath.Join(dir, "ns", kind))
		if err != nil {
			t.Fatal(err)
		}
		host, err := os.Readlink(filepath.Join(suite.NodeRoot(t), "proc/1/ns", kind))
		if err != nil {
			t.Fatal(err)
		}
		if own == host && kind != "cgroup" { // on cgroup v1 a container shares that
			t.Errorf("the driver shares the node's %s namespace", kind)
		}
	}
}

// driverProcess is the folder in /proc of the driver.
func driverProcess(t *testing.T) string {
	t.Helper()
	processes, err := filepath.Glob(filepath.Join(suite.NodeRoot(t), "proc/[0-9]*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range processes {
		command, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err == nil && strings.Contains(string(command), "--driver-name="+harness.DriverName) {
			return dir
		}
	}
	t.Fatalf("no process of the driver among %d", len(processes))
	return ""
}

// TestServiceAccountMayDoNoMore asks the API server for all that the driver's account may do.
func TestServiceAccountMayDoNoMore(t *testing.T) {
	own := rulesOf(t, fmt.Sprintf("system:serviceaccount:%s:%s", harness.DriverNamespace, harness.DaemonSet))
	anybody := rulesOf(t, fmt.Sprintf("system:serviceaccount:%s:%s", harness.DriverNamespace, "default"))
	var granted []string
	for _, rule := range own {
		if !slices.Contains(anybody, rule) {
			granted = append(granted, rule)
		}
	}
	// driver.TestPermissionsUsed sees the driver do all of this.
	want := []string{
		"associated-node:patch resource.k8s.io/resourceclaims/driver " + harness.DriverName,
		"create /events", "create resource.k8s.io/resourceslices", "delete resource.k8s.io/resourceslices",
		"get /nodes", "get resource.k8s.io/resourceclaims",
		"list /nodes", "list resource.k8s.io/resourceslices",
		"patch /events", "patch resource.k8s.io/resourceclaims/status",
		"update resource.k8s.io/resourceslices",
		"watch /nodes", "watch resource.k8s.io/resourceslices",
	}
	slices.Sort(granted)
	slices.Sort(want)
	if !slices.Equal(granted, want) {
		t.Errorf("may %q\nshould %q", granted, want)
	}
}

func rulesOf(t *testing.T, user string) []string {
	t.Helper()
	config := rest.CopyConfig(suite.RESTConfig)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + harness.DriverNamespace, "system:authenticated"}}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	review, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(), &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: harness.DriverNamespace},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var rules []string
	for _, rule := range review.Status.ResourceRules {
		for _, verb := range rule.Verbs {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					rules = append(rules, strings.TrimSpace(verb+" "+group+"/"+resource+" "+strings.Join(rule.ResourceNames, ",")))
				}
			}
		}
	}
	return rules
}
