package main

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/simgpu/simgpu/driver/inventory"
	"github.com/simgpu/simgpu/profiles"
)

// modelView is a model as this command shows it. What nobody sourced is absent.
type modelView struct {
	ID                string              `json:"id"`
	ProductName       string              `json:"productName,omitempty"`
	Brand             string              `json:"brand"`
	Architecture      string              `json:"architecture"`
	ComputeCapability string              `json:"computeCapability"`
	PCIDeviceID       string              `json:"pciDeviceID"`
	MemoryMiB         int64               `json:"memoryMiB,omitempty"`
	Multiprocessors   int64               `json:"multiprocessors,omitempty"`
	PowerLimitWatts   int64               `json:"powerLimitWatts,omitempty"`
	MIGModes          []inventory.MIGMode `json:"migModes"`
	Confidence        string              `json:"confidence"`
	DriverVersion     string              `json:"driverVersion"`
	CUDAVersion       string              `json:"cudaVersion"`
	// DriverVersions are the ranges with figures of partitions.
	DriverVersions []string          `json:"driverVersions,omitempty"`
	Missing        []string          `json:"missing,omitempty"`
	Sources        []string          `json:"sources"`
	Partitioning   *partitioningView `json:"partitioning,omitempty"`
}

type partitioningView struct {
	MemorySlices int `json:"memorySlices"`
	MaxInstances int `json:"maxInstances"`
	// Shared is what partitions share, memory in MiB.
	Shared            map[profiles.Figure]int64 `json:"shared,omitempty"`
	WholeGPUBeside    bool                      `json:"wholeGPUBesidePartitions"`
	InstanceIDs       string                    `json:"gpuInstanceIDs"`       // inferred or assigned
	InstanceIDsSource string                    `json:"gpuInstanceIDsSource"` // in words
	Profiles          []profileView             `json:"profiles"`
}

type profileView struct {
	Name         string `json:"name"`
	ID           int    `json:"id"`
	Slices       int    `json:"slices"`
	MaxInstances int    `json:"maxInstances"`
	// Figures are the known ones, memory in MiB.
	Figures    map[profiles.Figure]int64 `json:"figures,omitempty"`
	Size       int                       `json:"memorySlices"`
	Placements []placementView           `json:"placements"`

	figures profiles.Figures
	absent  []profiles.Figure
}

type placementView struct {
	Start         int `json:"start"`
	GPUInstanceID int `json:"gpuInstanceID"`
}

const assignedIDs = "assigned: nobody sourced them; they number the placements from the largest size to the smallest, from left to right"

// viewOf shows a model as one driver version sees it, the default version if it is "".
func viewOf(model *profiles.Model, driverVersion string) (modelView, error) {
	table, err := model.Known(driverVersion)
	if err != nil {
		return modelView{}, err
	}
	view := modelView{
		ID: model.ID, ProductName: model.ProductName, Brand: model.Brand, Architecture: model.Architecture,
		ComputeCapability: model.ComputeCapability, PCIDeviceID: model.PCIDeviceID,
		MemoryMiB: model.MemoryMiB, Multiprocessors: model.Multiprocessors, PowerLimitWatts: model.PowerLimitWatts,
		MIGModes: migModes(table), Confidence: model.Confidence, DriverVersion: table.DriverVersion, CUDAVersion: table.CUDAVersion,
		DriverVersions: model.DriverVersions(), Missing: append(model.Absent(), table.Absent()...), Sources: model.Sources,
	}
	if model.Partitioning != nil {
		view.Partitioning = partitioningOf(table)
	}
	return view, nil
}

// migModes are the modes in which the model can be simulated.
func migModes(table *profiles.Table) []inventory.MIGMode {
	modes := []inventory.MIGMode{}
	if _, err := table.Model.Table(table.DriverVersion); err != nil {
		return modes
	}
	if _, err := table.Partitionable(); err == nil {
		modes = append(modes, inventory.MIGDynamic)
	}
	for _, profile := range table.Profiles {
		if len(profile.Absent) == 0 {
			modes = append(modes, inventory.MIGStatic)
			break
		}
	}
	return append(modes, inventory.MIGDisabled)
}

