// Command simgpu-kubelet-plugin is the node driver: it publishes the simulated GPUs of a node and
// prepares the claims that are allocated from them. Package driver does the work.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/driver"
	"github.com/simgpu/simgpu/profiles"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := newCommand(os.Getenv, runDriver).ExecuteContext(ctx)
	stop()
	klog.Flush()
	if err != nil {
		fmt.Fprintf(os.Stderr, "simgpu-kubelet-plugin: %v\n", err)
		os.Exit(1)
	}
}

// config is what the command line says.
type config struct {
	driver     driver.Options
	kubeconfig string
	logging    *logsapi.LoggingConfiguration
}

func newCommand(getenv func(string) string, run func(context.Context, config) error) *cobra.Command {
	c := config{driver: driver.DefaultOptions(), logging: logsapi.NewLoggingConfiguration()}
	c.driver.Tools = []string{"nvidia-smi", "simgpu-run"}
	cmd := &cobra.Command{
		Use:           "simgpu-kubelet-plugin --inventory FILE [flags]",
		Short:         "Publish simulated GPUs of this node and prepare the claims for them",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), c) },
	}
	c.addFlags(cmd.Flags(), getenv)
	cmd.AddCommand(newInUseCommand())
	cmd.CompletionOptions.DisableDefaultCmd = true
	return cmd
}

func (c *config) addFlags(flags *pflag.FlagSet, getenv func(string) string) {
	o := &c.driver
	flags.StringVar(&o.NodeName, "node-name", getenv("NODE_NAME"), "name of this node [NODE_NAME]")
	flags.StringVar(&o.PodUID, "pod-uid", getenv("POD_UID"), "UID of the pod that this runs in, without which an update interrupts the driver [POD_UID]")
	flags.StringVar(&o.DriverName, "driver-name", "", "DRA driver name (default: that of the GPU vendor)")
	flags.StringVar(&o.InventoryFile, "inventory", "", "NodeInventory file; changes are applied while running")
	flags.StringVar(&o.KubeletPluginsDir, "kubelet-plugins-dir", o.KubeletPluginsDir, "folder in which the kubelet lets plugins keep files")
	flags.StringVar(&o.KubeletRegistrarDir, "kubelet-registrar-dir", o.KubeletRegistrarDir, "folder in which the kubelet looks for plugins")
	flags.StringVar(&o.CDIDir, "cdi-dir", o.CDIDir, "folder in which the container runtime looks for CDI specs")
	flags.StringVar(&o.ToolsDir, "tools-dir", toolsDir(), "folder with the programs that containers get: nvidia-smi and simgpu-run")
	flags.StringVar(&o.HTTPEndpoint, "http-endpoint", o.HTTPEndpoint, "address of /metrics, /healthz and /readyz; empty: none")
	flags.StringVar(&o.DCGMEndpoint, "dcgm-endpoint", o.DCGMEndpoint, "address of the GPUs' own /metrics, as dcgm-exporter names them; empty: none")
	flags.StringVar(&o.PodResourcesSocket, "pod-resources-socket", o.PodResourcesSocket, "socket of the kubelet that tells --dcgm-endpoint which pods use the GPUs, and which of those that the device plugin has given out are free again; empty: that stays unknown")
	flags.StringVar(&o.DevicePluginDir, "device-plugin-dir", o.DevicePluginDir, "the kubelet's folder of device plugins: whole GPUs are given out as --device-plugin-resource, and not to claims; empty: to claims alone")
	flags.StringVar(&o.DevicePluginResource, "device-plugin-resource", o.DevicePluginResource, "extended resource that --device-plugin-dir gives out, or has given out before")
	flags.StringVar((*string)(&o.DeviceOrder), "device-order", string(o.DeviceOrder), "order in which devices are published, of which the scheduler takes the first that fits: "+
		"vendor, as real hardware; packed, those first that rule out fewest others; adaptive, the same for what is in use at the moment")
	flags.DurationVar(&o.DeviceOrderInterval, "device-order-interval", o.DeviceOrderInterval, "least time between two changes of the adaptive order, each of which rewrites one ResourceSlice")
	flags.StringVar(&c.kubeconfig, "kubeconfig", "", "kubeconfig file (default: the service account of the pod)")
	flags.BoolVar(&o.DeviceStatus, "device-status", o.DeviceStatus, "tell in status.devices of claims which devices are prepared")
	flags.DurationVar(&o.AttachDelay, "attach-delay", o.AttachDelay, "publish devices with binding conditions, and say in the status of claims so long after their allocation that the devices are attached; 0: none")
	flags.BoolVar(&o.PartitionTypes, "partition-types", o.PartitionTypes, "alpha, Kubernetes 1.37 with DRAPartitionableDevicesType: publish the attribute by which partitions are counted")
	flags.StringSliceVar(&o.SkipNodeOperations, "skip-node-operations", o.SkipNodeOperations, "alpha, Kubernetes 1.37 with DRAOptionalNodeOperations: calls that the kubelet is not to make: NodePrepareResources, NodeUnprepareResources, *")
	flags.BoolVar(&o.ForceBesideRealGPU, "force-beside-real-gpu", false, "start even where a driver of real GPUs is installed")
	logsapi.AddFlags(c.logging, flags)
}

// toolsDir is where this program is: in the image the tools are beside it.
func toolsDir() string {
	self, err := os.Executable()
	if err != nil {
		return "/usr/bin"
	}
	return filepath.Dir(self)
}

func runDriver(ctx context.Context, c config) error {
	if err := logsapi.ValidateAndApply(c.logging, nil); err != nil {
		return err
	}
	ctx = klog.NewContext(ctx, klog.Background())
	c.driver.APIRequests = driver.NewAPIRequests()
	client, err := newClient(c.kubeconfig, c.driver.APIRequests)
	if err != nil {
		return err
	}
	c.driver.KubeClient = client
	if c.driver.Catalogue, err = profiles.Load(); err != nil {
		return err
	}
	d, err := driver.New(c.driver)
	if err != nil {
		return err
	}
	return d.Run(ctx)
}

func newClient(kubeconfig string, requests *driver.APIRequests) (kubernetes.Interface, error) {
	find := rest.InClusterConfig
	if kubeconfig != "" {
		find = func() (*rest.Config, error) { return clientcmd.BuildConfigFromFlags("", kubeconfig) }
	}
	config, err := find()
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	// Every prepare begins with a request for its claim, and pods come in bursts: a limit here would be one on
	// how fast they start. What the driver asks is bounded by what the kubelet asks of it, and the API server
	// has limits of its own.
	config.QPS = -1
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	rest.AddUserAgent(config, "simgpu-kubelet-plugin")
	config.Wrap(requests.Wrap)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	return client, nil
}
