package hardware

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/simgpu/simgpu/driver/inventory"
)

func sharing(group inventory.GPUGroup, shares string) inventory.GPUGroup {
	group.ConsumableShares = shares
	return group
}

// TestConsumableShares has the policies of the vendor's driver for each way to share.
func TestConsumableShares(t *testing.T) {
	type policy struct{ value, byDefault, first, last, step string }
	for name, test := range map[string]struct {
		group  inventory.GPUGroup
		device string
		memory policy
		shares *policy
	}{
		"memory of a whole GPU":        {sharing(disabled("h100-sxm5-80gb", 1), "memory"), "gpu-0", policy{"81559Mi", "81559Mi", "1Mi", "81559Mi", "1Mi"}, nil},
		"memory of a GPU beside parts": {sharing(dynamic("h100-sxm5-80gb", 1), "memory"), "gpu-0", policy{"81152Mi", "81152Mi", "1Mi", "81152Mi", "1Mi"}, nil},
		"memory of a partition":        {sharing(dynamic("h100-sxm5-80gb", 1), "memory"), "gpu-0-mig-3g40gb-9-4", policy{"40448Mi", "40448Mi", "1Mi", "40448Mi", "1Mi"}, nil},
		"unlimited":                    {sharing(disabled("h100-sxm5-80gb", 1), "unlimited"), "gpu-0", policy{"81559Mi", "0", "0", "81559Mi", "1Mi"}, nil},
		"a number":                     {sharing(disabled("h100-sxm5-80gb", 1), "4"), "gpu-0", policy{"81559Mi", "0", "0", "81559Mi", "1Mi"}, &policy{"4", "1", "1", "4", "1"}},
	} {
		t.Run(name, func(t *testing.T) {
			d := device(t, newNode(t, catalogue(t), test.group), test.device)
			if !d.Shared() {
				t.Error("does not allow multiple allocations")
			}
			check := func(name string, want policy) {
				c := d.Published.Capacity[resourceapi.QualifiedName(name)]
				if c.RequestPolicy == nil {
					t.Fatalf("capacity %s has no policy", name)
				}
				r := c.RequestPolicy
				got := policy{c.Value.String(), r.Default.String(), r.ValidRange.Min.String(), r.ValidRange.Max.String(), r.ValidRange.Step.String()}
				if got != want {
					t.Errorf("capacity %s: %v, want %v", name, got, want)
				}
			}
			check("memory", test.memory)
			if test.shares != nil {
				check("shares", *test.shares)
			} else if _, has := d.Published.Capacity["shares"]; has {
				t.Error("publishes shares")
			}
		})
	}
	if d := device(t, newNode(t, catalogue(t), disabled("h100-sxm5-80gb", 1)), "gpu-0"); d.Shared() || d.Published.Capacity["memory"].RequestPolicy != nil {
		t.Error("shared without being asked to")
	}
}

func TestMemoryOfAShare(t *testing.T) {
	d := device(t, newNode(t, catalogue(t), sharing(dynamic("h100-sxm5-80gb", 1), "memory")), "gpu-0")
	for consumed, want := range map[string]int64{"20Gi": 20480, "1Mi": 1, "81152Mi": 81559, "0": 81559} {
		if got := d.ShareMiB(map[string]resource.Quantity{"memory": resource.MustParse(consumed)}); got != want {
			t.Errorf("a share of %s can use %d MiB, want %d", consumed, got, want)
		}
	}
	if got := d.ShareMiB(nil); got != 81559 {
		t.Errorf("a claim of the whole can use %d MiB", got)
	}
}
