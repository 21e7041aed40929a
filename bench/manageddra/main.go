// Command manageddra measures the controller of managed DRA on a real API server, that of the current kubeconfig: for 1, 100
// and 1000 services, how many requests each costs when it is created, when nothing about it has to change, and when its
// request changes, and how long that takes. The controller runs in this program, as managed-dra-controller runs it, so that
// its requests can be counted where they leave it. run.sh brings a cluster up for it.
//
// With --first-token it measures instead how long it takes from the creation of a demo's service to the first token of its
// answer, on a cluster that has the driver and the controller.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/manageddra:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("bench/manageddra", flag.ContinueOnError)
	sizes := flags.String("services", "1,100,1000", "numbers of services")
	workers := flags.Int("clients", 8, "how many requests the users of the services have under way at a time")
	token := flags.String("first-token", "", "manifest of a service: measure the time to its first token instead")
	rounds := flags.Int("rounds", 5, "how often to measure the time to the first token")
	quick := flags.Bool("quick", false, "few services and rounds, for a glance")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *quick {
		*sizes, *rounds = "1,20", 2
	}
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrl.SetLogger(klog.Background())
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	config.QPS, config.Burst = -1, 0 // as managed-dra-controller has it
	if *token != "" {
		return firstToken(ctx, config, *token, *rounds)
	}
	var numbers []int
	for _, field := range strings.Split(*sizes, ",") {
		number, err := strconv.Atoi(strings.TrimSpace(field))
		if err != nil || number < 1 {
			return fmt.Errorf("--services %q: %q is no number of services", *sizes, field)
		}
		numbers = append(numbers, number)
	}
	b, err := newBench(config, *workers)
	if err != nil {
		return err
	}
	table := []row{}
	for _, number := range numbers {
		fmt.Fprintf(os.Stderr, "%s  %d services ...\n", time.Now().Format(time.TimeOnly), number)
		rows, err := b.measure(ctx, number)
		if err != nil {
			return fmt.Errorf("%d services: %w", number, err)
		}
		table = append(table, rows...)
	}
	return printTable(os.Stdout, table)
}
