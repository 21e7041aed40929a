package profiles

import (
	"maps"
	"slices"

	"github.com/simgpu/simgpu/internal/strictyaml"
)

// Health is how the vendor's driver speaks of broken devices.
type Health struct {
	// XIDTaint and LostTaint are the keys of device taints, without the domain, which is the name of the driver.
	XIDTaint, LostTaint string
	// XIDs are the error codes whose meaning is sourced, by number. Others exist.
	XIDs map[int]XID
}

// XID is an error code that the vendor's kernel module reports.
type XID struct {
	Number  int
	Meaning string
	// Action is what the vendor tells people to do at once; "" where that depends on more than the code.
	Action string
	// Application says that the vendor's driver takes it for an error of the program that uses the GPU: the
	// GPU counts as healthy.
	Application bool
}

// healthFormat is the health block of a vendor.yaml.
type healthFormat struct {
	Taints struct {
		XID  string `json:"xid"`
		Lost string `json:"lost"`
	} `json:"taints"`
	XIDs map[int]xidFormat `json:"xids"`
}

type xidFormat struct {
	Meaning     string `json:"meaning"`
	Action      string `json:"action"`
	Application bool   `json:"application"`
}

func (f healthFormat) validate(faults *strictyaml.Faults) {
	if !dnsLabel.MatchString(f.Taints.XID) {
		faults.Add("health.taints.xid", "%q is not a DNS label", f.Taints.XID)
	}
	if !dnsLabel.MatchString(f.Taints.Lost) {
		faults.Add("health.taints.lost", "%q is not a DNS label", f.Taints.Lost)
	}
	for _, number := range slices.Sorted(maps.Keys(f.XIDs)) {
		if number < 1 {
			faults.Add(key("health.xids", number), "codes start at 1")
		}
		if f.XIDs[number].Meaning == "" {
			faults.Add(key("health.xids", number)+".meaning", "is required")
		}
	}
}

func (f healthFormat) health() Health {
	health := Health{XIDTaint: f.Taints.XID, LostTaint: f.Taints.Lost, XIDs: map[int]XID{}}
	for number, xid := range f.XIDs {
		health.XIDs[number] = XID{Number: number, Meaning: xid.Meaning, Action: xid.Action, Application: xid.Application}
	}
	return health
}
