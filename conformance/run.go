package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/simgpu/simgpu/conformance/internal/process"
)

// Options say what to test and how.
type Options struct {
	// DriverCommand starts the driver: a shell command that is a template, see [process.Vars] for the names. Required.
	DriverCommand string
	Profile       Profile
	// Level is the weakest level of the checks that run; "" is May.
	Level Level
	// Focus and Skip pick checks by name; nil is all and none.
	Focus, Skip *regexp.Regexp
	// Roles are what the driver may do; without any it may do everything.
	Roles []rbacv1.ClusterRole
	// Dir is where the node lives; "" is a new folder for temporary files. Keep it short: the driver's sockets are in it.
	Dir string
	// Progress is told what goes on; nil: nobody is.
	Progress io.Writer
	// Log gets the driver's output; nil: nobody does.
	Log io.Writer
}

// selected are the checks that the options pick.
func (o Options) selected() []Check {
	return slices.DeleteFunc(Checks(), func(check Check) bool {
		return !o.Level.includes(check.Level) || o.Focus != nil && !o.Focus.MatchString(check.Name) || o.Skip != nil && o.Skip.MatchString(check.Name)
	})
}

// Run tests a driver. A process can run one test at a time. An error says that the test could not be made; that the driver fails is in the report. Checks that
// were made are in the report in either case.
func Run(ctx context.Context, opts Options) (*Report, error) {
	if opts.Level == "" {
		opts.Level = May
	}
	if opts.Progress == nil {
		opts.Progress = io.Discard
	}
	command, err := process.Parse(opts.DriverCommand)
	if err != nil {
		return nil, fmt.Errorf("driver command: %w", err)
	}
	checks := opts.selected()
	if len(checks) == 0 {
		return nil, errors.New("no check is left to run: see \"dra-conformance list\" for their names")
	}
	if opts.Dir == "" {
		if opts.Dir, err = os.MkdirTemp("", "dra"); err != nil {
			return nil, err
		}
		defer os.RemoveAll(opts.Dir)
	}
	if opts.Dir, err = filepath.Abs(opts.Dir); err != nil {
		return nil, err
	}

	start := time.Now()
	fmt.Fprintln(opts.Progress, "Starting etcd and the API server")
	bed, err := startTestbed(ctx, opts.Dir, command, opts)
	if err != nil {
		return nil, err
	}
	defer bed.stop()
	r := &runner{bed: bed, opts: opts, fresh: true}
	report := &Report{}
	for i, check := range checks {
		if err := ctx.Err(); err != nil {
			return report, err
		}
		fmt.Fprintf(opts.Progress, "[%d/%d] %s ", i+1, len(checks), check.Name)
		result, err := r.run(ctx, check)
		if err != nil {
			fmt.Fprintln(opts.Progress)
			return report, err
		}
		fmt.Fprintf(opts.Progress, "%s (%.1fs)\n", result.Outcome, result.Duration.Seconds())
		report.Results = append(report.Results, result)
	}
	report.Driver, report.Duration = bed.vars.DriverName, time.Since(start)
	if version := kubernetesVersion(); version != nil {
		report.Kubernetes = version.GitVersion
	}
	return report, nil
}

// runner runs one check after the other.
type runner struct {
	bed  *testbed
	opts Options
	// fresh is true if the node has to be made anew before the next check.
	fresh bool
}

func (r *runner) run(ctx context.Context, check Check) (Result, error) {
	start := time.Now()
	t := &T{testbed: r.bed, ctx: ctx, profile: r.opts.Profile, started: start}
	if err := r.setUp(ctx); err != nil {
		if _, starts := errors.AsType[*startError](err); !starts {
			return Result{}, err
		}
		t.Errorf("%v", err)
		r.fresh = true
	} else {
		r.call(t, check)
		if err := r.tearDown(ctx, t); err != nil {
			return Result{}, err
		}
	}
	result := Result{Check: check.Name, Level: check.Level, Outcome: Passed, Messages: t.messages, Notes: t.notes, Duration: time.Since(start)}
	known := slices.IndexFunc(r.opts.Profile.KnownFailures, func(k KnownFailure) bool { return k.Check == check.Name })
	switch {
	case t.skipped:
		result.Outcome = Skipped
	case len(t.messages) > 0 && known >= 0:
		result.Outcome = Known
		result.Messages = append([]string{"known: " + r.opts.Profile.KnownFailures[known].Reason}, t.messages...)
	case len(t.messages) > 0:
		result.Outcome = Failed
	case known >= 0:
		result.Outcome = Fixed
	}
	r.fresh = r.fresh || t.fresh
	if result.Outcome == Failed || result.Outcome == Known {
		result.Evidence = append(t.evidence, r.driverLog(start))
		r.fresh = true
	}
	return result, nil
}

// startError is a driver that does not become ready on an empty node.
type startError struct{ err error }

func (e *startError) Error() string {
	return "the driver does not start on an empty node: " + e.err.Error()
}
func (e *startError) Unwrap() error { return e.err }

// setUp gives the next check a driver that is ready and has prepared nothing.
func (r *runner) setUp(ctx context.Context) error {
	if !r.fresh && r.bed.ready(ctx) == nil {
		return nil
	}
	if err := r.bed.renew(ctx); err != nil {
		return fmt.Errorf("make an empty node: %w", err)
	}
	r.fresh = false
	if err := r.bed.startDriver(); err != nil {
		return fmt.Errorf("start the driver: %w", err)
	}
	if err := eventually(ctx, r.bed.times.patience, func() error { return r.bed.ready(ctx) }); err != nil {
		return &startError{err}
	}
	return nil
}

// call runs the check, and the end of its life.
func (r *runner) call(t *T, check Check) {
	guarded := func(f func()) {
		defer func() {
			if p := recover(); p != nil {
				if _, ok := p.(stopped); !ok {
					t.Errorf("the check itself is broken: %v\n%s", p, debug.Stack())
				}
			}
		}()
		f()
	}
	guarded(func() { check.run(t) })
	for _, f := range slices.Backward(t.cleanup) {
		guarded(f)
	}
}

// tearDown unprepares what the check has left prepared. What cannot be put right makes the node be made anew.
func (r *runner) tearDown(ctx context.Context, t *T) error {
	r.bed.proxy.Recover()
	if len(t.messages) > 0 && !t.skipped {
		return nil // made anew anyway
	}
	claims, err := r.bed.claims(ctx)
	if err != nil {
		return err
	}
	if len(claims) == 0 {
		return nil
	}
	if r.bed.ready(ctx) != nil {
		r.fresh = true
		return nil //nolint:nilerr // the node is made anew
	}
	// Not through the check's own T: what happens here is no evidence.
	end := &T{testbed: r.bed, ctx: ctx}
	r.call(end, Check{run: func(end *T) { end.unprepare(claims...) }})
	r.fresh = len(end.messages) > 0
	return r.bed.deleteClaims(ctx)
}

// driverLog is what the driver has said during the check.
func (r *runner) driverLog(since time.Time) Evidence {
	const most = 200
	e := Evidence{Title: "output of the driver during the check"}
	if r.bed.driver == nil {
		e.Text = "(it is not running)"
		return e
	}
	lines := r.bed.driver.Output(since)
	var text []string
	for _, line := range lines[max(0, len(lines)-most):] {
		text = append(text, line.Time.Format("15:04:05.000")+" "+line.Text)
	}
	if len(lines) > most {
		text = append([]string{fmt.Sprintf("(%d lines before these)", len(lines)-most)}, text...)
	}
	e.Text = strings.Join(text, "\n")
	return e
}
