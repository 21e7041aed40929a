package e2e

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
	driverslices "github.com/simgpu/simgpu/driver/slices"
	"github.com/simgpu/simgpu/e2e/harness"
	"github.com/simgpu/simgpu/profiles"
)

// TestPoolIsWholeOrNothing changes the number of GPUs under a running driver and follows every write of a slice, as a
// scheduler does: whenever the pool looks complete, it is all of one inventory and nothing of another. Each slice is
// written once per change.
func TestPoolIsWholeOrNothing(t *testing.T) {
	states := map[string]string{} // content of the pool -> what it is
	sliceCount := map[int]int{}
	for _, gpus := range []int{1, 2, 9, 64} {
		pool := poolOf(t, gpus)
		sliceCount[gpus] = len(pool)
		states[contentOf(pool)] = fmt.Sprintf("%d GPUs", gpus)
	}
	set := func(ctx context.Context, gpus int) {
		t.Helper()
		if err := suite.InstallChart(ctx, map[string]any{"inventory": map[string]any{"rules": []any{map[string]any{
			"name": "test",
			"gpus": []any{map[string]any{"model": "h100-sxm5-80gb", "count": gpus}},
		}}}}); err != nil {
			t.Fatal(err)
		}
	}
	pool := followPool(t)
	pool.expect(t, states, "1 GPUs")
	t.Cleanup(func() { set(context.WithoutCancel(t.Context()), 1) })
	writes := sliceWrites(t)
	was := 1
	for _, gpus := range []int{9, 64, 2, 1} {
		set(t.Context(), gpus)
		pool.expect(t, states, fmt.Sprintf("%d GPUs", gpus))
		// The driver counts a write when it has the answer, which is later than others see the slice.
		want, now := max(sliceCount[was], sliceCount[gpus]), 0
		suite.Eventually(t, "the driver to count its writes", func(context.Context) error {
			if now = sliceWrites(t); now-writes != want {
				return fmt.Errorf("%d writes from %d GPUs in %d slices to %d in %d, want %d", now-writes, was, sliceCount[was], gpus, sliceCount[gpus], want)
			}
			return nil
		})
		was, writes = gpus, now
	}
}

// poolOf is what a node with that many H100s publishes.
func poolOf(t *testing.T, gpus int) []resourceapi.ResourceSliceSpec {
	t.Helper()
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	name := suite.Cluster.Node(1).Name()
	node, err := hardware.New(hardware.Config{
		NodeName:  name,
		Catalogue: catalogue,
		Groups:    []inventory.GPUGroup{{Model: "h100-sxm5-80gb", Count: gpus, MIGMode: inventory.MIGDynamic}},
	})
	if err != nil {
		t.Fatal(err)
	}
	resources, err := driverslices.Resources(node, driverslices.Split)
	if err != nil {
		t.Fatal(err)
	}
	var pool []resourceapi.ResourceSliceSpec
	for _, slice := range resources.Pools[name].Slices {
		pool = append(pool, resourceapi.ResourceSliceSpec{Devices: slice.Devices, SharedCounters: slice.SharedCounters})
	}
	return pool
}

// contentOf names everything in the slices, in an order of its own.
func contentOf(pool []resourceapi.ResourceSliceSpec) string {
	var names []string
	for _, slice := range pool {
		for _, set := range slice.SharedCounters {
			names = append(names, set.Name)
		}
		for _, device := range slice.Devices {
			names = append(names, device.Name)
		}
	}
	return strings.Join(sorted(names), " ")
}

// followedPool is the pool of the node as a client sees it that watches slices.
type followedPool struct {
	events <-chan watch.Event
	slices map[string]resourceapi.ResourceSliceSpec
}

func followPool(t *testing.T) *followedPool {
	t.Helper()
	client := suite.Client.ResourceV1().ResourceSlices()
	options := metav1.ListOptions{FieldSelector: "spec.driver=" + harness.DriverName + ",spec.nodeName=" + suite.Cluster.Node(1).Name()}
	list, err := client.List(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	p := &followedPool{slices: map[string]resourceapi.ResourceSliceSpec{}}
	for _, slice := range list.Items {
		p.slices[slice.Name] = slice.Spec
	}
	options.ResourceVersion = list.ResourceVersion
	watching, err := client.Watch(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(watching.Stop)
	p.events = watching.ResultChan()
	return p
}

// expect takes one write after the other until the pool is complete and what is wanted. Nothing complete may be in
// neither of the states.
func (p *followedPool) expect(t *testing.T, states map[string]string, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	seen := 0
	for {
		if pool, complete := p.newest(); complete {
			state, known := states[contentOf(pool)]
			if !known {
				t.Fatalf("after %d writes the pool looks complete with %s", seen, contentOf(pool))
			}
			if state == want {
				return
			}
		}
		select {
		case event, open := <-p.events:
			slice, isSlice := event.Object.(*resourceapi.ResourceSlice)
			if !open || !isSlice {
				t.Fatalf("the watch ended with %+v", event)
			}
			seen++
			if event.Type == watch.Deleted {
				delete(p.slices, slice.Name)
			} else {
				p.slices[slice.Name] = slice.Spec
			}
		case <-ctx.Done():
			t.Fatalf("no complete pool with %s after %d writes in %s", want, seen, harness.Patience)
		}
	}
}

// newest are the slices of the newest generation, and whether they are all that there are.
func (p *followedPool) newest() (pool []resourceapi.ResourceSliceSpec, complete bool) {
	var generation int64
	for _, slice := range p.slices {
		generation = max(generation, slice.Pool.Generation)
	}
	for _, slice := range p.slices {
		if slice.Pool.Generation == generation {
			pool = append(pool, slice)
		}
	}
	return pool, len(pool) > 0 && !slices.ContainsFunc(pool, func(s resourceapi.ResourceSliceSpec) bool {
		return int(s.Pool.ResourceSliceCount) != len(pool)
	})
}

// sliceWrites is how often the driver has written ResourceSlices, dry runs not counted.
func sliceWrites(t *testing.T) int {
	t.Helper()
	page, err := suite.Scrape(t.Context(), t, 8080)
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	for _, found := range regexp.MustCompile(`(?m)^simgpu_api_requests_total\{.*resource="resourceslices",verb="(create|update|delete)"\} (\d+)$`).FindAllStringSubmatch(page, -1) {
		count, err := strconv.Atoi(found[2])
		if err != nil {
			t.Fatal(err)
		}
		total += count
	}
	return total // 0 of a driver that was restarted and found everything as it should be
}
