// Command driver measures the node driver: what a claim costs beside the least that it could cost, what a
// start costs, and what it needs while nothing happens. It builds simgpu-kubelet-plugin and runs it as it
// is, on real files and sockets; the kubelet is this program, and the API server one in memory, reached
// over HTTP.
//
// The floor of a claim is two atomic, synced replacements of a file (one to say what is going to be done,
// one to say that it is), by the same code and on the same disk as the driver's, with as many at a time,
// and one read of a claim from the API server.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	draapi "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/simgpu/simgpu/driver/faults"
	"github.com/simgpu/simgpu/internal/durable"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench/driver:", err)
		os.Exit(1)
	}
}

type bench struct {
	out     io.Writer
	program string
	dir     string // on the disk to measure
	cdiDir  string
	api     *apiServer
	client  kubernetes.Interface
	idle    time.Duration
	rounds  func(concurrent int) int
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("bench/driver", flag.ContinueOnError)
	dir := flags.String("dir", os.TempDir(), "folder on the disk to measure")
	memory := flags.String("memory-dir", "/dev/shm", "folder in memory for the CDI specs, as /var/run/cdi is on a node; empty: they are on the disk, too")
	idle := flags.Duration("idle", 20*time.Second, "how long to watch an idle driver")
	quick := flags.Bool("quick", false, "few rounds, for a glance")
	if err := flags.Parse(args); err != nil {
		return err
	}
	b := &bench{out: out, idle: *idle, rounds: func(concurrent int) int { return max(5, 100/concurrent) }}
	if *quick {
		b.idle, b.rounds = min(b.idle, 2*time.Second), func(concurrent int) int { return max(2, 10/concurrent) }
	}
	if b.dir, err = os.MkdirTemp(*dir, "simgpu-bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	b.cdiDir = filepath.Join(b.dir, "cdi")
	if *memory != "" {
		if b.cdiDir, err = os.MkdirTemp(*memory, "simgpu-bench-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(b.cdiDir)) }()
	}
	b.program = filepath.Join(b.dir, "simgpu-kubelet-plugin")
	build := exec.CommandContext(ctx, "go", "build", "-o", b.program, "github.com/simgpu/simgpu/cmd/simgpu-kubelet-plugin")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("build the driver: %w", err)
	}
	if err := b.sizes(ctx); err != nil {
		return err
	}
	return b.claims(ctx)
}

// reset makes a new API server with the node in it.
func (b *bench) reset() error {
	if b.api != nil {
		b.api.CloseClientConnections()
		b.api.Close()
	}
	b.api = startAPIServer()
	b.api.put("nodes", simulatedNode(nil))
	var err error
	b.client, err = kubernetes.NewForConfig(&rest.Config{Host: b.api.URL, QPS: -1})
	return err
}

func simulatedNode(annotations map[string]string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node-uid", Annotations: annotations}}
}

// fault breaks GPU 0 and returns how long it takes until the API shows that.
func (b *bench) fault(ctx context.Context) (time.Duration, error) {
	begin := time.Now()
	b.api.put("nodes", simulatedNode(map[string]string{faults.Annotation: "{apiVersion: simgpu.dev/v1alpha1, kind: NodeFaults, faults: [{id: one, device: gpu-0, type: XID, xid: 79}]}"}))
	for time.Since(begin) < time.Minute {
		for _, slice := range b.api.slices() {
			if slices.ContainsFunc(slice.Spec.Devices, func(d resourceapi.Device) bool { return len(d.Taints) > 0 }) {
				return time.Since(begin), nil
			}
		}
		if err := pass(ctx, 5*time.Millisecond); err != nil {
			return 0, err
		}
	}
	return 0, errors.New("no device is tainted a minute after a fault")
}

// pass lets time go by.
func pass(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// sizes measures start and idleness at several numbers of GPUs.
func (b *bench) sizes(ctx context.Context) error {
	fmt.Fprintf(b.out, "Start and idle (%v), by number of GPUs\n\n", b.idle)
	fmt.Fprintln(b.out, "| GPUs | devices | slices | ready after | API writes (requests) at start | CPU at start | RSS idle (peak) MiB | API writes idle | CPU idle | fault shown after | API writes for it |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|---|---|---|---|")
	for _, gpus := range []int{1, 8, 64} {
		if err := b.size(ctx, gpus); err != nil {
			return fmt.Errorf("%d GPUs: %w", gpus, err)
		}
	}
	fmt.Fprintln(b.out)
	return nil
}

func (b *bench) size(ctx context.Context, gpus int) (err error) {
	if err := b.reset(); err != nil {
		return err
	}
	n, err := startNode(ctx, b.program, filepath.Join(b.dir, fmt.Sprint(gpus)), b.cdiDir, b.api, gpus)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.stop()) }()
	writes, all, err1 := n.requests()
	cpu, err2 := n.cpu()
	if err := pass(ctx, b.idle); err != nil {
		return err
	}
	writesIdle, _, err3 := n.requests()
	cpuIdle, err4 := n.cpu()
	rss, peak, err5 := n.rss()
	shown, err6 := b.fault(ctx)
	if err := pass(ctx, 2*time.Second); err != nil { // for all else that follows
		return err
	}
	writesFault, _, err7 := n.requests()
	if err := errors.Join(err1, err2, err3, err4, err5, err6, err7); err != nil {
		return err
	}
	devices := 0
	for _, s := range b.api.slices() {
		devices += len(s.Spec.Devices)
	}
	fmt.Fprintf(b.out, "| %d | %d | %d | %v | %d (%d) | %v | %.0f (%.0f) | %d | %.2f %% | %v | %d |\n", gpus, devices, len(b.api.slices()),
		n.ready.Round(time.Millisecond), writes, all, cpu, rss, peak, writesIdle-writes, 100*(cpuIdle-cpu).Seconds()/b.idle.Seconds(), shown.Round(time.Millisecond), writesFault-writesIdle)
	return nil
}

