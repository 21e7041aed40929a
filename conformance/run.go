package conformance

import (
	"cmp"
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
	"sync"
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
	// Nodes is on how many nodes checks are made side by side, each with a driver of its own on this machine; 0 is one.
	Nodes int
	// Cycles is how often load/cycles prepares and unprepares a claim; 0 is 200.
	Cycles int
	// Slices is a file that the ResourceSlices of the first node that is ready are written to, as JSON; "": none is.
	Slices string
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

	if opts.Log != nil {
		opts.Log = &locked{to: opts.Log}
	}

	start := time.Now()
	fmt.Fprintln(opts.Progress, "Starting etcd and the API server")
	c, err := startCluster(ctx, opts.Dir, min(max(opts.Nodes, 1), len(checks)), command, opts)
	if err != nil {
		return nil, err
	}
	defer c.stop()
	report := &Report{}
	report.Results, err = c.runAll(ctx, checks, opts)
	report.Driver, report.Duration = c.testbeds[0].vars.DriverName, time.Since(start)
	if asked, failed := c.testbeds[0].asked(); failed == nil {
		report.Rights = rights(opts.Roles, asked)
	} else {
		err = errors.Join(err, failed)
	}
	if version := kubernetesVersion(); version != nil {
		report.Kubernetes = version.GitVersion
	}
	return report, err
}

// runAll runs the checks on all nodes, each on the next that is free. The results are in the order of the checks, and
// those that were made even if there is an error.
func (c *cluster) runAll(ctx context.Context, checks []Check, opts Options) ([]Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var runners []*runner
	for _, bed := range c.testbeds {
		runners = append(runners, &runner{bed: bed, opts: opts, fresh: true})
	}
	results := make([]*Result, len(checks))
	var mu sync.Mutex // guards what is told, and how much is done
	done := 0
	tell := func(check Check, outcome string) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case outcome == "" && len(runners) == 1:
			fmt.Fprintf(opts.Progress, "[%d/%d] %s ", done+1, len(checks), check.Name)
		case outcome != "" && len(runners) == 1:
			done++
			fmt.Fprintln(opts.Progress, outcome)
		case outcome != "":
			done++
			fmt.Fprintf(opts.Progress, "[%d/%d] %s %s\n", done, len(checks), check.Name, outcome)
		}
	}
	for _, turn := range turns(checks, len(runners)) {
		next := make(chan int, len(turn))
		for _, i := range turn {
			next <- i
		}
		close(next)
		var nodes sync.WaitGroup
		for _, r := range runners {
			nodes.Go(func() {
				for i := range next {
					if ctx.Err() != nil {
						return
					}
					tell(checks[i], "")
					result, err := r.run(ctx, checks[i])
					if err != nil {
						cancel(err)
						return
					}
					results[i] = &result
					tell(checks[i], fmt.Sprintf("%s (%.1fs)", result.Outcome, result.Duration.Seconds()))
				}
			})
		}
		nodes.Wait()
	}
	var made []Result
	for _, result := range results {
		if result != nil {
			made = append(made, *result)
		}
	}
	return made, context.Cause(ctx)
}

// turns is in which order the checks are begun, by their index: as they are, but with several nodes those first that take
// long, so that the others do not wait for them in the end. What is last is a turn of its own.
func turns(checks []Check, nodes int) [2][]int {
	var turns [2][]int
	for i, check := range checks {
		if check.last {
			turns[1] = append(turns[1], i)
		} else {
			turns[0] = append(turns[0], i)
		}
	}
	if nodes > 1 {
		slices.SortStableFunc(turns[0], func(a, b int) int { return cmp.Compare(checks[b].takes, checks[a].takes) })
	}
	return turns
}

// locked is a writer for several at a time.
type locked struct {
	mu sync.Mutex
	to io.Writer
}

// Write implements [io.Writer].
func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.to.Write(p)
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
	return r.bed.keepSlices(ctx)
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
