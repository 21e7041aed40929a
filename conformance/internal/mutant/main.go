// Command mutant is a small DRA driver that does everything right, and, told so, one thing wrong. The tests of the kit use
// it to show that each check finds the fault it is for, and that a driver without faults passes all of them.
//
// What it publishes is made of nothing: a pool of gadgets, of which two and two are halves of a third.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// domain is that of the attributes and the parameters, and the usual name of the driver.
const domain = "gadget.example.com"

// config is the command line.
type config struct {
	name, kubeconfig, node, plugins, registry, cdi string
	fault                                          string
}

func main() {
	var c config
	list := flag.Bool("list", false, "list the faults")
	flag.StringVar(&c.name, "name", domain, "")
	flag.StringVar(&c.kubeconfig, "kubeconfig", "", "")
	flag.StringVar(&c.node, "node", "", "")
	flag.StringVar(&c.plugins, "plugins", "", "")
	flag.StringVar(&c.registry, "registry", "", "")
	flag.StringVar(&c.cdi, "cdi", "", "")
	flag.StringVar(&c.fault, "fault", "", "what to do wrong")
	flag.Parse()
	if *list {
		fmt.Println(strings.Join(faults, "\n"))
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if c.fault == "ignores-sigterm" {
		signal.Ignore(syscall.SIGTERM)
		ctx = context.Background()
	}
	if err := run(ctx, c); err != nil {
		fmt.Fprintln(os.Stderr, "mutant:", err)
		os.Exit(1)
	}
	if c.fault == "fails-on-sigterm" {
		os.Exit(1)
	}
}

func run(ctx context.Context, c config) error {
	if !contains(faults, c.fault) && c.fault != "" {
		return fmt.Errorf("unknown fault %q", c.fault)
	}
	restConfig, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig)
	if err != nil {
		return err
	}
	restConfig.QPS = -1
	client, err := kubernetes.NewForConfig(restConfig)
	if err != nil {
		return err
	}
	d := &driver{config: c, client: client, dir: filepath.Join(c.plugins, c.name)}
	return d.run(ctx)
}

func contains(list []string, s string) bool {
	for _, item := range list {
		if item == s {
			return true
		}
	}
	return false
}
