package app

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/simgpu/simgpu/e2e/cluster"
)

func upCommand(o *options) *cobra.Command {
	config := cluster.Config{}
	var gates, runtimeConfig map[string]string
	command := &cobra.Command{
		Use:   "up",
		Short: "Make a cluster, or start again what does not run in it",
		Long: `Makes the cluster and returns when pods can run. The first time on a machine it builds everything, which takes a
quarter of an hour on two cores; afterwards it takes seconds. For a cluster that exists it starts what does not run.`,
		Args: cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			config.Dirs, config.Name, config.Progress = o.dirs, o.name, o.Err
			config.RuntimeConfig = runtimeConfig
			var err error
			if config.FeatureGates, err = booleans(gates); err != nil {
				return err
			}
			c, err := cluster.Up(command.Context(), config)
			if err != nil {
				return err
			}
			flag := ""
			if c.Name() != cluster.DefaultName {
				flag = " --name " + c.Name()
			}
			fmt.Fprintf(o.Out, "\nUse it:    eval \"$(simgpu-cluster env%s)\"; kubectl get nodes\nRemove it: simgpu-cluster down%s\n", flag, flag)
			return nil
		},
	}
	flags := command.Flags()
	flags.IntVar(&config.Nodes, "nodes", 0, "number of nodes (default 1)")
	flags.StringToStringVar(&gates, gatesFlag, nil, "feature gates of all components (Name=true,...)")
	flags.StringToStringVar(&runtimeConfig, "runtime-config", nil, "API versions to serve or not (resource.k8s.io/v1alpha3=true,...)")
	flags.BoolVar(&config.Retain, "retain", false, "keep what was started when the cluster does not come up, to look into it")
	flags.DurationVar(&config.Timeout, "timeout", cluster.DefaultTimeout, "how long the cluster may take to come up, without building")
	return command
}

func booleans(values map[string]string) (map[string]bool, error) {
	if len(values) == 0 {
		return nil, nil
	}
	parsed := map[string]bool{}
	for name, value := range values {
		on, err := strconv.ParseBool(value)
		if err != nil {
			return nil, fmt.Errorf("feature gate %s=%s: expected true or false", name, value)
		}
		parsed[name] = on
	}
	return parsed, nil
}

func downCommand(o *options) *cobra.Command {
	var all bool
	command := &cobra.Command{
		Use:   "down",
		Short: "End a cluster and remove everything that belongs to it",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			names := []string{o.name}
			if all {
				var err error
				if names, err = cluster.List(o.dirs); err != nil {
					return err
				}
			}
			for _, name := range names {
				start := time.Now()
				c, err := cluster.Open(o.dirs, name)
				if errors.Is(err, cluster.ErrNotFound) {
					fmt.Fprintf(o.Err, "There is no cluster %s.\n", name)
					continue
				} else if err != nil {
					return err
				}
				if err := c.Down(command.Context()); err != nil {
					return err
				}
				fmt.Fprintf(o.Err, "Removed cluster %s in %.1fs.\n", name, time.Since(start).Seconds())
			}
			return nil
		},
	}
	command.Flags().BoolVar(&all, "all", false, "all clusters")
	return command
}

func buildCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "build",
		Short: "Get everything that clusters need, without making one",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			return cluster.Build(command.Context(), cluster.Config{Dirs: o.dirs, Name: o.name, Progress: o.Err})
		},
	}
}

func startCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "start NODE COMPONENT",
		Short: "Start a component of a node that does not run, and wait until it is ready",
		Args:  cobra.ExactArgs(2),
		RunE: func(command *cobra.Command, args []string) error {
			n, err := o.node(args[0])
			if err != nil {
				return err
			}
			return n.Start(command.Context(), args[1])
		},
	}
}

func stopCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "stop NODE COMPONENT",
		Short: "End a component of a node",
		Args:  cobra.ExactArgs(2),
		RunE: func(command *cobra.Command, args []string) error {
			n, err := o.node(args[0])
			if err != nil {
				return err
			}
			return n.Stop(command.Context(), args[1])
		},
	}
}

func restartCommand(o *options) *cobra.Command {
	var gates map[string]string
	command := &cobra.Command{
		Use:   "restart NODE COMPONENT",
		Short: "End and start a component of a node, and wait until it is ready",
		Args:  cobra.ExactArgs(2),
		RunE: func(command *cobra.Command, args []string) error {
			changed, err := booleans(gates)
			if err != nil {
				return err
			}
			n, err := o.node(args[0])
			if err != nil {
				return err
			}
			if !command.Flags().Changed(gatesFlag) {
				return n.Restart(command.Context(), args[1])
			}
			return n.RestartWith(command.Context(), args[1], changed)
		},
	}
	command.Flags().StringToStringVar(&gates, gatesFlag, nil,
		"feature gates that the component has from now on beside those of the cluster (Name=false,...; empty: no others)")
	return command
}

const gatesFlag = "feature-gates"

func rebootCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "reboot NODE",
		Short: "Do to a node what switching it off and on does: its processes, containers and /run are gone, its disk stays",
		Args:  cobra.ExactArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			n, err := o.node(args[0])
			if err != nil {
				return err
			}
			return n.Reboot(command.Context())
		},
	}
}
