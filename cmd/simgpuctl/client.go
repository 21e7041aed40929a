package main

import (
	"fmt"

	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// connector adds the flags that say which API server to talk to, and returns what connects to it once they are
// parsed.
type connector func(*pflag.FlagSet) func() (kubernetes.Interface, error)

// connectLikeKubectl takes the flags, the environment and the files that kubectl takes.
func connectLikeKubectl(flags *pflag.FlagSet) func() (kubernetes.Interface, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	overrides := &clientcmd.ConfigOverrides{}
	flags.StringVar(&rules.ExplicitPath, "kubeconfig", "", "path of the kubeconfig file to use")
	names := clientcmd.RecommendedConfigOverrideFlags("")
	names.ContextOverrideFlags.Namespace = clientcmd.FlagInfo{} // Nodes have none
	clientcmd.BindOverrideFlags(overrides, flags, names)
	return func() (kubernetes.Interface, error) {
		config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides).ClientConfig()
		if err != nil {
			return nil, fmt.Errorf("find the API server: %w", err)
		}
		rest.AddUserAgent(config, "simgpuctl")
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return nil, fmt.Errorf("find the API server: %w", err)
		}
		return client, nil
	}
}
