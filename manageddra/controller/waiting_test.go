package controller

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/event"
)

// TestNodesThatMatter: what keeps pods away from a node makes the controller look again, a heartbeat does not.
func TestNodesThatMatter(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*corev1.Node)
		passes bool
	}{
		"cordoned": {func(n *corev1.Node) { n.Spec.Unschedulable = true }, true},
		"tainted": {func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "maintenance", Effect: corev1.TaintEffectNoSchedule}}
		}, true},
		"labelled":  {func(n *corev1.Node) { n.Labels = map[string]string{"pool": "b"} }, true},
		"made anew": {func(n *corev1.Node) { n.UID = "another" }, true},
		"a heartbeat": {func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady}}
			n.ResourceVersion = "2"
		}, false},
		"an annotation": {func(n *corev1.Node) { n.Annotations = map[string]string{"of": "somebody"} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			before := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "one", ResourceVersion: "1", Labels: map[string]string{"pool": "a"}}}
			after := before.DeepCopy()
			tc.change(after)
			if got := placing.Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}); got != tc.passes {
				t.Errorf("passes: %v, want %v", got, tc.passes)
			}
		})
	}
	if !placing.Create(event.CreateEvent{Object: &corev1.Node{}}) || !placing.Delete(event.DeleteEvent{Object: &corev1.Node{}}) {
		t.Error("a node that comes or goes does not matter")
	}
}
