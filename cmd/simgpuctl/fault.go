package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"github.com/simgpu/simgpu/driver/faults"
	"github.com/simgpu/simgpu/profiles"
)

// newFaultCommand is "simgpuctl fault".
func newFaultCommand(connect connector) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "fault",
		Short: "Break simulated devices, and mend them again",
		Long: `Faults are kept in the annotation ` + faults.Annotation + ` of a Node, from where the node's driver takes them at
once. They show where those of real devices show: as taints of devices in ResourceSlices, as unhealthy devices in
the status of pods, in nvidia-smi, in metrics and in Events on the Node. Faults of prepare and unprepare make the
kubelet wait, try again or meet a driver that crashes.

Needs the right to get and patch nodes; to list resourceslices as well for devices to be checked.`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	client := connect(cmd.PersistentFlags())
	cmd.AddCommand(newFaultAddCommand(client), newFaultListCommand(client), newFaultClearCommand(client))
	return cmd
}

// faultFlags are the flags of "fault add".
type faultFlags struct {
	devices                      []string
	xids                         []int
	correctable, uncorrectable   int64
	lost                         bool
	effect                       string
	failPrepare, hangPrepare     bool
	failUnprepare, hangUnprepare bool
	slowPrepare, slowUnprepare   time.Duration
	times                        int64
	crashAt                      string
	output                       string
}

