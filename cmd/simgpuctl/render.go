package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/version"

	"github.com/simgpu/simgpu/driver/hardware"
	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/driver/order"
	"github.com/simgpu/simgpu/driver/slices"
	"github.com/simgpu/simgpu/profiles"
)

// renderFlags are the flags of "render".
type renderFlags struct {
	model, driverVersion string
	gpus                 int
	mig                  string
	partitions           []string

	inventory  string
	nodeLabels map[string]string

	node, kubernetes, driverName, order string
	output                              string
}

// newRenderCommand is "simgpuctl render".
func newRenderCommand() *cobra.Command {
	var f renderFlags
	cmd := &cobra.Command{
		Use:   "render (--model ID | --inventory FILE)",
		Short: "Print the ResourceSlices that a node would publish",
		Long: `Prints the ResourceSlices that the driver of a node would publish, without a cluster. They are what the driver
creates where nothing is published yet, but for the reference to the Node that owns them, whose UID only a cluster
knows, and the random end of their names, which the API server appends to generateName.

The GPUs are those of --model, or those that an inventory has for the node. What cannot be published is an error that
says why.`,
		Example: `  # Two H100s, as published to Kubernetes 1.35 and later
  simgpuctl render --model h100-sxm5-80gb --gpus 2

  # What an inventory has for a node of that name and with those labels
  simgpuctl render --inventory inventory.yaml --node gpu-1 --node-labels pool=ampere -o table

  # An H100 that is partitioned for good
  simgpuctl render --model h100-sxm5-80gb --mig static --partitions 3g.40gb@4,1g.10gb,1g.10gb -o table`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&f.model, "model", "", "id of the GPU model; \"simgpuctl models\" lists them")
	flags.IntVar(&f.gpus, "gpus", 1, "number of GPUs of the model")
	flags.StringVar(&f.mig, "mig", "", "dynamic, static or disabled (default: dynamic where the model can be partitioned)")
	flags.StringSliceVar(&f.partitions, "partitions", nil, "with --mig static, the partitions of each GPU: profiles, each with or without its first memory slice, as in 3g.40gb@4,1g.10gb")
	flags.StringVar(&f.driverVersion, "driver-version", "", "version of the GPU driver (default: the model's)")
	flags.StringVar(&f.inventory, "inventory", "", "file with a NodeInventory, or - for standard input, in place of --model")
	flags.StringToStringVar(&f.nodeLabels, "node-labels", nil, "labels of the node, by which an inventory may choose, as in pool=ampere,zone=a")
	flags.StringVar(&f.node, "node", "node-1", "name of the node; UUIDs and serial numbers follow from it")
	flags.StringVar(&f.kubernetes, "kubernetes", "1.37", "version of the API server: 1.34 wants another layout than later ones")
	flags.StringVar(&f.driverName, "driver-name", "", "name of the DRA driver (default: the vendor's own)")
	flags.StringVar(&f.order, "device-order", order.Names()[0], "order of the devices: "+strings.Join(order.Names(), ", "))
	flags.StringVarP(&f.output, "output", "o", "yaml", "yaml, json or table")
	return cmd
}

func (f *renderFlags) run(stdout, stderr io.Writer) error {
	if f.output != "yaml" && f.output != "json" && f.output != "table" {
		return fmt.Errorf("--output %q is not known: use yaml, json or table", f.output)
	}
	if err := f.checkNames(); err != nil {
		return err
	}
	node, err := f.hardware()
	if err != nil {
		return err
	}
	objects, err := f.objects(node)
	if err != nil {
		return err
	}
	for _, absent := range hardware.Absent(node.GPUs) {
		fmt.Fprintf(stderr, "Partitions left out, since nobody sourced the %s\n", absent)
	}
	if f.output == "table" {
		return writeSlices(stdout, node, objects)
	}
	// A list of typed slices, but of the kind that kubectl prints and applies.
	return writeAs(stdout, f.output, struct {
		metav1.TypeMeta `json:",inline"`
		Items           []resourceapi.ResourceSlice `json:"items"`
	}{metav1.TypeMeta{APIVersion: "v1", Kind: "List"}, objects})
}

// checkNames refuses names that no node and no driver can have: the API server would take none of its slices.
func (f *renderFlags) checkNames() error {
	if problems := validation.IsDNS1123Subdomain(f.node); len(problems) > 0 {
		return fmt.Errorf("--node %q: %s", f.node, strings.Join(problems, "; "))
	}
	if problems := validation.IsDNS1123Subdomain(f.driverName); f.driverName != "" && len(problems) > 0 {
		return fmt.Errorf("--driver-name %q: %s", f.driverName, strings.Join(problems, "; "))
	}
	return nil
}

// hardware makes the GPUs of the node.
func (f *renderFlags) hardware() (*hardware.Node, error) {
	catalogue, err := profiles.Load()
	if err != nil {
		return nil, err
	}
	groups, err := f.groups(catalogue)
	if err != nil {
		return nil, err
	}
	return hardware.New(hardware.Config{NodeName: f.node, DriverName: f.driverName, Groups: groups, Catalogue: catalogue})
}

