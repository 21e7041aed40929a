// Command simgpuctl is the people's tool beside the driver: it shows the GPU models that can be simulated, prints what
// a node would publish, puts faults on simulated devices, says why pods wait for
// devices, where claims would land, and how pods fare with DRA and with device plugins. Installed as kubectl-simgpu it is
// "kubectl simgpu".
// Each command is thin: the packages do the work.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	cmd := newCommand(filepath.Base(os.Args[0]), os.Stdout, os.Stderr)
	err := cmd.ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", cmd.Name(), err)
		os.Exit(1)
	}
}

// newCommand returns the command with all its subcommands, under the name by which it was called.
func newCommand(calledAs string, stdout, stderr io.Writer) *cobra.Command {
	cmd := &cobra.Command{
		Use:           "simgpuctl",
		Short:         "Look at simulated GPUs, break them, and see why pods wait for devices",
		Args:          cobra.NoArgs,
		RunE:          showHelp,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	if plugin, isPlugin := strings.CutPrefix(calledAs, "kubectl-"); isPlugin {
		cmd.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl " + plugin}
	}
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	cmd.AddCommand(newModelsCommand(), newModelCommand(), newRenderCommand())
	cmd.AddCommand(newFaultCommand(connectLikeKubectl), newExplainCommand(), newPlaceCommand(), newCanaryCommand())
	return cmd
}

// showHelp is what a command does that only holds others. Without it cobra shows the help for an unknown subcommand too,
// and succeeds.
func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }
