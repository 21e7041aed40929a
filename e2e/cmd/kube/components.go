package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	_ "time/tzdata" // time zones of CronJobs

	"github.com/coredns/coredns/coremain"
	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	helmcmd "helm.sh/helm/v4/pkg/cmd"
	helmkube "helm.sh/helm/v4/pkg/kube"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // authentication plugins of kubectl and helm
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of the API clients
	_ "k8s.io/component-base/metrics/prometheus/version"  // the version metric
	kubectlcmd "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserverapp "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanagerapp "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxyapp "k8s.io/kubernetes/cmd/kube-proxy/app"
	schedulerapp "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubeletapp "k8s.io/kubernetes/cmd/kubelet/app"

	// The plugins of CoreDNS that the Corefile of the cluster uses, and what helps to look into it.
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/metrics"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/template"
)

func apiserver() int         { return run(apiserverapp.NewAPIServerCommand()) }
func controllerManager() int { return run(controllermanagerapp.NewControllerManagerCommand()) }
func scheduler() int         { return run(schedulerapp.NewSchedulerCommand()) }
func proxy() int             { return run(proxyapp.NewProxyCommand()) }
func kubelet() int           { return run(kubeletapp.NewKubeletCommand(context.Background())) }

func run(command *cobra.Command) int { return cli.Run(command) }

func kubectl() int {
	if _, err := logs.GlogSetter(kubectlcmd.GetLogVerbosity(os.Args)); err != nil {
		fmt.Fprintln(os.Stderr, "kubectl:", err)
		return 1
	}
	if err := cli.RunNoErrOutput(kubectlcmd.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err) // prints in kubectl's way and exits
	}
	return 0
}

func helm() int {
	helmkube.ManagedFieldsManager = "helm"
	command, err := helmcmd.NewRootCmd(os.Stdout, os.Args[1:], helmcmd.SetupLogging)
	if err != nil {
		fmt.Fprintln(os.Stderr, "helm:", err)
		return 1
	}
	if err := command.Execute(); err != nil {
		if failed, ok := errors.AsType[helmcmd.CommandError](err); ok {
			return failed.ExitCode
		}
		return 1
	}
	return 0
}

func etcd() int {
	etcdmain.Main(os.Args)
	return 0
}

func coredns() int {
	coremain.Run()
	return 0
}
