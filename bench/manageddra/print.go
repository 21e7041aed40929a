package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

func printTable(out io.Writer, rows []row) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "services\tphase\treconciles\treads\twrites\tevents\tmean reconcile\tmedian\t99th of 100\tall\t")
	for _, r := range rows {
		fmt.Fprintf(table, "%d\t%s\t%s\t%s\t%s\t%s\t%v\t%s\t%s\t%s\t\n", r.Services, r.Phase,
			perService(r.Reconciles, r.Services), perService(r.Requests.Reads, r.Services), perService(r.Requests.Writes, r.Services), perService(r.Requests.Events, r.Services),
			r.Mean.Round(10*time.Microsecond), quantile(r.Times, 0.5), quantile(r.Times, 0.99), rounded(r.All))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, "\nReconciles, reads, writes and events are per service; median and 99th of 100: from the user's request until claim template,"+
		"\nDeployment and conditions are as they should be; all: from the first request to the last service.")
	return err
}

func quantile(times []time.Duration, q float64) string {
	if len(times) == 0 {
		return "-"
	}
	sorted := slices.Sorted(slices.Values(times))
	return rounded(sorted[min(len(sorted)-1, int(q*float64(len(sorted))))])
}

func rounded(d time.Duration) string {
	switch {
	case d == 0:
		return "-"
	case d < time.Second:
		return d.Round(100 * time.Microsecond).String()
	default:
		return d.Round(10 * time.Millisecond).String()
	}
}
