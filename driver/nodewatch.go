package driver

import (
	"context"
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/simgpu/simgpu/driver/faults"
)

// watchNode calls identified with the UID of the node, annotated with the annotation that names its faults, "" where it has
// none, and then labelled with its labels: first when they are known and then whenever they are others, until the context
// ends. It lists and watches that one Node, and calls reconnected when it watches again after the connection was lost
// or the API server closed it.
func watchNode(ctx context.Context, client kubernetes.Interface, nodeName string, reconnected func(), identified func(types.UID), annotated func(string), labelled func(map[string]string)) {
	connected := false
	byName := fields.OneTermEqualSelector(metav1.ObjectNameField, nodeName).String()
	var labels map[string]string
	var annotation string
	var uid types.UID
	see := func(object any) {
		node, ok := object.(*corev1.Node)
		if !ok || node.Name != nodeName {
			return
		}
		first := labels == nil
		if first || node.UID != uid {
			uid = node.UID
			identified(uid)
		}
		if now := node.Annotations[faults.Annotation]; first || now != annotation {
			annotation = now
			annotated(now)
		}
		if first || !maps.Equal(labels, node.Labels) {
			labels = map[string]string{}
			maps.Copy(labels, node.Labels)
			labelled(maps.Clone(labels))
		}
	}
	_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
				options.FieldSelector = byName
				return client.CoreV1().Nodes().List(ctx, options)
			},
			WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
				options.FieldSelector = byName
				watching, err := client.CoreV1().Nodes().Watch(ctx, options)
				if err == nil && connected {
					reconnected()
				}
				connected = connected || err == nil
				return watching, err
			},
		}, client),
		ObjectType: &corev1.Node{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    see,
			UpdateFunc: func(_, object any) { see(object) },
		},
		Transform: func(object any) (any, error) {
			node, ok := object.(*corev1.Node)
			if !ok {
				return object, nil
			}
			// A Node is large, mostly for its images.
			small := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
				Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion, Labels: node.Labels,
			}}
			if annotation, ok := node.Annotations[faults.Annotation]; ok {
				small.Annotations = map[string]string{faults.Annotation: annotation}
			}
			return small, nil
		},
	})
	controller.RunWithContext(ctx)
}