func partitioningOf(table *profiles.Table) *partitioningView {
	p := table.Model.Partitioning
	view := &partitioningView{
		MemorySlices: p.MemorySlices, MaxInstances: p.MaxInstances, WholeGPUBeside: !p.Exclusive,
		InstanceIDs: "inferred", InstanceIDsSource: p.InstanceIDSource,
	}
	if p.InstanceIDSource == "" {
		view.InstanceIDs, view.InstanceIDsSource = "assigned", assignedIDs
	}
	if shared, err := table.Partitionable(); err == nil {
		view.Shared = map[profiles.Figure]int64{}
		for _, figure := range profiles.AllFigures() {
			view.Shared[figure] = shared.Get(figure)
		}
	}
	for _, profile := range table.Profiles {
		row := profileView{
			Name: profile.Name, ID: profile.ID, Slices: profile.Slices, MaxInstances: profile.MaxInstances, Size: profile.Size,
			Figures: map[profiles.Figure]int64{}, figures: profile.Figures, absent: profile.Absent,
		}
		for _, figure := range profiles.AllFigures() {
			if row.knows(figure) {
				row.Figures[figure] = profile.Figures.Get(figure)
			}
		}
		for _, start := range profile.Starts {
			row.Placements = append(row.Placements, placementView{start, table.Partition(profile, start).InstanceID})
		}
		view.Profiles = append(view.Profiles, row)
	}
	return view
}

func (p profileView) knows(figure profiles.Figure) bool {
	for _, absent := range p.absent {
		if absent == figure {
			return false
		}
	}
	return true
}

// known is a figure for people.
func (p profileView) known(figure profiles.Figure) string {
	if !p.knows(figure) {
		return "-"
	}
	return strconv.FormatInt(p.figures.Get(figure), 10)
}

