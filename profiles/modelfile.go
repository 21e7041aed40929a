package profiles

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/simgpu/simgpu/internal/strictyaml"
)

// modelFormat is the file of one model. Pointers are figures that may be absent.
type modelFormat struct {
	APIVersion           string              `json:"apiVersion"`
	Kind                 string              `json:"kind"`
	ID                   string              `json:"id"`
	Confidence           string              `json:"confidence"`
	Sources              []string            `json:"sources"`
	GPU                  gpuFormat           `json:"gpu"`
	Partitioning         *partitioningFormat `json:"partitioning"`
	DefaultDriverVersion string              `json:"defaultDriverVersion"`
	Drivers              []driverFormat      `json:"drivers"`
}

type gpuFormat struct {
	ProductName       string `json:"productName"`
	Brand             string `json:"brand"`
	Architecture      string `json:"architecture"`
	ComputeCapability string `json:"computeCapability"`
	PCIVendorID       string `json:"pciVendorID"`
	PCIDeviceID       string `json:"pciDeviceID"`
	PCISubsystemID    string `json:"pciSubsystemID"`
	AddressingMode    string `json:"addressingMode"`
	MemoryMiB         *int64 `json:"memoryMiB"`
	MemoryReservedMiB *int64 `json:"memoryReservedMiB"`
	Multiprocessors   *int64 `json:"multiprocessors"`
	PowerLimitWatts   *int64 `json:"powerLimitWatts"`
}

type partitioningFormat struct {
	MemorySlices int `json:"memorySlices"`
	MaxInstances int `json:"maxInstances"`
	// WholeGPU is "always" or "whenDisabled": can the GPU be used as a whole while it offers partitions?
	WholeGPU    string             `json:"wholeGPU"`
	Profiles    []profileFormat    `json:"profiles"`
	InstanceIDs *instanceIDsFormat `json:"instanceIDs"`
}

type profileFormat struct {
	ID               int                      `json:"id"`
	Slices           int                      `json:"slices"`
	MaxInstances     int                      `json:"maxInstances"`
	Figures          figuresFormat            `json:"figures"`
	Placements       placementsFormat         `json:"placements"`
	ComputeInstances []ComputeInstanceProfile `json:"computeInstances"`
}

// figuresFormat is what an instance of a profile has, whatever the driver version.
type figuresFormat struct {
	Multiprocessors *int64 `json:"multiprocessors"`
	CopyEngines     *int64 `json:"copyEngines"`
	Decoders        *int64 `json:"decoders"`
	Encoders        *int64 `json:"encoders"`
	JPEGEngines     *int64 `json:"jpegEngines"`
	OFAEngines      *int64 `json:"ofaEngines"`
}

type placementsFormat struct {
	Size   int   `json:"size"`
	Starts []int `json:"starts"`
}

// instanceIDsFormat gives each placement its GPU instance id: size, then start, then id.
type instanceIDsFormat struct {
	Source string              `json:"source"`
	BySize map[int]map[int]int `json:"bySize"`
}

// driverFormat is what a range of driver versions makes of the profiles, by profile id. A profile that
// is not listed does not exist there.
type driverFormat struct {
	From     string                      `json:"from"`
	Through  string                      `json:"through"`
	Source   string                      `json:"source"`
	Profiles map[int]driverProfileFormat `json:"profiles"`
}

type driverProfileFormat struct {
	Name      string `json:"name"`
	MemoryMiB *int64 `json:"memoryMiB"`
}

const (
	wholeGPUAlways       = "always"
	wholeGPUWhenDisabled = "whenDisabled"
)

var (
	confidences = []string{"high", "good", "partial", "names-only"}
	semver      = regexp.MustCompile(`^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$`)
	hex4        = regexp.MustCompile(`^0x[0-9a-f]{4}$`)
	hex8        = regexp.MustCompile(`^0x[0-9a-f]{8}$`)
)

