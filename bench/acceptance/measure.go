package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/simgpu/simgpu/bench/replay"
	"github.com/simgpu/simgpu/driver/order"
	"github.com/simgpu/simgpu/profiles"
)

// config says what is measured. It is part of the report.
type config struct {
	Model       string    `json:"model"`
	GPUs        int       `json:"gpus"`
	Loads       []float64 `json:"loads"`
	Claims      int       `json:"claims"`
	Seeds       int       `json:"seeds"`
	Seed        uint64    `json:"seed"`
	SmallClaims int       `json:"smallClaims"`
	Times       int       `json:"times"`
	Timed       []int     `json:"timedGPUs"`
}

func defaults() config {
	return config{
		Model: "h100-sxm5-80gb", GPUs: 4, Loads: []float64{0.7, 1, 1.3}, Claims: 400, Seeds: 8, Seed: 1,
		SmallClaims: 24, Times: 31, Timed: []int{1, 2, 4, 8, 16},
	}
}

// quick makes everything small that no flag has set.
func (c config) quick(set func(flag string) bool) config {
	for flag, shrink := range map[string]func(){
		"gpus":         func() { c.GPUs = 2 },
		"loads":        func() { c.Loads = []float64{1} },
		"claims":       func() { c.Claims = 20 },
		"seeds":        func() { c.Seeds = 2 },
		"small-claims": func() { c.SmallClaims = 8 },
		"times":        func() { c.Times = 3 },
	} {
		if !set(flag) {
			shrink()
		}
	}
	c.Timed = []int{1, 2}
	return c
}

// report is what was found.
type report struct {
	Config   config   `json:"config"`
	Policies []string `json:"policies"`
	// Same are policies that no claim can tell apart, so that one replay serves both.
	Same  map[string]string `json:"same,omitempty"`
	Large []cell            `json:"acceptance"`
	Small []cell            `json:"smallCases,omitempty"`
	// Skipped are small streams for which trying everything would have taken too long.
	Skipped int             `json:"skippedSmallStreams"`
	Timing  []replay.Timing `json:"allocatorTime,omitempty"`
}

// cell is the streams of one mix and load.
type cell struct {
	Mix  string  `json:"mix"`
	Load float64 `json:"load"`
	// Acceptance and Compute are in percent, per policy, of the claims and of the compute asked for.
	Acceptance map[string]figure `json:"acceptance"`
	Compute    map[string]figure `json:"computeAcceptance"`
	// Writes of slices per accepted claim.
	Writes map[string]float64 `json:"writesPerClaim"`

	results []results
	// accepted and compute are the percentages of each stream.
	accepted, compute map[string][]float64
}

// figure is a mean over streams, with the half width of its 95 % confidence interval.
type figure struct {
	Mean float64 `json:"mean"`
	// Gain is by how much it is more than that of the first policy on the same streams.
	Gain   float64 `json:"gain"`
	GainCI float64 `json:"gainCI95"`
}

const (
	repacking = "repacking"
	offline   = "offline"
)