func newFaultAddCommand(client func() (kubernetes.Interface, error)) *cobra.Command {
	var f faultFlags
	cmd := &cobra.Command{
		Use:   "add NODE [--device DEVICE]... FAULT...",
		Short: "Add faults to devices of a node",
		Long: `Adds faults to the devices of a node that --device names, or to all of them. A GPU stands for itself and all its
partitions. Several faults in one command take effect together.`,
		Example: `  # A GPU falls off the bus: nobody new gets it, and nvidia-smi and what holds its memory fail
  simgpuctl fault add node-1 --device gpu-0 --xid 79 --lost

  # The same, and pods that use the GPU are evicted
  simgpuctl fault add node-1 --device gpu-0 --xid 79 --lost --effect NoExecute

  # The next two prepares on the node fail, then all is well
  simgpuctl fault add node-1 --fail-prepare --times 2

  # Prepares of one partition hang until the fault is cleared
  simgpuctl fault add node-1 --device gpu-0-mig-3g40gb-9-0 --hang-prepare

  # The driver crashes once in the middle of a prepare
  simgpuctl fault add node-1 --crash-at SpecWritten`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			list, err := f.faults(time.Now())
			if err != nil {
				return err
			}
			if err := checkOutput(f.output); err != nil {
				return err
			}
			c, err := client()
			if err != nil {
				return err
			}
			return addFaults(cmd.Context(), c, args[0], f.devices, list, f.output, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringSliceVar(&f.devices, "device", nil, "name of a GPU (gpu-0) or of one partition; may be repeated (default: all devices of the node)")
	flags.IntSliceVar(&f.xids, "xid", nil, "error code of the GPU's kernel module, such as 79; may be repeated")
	flags.BoolVar(&f.lost, "lost", false, "the GPU does not answer any more")
	flags.Int64Var(&f.correctable, "ecc-correctable", 0, "number of memory errors that were corrected")
	flags.Int64Var(&f.uncorrectable, "ecc-uncorrectable", 0, "number of memory errors that were not corrected")
	flags.StringVar(&f.effect, "effect", "", "effect of the device taint: NoSchedule, NoExecute or None (default: what the vendor's driver does)")
	flags.BoolVar(&f.failPrepare, "fail-prepare", false, "preparing a claim fails")
	flags.BoolVar(&f.hangPrepare, "hang-prepare", false, "preparing a claim hangs until the fault is cleared or the kubelet gives up")
	flags.DurationVar(&f.slowPrepare, "slow-prepare", 0, "preparing a claim takes that much longer, such as 5s")
	flags.BoolVar(&f.failUnprepare, "fail-unprepare", false, "unpreparing a claim fails")
	flags.BoolVar(&f.hangUnprepare, "hang-unprepare", false, "unpreparing a claim hangs until the fault is cleared or the kubelet gives up")
	flags.DurationVar(&f.slowUnprepare, "slow-unprepare", 0, "unpreparing a claim takes that much longer")
	flags.Int64Var(&f.times, "times", 0, "how often preparing or unpreparing fails, hangs or is slow (default: until the fault is cleared)")
	flags.StringVar(&f.crashAt, "crash-at", "", "the driver crashes, once, at this step: "+strings.Join(faults.Steps(), ", "))
	flags.StringVarP(&f.output, "output", "o", "", "json or yaml: print the faults added")
	return cmd
}

// faults returns what the flags ask for, per device.
func (f *faultFlags) faults(now time.Time) ([]faults.Fault, error) {
	var list []faults.Fault
	ofDevice := func(fault faults.Fault) {
		fault.Effect = resourceapi.DeviceTaintEffect(f.effect)
		list = append(list, fault)
	}
	for _, xid := range f.xids {
		ofDevice(faults.Fault{Type: faults.XID, XID: xid})
	}
	if f.correctable != 0 || f.uncorrectable != 0 {
		ofDevice(faults.Fault{Type: faults.ECC, Correctable: f.correctable, Uncorrectable: f.uncorrectable})
	}
	if f.lost {
		ofDevice(faults.Fault{Type: faults.GPULost})
	}
	if f.effect != "" && len(list) == 0 {
		return nil, errors.New("--effect needs a fault that makes a taint: --xid, --lost, --ecc-correctable or --ecc-uncorrectable")
	}
	operations := 0
	for _, o := range []struct {
		asked bool
		fault faults.Fault
	}{
		{f.slowPrepare != 0, faults.Fault{Type: faults.SlowPrepare, Delay: f.slowPrepare}},
		{f.hangPrepare, faults.Fault{Type: faults.HangPrepare}},
		{f.failPrepare, faults.Fault{Type: faults.FailPrepare}},
		{f.slowUnprepare != 0, faults.Fault{Type: faults.SlowUnprepare, Delay: f.slowUnprepare}},
		{f.hangUnprepare, faults.Fault{Type: faults.HangUnprepare}},
		{f.failUnprepare, faults.Fault{Type: faults.FailUnprepare}},
	} {
		if o.asked {
			operations++
			o.fault.Times = f.times
			list = append(list, o.fault)
		}
	}
	if f.times != 0 && operations == 0 {
		return nil, errors.New("--times needs a fault of prepare or unprepare: --fail-prepare, --hang-prepare, --slow-prepare or their like for unprepare")
	}
	if f.crashAt != "" {
		list = append(list, faults.Fault{Type: faults.Crash, At: f.crashAt})
	}
	if len(list) == 0 {
		return nil, errors.New("no fault is given: --xid 79, --lost, --fail-prepare, ...; see --help")
	}

	var all []faults.Fault
	devices := f.devices
	if len(devices) == 0 {
		devices = []string{""}
	}
	for _, device := range devices {
		for _, fault := range list {
			fault.ID, fault.Device, fault.Created = rand.String(5), device, now.UTC().Truncate(time.Second)
			all = append(all, fault)
		}
	}
	// Found out here, it changes nothing.
	if _, err := faults.Encode(all); err != nil {
		return nil, err
	}
	return all, nil
}

// addFaults adds faults to a node and says so.
func addFaults(ctx context.Context, client kubernetes.Interface, node string, devices []string, added []faults.Fault, output string, stdout, stderr io.Writer) error {
	if err := checkDevices(ctx, client, node, devices, stderr); err != nil {
		return err
	}
	err := editFaults(ctx, client, node, func(list []faults.Fault) ([]faults.Fault, error) {
		for i := range added {
			for slices.ContainsFunc(list, func(f faults.Fault) bool { return f.ID == added[i].ID }) {
				added[i].ID = rand.String(5)
			}
			list = append(list, added[i])
		}
		return list, nil
	})
	if err != nil {
		return err
	}
	if output != "" {
		return writeAs(stdout, output, added)
	}
	words, err := newXIDWords()
	if err != nil {
		return err
	}
	for _, f := range added {
		fmt.Fprintf(stdout, "node/%s: fault %s added: %s on %s\n", node, f.ID, words.describe(f), place(f))
	}
	return nil
}

// checkDevices fails for a device that the node does not have, as far as that can be known.
func checkDevices(ctx context.Context, client kubernetes.Interface, node string, devices []string, stderr io.Writer) error {
	if len(devices) == 0 {
		return nil
	}
	list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorNodeName, node).String(),
	})
	if apierrors.IsForbidden(err) {
		fmt.Fprintf(stderr, "Warning: not checked whether node %s has the device: %v\n", node, err)
		return nil
	}
	if err != nil {
		return err
	}
	var known []string
	for _, slice := range list.Items {
		if ptr.Deref(slice.Spec.NodeName, "") != node {
			continue
		}
		for _, d := range slice.Spec.Devices {
			known = append(known, d.Name)
		}
	}
	if len(known) == 0 {
		fmt.Fprintf(stderr, "Warning: node %s publishes no devices at present\n", node)
		return nil
	}
	slices.Sort(known)
	for _, device := range devices {
		// A GPU that offers only its partitions is not published itself.
		if !slices.ContainsFunc(known, func(k string) bool { return k == device || strings.HasPrefix(k, device+"-") }) {
			return fmt.Errorf("node %s has no device %s; it has %s", node, device, strings.Join(shortened(known), ", "))
		}
	}
	return nil
}