// get returns one figure, nil where it is absent. Memory is never here: it depends on the driver.
func (f *figuresFormat) get(figure Figure) *int64 {
	switch figure {
	case Multiprocessors:
		return f.Multiprocessors
	case CopyEngines:
		return f.CopyEngines
	case Decoders:
		return f.Decoders
	case Encoders:
		return f.Encoders
	case JPEGEngines:
		return f.JPEGEngines
	case OFAEngines:
		return f.OFAEngines
	}
	return nil
}

// decodeModel reads the file of one model.
func decodeModel(file string, data []byte, vendor *Vendor) (*Model, error) {
	var f modelFormat
	faults := strictyaml.Decode(data, &f)
	if !faults.At("") { // otherwise nothing was read
		f.validate(strings.TrimSuffix(path.Base(file), ".yaml"), vendor, &faults)
	}
	if err := faults.Err(file); err != nil {
		return nil, err
	}
	model := &Model{
		ID:                   f.ID,
		Vendor:               vendor,
		Confidence:           f.Confidence,
		Sources:              f.Sources,
		ProductName:          f.GPU.ProductName,
		Brand:                f.GPU.Brand,
		Architecture:         f.GPU.Architecture,
		ComputeCapability:    f.GPU.ComputeCapability,
		PCIVendorID:          f.GPU.PCIVendorID,
		PCIDeviceID:          f.GPU.PCIDeviceID,
		PCISubsystemID:       f.GPU.PCISubsystemID,
		AddressingMode:       f.GPU.AddressingMode,
		MemoryMiB:            orZero(f.GPU.MemoryMiB),
		MemoryReservedMiB:    orZero(f.GPU.MemoryReservedMiB),
		Multiprocessors:      orZero(f.GPU.Multiprocessors),
		PowerLimitWatts:      orZero(f.GPU.PowerLimitWatts),
		DefaultDriverVersion: f.DefaultDriverVersion,
	}
	if f.Partitioning == nil {
		return model, nil
	}
	model.Partitioning = &Partitioning{
		MemorySlices: f.Partitioning.MemorySlices,
		MaxInstances: f.Partitioning.MaxInstances,
		Exclusive:    f.Partitioning.WholeGPU == wholeGPUWhenDisabled,
	}
	if ids := f.Partitioning.InstanceIDs; ids != nil {
		model.Partitioning.InstanceIDSource, model.Partitioning.instanceIDs = ids.Source, ids.BySize
	} else {
		model.Partitioning.instanceIDs = f.Partitioning.assignInstanceIDs()
	}
	for _, driver := range f.Drivers {
		model.ranges = append(model.ranges, f.driverRange(driver))
	}
	return model, nil
}

// driverRange joins the figures of the profiles with their names and memory sizes.
func (f *modelFormat) driverRange(driver driverFormat) driverRange {
	r := driverRange{from: driver.From, through: driver.Through}
	for _, p := range f.Partitioning.Profiles {
		named, exists := driver.Profiles[p.ID]
		if !exists {
			continue
		}
		profile := &Profile{
			Name:             named.Name,
			ID:               p.ID,
			Slices:           p.Slices,
			MaxInstances:     p.MaxInstances,
			Size:             p.Placements.Size,
			Starts:           p.Placements.Starts,
			ComputeInstances: p.ComputeInstances,
		}
		for _, figure := range AllFigures() {
			value := p.Figures.get(figure)
			if figure == Memory {
				value = named.MemoryMiB
			}
			if value == nil {
				profile.Absent = append(profile.Absent, figure)
				continue
			}
			*profile.Figures.at(figure) = *value
		}
		r.profiles = append(r.profiles, profile)
	}
	return r
}

func (f *modelFormat) validate(id string, vendor *Vendor, faults *strictyaml.Faults) {
	checkHeader(f.APIVersion, f.Kind, "GPUModel", f.Sources, faults)
	if f.ID != id || !dnsLabel.MatchString(f.ID) {
		faults.Add("id", "%q must be a DNS label and the name of the file without .yaml, %q", f.ID, id)
	}
	if !slices.Contains(confidences, f.Confidence) {
		faults.Add("confidence", "%q is unknown; known: %s", f.Confidence, list(confidences))
	}
	f.GPU.validate(faults)
	f.checkDefaultDriver(vendor, faults)
	if f.Partitioning == nil {
		if len(f.Drivers) > 0 {
			faults.Add("drivers", "needs partitioning: only profiles depend on the driver version")
		}
		return
	}
	f.Partitioning.validate(f.GPU, vendor, faults)
	if len(f.Drivers) == 0 {
		faults.Add("drivers", "is required with partitioning")
	}
	for i := range f.Drivers {
		f.checkDriver(i, vendor, faults)
	}
}

