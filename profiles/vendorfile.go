package profiles

import (
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/simgpu/simgpu/internal/strictyaml"
)

// APIVersion is the version of the catalogue's file format.
const APIVersion = "simgpu.dev/v1alpha1"

// vendorFormat is a vendor.yaml.
type vendorFormat struct {
	APIVersion    string         `json:"apiVersion"`
	Kind          string         `json:"kind"`
	Sources       []string       `json:"sources"`
	DriverName    string         `json:"driverName"`
	DeviceClasses []classFormat  `json:"deviceClasses"`
	ClaimConfig   ClaimConfig    `json:"claimConfig"`
	Names         nameFormat     `json:"names"`
	Attributes    attributesFile `json:"attributes"`
	Countables    []Countable    `json:"countables"`
	Files         filesFormat    `json:"files"`
	// Env maps names to values.
	Env          map[string]string `json:"env"`
	CUDAVersions map[int]string    `json:"cudaVersions"`
	Health       healthFormat      `json:"health"`
}

type classFormat struct {
	Name     string `json:"name"`
	Selector string `json:"selector"`
}

type nameFormat struct {
	GPU                string `json:"gpu"`
	Partition          string `json:"partition"`
	CounterSet         string `json:"counterSet"`
	MemorySliceCounter string `json:"memorySliceCounter"`
	// MemorySliceCapacity is on partitions that exist for good.
	MemorySliceCapacity string   `json:"memorySliceCapacity"`
	GPUUUID             string   `json:"gpuUUID"`
	PartitionUUID       string   `json:"partitionUUID"`
	Profile             string   `json:"profile"`
	SharesCapacity      string   `json:"sharesCapacity"`
	ProfileSuffixes     []string `json:"profileSuffixes"`
}

type attributesFile struct {
	GPU       []Attribute `json:"gpu"`
	Partition []Attribute `json:"partition"`
	// Fixed are what partitions that exist for good have beside those of all partitions.
	Fixed []Attribute `json:"fixedPartition"`
}

type filesFormat struct {
	Control    []string       `json:"control"`
	GPU        string         `json:"gpu"`
	Capability string         `json:"capability"`
	CapMinor   capMinorFormat `json:"capMinor"`
	MaxGPUs    int            `json:"maxGPUs"`
}

// capMinorFormat numbers the capability files: a GPU instance has first + perGPU x GPU + perInstance x
// id, and its compute instances follow.
type capMinorFormat struct {
	First       int `json:"first"`
	PerGPU      int `json:"perGPU"`
	PerInstance int `json:"perInstance"`
}