// claims measures prepare and unprepare.
func (b *bench) claims(ctx context.Context) (err error) {
	if err := b.reset(); err != nil {
		return err
	}
	const gpus = 160 // 7 partitions each
	n, err := startNode(ctx, b.program, filepath.Join(b.dir, "claims"), b.cdiDir, b.api, gpus)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.stop()) }()
	claims, err := b.allocate(1100)
	if err != nil {
		return err
	}
	fmt.Fprintf(b.out, "Claims, each for a 1g.10gb of one of %d H100; times are medians, per claim\n\n", gpus)
	fmt.Fprintln(b.out, "| prepared already | at a time | two file writes | API read | floor | prepare | of floor | unprepare | prepares/s | of floor | unprepares/s | CPU of the driver for both |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|---|---|---|---|---|")
	prepared := 0
	for _, want := range []int{0, 100, 1000} {
		for ; prepared < want; prepared += 50 {
			if _, err := each(claims[prepared:min(prepared+50, want)], func(c *resourceapi.ResourceClaim) error { return n.prepare(ctx, c) }); err != nil {
				return err
			}
		}
		for _, concurrent := range []int{1, 10, 100} {
			if err := b.level(ctx, n, want, claims[1000:1000+concurrent]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) level(ctx context.Context, n *node, prepared int, claims []*resourceapi.ResourceClaim) error {
	writes, read, prepare, unprepare := &series{}, &series{}, &series{}, &series{}
	files := filepath.Join(b.dir, "floor")
	if err := os.MkdirAll(files, 0o755); err != nil {
		return err
	}
	record := make([]byte, 1024) // the size of a checkpoint
	before, err := n.cpu()
	if err != nil {
		return err
	}
	// In turns, so that whatever else the machine does meets all of them.
	for range b.rounds(len(claims)) {
		for _, step := range []struct {
			into *series
			do   func(*resourceapi.ResourceClaim) error
		}{
			{writes, func(c *resourceapi.ResourceClaim) error {
				path := filepath.Join(files, string(c.UID))
				return errors.Join(durable.WriteFile(path, record, 0o600, nil), durable.WriteFile(path, record, 0o600, nil))
			}},
			{read, func(c *resourceapi.ResourceClaim) error {
				_, err := b.client.ResourceV1().ResourceClaims(c.Namespace).Get(ctx, c.Name, metav1.GetOptions{})
				return err
			}},
			{prepare, func(c *resourceapi.ResourceClaim) error { return n.prepare(ctx, c) }},
			{unprepare, func(c *resourceapi.ResourceClaim) error { return n.unprepare(ctx, c) }},
		} {
			round, err := each(claims, step.do)
			if err != nil {
				return err
			}
			step.into.add(round)
		}
	}
	after, err := n.cpu()
	if err != nil {
		return err
	}
	floor := writes.median() + read.median()
	floorRate := 1 / (1/writes.rate() + 1/read.rate())
	fmt.Fprintf(b.out, "| %d | %d | %s | %s | %s | %s | **%.2f** | %s | %.0f | **%.2f** | %.0f | %s |\n", prepared, len(claims),
		ms(writes.median()), ms(read.median()), ms(floor), ms(prepare.median()), prepare.median().Seconds()/floor.Seconds(), ms(unprepare.median()),
		prepare.rate(), floorRate/prepare.rate(), unprepare.rate(), ms((after-before)/time.Duration(len(prepare.each))))
	return nil
}

// allocate makes claims that have a partition each, as the scheduler leaves them.
func (b *bench) allocate(count int) ([]*resourceapi.ResourceClaim, error) {
	partition := regexp.MustCompile(`^gpu-\d+-mig-1g10gb-\d+-\d+$`)
	var claims []*resourceapi.ResourceClaim
	for _, slice := range b.api.slices() {
		for _, device := range slice.Spec.Devices {
			if !partition.MatchString(device.Name) || len(claims) == count {
				continue
			}
			name := fmt.Sprintf("claim-%d", len(claims))
			claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: name, UID: types.UID("uid-" + name)}}
			claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "mig.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}}}
			claim.Status.Allocation = &resourceapi.AllocationResult{}
			claim.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: driverName, Pool: nodeName, Device: device.Name}}
			b.api.put("resourceclaims", claim)
			claims = append(claims, claim)
		}
	}
	if len(claims) < count {
		return nil, fmt.Errorf("%d partitions are published, %d are needed", len(claims), count)
	}
	return claims, nil
}

