package profiles

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// wanted reads "3g.40gb@4 1g.10gb".
func wanted(t *testing.T, text string) []Wanted {
	t.Helper()
	var all []Wanted
	for field := range strings.FieldsSeq(text) {
		profile, at, placed := strings.Cut(field, "@")
		want := Wanted{Profile: profile}
		if placed {
			start, err := strconv.Atoi(at)
			if err != nil {
				t.Fatal(err)
			}
			want.Start = &start
		}
		all = append(all, want)
	}
	return all
}

func TestLayout(t *testing.T) {
	for name, test := range map[string]struct{ model, wanted, want string }{
		"nothing":                             {"h100-sxm5-80gb", "", ""},
		"the vendor's order of 1g":            {"a100-40gb", "1g.5gb 1g.5gb 1g.5gb 1g.5gb", "1g.5gb at 0, 1g.5gb at 4, 1g.5gb at 5, 1g.5gb at 6"},
		"the vendor's order of 2g":            {"a100-40gb", "2g.10gb 2g.10gb", "2g.10gb at 0, 2g.10gb at 4"},
		"the vendor's order of 3g":            {"h100-sxm5-80gb", "3g.40gb", "3g.40gb at 4"},
		"seven":                               {"h100-sxm5-80gb", strings.Repeat("1g.10gb ", 7), "1g.10gb at 0, 1g.10gb at 1, 1g.10gb at 2, 1g.10gb at 3, 1g.10gb at 4, 1g.10gb at 5, 1g.10gb at 6"},
		"4g and 3g":                           {"h100-sxm5-80gb", "3g.40gb 4g.40gb", "4g.40gb at 0, 3g.40gb at 4"},
		"what is placed comes first":          {"h100-sxm5-80gb", "1g.10gb 2g.20gb 3g.40gb@4", "1g.10gb at 0, 2g.20gb at 2, 3g.40gb at 4"},
		"earlier ones give way to later ones": {"h100-sxm5-80gb", "2g.20gb 2g.20gb 3g.40gb", "2g.20gb at 0, 2g.20gb at 2, 3g.40gb at 4"},
		"one with media engines":              {"h100-sxm5-80gb", "1g.10gb+me 1g.10gb", "1g.10gb at 4, 1g.10gb+me at 6"},
		"four slices":                         {"a30-24gb", "1g.6gb 2g.12gb 1g.6gb", "1g.6gb at 0, 1g.6gb at 1, 2g.12gb at 2"},
		"twelve slices":                       {"rtx-pro-6000-96gb", "1g.24gb-me 1g.24gb+me.all 2g.48gb-me", "1g.24gb-me at 0, 1g.24gb+me.all at 3, 2g.48gb-me at 6"},
		"what is known is enough":             {"gb200-186gb", "2g.47gb 2g.47gb 2g.47gb 1g.23gb", "2g.47gb at 0, 2g.47gb at 2, 2g.47gb at 4, 1g.23gb at 6"},
	} {
		t.Run(name, func(t *testing.T) {
			partitions, err := table(t, builtIn(t), test.model, "").Layout(wanted(t, test.wanted))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, p := range partitions {
				got = append(got, p.String())
			}
			if diff := cmp.Diff(test.want, strings.Join(got, ", ")); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestImpossibleLayout(t *testing.T) {
	for name, test := range map[string]struct{ model, wanted, want string }{
		"names and starts, all at once": {
			"h100-sxm5-80gb", "3g.41gb 3g.40gb@2 1g.10gb",
			`partition 0: model h100-sxm5-80gb has no profile "3g.41gb" with driver version 580.95.05; it has: 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb` + "\n" +
				"partition 1: 3g.40gb cannot start at memory slice 2; it can at 0, 4",
		},
		"memory slices": {
			"h100-sxm5-80gb", "4g.40gb 3g.40gb 1g.10gb",
			"partition 2: 1g.10gb does not fit beside 4g.40gb at 0, 3g.40gb at 4: at 6, 4, 5 memory slices 4-7 are taken by 3g.40gb at 4; " +
				"at 0, 1, 2, 3 memory slices 0-3 are taken by 4g.40gb at 0. Nothing more fits",
		},
		"placed on each other": {
			"h100-sxm5-80gb", "1g.10gb@5 3g.40gb@4",
			"partition 1: 3g.40gb does not fit beside 1g.10gb at 5: at 4 memory slice 5 is taken by 1g.10gb at 5. " +
				"What fits: 1g.10gb at 0, 1, 2, 3, 4, 6; 1g.10gb+me at 0, 1, 2, 3, 4, 6; 1g.20gb at 0, 2, 6; 2g.20gb at 0, 2; 3g.40gb at 0; 4g.40gb at 0",
		},
		"a counter": {
			"h100-sxm5-80gb", "1g.10gb+me 1g.10gb+me 4g.40gb",
			"partition 1: 1g.10gb+me does not fit beside 1g.10gb+me at 6: at 6 memory slice 6 is taken by 1g.10gb+me at 6; " +
				"at 4, 5, 0, 1, 2, 3 it needs 1 ofaEngines, and 0 of 1 are left. " +
				"What fits: 1g.10gb at 0, 1, 2, 3, 4, 5; 1g.20gb at 0, 2, 4; 2g.20gb at 0, 2, 4; 3g.40gb at 0; 4g.40gb at 0",
		},
		"a counter of another profile": {
			"rtx-pro-6000-96gb", "1g.24gb+me.all 1g.24gb",
			"partition 1: 1g.24gb does not fit beside 1g.24gb+me.all at 0: at 0 memory slices 0-2 are taken by 1g.24gb+me.all at 0; " +
				"at 3, 6, 9 it needs 1 decoders, and 0 of 4 are left. What fits: 1g.24gb-me at 3, 6, 9; 2g.48gb-me at 6",
		},
		"what counters would tell": {
			"gb200-186gb", "1g.23gb+me@0 1g.23gb+me@1",
			"partition 1: 1g.23gb+me does not fit beside 1g.23gb+me at 0: at 1 it would be number 2, and there can be 1. " +
				"What fits: 1g.23gb at 1, 2, 3, 4, 5, 6; 1g.47gb at 2, 4, 6; 2g.47gb at 2, 4",
		},
		"too many": {"a30-24gb", strings.Repeat("1g.6gb ", 5), "partition 4: 1g.6gb is one of 5 partitions, and model a30-24gb can have 4"},
		"figures nobody sourced": {
			"gb200-186gb", "3g.93gb",
			"partition 0: model gb200-186gb cannot have 3g.93gb with driver version 580.95.05, nobody sourced its multiprocessors, copyEngines, decoders, encoders, jpegEngines, ofaEngines, memory",
		},
	} {
		t.Run(name, func(t *testing.T) {
			partitions, err := table(t, builtIn(t), test.model, "").Layout(wanted(t, test.wanted))
			var layoutErr *LayoutError
			if !errors.As(err, &layoutErr) || partitions != nil {
				t.Fatalf("got %v, %v", partitions, err)
			}
			if diff := cmp.Diff(test.want, err.Error()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
	if _, err := table(t, builtIn(t), "l4-24gb", "").Layout(wanted(t, "1g.6gb")); err == nil || err.Error() != "model l4-24gb cannot be partitioned" {
		t.Errorf("got error %v", err)
	}
}

// TestPlacementsOfTheVendorsDriver holds what the MIG user guide shows.
func TestPlacementsOfTheVendorsDriver(t *testing.T) {
	for _, model := range []string{"a100-40gb", "h100-sxm5-80gb", "b200-180gb"} {
		table := table(t, builtIn(t), model, "")
		for _, profile := range table.Profiles {
			want := map[int][]int{1: {6, 4, 5, 0, 1, 2, 3}, 4: {4, 0}, 8: {0}}[profile.Size]
			switch {
			case profile.Size == 2 && profile.Slices == 2:
				want = []int{4, 0, 2}
			case profile.Size == 2:
				want = []int{6, 4, 0, 2}
			case profile.Slices == 4:
				want = []int{0}
			}
			if diff := cmp.Diff(want, table.placements(profile)); diff != "" {
				t.Errorf("%s of %s (-want +got):\n%s", profile.Name, model, diff)
			}
		}
	}
}
