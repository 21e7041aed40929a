package conformance

import (
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func securityChecks() []Check {
	return []Check{
		{
			Name: "security/foreign-slices", Level: Must,
			Asserts: "Slices of other nodes and of other drivers are left alone.",
			Source:  "KEP-4381: a node plugin may write the slices of its node only; an admission policy refuses the rest",
			Fix:     "Select by driver and node.",
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
			Source:  "whoever gets hold of one node has the rights of the drivers on it",
			Fix:     "Move the rest into a controller.",
			run:     checkModestVerbs,
		},
		{
			Name: "security/declared-rbac", Level: Must,
			Asserts: "The roles in the driver's own manifest (--rbac) are enough for everything that it does.",
			Source:  "Kubernetes RBAC",
			Fix:     "Add the verbs to the role.",
			run:     checkDeclaredRBAC,
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

// usedVerbs are what the driver has asked the API server for since the kit was started: verbs by group/resource.
func (t *T) usedVerbs() map[string]map[string]bool {
	used := map[string]map[string]bool{}
	for _, request := range t.proxy.Requests(t.since) {
		if request.Resource == "" {
			continue
		}
		resource := request.Resource
		if request.Group != "" {
			resource += "." + request.Group
		}
		if used[resource] == nil {
			used[resource] = map[string]bool{}
		}
		used[resource][request.Verb] = true
	}
	return used
}

// modest are the objects that a node driver may write.
var modest = []string{
	"resourceslices.resource.k8s.io", "resourceclaims/status.resource.k8s.io", "resourceclaims/driver.resource.k8s.io",
	"events", "events.events.k8s.io", "leases.coordination.k8s.io", "nodes", "nodes/status",
}

func checkModestVerbs(t *T) {
	t.prepared()
	used := t.usedVerbs()
	for _, resource := range slices.Sorted(maps.Keys(used)) {
		verbs := slices.Sorted(maps.Keys(used[resource]))
		t.notef("used: %s %s", resource, strings.Join(verbs, ","))
		for _, verb := range verbs {
			switch reads := verb == "get" || verb == "list" || verb == "watch"; {
			case reads && strings.HasPrefix(resource, "secrets"):
				t.Errorf("the driver reads secrets (%s)", verb)
			case !reads && !slices.Contains(modest, resource):
				t.Errorf("the driver writes %s (%s)", resource, verb)
			case verb == "deletecollection":
				t.Errorf("the driver deletes collections of %s", resource)
			}
		}
	}
}

func checkDeclaredRBAC(t *T) {
	if len(t.roles) == 0 {
		t.Skipf("the driver has the rights of an administrator; --rbac gives it those of its manifest")
	}
	t.prepared()
	refused := map[string]bool{}
	for _, request := range t.proxy.Requests(t.since) {
		if request.Status == 403 {
			refused[request.Verb+" "+request.Resource+" "+request.Group] = true
		}
	}
	for _, request := range slices.Sorted(maps.Keys(refused)) {
		t.Errorf("refused: %s", strings.TrimSpace(request))
	}
	used := t.usedVerbs()
	for _, role := range t.roles {
		for _, rule := range role.Rules {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					name := resource
					if group != "" {
						name += "." + group
					}
					for _, verb := range rule.Verbs {
						if !used[name][verb] {
							t.notef("granted and not used: %s %s", name, verb)
						}
					}
				}
			}
		}
	}
}
