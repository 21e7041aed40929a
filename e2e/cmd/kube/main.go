// Command kube is every Kubernetes component of the local cluster, etcd, CoreDNS, kubectl and helm in one executable.
// It acts as the component it is called by: by the name of a link to it (kubectl -> kube), or by its first
// argument (kube kubectl get pods).
//
// One executable needs one link instead of nine and a third of the space. Each component still runs as a process of
// its own, since feature gates belong to the process.
package main

import (
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// components maps each name to what the component's own main function does. A component returns its exit code or ends the process itself.
var components = map[string]func() int{
	"coredns":                 coredns,
	"etcd":                    etcd,
	"helm":                    helm,
	"kube-apiserver":          apiserver,
	"kube-controller-manager": controllerManager,
	"kube-proxy":              proxy,
	"kube-scheduler":          scheduler,
	"kubectl":                 kubectl,
	"kubelet":                 kubelet,
}

func main() {
	run, args, err := choose(os.Args)
	if err != nil {
		usage(os.Stderr, err)
		os.Exit(2)
	}
	os.Args = args
	if filepath.Base(args[0]) != "coredns" {
		flag.CommandLine = without(flag.CommandLine, corednsFlags)
	}
	os.Exit(run())
}

// choose finds the component that args ask for, and the arguments as that component expects them.
func choose(args []string) (func() int, []string, error) {
	if run, ok := components[filepath.Base(args[0])]; ok {
		return run, args, nil
	}
	if len(args) < 2 {
		return nil, nil, fmt.Errorf("no component named")
	}
	run, ok := components[args[1]]
	if !ok {
		return nil, nil, fmt.Errorf("unknown component %q", args[1])
	}
	return run, args[1:], nil
}

func usage(w io.Writer, err error) {
	fmt.Fprintf(w, "kube: %v\nusage: kube COMPONENT [ARGUMENT...]\ncomponents: %s\n",
		err, strings.Join(slices.Sorted(maps.Keys(components)), ", "))
}

// corednsFlags are the flags that CoreDNS registers for the whole process. The other components add all flags of the
// process to their own, where these would be wrong and, being one letter long, collide.
var corednsFlags = []string{"conf", "dns.port", "p", "pidfile", "plugins", "quiet", "version"}

// without returns the flags of set except those named.
func without(set *flag.FlagSet, names []string) *flag.FlagSet {
	kept := flag.NewFlagSet(set.Name(), set.ErrorHandling())
	set.VisitAll(func(f *flag.Flag) {
		if !slices.Contains(names, f.Name) {
			kept.Var(f.Value, f.Name, f.Usage)
		}
	})
	return kept
}
