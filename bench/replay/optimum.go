package replay

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
)

// Repacking accepts each claim with which everything that is held fits on the node somehow.
func (n *Node) Repacking(stream []Claim) Result {
	type held struct {
		until float64
		kind  string
	}
	var holding []held
	var result Result
	for _, claim := range stream {
		holding = slices.DeleteFunc(holding, func(h held) bool { return h.until <= claim.Arrival })
		result.Claims++
		result.Compute += claim.Compute
		kinds := []string{claim.Kind}
		for _, h := range holding {
			kinds = append(kinds, h.kind)
		}
		if !n.fit(kinds) {
			continue
		}
		holding = append(holding, held{claim.Arrival + claim.Stay, claim.Kind})
		result.Accepted++
		result.AcceptedCompute += claim.Compute
	}
	return result
}

// fit is true if devices of these kinds can be in use at once.
func (n *Node) fit(kinds []string) bool {
	kinds = slices.Clone(kinds)
	// Large ones have few places: they go first.
	slices.SortFunc(kinds, func(a, b string) int { return len(n.of(a)) - len(n.of(b)) })
	used := make([]uint64, len(n.GPUs))
	var place func(int) bool
	place = func(i int) bool {
		if i == len(kinds) {
			return true
		}
		for gpu := range used {
			if slices.Contains(used[:gpu], used[gpu]) {
				continue // a GPU like one that has been tried
			}
			for _, device := range n.of(kinds[i]) {
				before := used[gpu]
				if before&(1<<device) != 0 || !n.board.possible(before|1<<device) {
					continue
				}
				used[gpu] |= 1 << device
				if place(i + 1) {
					return true
				}
				used[gpu] = before
			}
		}
		return false
	}
	return place(0)
}

// ErrTooManyCases is returned where trying everything would take too long.
var ErrTooManyCases = errors.New("too many cases to try them all")

// mostCases is how many ways to have placed the claims so far Offline follows at once.
const mostCases = 2_000_000

// Offline returns the best that can be had of a stream on a node with one GPU: the largest number of
// claims, and, counted by itself, the most compute.
func (n *Node) Offline(ctx context.Context, stream []Claim) (Result, error) {
	if len(n.GPUs) != 1 {
		return Result{}, errors.New("the offline optimum is for one GPU")
	}
	result := Result{Claims: len(stream)}
	for _, claim := range stream {
		result.Compute += claim.Compute
	}
	var err error
	if result.Accepted, err = n.offline(ctx, stream, func(Claim) int { return 1 }); err != nil {
		return Result{}, err
	}
	result.AcceptedCompute, err = n.offline(ctx, stream, func(c Claim) int { return c.Compute })
	return result, err
}

// beam is how many ways are followed to find out what is within reach at least.
const beam = 2000

// offline first follows the most promising ways only. That says how much can be refused at most in a
// better one, and leaves few enough to follow them all.
func (n *Node) offline(ctx context.Context, stream []Claim, worth func(Claim) int) (int, error) {
	reached, err := n.follow(ctx, stream, worth, 0, beam)
	if err != nil {
		return 0, err
	}
	best, err := n.follow(ctx, stream, worth, reached+1, 0)
	return max(reached, best), err
}

// follow tries the ways to accept claims and to place them that can be worth so much, or the best so many
// of them after each claim. Two ways that leave the same devices to the same claims differ in their value
// only, and the better one is kept.
func (n *Node) follow(ctx context.Context, stream []Claim, worth func(Claim) int, least, most int) (int, error) {
	// A way is which of the claims that are around has which device: a byte each, in the order of arrival.
	const refused = 0xff
	ways := map[string]int{"": 0}
	rest := 0
	for _, claim := range stream {
		rest += worth(claim)
	}
	var around []Claim
	for _, claim := range stream {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		rest -= worth(claim)
		stays := make([]bool, len(around))
		for i, c := range around {
			stays[i] = c.Arrival+c.Stay > claim.Arrival
		}
		next := map[string]int{}
		for way, value := range ways {
			left := make([]byte, 0, len(way)+1)
			var used uint64
			for i := range len(way) {
				if !stays[i] {
					continue
				}
				left = append(left, way[i])
				if way[i] != refused {
					used |= 1 << way[i]
				}
			}
			keep := func(device byte, value int) {
				if value+rest < least {
					return
				}
				key := string(append(left, device))
				if best, known := next[key]; !known || value > best {
					next[key] = value
				}
			}
			keep(refused, value)
			for _, device := range n.of(claim.Kind) {
				if used&(1<<device) == 0 && n.board.possible(used|1<<device) {
					keep(byte(device), value+worth(claim))
				}
			}
		}
		if len(next) > mostCases {
			return 0, ErrTooManyCases
		}
		ways = next
		if most > 0 && len(ways) > most {
			ways = bestOf(ways, most)
		}
		around = append(slices.DeleteFunc(slices.Clone(around), func(c Claim) bool { return c.Arrival+c.Stay <= claim.Arrival }), claim)
	}
	best := 0
	for _, value := range ways {
		best = max(best, value)
	}
	return best, nil
}

// bestOf returns the ways of the highest value, which ones of equal value does not depend on chance.
func bestOf(ways map[string]int, most int) map[string]int {
	keys := slices.SortedFunc(maps.Keys(ways), func(a, b string) int {
		return cmp.Or(cmp.Compare(ways[b], ways[a]), cmp.Compare(a, b))
	})
	best := map[string]int{}
	for _, key := range keys[:most] {
		best[key] = ways[key]
	}
	return best
}