func measure(ctx context.Context, c config, progress io.Writer) (*report, error) {
	if c.Seeds < 2 || c.Claims < 1 || c.GPUs < 1 {
		return nil, fmt.Errorf("%d seeds, %d claims, %d GPUs: at least 2, 1 and 1 are needed", c.Seeds, c.Claims, c.GPUs)
	}
	catalogue, err := profiles.Load()
	if err != nil {
		return nil, err
	}
	r := &report{Config: c, Same: map[string]string{}}
	started := time.Now()
	say := func(format string, args ...any) {
		fmt.Fprintf(progress, "%6s  %s\n", time.Since(started).Round(time.Second), fmt.Sprintf(format, args...))
	}

	node, err := replay.NewNode(catalogue, c.Model, c.GPUs)
	if err != nil {
		return nil, err
	}
	policies := replay.Policies()
	for i, p := range policies {
		r.Policies = append(r.Policies, p.Name)
		for _, earlier := range policies[:i] {
			if node.Same(p, earlier) {
				r.Same[p.Name] = earlier.Name
			}
		}
	}
	var mixes []replay.Mix
	for _, mix := range replay.Mixes() {
		if _, err := node.Stream(mix, 1, 1, 1); err != nil {
			say("left out: %v", err)
			continue
		}
		mixes = append(mixes, mix)
	}
	if len(mixes) == 0 {
		return nil, fmt.Errorf("model %s has not the partitions that any mix asks for", c.Model)
	}
	for _, mix := range mixes {
		for _, load := range c.Loads {
			say("%d GPUs, mix %s, load %g", c.GPUs, mix.Name, load)
			results, err := inParallel(ctx, c.Seeds, func(seed int) (results, error) {
				node, err := replay.NewNode(catalogue, c.Model, c.GPUs)
				if err != nil {
					return nil, err
				}
				stream, err := node.Stream(mix, load, c.Claims, c.Seed+uint64(seed))
				if err != nil {
					return nil, err
				}
				return r.replay(ctx, node, policies, stream)
			})
			if err != nil {
				return nil, err
			}
			cell := cell{Mix: mix.Name, Load: load, results: results}
			r.Large = append(r.Large, cell.summed(r.Policies))
		}
	}
	r.Large = append(r.Large, means(r.Large, r.Policies)...)

	if c.SmallClaims > 0 {
		if err := r.small(ctx, catalogue, mixes, policies, say); err != nil {
			return nil, err
		}
	}
	if c.Times > 0 {
		for _, gpus := range c.Timed {
			say("time of the allocator, %d GPUs", gpus)
			node, err := replay.NewNode(catalogue, c.Model, gpus)
			if err != nil {
				return nil, err
			}
			for _, o := range []order.Order{order.Vendor, order.Adaptive} {
				timing, err := node.Time(ctx, o, c.Times)
				if err != nil {
					return nil, err
				}
				r.Timing = append(r.Timing, timing)
			}
		}
	}
	return r, nil
}

// results are what became of one stream, by policy.
type results map[string]replay.Result

// inParallel returns what became of each stream, in their order, without those of which nothing did.
func inParallel(ctx context.Context, streams int, replay func(seed int) (results, error)) ([]results, error) {
	all, errs := make([]results, streams), make([]error, streams)
	var running sync.WaitGroup
	turn := make(chan struct{}, runtime.NumCPU())
	for seed := range streams {
		running.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			if errs[seed] = ctx.Err(); errs[seed] == nil {
				all[seed], errs[seed] = replay(seed)
			}
		})
	}
	running.Wait()
	return slices.DeleteFunc(all, func(r results) bool { return r == nil }), errors.Join(errs...)
}

// replay returns what each policy makes of a stream.
func (r *report) replay(ctx context.Context, node *replay.Node, policies []replay.Policy, stream []replay.Claim) (results, error) {
	all := results{}
	for _, p := range policies {
		if same, ok := r.Same[p.Name]; ok {
			all[p.Name] = all[same]
			continue
		}
		result, err := node.Replay(ctx, p, stream)
		if err != nil {
			return nil, err
		}
		all[p.Name] = result
	}
	return all, nil
}

