package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/simgpu/simgpu/placement/canary"
)

func newCanaryCommand() *cobra.Command {
	var selector, resource, output string
	cmd := &cobra.Command{
		Use:   "canary [-l SELECTOR]",
		Short: "Compare pods that get devices by DRA with those that get them from a device plugin",
		Long: `Shows for the pods of a namespace, by the way in which they get their devices, how many are ready, wait or have failed, and
how long it took to schedule them; and for each node what is left on both ways, with the largest device that still fits.

Which way a pod goes is for its node to say: an extended resource that a DeviceClass stands for is taken from a device plugin
where the node has one, and from DRA elsewhere. A rollout from one to the other, or back, has pods of both for a while.`,
		Example: `  simgpuctl canary -n team-a -l app=server
  simgpuctl canary --resource example.com/gpu -o json`,
		Args: cobra.NoArgs,
	}
	read := snapshotFlags(cmd.Flags())
	cmd.Flags().StringVarP(&selector, "selector", "l", "", "labels of the pods")
	cmd.Flags().StringVar(&resource, "resource", "nvidia.com/gpu", "extended resource that both ways serve")
	outputFlag(cmd, &output)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		wanted, err := labels.Parse(selector)
		if err != nil {
			return fmt.Errorf("--selector %q: %w", selector, err)
		}
		snapshot, namespace, err := read(cmd.Context())
		if err != nil {
			return err
		}
		report := canary.Compare(snapshot, corev1.ResourceName(resource), func(pod *corev1.Pod) bool {
			return (namespace == "" || pod.Namespace == namespace) && wanted.Matches(labels.Set(pod.Labels))
		})
		return printAs(cmd.OutOrStdout(), output, report, func(w io.Writer) error { return printCanary(w, report, resource) })
	}
	return cmd
}

func printCanary(w io.Writer, report canary.Report, resource string) error {
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "PATH\tPODS\tREADY\tPENDING\tFAILED\tRESTARTS\tSCHEDULED AFTER\tAT MOST")
	for _, f := range report.Paths {
		fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%d\t%d\t%v\t%v\n", f.Path, f.Pods, f.Ready, f.Pending, f.Failed, f.Restarts, f.Scheduled, f.Longest)
	}
	if len(report.Paths) == 0 {
		fmt.Fprintln(table, "none\t0\t0\t0\t0\t0\t-\t-")
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	table = tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintf(table, "NODE\tDRA DEVICES FREE\tLARGEST THAT FITS\t%s FREE\n", strings.ToUpper(resource))
	for _, node := range report.Nodes {
		var largest []string
		for _, set := range slices.Sorted(maps.Keys(node.Largest)) {
			largest = append(largest, node.Largest[set])
		}
		slices.Sort(largest)
		fmt.Fprintf(table, "%s\t%d of %d\t%s\t%d of %d\n", node.Name, node.DevicesFree, node.Devices, orNone(strings.Join(largest, ",")), node.PluginFree, node.Plugin)
	}
	return table.Flush()
}
