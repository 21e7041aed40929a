package replay

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/simgpu/simgpu/driver/order"
	"github.com/simgpu/simgpu/profiles"
)

const h100 = "h100-sxm5-80gb"

func newNode(t *testing.T, gpus int) *Node {
	t.Helper()
	catalogue, err := profiles.Load()
	if err != nil {
		t.Fatal(err)
	}
	node, err := NewNode(catalogue, h100, gpus)
	if err != nil {
		t.Fatal(err)
	}
	return node
}

func (n *Node) mustStream(t *testing.T, mix Mix, load float64, claims int, seed uint64) []Claim {
	t.Helper()
	stream, err := n.Stream(mix, load, claims, seed)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

// hasty is an adaptive order that a scheduler sees very late.
var hasty = Policy{Name: "adaptive, seen late", Order: order.Adaptive, Lag: 0.5, Interval: 0.6}

// Replay itself fails where something overlaps, or is not what the claim asked for.
func TestNothingOverlapsUnderAnyOrder(t *testing.T) {
	for _, mix := range Mixes() {
		t.Run(mix.Name, func(t *testing.T) {
			t.Parallel()
			node := newNode(t, 2)
			stream := node.mustStream(t, mix, 4, 30, 1)
			for _, policy := range append(Policies(), hasty) {
				first, err := node.Replay(t.Context(), policy, stream)
				if err != nil {
					t.Fatal(err)
				}
				if first.Claims != len(stream) || first.Accepted == 0 || first.Accepted == first.Claims {
					t.Errorf("%s: %+v: the load is meant to be too much for some claims", policy.Name, first)
				}
				if writes := first.Writes > 0; writes != (policy.Order == order.Adaptive) {
					t.Errorf("%s: %d writes", policy.Name, first.Writes)
				}
				second, err := node.Replay(t.Context(), policy, stream)
				if err != nil {
					t.Fatal(err)
				}
				if first != second {
					t.Errorf("%s: %+v, and the second time %+v", policy.Name, first, second)
				}
			}
		})
	}
}

func TestOverlapsAreFound(t *testing.T) {
	node := newNode(t, 1)
	r := &run{node: node, used: make([]uint64, 1)}
	claim := func(kind string) Claim { return Claim{Stay: 1, Kind: kind} }
	if err := r.take(claim("3g"), "gpu-0-mig-3g40gb-9-4"); err != nil {
		t.Fatal(err)
	}
	for device, kind := range map[string]string{"gpu-0-mig-1g10gb-19-5": "1g", "gpu-0-mig-3g40gb-9-4": "3g", "gpu-0": "gpu", "gpu-0-mig-1g10gb-19-0": "2g", "gpu-7": "gpu"} {
		if err := r.take(claim(kind), device); err == nil {
			t.Errorf("a claim for %s could have %s", kind, device)
		}
	}
	if err := r.take(claim("3g"), "gpu-0-mig-3g40gb-9-0"); err != nil {
		t.Error(err)
	}
}

func TestAnEmptyNodeHasRoomForEveryKind(t *testing.T) {
	node := newNode(t, 1)
	for _, policy := range Policies() {
		for _, kind := range []string{"1g", "1g+", "2g", "3g", "4g", "7g", wholeGPU} {
			result, err := node.Replay(t.Context(), policy, []Claim{{Arrival: 1, Stay: 1, Kind: kind, Compute: 1}})
			if err != nil || result.Accepted != 1 {
				t.Errorf("%s, %s: %+v, %v", policy.Name, kind, result, err)
			}
		}
	}
}

func TestStream(t *testing.T) {
	node := newNode(t, 4)
	for _, mix := range Mixes() {
		stream := node.mustStream(t, mix, 0.5, 20000, 3)
		if diff := cmp.Diff(stream, node.mustStream(t, mix, 0.5, 20000, 3)); diff != "" {
			t.Fatalf("another stream for the same seed: %s", diff)
		}
		var offered float64
		count := map[string]float64{}
		for _, c := range stream {
			offered += c.Stay * float64(c.Compute)
			count[c.Kind]++
		}
		load := offered / stream[len(stream)-1].Arrival / float64(4*7)
		if load < 0.47 || load > 0.53 {
			t.Errorf("%s: load %.3f, want 0.5", mix.Name, load)
		}
		var total float64
		for _, w := range mix.Weights {
			total += w
		}
		for kind, w := range mix.Weights {
			if got, want := count[kind]/20000, w/total; got < want-0.02 || got > want+0.02 {
				t.Errorf("%s: %.3f of the claims are for %s, want %.3f", mix.Name, got, kind, want)
			}
		}
	}
	if _, err := node.Stream(Mix{Name: "odd", Weights: map[string]float64{"5g": 1}}, 1, 1, 1); err == nil || !strings.Contains(err.Error(), "no partition 5g") {
		t.Errorf("got %v", err)
	}
}

func TestPackedIsNVIDIAsOrder(t *testing.T) {
	node := newNode(t, 2)
	policies := Policies()
	if !node.Same(policies[1], policies[2]) {
		t.Error("packed and NVIDIA's order differ")
	}
	if node.Same(policies[0], policies[1]) {
		t.Error("the vendor's and NVIDIA's order are the same")
	}
}

func TestOptimum(t *testing.T) {
	node := newNode(t, 1)
	long := func(kind string, at, stay float64) Claim {
		size, err := node.compute(kind)
		if err != nil {
			t.Fatal(err)
		}
		return Claim{Arrival: at, Stay: stay, Kind: kind, Compute: size}
	}
	for name, test := range map[string]struct {
		stream                           []Claim
		vendor, repacking, offline, most int
	}{
		"order matters":                        {[]Claim{long("1g", 1, 9), long("4g", 2, 9)}, 1, 2, 2, 5},
		"refusing one makes room":              {[]Claim{long("7g", 1, 9), long("3g", 2, 9), long("3g", 3, 9)}, 1, 1, 2, 7},
		"what ends makes room":                 {[]Claim{long("7g", 1, 1), long("3g", 3, 9), long("3g", 4, 9)}, 3, 3, 3, 13},
		"two halves and nothing more":          {[]Claim{long("3g", 1, 9), long("3g", 2, 9), long("1g", 3, 9)}, 2, 2, 2, 6},
		"one too many however they are placed": {[]Claim{long("1g", 1, 9), long("1g", 1.1, 9), long("1g", 1.2, 1), long("1g", 1.3, 9), long("3g", 3, 9), long("2g", 4, 9)}, 5, 5, 5, 8},
	} {
		t.Run(name, func(t *testing.T) {
			vendor, err := node.Replay(t.Context(), Policies()[0], test.stream)
			if err != nil {
				t.Fatal(err)
			}
			offline, err := node.Offline(t.Context(), test.stream)
			if err != nil {
				t.Fatal(err)
			}
			got := []int{vendor.Accepted, node.Repacking(test.stream).Accepted, offline.Accepted, offline.AcceptedCompute}
			if want := []int{test.vendor, test.repacking, test.offline, test.most}; !slices.Equal(got, want) {
				t.Errorf("vendor, repacking, offline, most compute: got %v, want %v", got, want)
			}
		})
	}
}

func TestNothingBeatsTheOptimum(t *testing.T) {
	node := newNode(t, 1)
	for seed, mix := range Mixes() {
		stream := node.mustStream(t, mix, 1.2, 16, uint64(seed))
		offline, err := node.Offline(t.Context(), stream)
		if err != nil {
			t.Fatal(err)
		}
		results := map[string]Result{}
		for _, policy := range append(Policies(), hasty) {
			if results[policy.Name], err = node.Replay(t.Context(), policy, stream); err != nil {
				t.Fatal(err)
			}
		}
		for name, r := range results {
			if r.Accepted > offline.Accepted || r.AcceptedCompute > offline.AcceptedCompute {
				t.Errorf("%s, %s: %+v is better than %+v", mix.Name, name, r, offline)
			}
		}
		if repacking := node.Repacking(stream); repacking.Claims != offline.Claims || repacking.Compute != offline.Compute {
			t.Errorf("%s: %+v and %+v", mix.Name, repacking, offline)
		}
	}
}

func TestTime(t *testing.T) {
	timing, err := newNode(t, 2).Time(t.Context(), order.Adaptive, 2)
	if err != nil || timing.First <= 0 || timing.Last <= 0 || timing.None <= 0 {
		t.Errorf("%+v, %v", timing, err)
	}
}