func (g *gpuFormat) validate(faults *strictyaml.Faults) {
	for _, text := range []struct {
		name, value string
		required    bool
	}{
		{"productName", g.ProductName, false},
		{"brand", g.Brand, true},
		{"architecture", g.Architecture, true},
		{"addressingMode", g.AddressingMode, false},
	} {
		if text.required && text.value == "" {
			faults.Add("gpu."+text.name, "is required")
		}
		if len(text.value) > 64 {
			faults.Add("gpu."+text.name, "is longer than the 64 bytes that the API allows an attribute")
		}
	}
	if !semver.MatchString(g.ComputeCapability) {
		faults.Add("gpu.computeCapability", "%q is not a semantic version like 9.0.0", g.ComputeCapability)
	}
	checkHex := func(name, value string, pattern *regexp.Regexp, example string) {
		if !pattern.MatchString(value) {
			faults.Add("gpu."+name, "%q is not a hexadecimal id like %q", value, example)
		}
	}
	checkHex("pciVendorID", g.PCIVendorID, hex4, "0x10de")
	checkHex("pciDeviceID", g.PCIDeviceID, hex4, "0x2330")
	if g.PCISubsystemID != "" {
		checkHex("pciSubsystemID", g.PCISubsystemID, hex8, "0x16c110de")
	}
	checkPositive(faults, "gpu.memoryMiB", g.MemoryMiB)
	checkPositive(faults, "gpu.multiprocessors", g.Multiprocessors)
	checkPositive(faults, "gpu.powerLimitWatts", g.PowerLimitWatts)
	if reserved := g.MemoryReservedMiB; reserved != nil && (*reserved < 0 || g.MemoryMiB == nil || *reserved >= *g.MemoryMiB) {
		faults.Add("gpu.memoryReservedMiB", "must be a part of memoryMiB")
	}
}

func (f *modelFormat) checkDefaultDriver(vendor *Vendor, faults *strictyaml.Faults) {
	version := f.DefaultDriverVersion
	if !dotted.MatchString(version) || !strings.Contains(version, ".") {
		faults.Add("defaultDriverVersion", "%q is not a version like 580.95.05", version)
		return
	}
	if _, err := vendor.cudaVersion(version); err != nil {
		faults.Add("defaultDriverVersion", "%v", err)
	}
	inRange := func(driver driverFormat) bool {
		return driver.wellFormed() && driverRange{from: driver.From, through: driver.Through}.contains(version)
	}
	if f.Partitioning != nil && !slices.ContainsFunc(f.Drivers, inRange) {
		faults.Add("defaultDriverVersion", "%s is in none of the ranges of drivers", version)
	}
}

