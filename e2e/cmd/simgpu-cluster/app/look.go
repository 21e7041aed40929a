package app

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/simgpu/simgpu/e2e/cluster"
)

func statusCommand(o *options) *cobra.Command {
	var output string
	command := &cobra.Command{
		Use:   "status",
		Short: "Show every component: state, process, memory",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			c, err := o.cluster()
			if err != nil {
				return err
			}
			statuses, err := c.Status(command.Context())
			if err != nil {
				return err
			}
			switch output {
			case "json":
				encoder := json.NewEncoder(o.Out)
				encoder.SetIndent("", "  ")
				return encoder.Encode(statuses)
			case "":
				return o.printStatus(statuses)
			default:
				return fmt.Errorf("output %q: expected json", output)
			}
		},
	}
	command.Flags().StringVarP(&output, "output", "o", "", "json, or a table when empty")
	return command
}

func (o *options) printStatus(statuses []cluster.ComponentStatus) error {
	table := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NODE\tCOMPONENT\tSTATE\tPID\tRSS\tSTARTS")
	for _, s := range statuses {
		pid, rss := "-", "-"
		if s.PID != 0 {
			pid, rss = fmt.Sprint(s.PID), fmt.Sprintf("%d MiB", s.RSS>>20)
		}
		state := s.State
		if s.Exit != "" {
			state += " (" + s.Exit + ")"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%d\n", s.Node, s.Component, state, pid, rss, s.Starts)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, s := range statuses {
		if len(s.LogTail) > 0 {
			fmt.Fprintf(o.Out, "\nThe end of the log of %s on %s:\n  %s\n", s.Component, s.Node, strings.Join(s.LogTail, "\n  "))
		}
	}
	return nil
}

func listCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "Show the names of all clusters",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			names, err := cluster.List(o.dirs)
			if err != nil {
				return err
			}
			for _, name := range names {
				fmt.Fprintln(o.Out, name)
			}
			return nil
		},
	}
}

func logsCommand(o *options) *cobra.Command {
	var follow bool
	var lines int
	var nodeName string
	command := &cobra.Command{
		Use:   "logs [COMPONENT]",
		Short: "Show the log of a component, or of all components of a node",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			n, err := o.node(nodeName)
			if err != nil {
				return err
			}
			statuses, err := n.Status(command.Context())
			if err != nil {
				return err
			}
			var files, known []string
			for _, s := range statuses {
				known = append(known, s.Component)
				// Of a node that does not run only its first process is known; logs of the others are there all the same.
				if len(args) == 0 || args[0] == s.Component {
					files = append(files, n.LogPath(s.Component))
				}
			}
			if len(args) == 1 && len(files) == 0 {
				if _, err := os.Stat(n.LogPath(args[0])); err != nil {
					return fmt.Errorf("node %s has no component %q; it has %s", n.Name(), args[0], strings.Join(known, ", "))
				}
				files = append(files, n.LogPath(args[0]))
			}
			files = slices.DeleteFunc(files, func(file string) bool { _, err := os.Stat(file); return err != nil })
			if len(files) == 0 {
				return errors.New("nothing has been logged yet")
			}
			tailArgs := []string{fmt.Sprintf("--lines=%d", lines)}
			if lines < 0 {
				tailArgs = []string{"--lines=+1"}
			}
			if follow {
				tailArgs = append(tailArgs, "--follow=name", "--retry")
			}
			tail := exec.CommandContext(command.Context(), "tail", append(tailArgs, files...)...)
			tail.Stdout, tail.Stderr = o.Out, o.Err
			if err := tail.Run(); err != nil && command.Context().Err() == nil {
				return fmt.Errorf("show logs: %w", err)
			}
			return nil
		},
	}
	command.Flags().BoolVarP(&follow, "follow", "f", false, "go on showing what is logged")
	command.Flags().IntVar(&lines, "tail", -1, "show this many lines from the end, all when negative")
	command.Flags().StringVar(&nodeName, "node", "node-1", "the node")
	return command
}

func execCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "exec NODE -- COMMAND [ARGUMENT...]",
		Short: "Run a command in a node",
		Args:  cobra.MinimumNArgs(2),
		RunE: func(command *cobra.Command, args []string) error {
			n, err := o.node(args[0])
			if err != nil {
				return err
			}
			inside, err := n.Command(command.Context(), args[1:]...)
			if err != nil {
				return err
			}
			inside.Stdin, inside.Stdout, inside.Stderr = o.In, o.Out, o.Err
			err = inside.Run()
			if ended, ok := errors.AsType[*exec.ExitError](err); ok && ended.ExitCode() > 0 {
				return &endedError{ended.ExitCode()}
			}
			return err
		},
	}
}

func kubeconfigCommand(o *options) *cobra.Command {
	var path bool
	command := &cobra.Command{
		Use:   "kubeconfig",
		Short: "Print the kubeconfig of the cluster",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			c, err := o.cluster()
			if err != nil {
				return err
			}
			if path {
				fmt.Fprintln(o.Out, c.KubeconfigPath())
				return nil
			}
			content, err := os.ReadFile(c.KubeconfigPath())
			if err != nil {
				return err
			}
			_, err = o.Out.Write(content)
			return err
		},
	}
	command.Flags().BoolVar(&path, "path", false, "print where it is instead")
	return command
}

func envCommand(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "env",
		Short: `Print settings for a shell: eval "$(simgpu-cluster env)"`,
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			c, err := o.cluster()
			if err != nil {
				return err
			}
			fmt.Fprintf(o.Out, "export KUBECONFIG=%s\nexport PATH=%s:\"$PATH\"\n", quote(c.KubeconfigPath()), quote(c.BinDir()))
			return nil
		},
	}
}

// quote makes a word of a shell.
func quote(word string) string { return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'" }
