package driver

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"github.com/simgpu/simgpu/driver/checkpoint"
	"github.com/simgpu/simgpu/driver/order"
	"github.com/simgpu/simgpu/profiles"
)

// Options says on which node, with which files and for which API server a driver works.
type Options struct {
	// NodeName is the name of the Node object. Required.
	NodeName string
	// PodUID is the UID of the pod that the driver runs in, by which two drivers on a node tell themselves
	// apart during an update. "", outside of a cluster: a second driver is not reachable before the first
	// has ended.
	PodUID string
	// DriverName is the DRA driver name; "" is the name of the catalogue's only vendor.
	DriverName string
	// InventoryFile is the path of the NodeInventory. Required.
	InventoryFile string
	// KubeletPluginsDir is the folder in which the driver makes its own.
	KubeletPluginsDir string
	// KubeletRegistrarDir is the folder that the kubelet watches for plugins. It must exist.
	KubeletRegistrarDir string
	// CDIDir is where the container runtime looks for CDI specs.
	CDIDir string
	// ToolsDir holds the programs named in Tools.
	ToolsDir string
	// Tools are the programs that containers find in /usr/bin.
	Tools []string
	// HTTPEndpoint serves /metrics, /healthz and /readyz; "" serves nothing, port 0 is any free port.
	HTTPEndpoint string
	// DCGMEndpoint serves the metrics of the GPUs as dcgm-exporter does, at /metrics; "" serves nothing.
	DCGMEndpoint string
	// PodResourcesSocket is the kubelet's socket that tells which pods use the GPUs. Without it metrics do not name pods, and GPUs
	// that the device plugin has given out never come back to claims.
	PodResourcesSocket string
	// DevicePluginDir is the kubelet's folder of device plugins. If it is set, whole GPUs are given out as the extended
	// resource DevicePluginResource, and not to claims; "" gives out nothing so.
	DevicePluginDir string
	// DevicePluginResource is the extended resource that GPUs are given out as, or have been before. Required for DevicePluginDir.
	DevicePluginResource string
	// APIRequests are exported with the metrics, if set. The caller has them count what KubeClient does.
	APIRequests *APIRequests
	// DeviceStatus has the driver tell in the status of claims which devices it has prepared.
	DeviceStatus bool
	// AttachDelay is how long after its allocation a device is attached to the node, which the scheduler waits
	// for before it binds the pod; 0: all devices are there.
	AttachDelay time.Duration
	// PartitionTypes has slices name the attribute by which Kubernetes counts partitions, an alpha feature of
	// 1.37 (DRAPartitionableDevicesType).
	PartitionTypes bool
	// SkipNodeOperations are the calls for the node's devices that the kubelet is not to make, an alpha feature
	// of 1.37 (DRAOptionalNodeOperations): NodePrepareResources, NodeUnprepareResources or *. Containers of
	// claims that are not prepared see no device.
	SkipNodeOperations []string
	// ForceBesideRealGPU starts the driver on a node where a driver of real GPUs is installed.
	ForceBesideRealGPU bool
	// DeviceOrder is the order in which devices are published; "" is that of the vendor.
	DeviceOrder order.Order
	// DeviceOrderInterval is the least time between two changes of an order that depends on what is in use.
	// Each rewrites one ResourceSlice.
	DeviceOrderInterval time.Duration
	// Resync is how often claims, orphans and published slices are compared with the API.
	Resync time.Duration

	KubeClient kubernetes.Interface
	Catalogue  *profiles.Catalogue
	// HostRoot is prefixed to the paths under /proc and /dev that describe the node.
	HostRoot string
	// Waypoints, if set, is told about each step that prepare and unprepare have completed.
	Waypoints Waypoints
}

// DefaultOptions returns the options of a node with the usual kubelet paths. What it leaves out is
// required.
func DefaultOptions() Options {
	return Options{
		KubeletPluginsDir:   "/var/lib/kubelet/plugins",
		KubeletRegistrarDir: "/var/lib/kubelet/plugins_registry",
		CDIDir:              "/var/run/cdi",
		HTTPEndpoint:        ":8080",
		DeviceStatus:        true,
		DeviceOrder:         order.Vendor,
		DeviceOrderInterval: time.Second,
		Resync:              5 * time.Minute,
		HostRoot:            "/",
	}
}

// complete checks the options and fills in the driver name. It touches nothing.
func (o *Options) complete() error {
	var errs []error
	if o.KubeClient == nil || o.Catalogue == nil {
		errs = append(errs, errors.New("a Kubernetes client and a catalogue are required"))
	}
	for _, required := range []struct{ name, value string }{
		{"the node name", o.NodeName},
		{"the inventory file", o.InventoryFile},
		{"the kubelet's plugins folder", o.KubeletPluginsDir},
		{"the kubelet's registration folder", o.KubeletRegistrarDir},
		{"the CDI folder", o.CDIDir},
	} {
		if required.value == "" {
			errs = append(errs, fmt.Errorf("%s is required", required.name))
		}
	}
	if o.DeviceOrder == "" {
		o.DeviceOrder = order.Vendor
	}
	if _, err := order.Parse(string(o.DeviceOrder)); err != nil {
		errs = append(errs, err)
	}
	if o.DeviceOrder == order.Adaptive && o.DeviceOrderInterval <= 0 {
		errs = append(errs, fmt.Errorf("the interval of the device order must be positive, not %v", o.DeviceOrderInterval))
	}
	if o.PodUID != "" {
		if err := checkpoint.CheckUID(types.UID(o.PodUID)); err != nil {
			errs = append(errs, fmt.Errorf("the pod's UID: %w", err))
		}
	}
	if problems := validation.IsQualifiedName(o.DevicePluginResource); o.DevicePluginResource != "" && len(problems) > 0 {
		errs = append(errs, fmt.Errorf("the extended resource %q: %s", o.DevicePluginResource, strings.Join(problems, "; ")))
	}
	if o.DevicePluginDir != "" && o.DevicePluginResource == "" {
		errs = append(errs, errors.New("a device plugin needs the name of an extended resource"))
	}
	if o.AttachDelay < 0 {
		errs = append(errs, fmt.Errorf("the time to attach devices must not be negative, and is %v", o.AttachDelay))
	}
	if o.Resync <= 0 {
		errs = append(errs, fmt.Errorf("the resync period must be positive, not %v", o.Resync))
	}
	if o.DriverName == "" && o.Catalogue != nil {
		vendors := o.Catalogue.Vendors()
		if len(vendors) == 1 {
			o.DriverName = vendors[0].DriverName
		} else {
			errs = append(errs, fmt.Errorf("the driver name is required: the catalogue has %d vendors", len(vendors)))
		}
	}
	if problems := validation.IsDNS1123Subdomain(o.DriverName); o.DriverName != "" && len(problems) > 0 {
		errs = append(errs, fmt.Errorf("driver name %q: %s", o.DriverName, strings.Join(problems, "; ")))
	}
	return errors.Join(errs...)
}

// paths are the folders of one driver.
type paths struct {
	plugin, checkpoint, dev, node, tools, metadata, faults string
}

func (o *Options) paths() paths {
	plugin := filepath.Join(o.KubeletPluginsDir, o.DriverName)
	return paths{
		plugin:     plugin,
		checkpoint: filepath.Join(plugin, "checkpoint"),
		dev:        filepath.Join(plugin, "dev"),
		node:       filepath.Join(plugin, "node"),
		tools:      filepath.Join(plugin, "tools"),
		metadata:   filepath.Join(plugin, "dra-device-metadata"),
		faults:     filepath.Join(plugin, "faults.json"),
	}
}
