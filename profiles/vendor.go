package profiles

// Vendor is the vocabulary of one GPU vendor: every word that Go code must not spell.
type Vendor struct {
	Name       string // folder in the catalogue, e.g. nvidia
	DriverName string // default DRA driver name, e.g. gpu.nvidia.com
	// DeviceClasses are the classes that the vendor's driver ships, whole GPUs first.
	DeviceClasses []DeviceClass
	// ClaimConfig names the opaque parameters the vendor's driver accepts in a claim.
	ClaimConfig ClaimConfig
	// Env is set in every container that gets a device, e.g. NVIDIA_VISIBLE_DEVICES=void. Sorted by name.
	Env []EnvVar
	// ControlFiles are the device nodes that every container with a device gets, e.g. /dev/nvidiactl.
	ControlFiles []string
}

// DeviceClass is a class that selects one type of device.
type DeviceClass struct {
	Name string // e.g. mig.nvidia.com
	Type string // value of the type attribute, e.g. mig
}

// ClaimConfig names opaque parameter kinds.
type ClaimConfig struct {
	APIVersion string // e.g. resource.nvidia.com/v1beta1
	GPU        string // kind for whole GPUs
	Partition  string // kind for partitions
}

// EnvVar is one environment variable.
type EnvVar struct{ Name, Value string }

// GPUFile is the device node of a whole GPU, e.g. /dev/nvidia0.
func (v *Vendor) GPUFile(minor int) string { return "" }

// CapFile is the device node that guards an instance, e.g. /dev/nvidia-caps/nvidia-cap12.
func (v *Vendor) CapFile(capMinor int) string { return "" }

// InstanceMinor is the capability minor of a GPU instance.
func (v *Vendor) InstanceMinor(gpuMinor, instanceID int) int { return 0 }

// ComputeInstanceMinor is the capability minor of a compute instance.
func (v *Vendor) ComputeInstanceMinor(gpuMinor, instanceID, computeInstanceID int) int { return 0 }
