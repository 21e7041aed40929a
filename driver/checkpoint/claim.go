package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

const (
	format  = "simgpu.dev/checkpoint"
	version = 1
)

// State says how far the preparation of a claim has come.
type State string

const (
	// Preparing is a claim for which files or sockets may exist but whose success nobody was told of.
	Preparing State = "Preparing"
	// Prepared is a claim that containers may be using.
	Prepared State = "Prepared"
)

// Claim is what the driver has to know about a prepared claim without asking the API.
type Claim struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	State     State     `json:"state"`
	// BootID identifies the boot of the node in which the claim was prepared.
	BootID string `json:"bootID,omitempty"`
	// NotUnprepared is a claim that the kubelet is not going to unprepare: its devices are free as soon as they are
	// not allocated to it any more.
	NotUnprepared bool `json:"notUnprepared,omitempty"`
	// ExtendedResource is a claim that the scheduler made for a pod's extended resource. Without it the device plugin calls
	// its GPU unhealthy, and offers fewer than it could.
	ExtendedResource bool `json:"extendedResource,omitempty"`
	// Devices are the allocation results of the driver, in the order of the claim.
	Devices []Device `json:"devices"`
}

// Device is one allocation result.
type Device struct {
	// Request is the request, or <request>/<subrequest>, that the device was allocated for.
	Request string `json:"request"`
	Pool    string `json:"pool"`
	Device  string `json:"device"`
	// AdminAccess gives access without taking the device from other claims.
	AdminAccess bool   `json:"adminAccess,omitempty"`
	ShareID     string `json:"shareID,omitempty"`
	// Consumed is what a share takes of the capacities of its device, by name.
	Consumed map[string]resource.Quantity `json:"consumed,omitempty"`
	// Env holds environment variables that follow from the configuration in the claim.
	Env map[string]string `json:"env,omitempty"`
	// GPU is what the device belongs to. With it the device can be described again after the
	// inventory has changed.
	GPU GPU `json:"gpu"`
}

// GPU is the entry of the inventory that a GPU came from.
type GPU struct {
	Index   int    `json:"index"`
	Model   string `json:"model"`
	MIGMode string `json:"migMode,omitempty"`
	// Partitions are the layout of a GPU that is partitioned for good.
	Partitions    []Partition `json:"partitions,omitempty"`
	NUMANode      *int        `json:"numaNode,omitempty"`
	PCIeRoot      string      `json:"pcieRoot,omitempty"`
	DriverVersion string      `json:"driverVersion,omitempty"`
	Seed          string      `json:"seed,omitempty"`

	ConsumableShares string `json:"consumableShares,omitempty"`
}

// Partition is a profile at a place: the first memory slice.
type Partition struct {
	Profile string `json:"profile"`
	Start   int    `json:"start"`
}

// Key names the claim for people.
func (c Claim) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
}

type envelope struct {
	Format  string          `json:"format"`
	Version int             `json:"version"`
	Sum     string          `json:"sum"`
	Claim   json.RawMessage `json:"claim"`
}

func encode(claim Claim) ([]byte, error) {
	payload, err := json.Marshal(claim)
	if err != nil {
		return nil, err
	}
	// Put together by hand because the encoder may rewrite a raw message, and the sum is over its bytes.
	return fmt.Appendf(nil, "{\"format\":%q,\"version\":%d,\"sum\":%q,\"claim\":%s}\n", format, version, sum(payload), payload), nil
}

func decode(data []byte) (Claim, error) {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return Claim{}, fmt.Errorf("not a JSON object: %w", err)
	}
	switch {
	case e.Format != format:
		return Claim{}, fmt.Errorf("format is %q, not %q", e.Format, format)
	case e.Version != version:
		return Claim{}, fmt.Errorf("version is %d, and this driver knows version %d", e.Version, version)
	case e.Sum != sum(e.Claim):
		return Claim{}, fmt.Errorf("sum over the claim is %s, the file says %s", sum(e.Claim), e.Sum)
	}
	var claim Claim
	if err := json.Unmarshal(e.Claim, &claim); err != nil {
		return Claim{}, fmt.Errorf("claim: %w", err)
	}
	switch {
	case claim.UID == "" || claim.Namespace == "" || claim.Name == "":
		return Claim{}, errors.New("claim: namespace, name or uid is missing")
	case claim.State != Preparing && claim.State != Prepared:
		return Claim{}, fmt.Errorf("claim: state is %q, not %q or %q", claim.State, Preparing, Prepared)
	}
	return claim, nil
}

func sum(data []byte) string {
	digest := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(digest[:])
}

// salvage returns what can still be made out of a damaged file: names that somebody has to confirm.
func salvage(data []byte) (key types.NamespacedName, devices []string) {
	decoder := json.NewDecoder(bytes.NewReader(data))
	field := ""
	for {
		token, err := decoder.Token()
		if err != nil {
			return key, devices
		}
		text, isString := token.(string)
		switch {
		case !isString:
			field = ""
		case field == "namespace" && key.Namespace == "":
			key.Namespace, field = text, ""
		case field == "name" && key.Name == "":
			key.Name, field = text, ""
		case field == "device":
			devices, field = append(devices, text), ""
		case field != "":
			field = ""
		default:
			field = text
		}
	}
}