// groups are those of an inventory, of which the flags are a short form.
func (f *renderFlags) groups(catalogue *profiles.Catalogue) ([]inventory.GPUGroup, error) {
	switch {
	case f.model == "" && f.inventory == "":
		return nil, errors.New("--model or --inventory is required")
	case f.model != "" && f.inventory != "":
		return nil, errors.New("--model and --inventory exclude each other: an inventory names its models")
	case f.model != "":
		partitions, err := parsePartitions(f.partitions)
		if err != nil {
			return nil, err
		}
		group, err := inventory.Group(catalogue, inventory.GPUGroup{
			Model: f.model, Count: f.gpus, MIGMode: inventory.MIGMode(f.mig), NUMANode: new(int), DriverVersion: f.driverVersion,
		}, partitions...)
		return []inventory.GPUGroup{group}, err
	}
	data, err := readFile(f.inventory)
	if err != nil {
		return nil, err
	}
	all, err := inventory.DecodeWith(catalogue, data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.inventory, err)
	}
	return all.ForNode(f.node, f.nodeLabels)
}

// parsePartitions reads 3g.40gb@4 and 1g.10gb.
func parsePartitions(texts []string) ([]profiles.Wanted, error) {
	var wanted []profiles.Wanted
	for _, text := range texts {
		profile, at, placed := strings.Cut(text, "@")
		want := profiles.Wanted{Profile: profile}
		if placed {
			start, err := strconv.Atoi(at)
			if err != nil {
				return nil, fmt.Errorf("--partitions %q is not a profile, or a profile and its first memory slice as in 3g.40gb@4", text)
			}
			want.Start = &start
		}
		wanted = append(wanted, want)
	}
	return wanted, nil
}

func readFile(name string) ([]byte, error) {
	if name == "-" {
		return io.ReadAll(os.Stdin)
	}
	return os.ReadFile(name)
}

// objects is what the driver publishes of the node while nothing is in use.
func (f *renderFlags) objects(node *hardware.Node) ([]resourceapi.ResourceSlice, error) {
	server, err := parseVersion(f.kubernetes)
	if err != nil {
		return nil, err
	}
	layout, err := slices.LayoutFor(server)
	if err != nil {
		return nil, err
	}
	devices, err := order.Parse(f.order)
	if err != nil {
		return nil, fmt.Errorf("--device-order: %w", err)
	}
	resources, err := order.NewPublisher(devices).Resources(node, layout, nil)
	if err != nil {
		return nil, err
	}
	return slices.Objects(node, resources), nil
}

// parseVersion reads 1.35, v1.35 and v1.35.2 as an API server tells its version.
func parseVersion(text string) (*version.Info, error) {
	major, rest, found := strings.Cut(strings.TrimPrefix(text, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	if !found || major == "" || minor == "" {
		return nil, fmt.Errorf("--kubernetes %q is not a version like 1.35", text)
	}
	return &version.Info{Major: major, Minor: minor}, nil
}

// writeSlices is a row per counter set and device, with all that they have of what the vendor counts.
func writeSlices(w io.Writer, node *hardware.Node, objects []resourceapi.ResourceSlice) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	var countables []profiles.Countable
	if len(node.GPUs) > 0 {
		countables = node.GPUs[0].Model.Vendor.Countables
	}
	header := []string{"SLICE", "NAME", "PROFILE", "PLACEMENT"}
	for _, countable := range countables {
		header = append(header, strings.ToUpper(string(countable.Figure)))
	}
	row := func(cells ...string) { fmt.Fprintln(table, strings.Join(cells, "\t")) }
	row(header...)
	for i, object := range objects {
		if len(object.Spec.SharedCounters)+len(object.Spec.Devices) == 0 {
			row(strconv.Itoa(i), "(no devices)")
		}
		for _, set := range object.Spec.SharedCounters {
			cells := []string{strconv.Itoa(i), set.Name, "-", "-"}
			for _, countable := range countables {
				counter := set.Counters[countable.Counter].Value
				cells = append(cells, counter.String())
			}
			row(cells...)
		}
		for _, published := range object.Spec.Devices {
			cells := []string{strconv.Itoa(i), published.Name, "-", "-"}
			if device, found := node.Device(published.Name); found && device.Partition != nil {
				cells[2], cells[3] = device.Partition.Profile.Name, memorySlices(device.Partition.Start, device.Partition.Profile.Size)
			}
			for _, countable := range countables {
				cell := "-"
				if capacity, found := published.Capacity[resourceapi.QualifiedName(countable.Capacity)]; found {
					cell = capacity.Value.String()
				}
				cells = append(cells, cell)
			}
			row(cells...)
		}
	}
	return table.Flush()
}

// memorySlices is the memory slices from the first to the last.
func memorySlices(start, size int) string {
	if size == 1 {
		return strconv.Itoa(start)
	}
	return fmt.Sprintf("%d-%d", start, start+size-1)
}
