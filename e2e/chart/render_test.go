// Package chart tests the Helm chart deployments/helm/simgpu without a cluster: what it renders, what it refuses,
// and that its texts agree with its values. Whether it installs is for the cluster tests to show.
//
// Go's test cache does not notice changes of files outside of this module, the chart's among them: use -count=1.
package chart

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

const (
	chartDir  = "../../deployments/helm/simgpu"
	release   = "simgpu"
	namespace = "simgpu"
)

// loadChart reads the chart anew, so that no test sees what another one did to it.
func loadChart(t *testing.T) *helmchart.Chart {
	t.Helper()
	chart, err := loader.Load(chartDir)
	if err != nil {
		t.Fatalf("load the chart: %v", err)
	}
	return chart
}

// templates renders the chart as `helm install --values` would, with a release called simgpu in a namespace of its own.
// The keys are paths below templates/.
func templates(t *testing.T, values string) (map[string]string, error) {
	t.Helper()
	return templatesIn(t, namespace, values)
}

func templatesIn(t *testing.T, namespace, values string, served ...string) (map[string]string, error) {
	t.Helper()
	chart := loadChart(t)
	cluster := common.DefaultCapabilities.Copy()
	cluster.APIVersions = append(cluster.APIVersions, served...)
	rendered, err := util.ToRenderValues(chart, parse(t, values), options(namespace), cluster)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(chart, rendered)
	if err != nil {
		return nil, err
	}
	short := map[string]string{}
	for name, text := range files {
		short[strings.TrimPrefix(name, path.Join(chart.Name(), "templates")+"/")] = text
	}
	return short, nil
}

func options(namespace string) common.ReleaseOptions {
	return common.ReleaseOptions{Name: release, Namespace: namespace, Revision: 1, IsInstall: true}
}

func parse(t *testing.T, values string) map[string]any {
	t.Helper()
	parsed := map[string]any{}
	if err := yaml.Unmarshal([]byte(values), &parsed); err != nil {
		t.Fatalf("values of the test: %v\n%s", err, values)
	}
	return parsed
}

// objects are what a chart renders, by "Kind/name".
type objects map[string]runtime.Object

// render returns the objects for the given values and fails the test where an object has a field its API does not know.
func render(t *testing.T, values string) objects {
	t.Helper()
	return renderIn(t, namespace, values)
}

// renderIn is render in another namespace, in a cluster that serves these APIs as well.
func renderIn(t *testing.T, namespace, values string, served ...string) objects {
	t.Helper()
	files, err := templatesIn(t, namespace, values, served...)
	if err != nil {
		t.Fatalf("render with %q: %v", values, err)
	}
	found := objects{}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		decoded, err := decode(files[name])
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, files[name])
		}
		for _, object := range decoded {
			key := keyOf(object)
			if _, twice := found[key]; twice {
				t.Fatalf("%s renders a second %s", name, key)
			}
			found[key] = object
		}
	}
	return found
}

func keyOf(object runtime.Object) string {
	accessor, err := meta.Accessor(object)
	if err != nil {
		panic(fmt.Sprintf("%T is no API object: %v", object, err))
	}
	return object.GetObjectKind().GroupVersionKind().Kind + "/" + accessor.GetName()
}

// decode is strict for all APIs of Kubernetes; those of others (OpenShift's) come out as unstructured objects.
func decode(text string) ([]runtime.Object, error) {
	strict := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme.Scheme, scheme.Scheme,
		json.SerializerOptions{Yaml: true, Strict: true})
	reader := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	var decoded []runtime.Object
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return decoded, nil
		}
		if err != nil {
			return nil, err
		}
		fields := map[string]any{}
		if err := yaml.UnmarshalStrict(document, &fields); err != nil {
			return nil, err
		}
		if len(fields) == 0 {
			continue
		}
		object, _, err := strict.Decode(document, nil, nil)
		if runtime.IsNotRegisteredError(err) {
			object, err = &unstructured.Unstructured{Object: fields}, nil
		}
		if err != nil {
			return nil, err
		}
		decoded = append(decoded, object)
	}
}

// get returns the object of type T with the given name and fails the test where the chart rendered none.
func get[T runtime.Object](t *testing.T, rendered objects, name string) T {
	t.Helper()
	for key, object := range rendered {
		if typed, ok := object.(T); ok && strings.HasSuffix(key, "/"+name) {
			return typed
		}
	}
	var none T
	t.Fatalf("no %T with the name %q among %v", none, name, slices.Sorted(maps.Keys(rendered)))
	return none
}