func (p *partitioningFormat) validate(gpu gpuFormat, vendor *Vendor, faults *strictyaml.Faults) {
	if most := resourceapi.ResourceSliceMaxCountersPerCounterSet - len(vendor.Countables); p.MemorySlices < 1 || p.MemorySlices > most {
		faults.Add("partitioning.memorySlices", "must be from 1 to %d: the API allows %d counters in a set, and %d count other things",
			most, resourceapi.ResourceSliceMaxCountersPerCounterSet, len(vendor.Countables))
	}
	if p.MaxInstances < 1 || p.MaxInstances > p.MemorySlices {
		faults.Add("partitioning.maxInstances", "must be from 1 to the number of memory slices")
	}
	if p.WholeGPU != wholeGPUAlways && p.WholeGPU != wholeGPUWhenDisabled {
		faults.Add("partitioning.wholeGPU", "%q is unknown; known: %s, %s", p.WholeGPU, wholeGPUAlways, wholeGPUWhenDisabled)
	}
	if len(p.Profiles) == 0 {
		faults.Add("partitioning.profiles", "is required")
	}
	ids := map[int]bool{}
	largest := 0
	for i := range p.Profiles {
		profile := &p.Profiles[i]
		at := index("partitioning.profiles", i)
		if profile.ID < 0 {
			faults.Add(at+".id", "must not be negative")
		}
		if ids[profile.ID] {
			faults.Add(at+".id", "%d is taken by another profile", profile.ID)
		}
		ids[profile.ID] = true
		profile.validate(at, p, faults)
		largest = max(largest, profile.Placements.Size)
	}
	if len(p.Profiles) > 0 && largest != p.MemorySlices {
		faults.Add("partitioning.memorySlices", "is %d, but the largest profile has %d memory slices", p.MemorySlices, largest)
	}
	for _, figure := range AllFigures() {
		p.checkSums(figure, faults)
	}
	if gpu.Multiprocessors != nil {
		for i := range p.Profiles {
			if n := p.Profiles[i].Figures.Multiprocessors; n != nil && *n > *gpu.Multiprocessors {
				faults.Add(index("partitioning.profiles", i)+".figures.multiprocessors", "%d is more than the %d of the whole GPU", *n, *gpu.Multiprocessors)
			}
		}
	}
	p.checkInstanceIDs(vendor, faults)
}

func (p *profileFormat) validate(at string, partitioning *partitioningFormat, faults *strictyaml.Faults) {
	if p.Slices < 1 {
		faults.Add(at+".slices", "must be at least 1")
	}
	for _, figure := range AllFigures() {
		if n := p.Figures.get(figure); n != nil && *n < 0 {
			faults.Add(at+".figures."+string(figure), "must not be negative")
		}
	}
	size, starts := p.Placements.Size, p.Placements.Starts
	if size < 1 || size > partitioning.MemorySlices {
		faults.Add(at+".placements.size", "must be from 1 to the number of memory slices, %d", partitioning.MemorySlices)
	}
	if len(starts) == 0 {
		faults.Add(at+".placements.starts", "is required")
	}
	for i, start := range starts {
		if start < 0 || start+size > partitioning.MemorySlices {
			faults.Add(index(at+".placements.starts", i), "a placement of %d memory slices at %d is outside the %d of the GPU", size, start, partitioning.MemorySlices)
		}
		if i > 0 && start <= starts[i-1] {
			faults.Add(index(at+".placements.starts", i), "%d must come after %d in ascending order", start, starts[i-1])
		}
	}
	if fit := disjoint(size, starts); p.MaxInstances < 1 || p.MaxInstances > fit || p.MaxInstances > partitioning.MaxInstances {
		faults.Add(at+".maxInstances", "must be from 1 to the number of placements that fit at once, %d", min(fit, partitioning.MaxInstances))
	}

	fills := false
	for i, ci := range p.ComputeInstances {
		ciAt := index(at+".computeInstances", i)
		if ci.ID < 0 || slices.ContainsFunc(p.ComputeInstances[:i], func(other ComputeInstanceProfile) bool { return other.ID == ci.ID }) {
			faults.Add(ciAt+".id", "must not be negative and not taken by another one")
		}
		if i > 0 && ci.Slices <= p.ComputeInstances[i-1].Slices {
			faults.Add(ciAt+".slices", "must ascend")
		}
		if ci.Slices < 1 || ci.MaxInstances < 1 || ci.MaxInstances > p.Slices/max(ci.Slices, 1) {
			faults.Add(ciAt, "%d compute instances of %d slices do not fit into %d slices", ci.MaxInstances, ci.Slices, p.Slices)
		}
		fills = fills || ci.Slices == p.Slices
	}
	if !fills {
		faults.Add(at+".computeInstances", "must have one that takes all %d slices", p.Slices)
	}
}

// disjoint counts how many of the placements fit at once.
func disjoint(size int, starts []int) int {
	fit, end := 0, 0
	for _, start := range slices.Sorted(slices.Values(starts)) {
		if start >= end {
			fit, end = fit+1, start+size
		}
	}
	return fit
}

