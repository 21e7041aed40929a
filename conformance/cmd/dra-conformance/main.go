// Command dra-conformance tests a DRA driver against the real API server and the real kubelet code, without a cluster.
// Package conformance does the work.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/conformance"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	cmd := newCommand(os.Stdout, os.Stderr)
	err := cmd.ExecuteContext(ctx)
	stop()
	switch {
	case errors.Is(err, errFailed):
		os.Exit(1)
	case err != nil:
		fmt.Fprintf(os.Stderr, "dra-conformance: %v\n", err)
		os.Exit(2)
	}
}

// errFailed is a driver that fails a MUST check. The report has said so.
var errFailed = errors.New("the driver does not conform")

func newCommand(stdout, stderr io.Writer) *cobra.Command {
	cmd := &cobra.Command{
		Use:           "dra-conformance",
		Short:         "Test a DRA driver against the real kubelet and API server code",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	cmd.AddCommand(newRunCommand(), newListCommand(), newExplainCommand(), newValidateCommand())
	return cmd
}

func newListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List all checks with their level and what they assert",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(table, "CHECK\tLEVEL\tASSERTS")
			for _, check := range conformance.Checks() {
				fmt.Fprintf(table, "%s\t%s\t%s\n", check.Name, check.Level, check.Asserts)
			}
			return table.Flush()
		},
	}
}

func newExplainCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "explain CHECK",
		Short: "Say what a check asserts, where the rule is written and what to do about a failure",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			check, err := conformance.FindCheck(args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s (%s)\n\nAsserts: %s\nSource:  %s\nFix:     %s\n", check.Name, check.Level, check.Asserts, check.Source, check.Fix)
			return err
		},
	}
}

type runFlags struct {
	command, profile, rbac, focus, skip, level string
	junit, json, reportDir                     string
	nodes, cycles                              int
	verbosity                                  int
}

func newRunCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run --driver-command 'TEMPLATE'",
		Short: "Start a driver and test it",
		Long: `Start a driver and test it. Exit code 0: no MUST check failed; 1: one did; 2: the test could not be made.

The driver command is a shell command. These are replaced in it:
  {{.Kubeconfig}}   kubeconfig of the driver, whose token is bound to the node
  {{.NodeName}}     name of the Node
  {{.PluginsDir}}   stands for /var/lib/kubelet/plugins
  {{.PluginDir}}    the driver's folder in it (with driverName in the profile)
  {{.RegistryDir}}  stands for /var/lib/kubelet/plugins_registry
  {{.CDIDir}}       stands for /var/run/cdi
  {{.StateDir}}     a folder for whatever else the driver keeps
  {{.Namespace}}, {{.PodUID}}  of the pod that the driver would run in
NODE_NAME, KUBECONFIG, NAMESPACE and POD_UID are set in its environment.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return run(cmd.Context(), f, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.command, "driver-command", "", "template of the shell command that starts the driver (required)")
	flags.StringVar(&f.profile, "profile", "", "file that says what to know about the driver")
	flags.StringVar(&f.rbac, "rbac", "", "file with the driver's manifest, as rendered: it gets the Roles and ClusterRoles in it instead of all rights")
	flags.StringVar(&f.focus, "focus", "", "run checks with a name that this regular expression matches")
	flags.StringVar(&f.skip, "skip", "", "leave out checks with a name that this regular expression matches")
	flags.StringVar(&f.level, "level", "may", "weakest level of the checks to run: must, should or may")
	flags.IntVar(&f.nodes, "nodes", 1, "make checks on so many nodes side by side; the driver is started once for each, on this machine")
	flags.IntVar(&f.cycles, "cycles", 200, "how often load/cycles prepares and unprepares a claim; thousands show slow leaks")
	flags.StringVar(&f.junit, "junit", "", "write the results to this file as JUnit XML")
	flags.StringVar(&f.json, "json", "", "write the results to this file as JSON")
	flags.StringVar(&f.reportDir, "report-dir", "", "write report.txt, report.json, junit.xml, resourceslices.json, driver.log and kubernetes.log to this folder")
	flags.IntVarP(&f.verbosity, "v", "v", 0, "verbosity of kubernetes.log")
	if err := cmd.MarkFlagRequired("driver-command"); err != nil {
		panic(err)
	}
	return cmd
}

func run(ctx context.Context, f runFlags, stdout, stderr io.Writer) error {
	opts := conformance.Options{DriverCommand: f.command, Nodes: f.nodes, Cycles: f.cycles, Progress: stderr}
	var err error
	if opts.Level, err = conformance.ParseLevel(f.level); err != nil {
		return err
	}
	if f.profile != "" {
		if opts.Profile, err = conformance.ReadProfile(f.profile); err != nil {
			return err
		}
	}
	if f.rbac != "" {
		if opts.Roles, err = conformance.ReadRoles(f.rbac); err != nil {
			return err
		}
	}
	if opts.Focus, err = expression("--focus", f.focus); err != nil {
		return err
	}
	if opts.Skip, err = expression("--skip", f.skip); err != nil {
		return err
	}
	kubernetesLog := io.Discard
	if f.reportDir != "" {
		if err := os.MkdirAll(f.reportDir, 0o755); err != nil {
			return err
		}
		driverLog, err := os.Create(filepath.Join(f.reportDir, "driver.log"))
		if err != nil {
			return err
		}
		defer driverLog.Close()
		opts.Log = driverLog
		file, err := os.Create(filepath.Join(f.reportDir, "kubernetes.log"))
		if err != nil {
			return err
		}
		defer file.Close()
		kubernetesLog = file
		opts.Slices = filepath.Join(f.reportDir, "resourceslices.json")
		f.json = cmp.Or(f.json, filepath.Join(f.reportDir, "report.json"))
		f.junit = cmp.Or(f.junit, filepath.Join(f.reportDir, "junit.xml"))
	}
	if err := redirectLogs(kubernetesLog, f.verbosity); err != nil {
		return err
	}
	report, err := conformance.Run(ctx, opts)
	if report != nil {
		err = errors.Join(err, write(report, f, stdout))
	}
	if err == nil && !report.Conforms() {
		return errFailed
	}
	return err
}

func expression(flag, text string) (*regexp.Regexp, error) {
	if text == "" {
		return nil, nil
	}
	re, err := regexp.Compile(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	return re, nil
}

// redirectLogs keeps what the Kubernetes code says out of the way of the report.
func redirectLogs(to io.Writer, verbosity int) error {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	if err := flags.Parse([]string{"-logtostderr=false", "-alsologtostderr=false", "-stderrthreshold=FATAL", fmt.Sprintf("-v=%d", verbosity)}); err != nil {
		return err
	}
	klog.SetOutput(to)
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	return nil
}

func write(report *conformance.Report, f runFlags, stdout io.Writer) error {
	to := func(file string, write func(io.Writer) error) error {
		if file == "" {
			return nil
		}
		var text strings.Builder
		if err := write(&text); err != nil {
			return err
		}
		return os.WriteFile(file, []byte(text.String()), 0o644)
	}
	var table string
	if f.reportDir != "" {
		table = filepath.Join(f.reportDir, "report.txt")
	}
	return errors.Join(report.WriteTable(stdout), to(table, report.WriteTable), to(f.json, report.WriteJSON), to(f.junit, report.WriteJUnit))
}