var (
	dnsLabel     = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	dnsSubdomain = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)
	identifier   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,31}$`)
)

// decodeVendor reads a vendor.yaml. The caller sets the name.
func decodeVendor(file string, data []byte) (*Vendor, error) {
	var f vendorFormat
	faults := strictyaml.Decode(data, &f)
	if !faults.At("") { // otherwise nothing was read
		f.validate(&faults)
	}
	if err := faults.Err(file); err != nil {
		return nil, err
	}
	vendor := &Vendor{
		DriverName:          f.DriverName,
		ClaimConfig:         f.ClaimConfig,
		GPUAttributes:       f.Attributes.GPU,
		PartitionAttributes: f.Attributes.Partition,
		FixedAttributes:     f.Attributes.Fixed,
		Countables:          f.Countables,
		ControlFiles:        f.Files.Control,
		MaxGPUs:             f.Files.MaxGPUs,
		Health:              f.Health.health(),
		format:              f,
	}
	for _, class := range f.DeviceClasses {
		vendor.DeviceClasses = append(vendor.DeviceClasses, DeviceClass{Name: class.Name, selector: class.Selector})
	}
	for _, name := range slices.Sorted(maps.Keys(f.Env)) {
		vendor.Env = append(vendor.Env, EnvVar{Name: name, Value: f.Env[name]})
	}
	return vendor, nil
}

func (f *vendorFormat) validate(faults *strictyaml.Faults) {
	checkHeader(f.APIVersion, f.Kind, "GPUVendor", f.Sources, faults)
	if len(f.DriverName) > 63 || !dnsSubdomain.MatchString(f.DriverName) {
		faults.Add("driverName", "%q is not a DNS name of at most 63 characters", f.DriverName)
	}
	for i, class := range f.DeviceClasses {
		if !dnsSubdomain.MatchString(class.Name) {
			faults.Add(index("deviceClasses", i)+".name", "%q is not a DNS name", class.Name)
		}
		checkPattern(faults, index("deviceClasses", i)+".selector", class.Selector, "driver")
	}
	if f.ClaimConfig.APIVersion == "" || f.ClaimConfig.GPU == "" || f.ClaimConfig.Partition == "" {
		faults.Add("claimConfig", "apiVersion, gpu and partition are required")
	}

	checkPattern(faults, "names.gpu", f.Names.GPU, "minor")
	checkPattern(faults, "names.partition", f.Names.Partition, "minor", "profile", "profileID", "start")
	checkPattern(faults, "names.counterSet", f.Names.CounterSet, "minor")
	checkPattern(faults, "names.memorySliceCounter", f.Names.MemorySliceCounter, "slice")
	checkPattern(faults, "names.memorySliceCapacity", f.Names.MemorySliceCapacity, "slice")
	if name := fill(f.Names.MemorySliceCapacity, "slice", 0); !identifier.MatchString(name) {
		faults.Add("names.memorySliceCapacity", "%q makes %q, which is not a C identifier of at most 32 characters", f.Names.MemorySliceCapacity, name)
	}
	checkPattern(faults, "names.gpuUUID", f.Names.GPUUUID, "uuid")
	checkPattern(faults, "names.partitionUUID", f.Names.PartitionUUID, "uuid")
	checkPattern(faults, "names.profile", f.Names.Profile, "slices", "memoryGB")
	checkPattern(faults, "files.gpu", f.Files.GPU, "minor")
	checkPattern(faults, "files.capability", f.Files.Capability, "capMinor")
	for i, file := range f.Files.Control {
		if !strings.HasPrefix(file, "/") {
			faults.Add(index("files.control", i), "%q is not an absolute path", file)
		}
	}
	if m := f.Files.CapMinor; m.First < 0 || m.PerInstance < 2 || m.PerGPU < m.PerInstance {
		faults.Add("files.capMinor", "first must not be negative, perInstance must hold an instance and a compute instance, perGPU an instance")
	}
	if f.Files.MaxGPUs < 1 {
		faults.Add("files.maxGPUs", "must be at least 1")
	}

	f.Health.validate(faults)
	checkAttributes(faults, "attributes.gpu", f.Attributes.GPU)
	checkAttributes(faults, "attributes.partition", f.Attributes.Partition)
	if len(f.Attributes.Fixed) > 0 {
		checkAttributes(faults, "attributes.fixedPartition", f.Attributes.Fixed)
	}
	f.checkCountables(faults)
	for _, branch := range slices.Sorted(maps.Keys(f.CUDAVersions)) {
		if !dotted.MatchString(f.CUDAVersions[branch]) {
			faults.Add(key("cudaVersions", branch), "%q is not a version like 13.0", f.CUDAVersions[branch])
		}
	}
}

func (f *vendorFormat) checkCountables(faults *strictyaml.Faults) {
	var figures []Figure
	names := map[string]bool{}
	for i, countable := range f.Countables {
		at := index("countables", i)
		switch {
		case !slices.Contains(AllFigures(), countable.Figure):
			faults.Add(at+".figure", "unknown figure %q; known figures: %s", countable.Figure, list(AllFigures()))
		case slices.Contains(figures, countable.Figure):
			faults.Add(at+".figure", "%q is listed twice", countable.Figure)
		}
		figures = append(figures, countable.Figure)
		if !identifier.MatchString(countable.Capacity) {
			faults.Add(at+".capacity", "%q is not a C identifier of at most 32 characters", countable.Capacity)
		}
		if !dnsLabel.MatchString(countable.Counter) {
			faults.Add(at+".counter", "%q is not a DNS label", countable.Counter)
		}
		if names[countable.Counter] {
			faults.Add(at+".counter", "%q is listed twice", countable.Counter)
		}
		names[countable.Counter] = true
	}
	for _, figure := range AllFigures() {
		if !slices.Contains(figures, figure) {
			faults.Add("countables", "figure %q is missing", figure)
		}
	}
}

func checkAttributes(faults *strictyaml.Faults, path string, attributes []Attribute) {
	if len(attributes) == 0 {
		faults.Add(path, "is required")
	}
	seen := map[string]bool{}
	for i, attribute := range attributes {
		at := index(path, i)
		domain, name, qualified := strings.Cut(attribute.Name, "/")
		if !qualified {
			domain, name = "", attribute.Name
		}
		if !identifier.MatchString(name) || qualified && (len(domain) > 63 || !dnsSubdomain.MatchString(domain)) {
			faults.Add(at+".name", "%q is not a C identifier of at most 32 characters, with or without a domain before a slash", attribute.Name)
		}
		if seen[attribute.Name] {
			faults.Add(at+".name", "%q is listed twice", attribute.Name)
		}
		seen[attribute.Name] = true
		if (attribute.Value == "") == (attribute.From == "") {
			faults.Add(at, "exactly one of value and from is required")
		} else if attribute.From != "" && !slices.Contains(facts, attribute.From) {
			faults.Add(at+".from", "unknown fact %q; known facts: %s", attribute.From, list(facts))
		}
	}
}

// checkPattern wants each of the names in braces, and no other.
func checkPattern(faults *strictyaml.Faults, path, pattern string, names ...string) {
	for _, name := range names {
		if !strings.Contains(pattern, "{"+name+"}") {
			faults.Add(path, "%q must contain {%s}", pattern, name)
		}
	}
	for _, found := range placeholder.FindAllString(pattern, -1) {
		if !slices.Contains(names, strings.Trim(found, "{}")) {
			faults.Add(path, "%q contains %s; known here: {%s}", pattern, found, strings.Join(names, "}, {"))
		}
	}
}

func checkHeader(apiVersion, kind, wantKind string, sources []string, faults *strictyaml.Faults) {
	if apiVersion != APIVersion {
		faults.Add("apiVersion", "%q is not supported; known: %s", apiVersion, APIVersion)
	}
	if kind != wantKind {
		faults.Add("kind", "%q is not %s", kind, wantKind)
	}
	if len(sources) == 0 {
		faults.Add("sources", "is required: where do the figures come from?")
	}
}