// checkSums makes sure that as many instances of a profile as it allows find their share. What the
// partitions share is the largest figure of any profile, so it needs that figure of all of them.
func (p *partitioningFormat) checkSums(figure Figure, faults *strictyaml.Faults) {
	var largest int64
	for i := range p.Profiles {
		n := p.Profiles[i].Figures.get(figure)
		if n == nil {
			return
		}
		largest = max(largest, *n)
	}
	for i := range p.Profiles {
		instances := p.Profiles[i].MaxInstances
		if n := *p.Profiles[i].Figures.get(figure); instances > 1 && n > largest/int64(instances) {
			faults.Add(index("partitioning.profiles", i)+".figures."+string(figure), "%d instances of %d are more than the %d that partitions share", instances, n, largest)
		}
	}
}

// placements returns the starts of all placements by their size.
func (p *partitioningFormat) placements() map[int]map[int]bool {
	placements := map[int]map[int]bool{}
	for _, profile := range p.Profiles {
		for _, start := range profile.Placements.Starts {
			if placements[profile.Placements.Size] == nil {
				placements[profile.Placements.Size] = map[int]bool{}
			}
			placements[profile.Placements.Size][start] = true
		}
	}
	return placements
}

// assignInstanceIDs numbers the placements from the largest size to the smallest, from left to right.
func (p *partitioningFormat) assignInstanceIDs() map[int]map[int]int {
	placements := p.placements()
	ids, next := map[int]map[int]int{}, 0
	for _, size := range slices.Backward(slices.Sorted(maps.Keys(placements))) {
		ids[size] = map[int]int{}
		for _, start := range slices.Sorted(maps.Keys(placements[size])) {
			ids[size][start] = next
			next++
		}
	}
	return ids
}

// checkInstanceIDs wants an id for each placement of each profile, and no other.
func (p *partitioningFormat) checkInstanceIDs(vendor *Vendor, faults *strictyaml.Faults) {
	const at = "partitioning.instanceIDs"
	wanted := p.placements()
	if p.InstanceIDs == nil {
		n := 0
		for _, starts := range wanted {
			n += len(starts)
		}
		if n > vendor.maxInstanceID()+1 {
			faults.Add(at, "is required: there are %d placements, and only %d ids have a device file", n, vendor.maxInstanceID()+1)
		}
		return
	}
	if p.InstanceIDs.Source == "" {
		faults.Add(at+".source", "is required")
	}
	for _, size := range slices.Sorted(maps.Keys(wanted)) {
		for _, start := range slices.Sorted(maps.Keys(wanted[size])) {
			if _, found := p.InstanceIDs.BySize[size][start]; !found {
				faults.Add(at+".bySize", "the placement of %d memory slices at %d has no id", size, start)
			}
		}
	}
	taken := map[int]string{}
	for _, size := range slices.Sorted(maps.Keys(p.InstanceIDs.BySize)) {
		for _, start := range slices.Sorted(maps.Keys(p.InstanceIDs.BySize[size])) {
			id := p.InstanceIDs.BySize[size][start]
			here := key(key(at+".bySize", size), start)
			if !wanted[size][start] {
				faults.Add(here, "no profile has a placement of %d memory slices at %d", size, start)
			}
			if id < 0 || id > vendor.maxInstanceID() {
				faults.Add(here, "%d is not from 0 to %d, the ids that have a device file", id, vendor.maxInstanceID())
			}
			if other, found := taken[id]; found {
				faults.Add(here, "%d is taken by %s", id, other)
			}
			taken[id] = here
		}
	}
}

func (d driverFormat) wellFormed() bool {
	return (d.From == "" || dotted.MatchString(d.From)) && (d.Through == "" || dotted.MatchString(d.Through))
}

