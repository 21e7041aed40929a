package conformance

import (
	"io/fs"
	"path/filepath"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const modestDoc = "Kubernetes documentation, RBAC good practices: whoever gets hold of one node has the rights of the drivers on it"

func securityChecks() []Check {
	return []Check{
		{
			Name: "security/foreign-slices", Level: Must,
			Asserts: "Slices of other nodes and of other drivers are left alone.",
			Source:  "KEP-4381: a node plugin may write the slices of its node only; an admission policy refuses the rest",
			Fix:     "Select by driver and node.",
			takes:   10 * time.Second,
			run:     checkForeignSlices,
		},
		{
			Name: "security/files-not-world-writable", Level: Must,
			Asserts: "No file or folder that the driver makes can be written by everybody, and not everybody can connect to the sockets that the kubelet calls.",
			Source:  "the kubelet, the container runtime and the driver, all of them root, believe what is in these files",
			Fix:     "Set modes explicitly, or a umask.",
			run:     checkFilesNotWorldWritable,
		},
		{
			Name: "security/modest-verbs", Level: Should,
			Asserts: "The driver uses only what a node driver may need: it reads no secrets and writes no objects but slices, the status of claims, events, leases, and the node it is on.",
			Source:  modestDoc,
			Fix:     "Move the rest into a controller.",
			last:    true,
			run:     checkModestVerbs,
		},
		{
			Name: "security/declared-rbac", Level: Must,
			Asserts: "The roles in the driver's own manifest (--rbac) are enough for everything that it does.",
			Source:  "Kubernetes RBAC",
			Fix:     "Add the verbs to the role.",
			last:    true,
			run:     checkDeclaredRBAC,
		},
		{
			Name: "security/modest-roles", Level: Should,
			Asserts: "The roles in the driver's own manifest (--rbac) grant no more than a node driver may need: nothing by \"*\", no secrets, no collections to delete, and nothing to write but slices, the status of claims, events, leases, and nodes.",
			Source:  modestDoc,
			Fix:     "Name verbs and resources one by one; move the rest into a controller.",
			run:     checkModestRoles,
		},
	}
}

func checkForeignSlices(t *T) {
	var foreign []*resourceapi.ResourceSlice
	for _, s := range []struct{ driver, node string }{{t.vars.DriverName, t.neighbour()}, {"other.example.com", t.nodeName}, {"other.example.com", t.neighbour()}} {
		created, err := t.admin.ResourceV1().ResourceSlices().Create(t.ctx, &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: uniqueName("foreign")},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: s.driver, NodeName: ptr.To(s.node), Devices: []resourceapi.Device{{Name: "foreign"}},
				Pool: resourceapi.ResourcePool{Name: s.node, Generation: 1, ResourceSliceCount: 1},
			},
		}, metav1.CreateOptions{})
		t.must(err)
		t.deferred(func() {
			_ = t.admin.ResourceV1().ResourceSlices().Delete(t.ctx, created.Name, metav1.DeleteOptions{}) // it may be gone
		})
		foreign = append(foreign, created)
	}
	t.restartDriver(false)
	t.settle()
	t.pause(t.times.quiet)
	for _, before := range foreign {
		after, err := t.admin.ResourceV1().ResourceSlices().Get(t.ctx, before.Name, metav1.GetOptions{})
		switch {
		case err != nil:
			t.Errorf("the slice of driver %s on node %s: %v", before.Spec.Driver, *before.Spec.NodeName, err)
		case !equality.Semantic.DeepEqual(before.Spec, after.Spec):
			t.Errorf("the slice of driver %s on node %s was changed", before.Spec.Driver, *before.Spec.NodeName)
		}
	}
}

func checkFilesNotWorldWritable(t *T) {
	t.prepared()
	own := t.own()
	for _, dir := range []string{t.vars.PluginsDir, t.vars.RegistryDir, t.vars.CDIDir, t.vars.StateDir} {
		t.must(filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // it has gone meanwhile
			}
			// Other sockets and device nodes may be for containers, whoever they run as.
			counts := entry.IsDir() || entry.Type().IsRegular() || path == own.socket || path == own.info.Endpoint
			if info, err := entry.Info(); err == nil && counts && info.Mode().Perm()&0o002 != 0 {
				t.Errorf("%s has mode %s", path, info.Mode())
			}
			return nil
		}))
	}
}

// rights are what the driver may do and what it has done.
func (t *T) rights() []Right {
	asked, err := t.asked()
	t.must(err)
	return rights(t.roles, asked)
}

func checkModestVerbs(t *T) {
	t.prepared()
	for _, right := range t.rights() {
		if what := immodest(right); right.Used && right.Verb != rbacv1.VerbAll && what != "" {
			t.Errorf("the driver does what a node driver has no need of: %s", what)
		}
	}
}

func (t *T) needsRoles() {
	if len(t.roles) == 0 {
		t.Skipf("the driver has the rights of an administrator; --rbac gives it those of its manifest")
	}
}

func checkDeclaredRBAC(t *T) {
	t.needsRoles()
	t.prepared()
	for _, right := range t.rights() {
		if right.Refused {
			t.Errorf("refused: %s %s", right.Verb, right.Resource)
		}
	}
}

func checkModestRoles(t *T) {
	t.needsRoles()
	for _, right := range t.rights() {
		if what := immodest(right); right.Granted && what != "" {
			t.Errorf("the roles grant what a node driver has no need of: %s", what)
		}
	}
}