// newModelsCommand is "simgpuctl models".
func newModelsCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "models",
		Short: "List the GPU models that can be simulated",
		Long: `Lists the GPU models of the catalogue. MIG is the modes in which a model can be simulated: partitions on demand
(dynamic), a layout of partitions that exist for good (static), whole GPUs (disabled). What nobody sourced is
missing, and what needs it cannot be simulated.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			catalogue, err := profiles.Load()
			if err != nil {
				return err
			}
			var views []modelView
			for _, model := range catalogue.Models() {
				view, err := viewOf(model, "")
				if err != nil {
					return err
				}
				views = append(views, view)
			}
			return printAs(cmd.OutOrStdout(), output, views, func(w io.Writer) error { return writeModels(w, views) })
		},
	}
	outputFlag(cmd, &output)
	return cmd
}

// newModelCommand is "simgpuctl model".
func newModelCommand() *cobra.Command {
	var output, driverVersion string
	cmd := &cobra.Command{
		Use:   "model ID",
		Short: "Show a GPU model: its profiles, their figures and placements",
		Example: `  simgpuctl model h100-sxm5-80gb
  simgpuctl model a100-40gb --driver-version 470.57.02 -o yaml`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			catalogue, err := profiles.Load()
			if err != nil {
				return err
			}
			model, err := catalogue.Model(args[0])
			if err != nil {
				return err
			}
			view, err := viewOf(model, driverVersion)
			if err != nil {
				return err
			}
			return printAs(cmd.OutOrStdout(), output, view, func(w io.Writer) error { return writeModel(w, view) })
		},
	}
	cmd.Flags().StringVar(&driverVersion, "driver-version", "", "version of the GPU driver (default: the model's)")
	outputFlag(cmd, &output)
	return cmd
}

// orDash is what people see where nobody sourced something.
func orDash[T comparable](value T, format string) string {
	if value == *new(T) {
		return "-"
	}
	return fmt.Sprintf(format, value)
}

func joined[T ~string](values []T) string {
	texts := make([]string, len(values))
	for i, value := range values {
		texts[i] = string(value)
	}
	return strings.Join(texts, ",")
}

func writeModels(w io.Writer, views []modelView) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "ID\tPRODUCT\tMEMORY\tMIG\tPROFILES\tCONFIDENCE\tDRIVERS\tMISSING")
	for _, view := range views {
		profiles := 0
		if view.Partitioning != nil {
			profiles = len(view.Partitioning.Profiles)
		}
		drivers := strings.Join(view.DriverVersions, "; ")
		if drivers == "" {
			drivers = "any"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", view.ID, orDash(view.ProductName, "%s"), orDash(view.MemoryMiB, "%dMi"),
			cmp.Or(joined(view.MIGModes), "-"), orDash(profiles, "%d"), view.Confidence, drivers, cmp.Or(strings.Join(view.Missing, "; "), "-"))
	}
	return table.Flush()
}

func writeModel(w io.Writer, view modelView) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name string, values ...string) {
		for i, value := range values {
			if i == 0 {
				value = name + ":\t" + value
			} else {
				value = "\t" + value
			}
			fmt.Fprintln(table, value)
		}
	}
	row("Model", view.ID)
	row("Product", orDash(view.ProductName, "%s"))
	row("Architecture", fmt.Sprintf("%s, compute capability %s, PCI device %s", view.Architecture, view.ComputeCapability, view.PCIDeviceID))
	row("Memory", orDash(view.MemoryMiB, "%d MiB"))
	row("Multiprocessors", orDash(view.Multiprocessors, "%d"))
	row("Power limit", orDash(view.PowerLimitWatts, "%d W"))
	row("Driver", fmt.Sprintf("%s, CUDA %s", view.DriverVersion, view.CUDAVersion))
	row("MIG modes", cmp.Or(strings.Join(strings.Split(joined(view.MIGModes), ","), ", "), "none: it cannot be simulated"))
	row("Confidence", view.Confidence)
	row("Missing", view.Missing...)
	row("Sources", view.Sources...)
	if p := view.Partitioning; p != nil {
		row("Figures for", "driver versions: "+strings.Join(view.DriverVersions, "; "))
		row("Partitions", fmt.Sprintf("%d memory slices, at most %d partitions", p.MemorySlices, p.MaxInstances))
		row("GPU instances", strings.Join(strings.Fields(p.InstanceIDsSource), " "))
	}
	if err := table.Flush(); err != nil || view.Partitioning == nil {
		return err
	}
	fmt.Fprintln(w)
	return writeProfiles(w, view.Partitioning)
}

// writeProfiles lists the profiles and draws each placement as a bar over the memory slices that it takes.
func writeProfiles(w io.Writer, p *partitioningView) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "PROFILE\tID\tMAX\tMEMORY\tSM\tCE\tDEC\tENC\tJPG\tOFA\tSTARTS\tGI IDS")
	for _, profile := range p.Profiles {
		var starts, ids []string
		for _, placement := range profile.Placements {
			starts, ids = append(starts, strconv.Itoa(placement.Start)), append(ids, strconv.Itoa(placement.GPUInstanceID))
		}
		memory := profile.known(profiles.Memory)
		if memory != "-" {
			memory += "Mi"
		}
		fmt.Fprintf(table, "%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", profile.Name, profile.ID, profile.MaxInstances, memory,
			profile.known(profiles.Multiprocessors), profile.known(profiles.CopyEngines), profile.known(profiles.Decoders),
			profile.known(profiles.Encoders), profile.known(profiles.JPEGEngines), profile.known(profiles.OFAEngines),
			strings.Join(starts, ","), strings.Join(ids, ","))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nPlacements, by memory slice:\n")
	width := 0
	for _, profile := range p.Profiles {
		width = max(width, len(profile.Name))
	}
	for _, line := range append([]string{ruler(p.MemorySlices)}, bars(p)...) {
		name, drawing, _ := strings.Cut(line, "\t")
		fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("%-*s  %s", width, name, drawing), " "))
	}
	return nil
}

// cell is how many characters a memory slice is wide.
const cell = 4

func ruler(slices int) string {
	line := "\t"
	for slice := range slices {
		line += fmt.Sprintf("%-*d", cell, slice)
	}
	return line
}

// bars draws the placements, those of one profile in as few lines as keep them apart.
func bars(p *partitioningView) []string {
	var lines []string
	for _, profile := range p.Profiles {
		name := profile.Name
		rest := profile.Placements
		for len(rest) > 0 {
			line, end := "", 0
			var overlapping []placementView
			for _, placement := range rest {
				if placement.Start < end {
					overlapping = append(overlapping, placement)
					continue
				}
				line += strings.Repeat(" ", cell*placement.Start-len(line))
				line += "[" + strings.Repeat("=", cell*profile.Size-2) + "]"
				end = placement.Start + profile.Size
			}
			lines = append(lines, name+"\t"+line)
			name, rest = "", overlapping
		}
	}
	return lines
}