func (n *node) prepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	response, err := n.claim.NodePrepareResources(ctx, &draapi.NodePrepareResourcesRequest{Claims: []*draapi.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}})
	if err != nil {
		return err
	}
	if answer := response.Claims[string(c.UID)]; answer == nil || answer.Error != "" {
		return fmt.Errorf("prepare %s: %v", c.Name, answer)
	}
	return nil
}

func (n *node) unprepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	response, err := n.claim.NodeUnprepareResources(ctx, &draapi.NodeUnprepareResourcesRequest{Claims: []*draapi.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}})
	if err != nil {
		return err
	}
	if answer := response.Claims[string(c.UID)]; answer == nil || answer.Error != "" {
		return fmt.Errorf("unprepare %s: %v", c.Name, answer)
	}
	return nil
}

// round is the same for several claims at a time.
type round struct {
	each []time.Duration
	all  time.Duration
}

func each(claims []*resourceapi.ResourceClaim, do func(*resourceapi.ResourceClaim) error) (round, error) {
	r := round{each: make([]time.Duration, len(claims))}
	errs := make([]error, len(claims))
	var all sync.WaitGroup
	begin := time.Now()
	for i, c := range claims {
		all.Go(func() {
			start := time.Now()
			errs[i] = do(c)
			r.each[i] = time.Since(start)
		})
	}
	all.Wait()
	r.all = time.Since(begin)
	return r, errors.Join(errs...)
}

type series struct {
	each []time.Duration
	all  time.Duration
}

func (s *series) add(r round) {
	s.each = append(s.each, r.each...)
	s.all += r.all
}

func (s *series) median() time.Duration {
	sorted := slices.Sorted(slices.Values(s.each))
	return sorted[len(sorted)/2]
}

// rate is per second.
func (s *series) rate() float64 { return float64(len(s.each)) / s.all.Seconds() }

func ms(d time.Duration) string { return fmt.Sprintf("%.2f ms", float64(d.Microseconds())/1000) }
