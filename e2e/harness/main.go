package harness

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/simgpu/simgpu/e2e/cluster"
	"github.com/simgpu/simgpu/e2e/internal/lock"
)

// Config says what cluster the tests of a package need.
type Config struct {
	// Name is what the cluster is called unless the flag -cluster says otherwise.
	Name string
	// Nodes is how many nodes it has. Default: 1.
	Nodes int
	// FeatureGates are set on every Kubernetes component.
	FeatureGates map[string]bool
	// RuntimeConfig serves API versions that are off by default, or the reverse.
	RuntimeConfig map[string]string
	// Images are loaded beside those of the driver and the model server, by the names of their recipes.
	Images []string
	// Values are those of the chart that differ from its defaults.
	Values map[string]any
	// WithoutChart leaves the cluster without the driver. InstallChart installs it.
	WithoutChart bool
}

// Main makes the cluster, has the tests of the package run in it and ends the process. The suite is set before the first
// test. Where no test is to run, as with -list or where -run names tests of other packages, there is no cluster.
func Main(m *testing.M, suite **Suite, config Config) {
	name := flag.String("cluster", config.Name, "name of the local cluster to start")
	retain := flag.Bool("retain", os.Getenv("RETAIN") != "", "leave the cluster up at the end, and start with the one that is there")
	flag.Parse()
	config.Name = *name
	if !testsToRun() {
		os.Exit(m.Run())
	}
	os.Exit(run(m, suite, config, *retain))
}

// testsToRun is false where surely no test of this program is going to run.
func testsToRun() bool {
	if flag.Lookup("test.list").Value.String() != "" {
		return false
	}
	names := flag.Lookup("test.run").Value.String()
	if names == "" {
		return true
	}
	var patterns []string
	for pattern := range strings.SplitSeq(names, "|") {
		if pattern, _, _ = strings.Cut(pattern, "/"); pattern == "" {
			return true
		}
		patterns = append(patterns, pattern)
	}
	// The pattern is not empty, so that the other process comes no further than the first question here.
	out, err := exec.Command(os.Args[0], "-test.list", strings.Join(patterns, "|")).Output()
	// A pattern that cannot be taken apart like this is for the test to judge.
	return err != nil || len(strings.TrimSpace(string(out))) > 0
}

func run(m *testing.M, suite **Suite, config Config, retain bool) int {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	work, err := os.Getwd()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	dirs, err := cluster.DefaultDirs(os.Getenv, work)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	// One run at a time has the cluster of that name.
	alone, err := lock.Acquire(ctx, filepath.Join(dirs.Cache, "tests-"+config.Name+".lock"), func() {
		fmt.Fprintf(os.Stderr, "Waiting for another run of tests on cluster %s\n", config.Name)
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer alone.Release()

	down := func() {
		c, err := cluster.Open(dirs, config.Name)
		if err == nil {
			err = c.Down(context.WithoutCancel(ctx))
		}
		if err != nil && !errors.Is(err, cluster.ErrNotFound) {
			fmt.Fprintln(os.Stderr, "removing the cluster:", err)
		}
	}
	if !retain {
		down() // of a run that was killed
		defer down()
	}
	if *suite, err = start(ctx, dirs, config); err != nil {
		fmt.Fprintln(os.Stderr, "starting the cluster:", err)
		return 1
	}
	return m.Run()
}