// shortened leaves out what is too much to read.
func shortened(names []string) []string {
	const most = 40
	if len(names) <= most {
		return names
	}
	return append(slices.Clone(names[:most]), fmt.Sprintf("and %d more", len(names)-most))
}

// editFaults changes the faults of a node. Where somebody else changed the Node meanwhile it begins again. Faults
// that cannot be read are not overwritten.
func editFaults(ctx context.Context, client kubernetes.Interface, node string, edit func([]faults.Fault) ([]faults.Fault, error)) error {
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		object, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		before := object.Annotations[faults.Annotation]
		list, err := faultsOf(object)
		if err != nil {
			return err
		}
		if list, err = edit(list); err != nil {
			return err
		}
		after, err := faults.Encode(list)
		if err != nil {
			return err
		}
		if after == before {
			return nil
		}
		var value any = after
		if after == "" {
			value = nil // removes it
		}
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
			"uid": object.UID, "resourceVersion": object.ResourceVersion,
			"annotations": map[string]any{faults.Annotation: value},
		}})
		if err != nil {
			return err
		}
		_, err = client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "simgpuctl"})
		return err
	})
}

func faultsOf(node *corev1.Node) ([]faults.Fault, error) {
	list, err := faults.Decode(node.Annotations[faults.Annotation])
	if err != nil {
		return nil, fmt.Errorf("node %s: %w\nIf nobody needs it, remove it: kubectl annotate node %s %s-", node.Name, err, node.Name, faults.Annotation)
	}
	return list, nil
}

func newFaultListCommand(client func() (kubernetes.Interface, error)) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "list [NODE]",
		Short: "List the faults of a node, or of all nodes",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			c, err := client()
			if err != nil {
				return err
			}
			return listFaults(cmd.Context(), c, args, output, time.Now(), cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "json or yaml (default: a table)")
	return cmd
}

// nodeFaults is a node in the output for programs.
type nodeFaults struct {
	Node   string         `json:"node"`
	Faults []faults.Fault `json:"faults"`
}