func (f *modelFormat) checkDriver(i int, vendor *Vendor, faults *strictyaml.Faults) {
	driver, at := f.Drivers[i], index("drivers", i)
	if driver.Source == "" {
		faults.Add(at+".source", "is required")
	}
	switch {
	case !driver.wellFormed():
		faults.Add(at, "from %q and through %q must be versions like 580 or 580.95.05", driver.From, driver.Through)
	case driver.From != "" && driver.Through != "" && compareVersions(driver.From, driver.Through) > 0:
		faults.Add(at+".through", "%s is before %s", driver.Through, driver.From)
	case i > 0 && f.Drivers[i-1].wellFormed() && (driver.Through == "" || f.Drivers[i-1].From == "" || compareVersions(driver.Through, f.Drivers[i-1].From) >= 0):
		faults.Add(at, "must end before the range above it starts: newest first, no overlap")
	}
	if len(driver.Profiles) == 0 {
		faults.Add(at+".profiles", "is required")
	}
	names := map[string]bool{}
	var largest int64
	complete := true
	for _, id := range slices.Sorted(maps.Keys(driver.Profiles)) {
		profile, profileAt := driver.Profiles[id], key(at+".profiles", id)
		if profile.Name == "" {
			faults.Add(profileAt+".name", "is required")
		}
		if names[profile.Name] {
			faults.Add(profileAt+".name", "%q is taken by another profile", profile.Name)
		}
		names[profile.Name] = true
		checkPositive(faults, profileAt+".memoryMiB", profile.MemoryMiB)
		complete = complete && profile.MemoryMiB != nil
		largest = max(largest, orZero(profile.MemoryMiB))

		known := slices.IndexFunc(f.Partitioning.Profiles, func(p profileFormat) bool { return p.ID == id })
		if known < 0 {
			faults.Add(profileAt, "no profile has this id")
			continue
		}
		f.checkDriverProfile(profileAt, &f.Partitioning.Profiles[known], profile, vendor, faults)
	}
	if !complete {
		return
	}
	for i := range f.Partitioning.Profiles {
		p := &f.Partitioning.Profiles[i]
		profile, exists := driver.Profiles[p.ID]
		if exists && p.MaxInstances > 1 && *profile.MemoryMiB > largest/int64(p.MaxInstances) {
			faults.Add(key(at+".profiles", p.ID)+".memoryMiB", "%d instances of %d are more than the %d that partitions share", p.MaxInstances, *profile.MemoryMiB, largest)
		}
	}
}

// checkDriverProfile compares a profile's name with what the vendor's tools would compute, and its
// memory with the whole GPU's.
func (f *modelFormat) checkDriverProfile(at string, p *profileFormat, named driverProfileFormat, vendor *Vendor, faults *strictyaml.Faults) {
	if name := vendor.PartitionName(0, &Partition{Profile: &Profile{Name: named.Name, ID: p.ID}}); !dnsLabel.MatchString(name) {
		faults.Add(at+".name", "%q makes %q, which is not a DNS label, a device name", named.Name, name)
	}
	total, memory := orZero(f.GPU.MemoryMiB), orZero(named.MemoryMiB)
	if total <= 0 || memory <= 0 {
		return
	}
	if memory > total {
		faults.Add(at+".memoryMiB", "%d is more than the %d of the whole GPU", memory, total)
		return
	}
	base := vendor.profileName(p.Slices, memory, total)
	suffix, found := strings.CutPrefix(named.Name, base)
	if suffixes := vendor.format.Names.ProfileSuffixes; !found || suffix != "" && !slices.Contains(suffixes, suffix) {
		faults.Add(at+".name", "%q does not follow from %d slices and %d of %d MiB, which make %s with or without %s",
			named.Name, p.Slices, memory, total, base, strings.Join(suffixes, ", "))
	}
}

func checkPositive(faults *strictyaml.Faults, path string, n *int64) {
	if n != nil && (*n < 1 || *n > maxFigure) {
		faults.Add(path, "must be from 1 to %d; leave it out where it is not sourced", int64(maxFigure))
	}
}

// maxFigure keeps arithmetic on figures, such as MiB into bytes, within an int64.
const maxFigure = 1 << 40

func orZero(n *int64) int64 {
	if n == nil {
		return 0
	}
	return *n
}

func index(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

func key(path string, k int) string { return fmt.Sprintf("%s.%d", path, k) }

func list[T ~string](values []T) string {
	var texts []string
	for _, value := range values {
		texts = append(texts, string(value))
	}
	return strings.Join(texts, ", ")
}
