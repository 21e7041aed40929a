package slices

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/simgpu/simgpu/driver/hardware"
)

// indexDigits is how many hexadecimal digits of an index the names of slices begin with, or more where there are more
// slices.
const indexDigits = 5

// Objects returns the ResourceSlices that the node's driver creates for its resources in a cluster that has none of it
// yet, as package resourceslice of k8s.io/dynamic-resource-allocation writes them, in the order of their names. Only the
// reference to the owning Node, whose UID is known in a cluster alone, is not there. The API server appends a
// random suffix to the names.
func Objects(n *hardware.Node, resources resourceslice.DriverResources) []resourceapi.ResourceSlice {
	var objects []resourceapi.ResourceSlice
	for _, name := range slices.Sorted(maps.Keys(resources.Pools)) {
		pool := resources.Pools[name]
		digits := max(indexDigits, len(strconv.FormatInt(int64(len(pool.Slices)-1), 16)))
		for i, slice := range pool.Slices {
			objects = append(objects, resourceapi.ResourceSlice{
				TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"},
				ObjectMeta: metav1.ObjectMeta{GenerateName: fmt.Sprintf("%0*x-%s-%s-", digits, i, n.DriverName, n.Name)},
				Spec: resourceapi.ResourceSliceSpec{
					Driver:                 n.DriverName,
					Pool:                   resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(pool.Slices))},
					NodeName:               &n.Name,
					Devices:                slice.Devices,
					SharedCounters:         slice.SharedCounters,
					PartitionTypeAttribute: slice.PartitionTypeAttribute,
					SkipNodeOperations:     slice.SkipNodeOperations,
				},
			})
		}
	}
	return objects
}
