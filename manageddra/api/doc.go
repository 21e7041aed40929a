// Package api has the objects of serving.kserve.io/v1alpha2 as far as managed DRA reads or writes them, and the names
// and labels that KServe gives to the objects it makes.
//
// The structs are a subset. What they do not know is preserved nevertheless: the CustomResourceDefinitions keep unknown
// fields, and the controller writes nothing of an LLMInferenceService but its status, as a patch.
//
// v1alpha1 and v1alpha2 have the same schema here, so that converting an object changes its apiVersion and nothing else.
//
// +k8s:deepcopy-gen=package
package api

//go:generate go run k8s.io/code-generator/cmd/deepcopy-gen@v0.37.2 --output-file zz_generated.deepcopy.go --go-header-file /dev/null .
