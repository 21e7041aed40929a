package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	kserve "github.com/simgpu/simgpu/manageddra/api"
	"github.com/simgpu/simgpu/placement"
	"github.com/simgpu/simgpu/placement/explain"
)

func newExplainCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "explain pod|claim|llmisvc NAME",
		Short: "Say why a pod, a claim or a service waits for devices, and what to change first",
		Long: `The answer is computed with the scheduler's own allocator from ResourceSlices, DeviceClasses and claims, of any
driver. The table has, per request and node, how many devices each step leaves: class, each CEL expression, taints,
allocations, counters.

With --slices the objects come from files instead of a cluster: YAML or JSON, as kubectl get -o yaml writes them.
Needs the right to list pods, nodes, resourceclaims, resourceclaimtemplates, resourceslices and deviceclasses.

The exit code is 0 if nothing is in the way of the devices, 1 if something is.`,
		Example: `  simgpuctl explain pod qwen-kserve-5f6c9-abcde
  simgpuctl explain llmisvc qwen -n team-a
  simgpuctl explain claim gpu --slices slices.yaml --classes classes.yaml --claims claims.yaml`,
		Args:      cobra.ExactArgs(2),
		ValidArgs: []string{"pod", "claim", "llmisvc"},
	}
	read := snapshotFlags(cmd.Flags())
	outputFlag(cmd, &output)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		snapshot, namespace, err := read(cmd.Context())
		if err != nil {
			return err
		}
		explanations, err := explainObject(cmd.Context(), snapshot, args[0], namespace, args[1])
		if err != nil {
			return err
		}
		err = printAs(cmd.OutOrStdout(), output, explanations, func(w io.Writer) error { return printExplanations(w, explanations) })
		for _, e := range explanations {
			if err == nil && (e.Outcome == explain.Waits || e.Outcome == explain.Broken) {
				err = errors.New("there is something in the way of the devices")
			}
		}
		return err
	}
	return cmd
}

// explainObject explains what was asked for; a service is the pods that it has. Without a namespace, as with files, the
// first object of that name counts.
func explainObject(ctx context.Context, s *placement.Snapshot, kind, namespace, name string) ([]*explain.Explanation, error) {
	here := func(objectNamespace string) bool { return namespace == "" || namespace == objectNamespace }
	var list []*explain.Explanation
	switch kind {
	case "claim", "resourceclaim":
		for _, claim := range s.Claims {
			if claim.Name == name && here(claim.Namespace) {
				e, err := explain.Claim(ctx, s, claim)
				return []*explain.Explanation{e}, err
			}
		}
		return nil, fmt.Errorf("there is no ResourceClaim %q in namespace %q", name, namespace)
	case "pod":
		for _, pod := range s.Pods {
			if pod.Name == name && here(pod.Namespace) {
				e, err := explain.Pod(ctx, s, pod)
				return []*explain.Explanation{e}, err
			}
		}
		return nil, fmt.Errorf("there is no pod %q in namespace %q", name, namespace)
	case "llmisvc", "llminferenceservice":
		for _, pod := range s.Pods {
			if here(pod.Namespace) && pod.Labels[kserve.LabelPartOf] == kserve.PartOf && pod.Labels[kserve.LabelName] == name {
				e, err := explain.Pod(ctx, s, pod)
				if err != nil {
					return nil, err
				}
				list = append(list, e)
			}
		}
		if len(list) == 0 {
			return nil, fmt.Errorf("LLMInferenceService %q in namespace %q has no pods: see kubectl describe llmisvc %s", name, namespace, name)
		}
		return list, nil
	}
	return nil, fmt.Errorf("cannot explain a %q: pod, claim and llmisvc can be", kind)
}

// printExplanations for people: the sentence first, then what it is based on.
func printExplanations(w io.Writer, list []*explain.Explanation) error {
	for i, e := range list {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s %s/%s: %s\n  %s\n", e.Kind, e.Namespace, e.Name, e.Outcome, e.Sentence)
		for _, request := range e.Requests {
			count := fmt.Sprint(request.Count)
			if request.Count == 0 {
				count = "all"
			}
			fmt.Fprintf(w, "\nclaim %s, request %s: %s of class %s; devices left on each node:\n", request.Claim, request.Name, count, request.Class)
			table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
			fmt.Fprint(table, "STEP")
			for _, node := range e.Nodes {
				fmt.Fprint(table, "\t"+node.Name)
			}
			fmt.Fprintln(table)
			for _, step := range request.Steps {
				fmt.Fprint(table, step.Name)
				for _, left := range step.Left {
					fmt.Fprintf(table, "\t%d", left)
				}
				fmt.Fprintln(table)
			}
			if err := table.Flush(); err != nil {
				return err
			}
			for _, step := range request.Steps {
				for _, detail := range step.Details {
					fmt.Fprintf(w, "  %s\n", detail)
				}
			}
		}
		var fits, notes []string
		for _, node := range e.Nodes {
			if node.Fits {
				fits = append(fits, node.Name)
			}
			if node.Note != "" {
				notes = append(notes, node.Name+": "+node.Note)
			}
		}
		if len(e.Nodes) > 0 && e.Outcome != explain.Broken {
			verdict := "on none of these nodes"
			if len(fits) > 0 {
				verdict = "on " + strings.Join(fits, ", ")
			}
			fmt.Fprintf(w, "\nThe scheduler's allocator finds devices %s.\n", verdict)
		}
		for _, note := range notes {
			fmt.Fprintln(w, "  "+note)
		}
	}
	return nil
}
