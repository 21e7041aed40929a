// Package app is the command line of simgpu-cluster: one file per group of commands, all work done by package cluster.
package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/simgpu/simgpu/e2e/cluster"
)

// Streams are where a command reads and writes. Progress and errors go to Err, results to Out.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// Run executes the command line and returns the exit code.
func Run(ctx context.Context, args []string, streams Streams) int {
	command := root(streams)
	command.SetArgs(args)
	err := command.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if ended, ok := errors.AsType[*endedError](err); ok {
		return ended.code
	}
	fmt.Fprintln(streams.Err, "Error:", err)
	return 1
}

// endedError is the end of a command that was run on behalf of the caller and has said itself what is wrong.
type endedError struct{ code int }

func (e *endedError) Error() string {
	return fmt.Sprintf("the command ended with exit code %d", e.code)
}

// options are those that every command has.
type options struct {
	Streams
	dirs cluster.Dirs
	name string
}

func root(streams Streams) *cobra.Command {
	o := &options{Streams: streams}
	command := &cobra.Command{
		Use:   "simgpu-cluster",
		Short: "Real Kubernetes clusters on one machine, without Docker and without an image registry",
		Long: `simgpu-cluster runs Kubernetes on this machine from its own Go modules: etcd, API server, controller manager,
scheduler, kubelet, kube-proxy, CoreDNS and containerd. Each node is a set of namespaces, so that a cluster changes
nothing on the machine, and down leaves nothing behind. It needs root.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			work, err := os.Getwd()
			if err != nil {
				return err
			}
			dirs, err := cluster.DefaultDirs(os.Getenv, work)
			if err != nil {
				return err
			}
			if o.dirs.Source != "" {
				dirs.Source = o.dirs.Source
			}
			o.dirs = dirs
			return nil
		},
	}
	command.SetOut(streams.Out)
	command.SetErr(streams.Err)
	command.SetIn(streams.In)
	command.PersistentFlags().StringVar(&o.name, "name", cluster.DefaultName, "name of the cluster")
	command.PersistentFlags().StringVar(&o.dirs.Source, "source", "", "folder of the e2e module in a checkout (default: found from the working directory)")
	command.AddCommand(
		upCommand(o), downCommand(o), statusCommand(o), listCommand(o), buildCommand(o),
		buildImageCommand(o), loadImageCommand(o),
		logsCommand(o), execCommand(o), kubeconfigCommand(o), envCommand(o),
		startCommand(o), stopCommand(o), restartCommand(o), rebootCommand(o),
	)
	return command
}

// cluster finds the cluster that the command is about.
func (o *options) cluster() (*cluster.Cluster, error) {
	c, err := cluster.Open(o.dirs, o.name)
	if !errors.Is(err, cluster.ErrNotFound) {
		return c, err
	}
	names, listErr := cluster.List(o.dirs)
	if listErr != nil || len(names) == 0 {
		return nil, fmt.Errorf("%w; `simgpu-cluster up` makes one", err)
	}
	return nil, fmt.Errorf("%w; there are: %s (choose with --name)", err, strings.Join(names, ", "))
}

// node finds a node of the cluster.
func (o *options) node(name string) (*cluster.Node, error) {
	c, err := o.cluster()
	if err != nil {
		return nil, err
	}
	return c.NodeByName(name)
}
