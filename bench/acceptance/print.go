package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

var printers = map[string]func(io.Writer, *report) error{"table": printTable, "json": printJSON}

func printJSON(w io.Writer, r *report) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(r)
}

func printTable(w io.Writer, r *report) error {
	c := r.Config
	fmt.Fprintf(w, "%s, %d GPUs, %d streams of %d claims per row, seed %d\n", c.Model, c.GPUs, c.Seeds, c.Claims, c.Seed)
	for _, name := range r.Policies {
		if same, ok := r.Same[name]; ok {
			fmt.Fprintf(w, "%s lists the devices of each kind in the same order as %s: one replay serves both.\n", name, same)
		}
	}
	const gain = "in percent; then points more than %s on the same streams, ± 95 %% confidence\n"
	fmt.Fprintf(w, "\nClaims accepted, "+gain, r.Policies[0])
	printCells(w, r.Large, r.Policies, func(c cell) map[string]figure { return c.Acceptance })
	fmt.Fprintf(w, "\nCompute accepted, "+gain, r.Policies[0])
	printCells(w, r.Large, r.Policies, func(c cell) map[string]figure { return c.Compute })
	fmt.Fprint(w, "\nSlices written per accepted claim, to change the order\n")
	printWrites(w, r.Large, r.Policies)

	if len(r.Small) > 0 {
		names := append(slices.Clone(r.Policies), repacking, offline)
		fmt.Fprintf(w, "\nOne GPU, %d streams of %d claims per row: claims accepted, "+gain, c.Seeds, c.SmallClaims, r.Policies[0])
		printCells(w, r.Small, names, func(c cell) map[string]figure { return c.Acceptance })
		fmt.Fprintf(w, "\nOne GPU: compute accepted, "+gain, r.Policies[0])
		printCells(w, r.Small, names, func(c cell) map[string]figure { return c.Compute })
		if r.Skipped > 0 {
			fmt.Fprintf(w, "%d streams are left out: trying everything would have taken too long.\n", r.Skipped)
		}
	}
	if len(r.Timing) > 0 {
		printTiming(w, r)
	}
	return nil
}

func printCells(w io.Writer, cells []cell, names []string, figures func(cell) map[string]figure) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "mix\tload\t%s\t\n", strings.Join(names, "\t"))
	for _, c := range cells {
		fmt.Fprintf(t, "%s\t%g\t", c.Mix, c.Load)
		for i, name := range names {
			if f := figures(c)[name]; i == 0 {
				fmt.Fprintf(t, "%.1f\t", f.Mean)
			} else {
				fmt.Fprintf(t, "%+.2f ±%.2f\t", math.Round(f.Gain*100)/100+0, f.GainCI)
			}
		}
		fmt.Fprintln(t)
	}
	t.Flush()
}

func printWrites(w io.Writer, cells []cell, names []string) {
	names = slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		return !slices.ContainsFunc(cells, func(c cell) bool { return c.Writes[name] > 0 })
	})
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "mix\tload\t%s\t\n", strings.Join(names, "\t"))
	for _, c := range cells {
		fmt.Fprintf(t, "%s\t%g\t", c.Mix, c.Load)
		for _, name := range names {
			fmt.Fprintf(t, "%.2f\t", c.Writes[name])
		}
		fmt.Fprintln(t)
	}
	t.Flush()
}

func printTiming(w io.Writer, r *report) {
	base := r.Timing[0].First
	fmt.Fprintf(w, "\nTime of the allocator for one claim for the smallest partition, as a multiple of the first (%s, median of %d)\n", base.Round(time.Microsecond), r.Config.Times)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "order\tGPUs\tfits the first\tfits the last\tfits none\t")
	for _, m := range r.Timing {
		fmt.Fprintf(t, "%s\t%d\t", m.Order, m.GPUs)
		for _, d := range []time.Duration{m.First, m.Last, m.None} {
			fmt.Fprintf(t, "%.1f\t", float64(d)/float64(base))
		}
		fmt.Fprintln(t)
	}
	t.Flush()
}
