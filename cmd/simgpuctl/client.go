package main

import (
	"fmt"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// connector adds the flags that say which cluster to use, and returns what connects to it once they are parsed.
type connector func(*pflag.FlagSet) func() (kubernetes.Interface, error)

// connectLikeKubectl finds the cluster as kubectl does: kubeconfig files, contexts, or the pod's own account.
func connectLikeKubectl(flags *pflag.FlagSet) func() (kubernetes.Interface, error) {
	names := clientcmd.RecommendedConfigOverrideFlags("")
	names.ContextOverrideFlags.Namespace = clientcmd.FlagInfo{} // Nodes have none
	config := likeKubectl(flags, names)
	return func() (kubernetes.Interface, error) { return connect(config()) }
}

// inNamespace is connectLikeKubectl for what is in a namespace, which it returns too.
func inNamespace(flags *pflag.FlagSet) func() (kubernetes.Interface, string, error) {
	config := likeKubectl(flags, clientcmd.RecommendedConfigOverrideFlags(""))
	return func() (kubernetes.Interface, string, error) {
		namespace, _, err := config().Namespace()
		if err != nil {
			return nil, "", fmt.Errorf("find the namespace: %w", err)
		}
		client, err := connect(config())
		return client, namespace, err
	}
}

func likeKubectl(flags *pflag.FlagSet, names clientcmd.ConfigOverrideFlags) func() clientcmd.ClientConfig {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	overrides := &clientcmd.ConfigOverrides{}
	flags.StringVar(&rules.ExplicitPath, "kubeconfig", "", "path of the kubeconfig file to use")
	clientcmd.BindOverrideFlags(overrides, flags, names)
	return func() clientcmd.ClientConfig {
		return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides)
	}
}

func connect(loader clientcmd.ClientConfig) (kubernetes.Interface, error) {
	config, err := loader.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	rest.AddUserAgent(config, "simgpuctl")
	config.QPS, config.Burst = -1, 0
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	return client, nil
}