// small compares with the optimum, on one GPU.
func (r *report) small(ctx context.Context, catalogue *profiles.Catalogue, mixes []replay.Mix, policies []replay.Policy, say func(string, ...any)) error {
	c := r.Config
	names := append(slices.Clone(r.Policies), repacking, offline)
	for _, mix := range mixes {
		for _, load := range c.Loads {
			say("optimum on one GPU, mix %s, load %g", mix.Name, load)
			found, err := inParallel(ctx, c.Seeds, func(seed int) (results, error) {
				node, err := replay.NewNode(catalogue, c.Model, 1)
				if err != nil {
					return nil, err
				}
				stream, err := node.Stream(mix, load, c.SmallClaims, c.Seed+uint64(seed))
				if err != nil {
					return nil, err
				}
				best, err := node.Offline(ctx, stream)
				if errors.Is(err, replay.ErrTooManyCases) {
					return nil, nil
				}
				if err != nil {
					return nil, err
				}
				all, err := r.replay(ctx, node, policies, stream)
				if err != nil {
					return nil, err
				}
				all[offline], all[repacking] = best, node.Repacking(stream)
				return all, nil
			})
			if err != nil {
				return err
			}
			r.Skipped += c.Seeds - len(found)
			if len(found) > 1 {
				r.Small = append(r.Small, cell{Mix: mix.Name, Load: load, results: found}.summed(names))
			}
		}
	}
	r.Small = append(r.Small, means(r.Small, names)...)
	return nil
}

// summed fills in the figures from the results.
func (c cell) summed(names []string) cell {
	c.Acceptance, c.Compute, c.Writes = map[string]figure{}, map[string]figure{}, map[string]float64{}
	c.accepted, c.compute = map[string][]float64{}, map[string][]float64{}
	for _, name := range names {
		writes, accepted := 0, 0
		for _, results := range c.results {
			r := results[name]
			c.accepted[name] = append(c.accepted[name], r.Acceptance())
			c.compute[name] = append(c.compute[name], r.ComputeAcceptance())
			writes, accepted = writes+r.Writes, accepted+r.Accepted
		}
		c.Writes[name] = float64(writes) / float64(max(accepted, 1))
	}
	c.compare(names)
	return c
}

func (c cell) compare(names []string) {
	for _, name := range names {
		c.Acceptance[name] = figureOf(c.accepted[name], c.accepted[names[0]])
		c.Compute[name] = figureOf(c.compute[name], c.compute[names[0]])
	}
}

// means returns a cell per load that has the means over the mixes, stream by stream.
func means(cells []cell, names []string) []cell {
	var loads []float64
	byLoad := map[float64][]cell{}
	for _, c := range cells {
		if byLoad[c.Load] == nil {
			loads = append(loads, c.Load)
		}
		byLoad[c.Load] = append(byLoad[c.Load], c)
	}
	var all []cell
	for _, load := range loads {
		of := byLoad[load]
		mean := cell{Mix: "mean", Load: load}.summed(names)
		streams := math.MaxInt
		for _, c := range of {
			streams = min(streams, len(c.accepted[names[0]]))
		}
		for _, name := range names {
			mean.accepted[name], mean.compute[name] = make([]float64, streams), make([]float64, streams)
			for _, c := range of {
				for i := range streams {
					mean.accepted[name][i] += c.accepted[name][i] / float64(len(of))
					mean.compute[name][i] += c.compute[name][i] / float64(len(of))
				}
				mean.Writes[name] += c.Writes[name] / float64(len(of))
			}
		}
		mean.compare(names)
		all = append(all, mean)
	}
	return all
}

func figureOf(values, base []float64) figure {
	gains := make([]float64, len(values))
	for i := range values {
		gains[i] = values[i] - base[i]
	}
	mean, _ := spread(values)
	gain, ci := spread(gains)
	return figure{Mean: mean, Gain: gain, GainCI: ci}
}

// spread returns the mean of samples and the half width of its 95 % confidence interval.
func spread(samples []float64) (mean, ci float64) {
	n := float64(len(samples))
	for _, s := range samples {
		mean += s / n
	}
	if n < 2 {
		return mean, 0
	}
	var squares float64
	for _, s := range samples {
		squares += (s - mean) * (s - mean)
	}
	return mean, studentT(len(samples)-1) * math.Sqrt(squares/(n-1)/n)
}

// studentT is the two-sided 95 % quantile of Student's t distribution.
func studentT(freedom int) float64 {
	table := []float64{12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086}
	if freedom <= len(table) {
		return table[freedom-1]
	}
	return 1.96 + 2.4/float64(freedom) // less than 0.01 too much or too little from here on
}
