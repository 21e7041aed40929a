package conformance

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
)

// Right is a verb on a resource: granted by the driver's roles, used by the driver, or both.
type Right struct {
	// Resource is as in "resourceclaims/status.resource.k8s.io".
	Resource string `json:"resource"`
	Verb     string `json:"verb"`
	// Granted is true if the driver's roles have it. Without roles the driver may do everything, and nothing is Granted.
	Granted bool `json:"granted"`
	// Used and Refused are true if the driver has asked for it, according to the API server's audit log, and if it did not
	// get it at least once.
	Used    bool `json:"used"`
	Refused bool `json:"refused,omitempty"`
}

// synthetic are verbs that the API server asks about besides those of a request, so that its audit log does not have them:
// the kubelet plugin's own part of a claim's status, since Kubernetes 1.36.
var synthetic = []string{"associated-node:", "arbitrary-node:"}

func resourceName(resource, group string) string {
	if group == "" {
		return resource
	}
	return resource + "." + group
}

// rights compares what roles grant with what was asked for. Rights are in the order of their resources and verbs.
func rights(roles []rbacv1.ClusterRole, asked []auditv1.Event) []Right {
	type name struct{ resource, verb string }
	found := map[name]*Right{}
	at := func(resource, verb string) *Right {
		n := name{resource, verb}
		if found[n] == nil {
			found[n] = &Right{Resource: resource, Verb: verb}
		}
		return found[n]
	}
	for _, event := range asked {
		if event.ObjectRef == nil || event.ObjectRef.Resource == "" {
			continue // discovery and the like
		}
		resource := event.ObjectRef.Resource
		if event.ObjectRef.Subresource != "" {
			resource += "/" + event.ObjectRef.Subresource
		}
		right := at(resourceName(resource, event.ObjectRef.APIGroup), event.Verb)
		right.Used = true
		right.Refused = right.Refused || event.ResponseStatus != nil && event.ResponseStatus.Code == 403
	}
	used := slices.Collect(maps.Values(found))
	for _, role := range roles {
		for _, rule := range role.Rules {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					for _, verb := range rule.Verbs {
						granted := at(resourceName(resource, group), verb)
						granted.Granted = true
						for _, u := range used {
							switch {
							case matches(rule.APIGroups, rule.Resources, rule.Verbs, *u):
								u.Granted = true
								granted.Used = granted.Used || matches([]string{group}, []string{resource}, []string{verb}, *u)
							case u.Resource == "resourceclaims/status.resource.k8s.io" && granted.Resource == "resourceclaims/driver.resource.k8s.io":
								granted.Used = granted.Used || slices.ContainsFunc(synthetic, func(prefix string) bool { return verb == prefix+u.Verb })
							}
						}
					}
				}
			}
		}
	}
	return slices.SortedFunc(func(yield func(Right) bool) {
		for _, right := range found {
			if !yield(*right) {
				return
			}
		}
	}, func(a, b Right) int { return cmp.Or(cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Verb, b.Verb)) })
}

// matches is true if a rule with these words covers the right.
func matches(groups, resources, verbs []string, right Right) bool {
	if !slices.Contains(verbs, right.Verb) && !slices.Contains(verbs, rbacv1.VerbAll) {
		return false
	}
	resource, group, _ := strings.Cut(right.Resource, ".")
	if !slices.Contains(groups, group) && !slices.Contains(groups, rbacv1.APIGroupAll) {
		return false
	}
	return slices.Contains(resources, resource) || slices.Contains(resources, rbacv1.ResourceAll)
}

// modest are the objects that a node driver may write.
var modest = []string{
	"resourceslices.resource.k8s.io", "resourceclaims/status.resource.k8s.io", "resourceclaims/driver.resource.k8s.io",
	"events", "events.events.k8s.io", "leases.coordination.k8s.io", "nodes", "nodes/status",
}

// immodest says what a node driver should not have or do with the right, "" if nothing is wrong with it.
func immodest(right Right) string {
	resource, group, _ := strings.Cut(right.Resource, ".")
	reads := right.Verb == "get" || right.Verb == "list" || right.Verb == "watch"
	switch {
	case resource == "*" || group == "*":
		return fmt.Sprintf("%s on everything (%s)", right.Verb, right.Resource)
	case right.Verb == "*":
		return "every verb on " + right.Resource
	case right.Verb == "deletecollection":
		return "deletes collections of " + right.Resource
	case resource == "secrets":
		return fmt.Sprintf("secrets (%s)", right.Verb)
	case !reads && !slices.Contains(modest, right.Resource):
		return fmt.Sprintf("writes %s (%s)", right.Resource, right.Verb)
	}
	return ""
}

// asked is what drivers have asked the API server for: those of all nodes, or where the time is set, the node's own since
// then.
func (b *testbed) asked() ([]auditv1.Event, error) {
	events, err := b.control.Audit()
	if err != nil {
		return nil, fmt.Errorf("the audit log of the API server: %w", err)
	}
	accounts := map[string]bool{}
	for _, bed := range b.testbeds {
		if b.since.IsZero() || bed == b {
			accounts[fmt.Sprintf("system:serviceaccount:%s:%s", bed.namespace, account)] = true
		}
	}
	return slices.DeleteFunc(events, func(event auditv1.Event) bool {
		return !accounts[event.User.Username] || event.RequestReceivedTimestamp.Time.Before(b.since.Truncate(time.Microsecond))
	}), nil
}