func listFaults(ctx context.Context, client kubernetes.Interface, args []string, output string, now time.Time, stdout io.Writer) error {
	var nodes []corev1.Node
	if len(args) == 1 {
		node, err := client.CoreV1().Nodes().Get(ctx, args[0], metav1.GetOptions{})
		if err != nil {
			return err
		}
		nodes = append(nodes, *node)
	} else {
		list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		nodes = list.Items
	}
	slices.SortFunc(nodes, func(a, b corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	broken := []nodeFaults{}
	var errs []error
	for i := range nodes {
		list, err := faultsOf(&nodes[i])
		errs = append(errs, err)
		if len(list) > 0 {
			broken = append(broken, nodeFaults{Node: nodes[i].Name, Faults: list})
		}
	}
	if output != "" {
		errs = append(errs, writeAs(stdout, output, broken))
	} else {
		errs = append(errs, writeFaultTable(stdout, broken, now))
	}
	return errors.Join(errs...)
}

func writeFaultTable(w io.Writer, broken []nodeFaults, now time.Time) error {
	if len(broken) == 0 {
		_, err := fmt.Fprintln(w, "No faults.")
		return err
	}
	words, err := newXIDWords()
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "NODE\tID\tDEVICE\tEFFECT\tAGE\tFAULT")
	for _, node := range broken {
		for _, f := range node.Faults {
			age := "<unknown>"
			if !f.Created.IsZero() {
				age = duration.HumanDuration(now.Sub(f.Created))
			}
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\n", node.Node, f.ID, place(f), words.effect(f), age, words.describe(f))
		}
	}
	return table.Flush()
}

func place(f faults.Fault) string {
	if f.Device == "" {
		return "all devices"
	}
	return f.Device
}

// xidWords knows what the catalogue says of error codes.
type xidWords map[int]profiles.XID

func newXIDWords() (xidWords, error) {
	catalogue, err := profiles.Load()
	if err != nil {
		return nil, err
	}
	words := xidWords{}
	for _, vendor := range catalogue.Vendors() {
		for number, xid := range vendor.Health.XIDs {
			words[number] = xid
		}
	}
	return words, nil
}

// describe names a fault and, of an error code, what is known of it.
func (w xidWords) describe(f faults.Fault) string {
	known, sourced := w[f.XID]
	if f.Type != faults.XID || !sourced {
		return f.String()
	}
	text := fmt.Sprintf("%s: %s", f, known.Meaning)
	if known.Action != "" {
		text += fmt.Sprintf(" (action: %s)", known.Action)
	}
	return text
}

// effect is the effect of the taint that a fault makes, "-" where it makes none.
func (w xidWords) effect(f faults.Fault) string {
	switch {
	case f.Effect != "":
		return string(f.Effect)
	case f.Type == faults.XID && w[f.XID].Application:
		return string(resourceapi.DeviceTaintEffectNone)
	case f.Type == faults.XID, f.Type == faults.GPULost:
		return string(resourceapi.DeviceTaintEffectNoSchedule)
	}
	return "-"
}

func newFaultClearCommand(client func() (kubernetes.Interface, error)) *cobra.Command {
	var devices []string
	cmd := &cobra.Command{
		Use:   "clear NODE [ID]... [--device DEVICE]...",
		Short: "Clear faults of a node",
		Long: `Clears the faults of a node that are named by their ids or were put on the devices given, or all of them. What is
not there is an error, and then nothing is cleared.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := client()
			if err != nil {
				return err
			}
			return clearFaults(cmd.Context(), c, args[0], args[1:], devices, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringSliceVar(&devices, "device", nil, "clear the faults on this device; may be repeated")
	return cmd
}

func clearFaults(ctx context.Context, client kubernetes.Interface, node string, ids, devices []string, stdout io.Writer) error {
	var cleared []faults.Fault
	err := editFaults(ctx, client, node, func(list []faults.Fault) ([]faults.Fault, error) {
		cleared = nil
		for _, id := range ids {
			if !slices.ContainsFunc(list, func(f faults.Fault) bool { return f.ID == id }) {
				return nil, fmt.Errorf("node %s has no fault %s: simgpuctl fault list %s shows which it has", node, id, node)
			}
		}
		for _, device := range devices {
			if !slices.ContainsFunc(list, func(f faults.Fault) bool { return f.Device == device }) {
				return nil, fmt.Errorf("node %s has no fault on device %s: simgpuctl fault list %s shows which it has", node, device, node)
			}
		}
		var kept []faults.Fault
		for _, f := range list {
			if len(ids)+len(devices) == 0 || slices.Contains(ids, f.ID) || f.Device != "" && slices.Contains(devices, f.Device) {
				cleared = append(cleared, f)
			} else {
				kept = append(kept, f)
			}
		}
		return kept, nil
	})
	if err != nil {
		return err
	}
	if len(cleared) == 0 {
		fmt.Fprintf(stdout, "node/%s has no faults\n", node)
	}
	for _, f := range cleared {
		fmt.Fprintf(stdout, "node/%s: fault %s cleared: %s on %s\n", node, f.ID, f, place(f))
	}
	return nil
}

func checkOutput(format string) error {
	if format != "" && format != "json" && format != "yaml" {
		return fmt.Errorf("--output %q is not known: use json or yaml", format)
	}
	return nil
}
