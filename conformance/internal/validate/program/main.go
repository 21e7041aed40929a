// Command program has the code of the API server judge ResourceSlices, without an API server: a list of them comes in as
// JSON, and what became of each goes out. It is built once for each version of Kubernetes, from this file alone, so it uses
// only what all versions have. Package validate builds it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/registry/resource/resourceslice"
	strictjson "sigs.k8s.io/json"
)

// verdict is what became of a slice.
type verdict struct {
	Name string `json:"name"`
	// Refused is why it is not stored.
	Refused string `json:"refused,omitempty"`
	// Dropped are the fields that are not stored.
	Dropped []string `json:"dropped,omitempty"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run takes feature gates as arguments, like GATE=false.
func run() error {
	if err := utilfeature.DefaultMutableFeatureGate.Set(strings.Join(os.Args[1:], ",")); err != nil {
		return err
	}
	var list struct {
		Items []json.RawMessage `json:"items"`
	}
	if err := json.NewDecoder(os.Stdin).Decode(&list); err != nil {
		return err
	}
	verdicts := []verdict{}
	for _, item := range list.Items {
		v, err := judge(item)
		if err != nil {
			return err
		}
		verdicts = append(verdicts, v)
	}
	return json.NewEncoder(os.Stdout).Encode(verdicts)
}

func judge(sent []byte) (verdict, error) {
	var slice resourceapi.ResourceSlice
	if _, err := strictjson.UnmarshalStrict(sent, &slice); err != nil {
		return verdict{}, err
	}
	v := verdict{Name: slice.Name}
	if v.Name == "" {
		v.Name = slice.GenerateName
	}
	// As if it were sent for the first time.
	slice.ObjectMeta = metav1.ObjectMeta{Name: slice.Name, GenerateName: slice.GenerateName, OwnerReferences: slice.OwnerReferences}
	stored, err := create(&slice)
	if err != nil {
		v.Refused = err.Error()
		return v, nil //nolint:nilerr // it is the verdict
	}
	before, err := spec(sent)
	if err != nil {
		return verdict{}, err
	}
	data, err := json.Marshal(stored)
	if err != nil {
		return verdict{}, err
	}
	after, err := spec(data)
	if err != nil {
		return verdict{}, err
	}
	v.Dropped = slices.Compact(slices.Sorted(slices.Values(lost("spec", before, after))))
	return v, nil
}

// create does what the API server does with a new slice up to where it would be stored.
func create(slice *resourceapi.ResourceSlice) (runtime.Object, error) {
	ctx := genericapirequest.WithNamespace(context.Background(), metav1.NamespaceNone)
	ctx = genericapirequest.WithRequestInfo(ctx, &genericapirequest.RequestInfo{
		IsResourceRequest: true, APIGroup: resourceapi.GroupName, APIVersion: "v1", Resource: "resourceslices",
	})
	legacyscheme.Scheme.Default(slice)
	var internal resource.ResourceSlice
	if err := legacyscheme.Scheme.Convert(slice, &internal, nil); err != nil {
		return nil, err
	}
	rest.FillObjectMetaSystemFields(&internal)
	if internal.Name == "" {
		internal.Name = resourceslice.Strategy.GenerateName(internal.GenerateName)
	}
	if err := rest.BeforeCreate(resourceslice.Strategy, ctx, &internal); err != nil {
		return nil, err
	}
	var stored resourceapi.ResourceSlice
	return &stored, legacyscheme.Scheme.Convert(&internal, &stored, nil)
}

func spec(slice []byte) (any, error) {
	var object map[string]any
	if err := json.Unmarshal(slice, &object); err != nil {
		return nil, err
	}
	if object["spec"] == nil {
		return nil, errors.New("a ResourceSlice without spec")
	}
	return object["spec"], nil
}

// lost are the paths of what is in before and not in after. Places in lists are left out: the same is lost in all of them.
func lost(path string, before, after any) []string {
	var paths []string
	switch b := before.(type) {
	case map[string]any:
		a, _ := after.(map[string]any)
		for _, key := range slices.Sorted(maps.Keys(b)) {
			if _, kept := a[key]; !kept {
				paths = append(paths, path+"."+key)
				continue
			}
			paths = append(paths, lost(path+"."+key, b[key], a[key])...)
		}
	case []any:
		a, _ := after.([]any)
		for i := range b {
			if i >= len(a) {
				return append(paths, path+"[]")
			}
			paths = append(paths, lost(path+"[]", b[i], a[i])...)
		}
	}
	return paths
}
