// Command acceptance measures what the order in which devices are published is worth: how many claims get
// a device, with kube-scheduler's own allocator, and how long that allocator takes. Package replay says
// what exactly is measured.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := newCommand().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "acceptance: %v\n", err)
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	config, output, quick := defaults(), "table", false
	cmd := &cobra.Command{
		Use:           "acceptance [flags]",
		Short:         "Replay streams of claims through the scheduler's allocator, under each order of devices",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			print := printers[output]
			if print == nil {
				return fmt.Errorf("unknown output %q; known: json, table", output)
			}
			if quick {
				config = config.quick(cmd.Flags().Changed)
			}
			report, err := measure(cmd.Context(), config, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return print(cmd.OutOrStdout(), report)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&config.Model, "model", config.Model, "GPU model")
	flags.IntVar(&config.GPUs, "gpus", config.GPUs, "GPUs of the node")
	flags.Float64SliceVar(&config.Loads, "loads", config.Loads, "compute that claims would keep busy, as a share of the node's")
	flags.IntVar(&config.Claims, "claims", config.Claims, "claims of a stream")
	flags.IntVar(&config.Seeds, "seeds", config.Seeds, "streams of each mix and load; the spread is over them")
	flags.Uint64Var(&config.Seed, "seed", config.Seed, "seed of the first stream; the same one gives the same figures, times apart")
	flags.IntVar(&config.SmallClaims, "small-claims", config.SmallClaims, "claims of a stream for which everything is tried on one GPU; 0 leaves that out")
	flags.IntVar(&config.Times, "times", config.Times, "how often the allocator is timed; 0 leaves that out")
	flags.BoolVar(&quick, "quick", false, "a few seconds' worth, to see that it works: the figures mean little")
	flags.StringVarP(&output, "output", "o", output, "table or json")
	return cmd
}
