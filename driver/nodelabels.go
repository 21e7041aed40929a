package driver

import (
	"context"
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// watchNodeLabels calls changed with the labels of the node, first when they are known and then
// whenever they are others, until the context ends. It lists and watches that one Node.
func watchNodeLabels(ctx context.Context, client kubernetes.Interface, nodeName string, changed func(map[string]string)) {
	byName := fields.OneTermEqualSelector(metav1.ObjectNameField, nodeName).String()
	var known map[string]string
	see := func(object any) {
		node, ok := object.(*corev1.Node)
		if !ok || node.Name != nodeName || known != nil && maps.Equal(known, node.Labels) {
			return
		}
		known = maps.Clone(node.Labels)
		if known == nil {
			known = map[string]string{}
		}
		changed(known)
	}
	_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
				options.FieldSelector = byName
				return client.CoreV1().Nodes().List(ctx, options)
			},
			WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
				options.FieldSelector = byName
				return client.CoreV1().Nodes().Watch(ctx, options)
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
			return &corev1.Node{ObjectMeta: metav1.ObjectMeta{
				Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion, Labels: node.Labels,
			}}, nil
		},
	})
	controller.RunWithContext(ctx)
}
