package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/simgpu/simgpu/placement/shadow"
)

func newPlaceCommand() *cobra.Command {
	var manifests []string
	var order, output string
	cmd := &cobra.Command{
		Use:   "place -f FILE",
		Short: "Find out where claims would land, without touching anything",
		Long: `Takes claims, pods, Deployments, StatefulSets, Jobs and LLMInferenceServices from manifests and places them one
after the other with the scheduler's own allocator, beside what is allocated in the cluster (or in files). Shows where
each would land, which would not and why, and what is left: counters, and the largest device that still fits.

Nodes are tried by name; the scheduler may prefer another of several that fit. Nothing is written.

The exit code is 0 if all find devices, 1 if some do not.`,
		Example: `  simgpuctl place -f deployment.yaml -n team-a
  simgpuctl render --model h100-sxm5-80gb -o yaml > slices.yaml
  simgpuctl place -f claims.yaml --slices slices.yaml --classes classes.yaml --order largest-first`,
		Args: cobra.NoArgs,
	}
	read := snapshotFlags(cmd.Flags())
	cmd.Flags().StringSliceVarP(&manifests, "filename", "f", nil, "files with what is to be placed; - is standard input")
	cmd.Flags().StringVar(&order, "order", string(shadow.AsListed), "as-listed, largest-first or smallest-first")
	outputFlag(cmd, &output)
	_ = cmd.MarkFlagRequired("filename")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch shadow.Order(order) {
		case shadow.AsListed, shadow.LargestFirst, shadow.SmallestFirst:
		default:
			return fmt.Errorf("--order %q is not known: use %s, %s or %s", order, shadow.AsListed, shadow.LargestFirst, shadow.SmallestFirst)
		}
		snapshot, namespace, err := read(cmd.Context())
		if err != nil {
			return err
		}
		units, skipped, err := shadow.ReadUnits(snapshot, namespace, manifests...)
		if err != nil {
			return err
		}
		if len(skipped) > 0 {
			fmt.Fprintln(cmd.ErrOrStderr(), "without claims, skipped:", strings.Join(skipped, ", "))
		}
		if len(units) == 0 {
			return errors.New("the files have no claims, and nothing that has claims")
		}
		report, err := shadow.Resolve(cmd.Context(), snapshot, units, shadow.Order(order))
		if err != nil {
			return err
		}
		if err := printAs(cmd.OutOrStdout(), output, report, func(w io.Writer) error { return printReport(w, report) }); err != nil {
			return err
		}
		if missing := len(report.Results) - report.Placed; missing > 0 {
			return fmt.Errorf("%d of %d find no devices", missing, len(report.Results))
		}
		return nil
	}
	return cmd
}

func printReport(w io.Writer, report *shadow.Report) error {
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "NAME\tNODE\tDEVICES")
	for _, result := range report.Results {
		if result.Node == "" {
			fmt.Fprintf(table, "%s\t-\t%s\n", result.Name, result.Why)
			continue
		}
		fmt.Fprintf(table, "%s\t%s\t%s\n", result.Name, result.Node, strings.Join(result.Devices, ","))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\n%d of %d find devices. What is left, before and after:\n\n", report.Placed, len(report.Results))
	table = tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "POOL\tSET\tMEMORY FREE\tCOMPUTE FREE\tLARGEST THAT FITS\tBEFORE\tAFTER")
	for i, after := range report.After {
		before := report.Before[i]
		if len(after.Sets) == 0 {
			fmt.Fprintf(table, "%s\t-\t-\t-\t-\t%d of %d devices\t%d of %d devices\n", after.Pool, before.DevicesFree, before.Devices, after.DevicesFree, after.Devices)
		}
		for j, set := range after.Sets {
			was := before.Sets[j]
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", after.Pool, set.Name, change(was, set, "memory"), change(was, set, "multiprocessors"),
				arrow(orNone(was.Largest), orNone(set.Largest)), units(was.Units), units(set.Units))
		}
	}
	return table.Flush()
}

// change of a counter.
func change(before, after shadow.Set, counter string) string {
	if _, found := after.Counters[counter]; !found {
		return "-"
	}
	return arrow(before.Counters[counter].Free, after.Counters[counter].Free)
}

func arrow(before, after string) string {
	if before == after {
		return after
	}
	return before + " -> " + after
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// units draws numbered counters, such as the memory slices of a GPU: # in use, . free.
func units(free []bool) string {
	if len(free) == 0 {
		return "-"
	}
	var b strings.Builder
	b.WriteByte('[')
	for _, f := range free {
		if f {
			b.WriteByte('.')
		} else {
			b.WriteByte('#')
		}
	}
	b.WriteByte(']')
	return b.String()
}
