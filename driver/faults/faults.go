package faults

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/simgpu/simgpu/internal/strictyaml"
)

const (
	// Annotation is the key of the annotation on the Node.
	Annotation = "simgpu.dev/faults"
	APIVersion = "simgpu.dev/v1alpha1"
	Kind       = "NodeFaults"
	ConfigKind = "FaultConfig"

	// Max is how many faults a list can have.
	Max = 128

	maxXID   = 65535
	maxCount = 1 << 40 // of ECC errors and of times
	maxDelay = time.Hour
)

// Type says what breaks.
type Type string

const (
	XID           Type = "XID"
	ECC           Type = "ECC"
	GPULost       Type = "GPULost"
	FailPrepare   Type = "FailPrepare"
	HangPrepare   Type = "HangPrepare"
	SlowPrepare   Type = "SlowPrepare"
	FailUnprepare Type = "FailUnprepare"
	HangUnprepare Type = "HangUnprepare"
	SlowUnprepare Type = "SlowUnprepare"
	Crash         Type = "Crash"
)

var (
	types = []Type{XID, ECC, GPULost, FailPrepare, HangPrepare, SlowPrepare, FailUnprepare, HangUnprepare, SlowUnprepare, Crash}
	// configTypes are those that a claim can carry.
	configTypes = []Type{FailPrepare, HangPrepare, SlowPrepare}
	effects     = []resourceapi.DeviceTaintEffect{resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute, resourceapi.DeviceTaintEffectNone}
)

// Types are all types, in the order in which they are told to people.
func Types() []Type { return slices.Clone(types) }

// Steps are the steps of prepare and unprepare at which a Crash can happen, in the order in which they are
// complete. They are the waypoints of the driver.
func Steps() []string {
	return []string{"IntentWritten", "SocketsOpened", "SpecWritten", "ClaimPrepared",
		"UndoIntentWritten", "SpecRemoved", "SocketsClosed", "ClaimRemoved"}
}

// Fault is one thing that is broken.
type Fault struct {
	// ID is unique among the faults of a node, and "" in the configuration of a claim.
	ID string
	// Device is a GPU or a partition; "" is every device of the node.
	Device string
	Type   Type
	// Created is for people; zero: unknown.
	Created time.Time

	XID                        int                           // of an XID
	Correctable, Uncorrectable int64                         // of ECC
	Effect                     resourceapi.DeviceTaintEffect // of XID, ECC, GPULost; "": the vendor's
	Times                      int64                         // of the faults of operations; 0: every time
	Delay                      time.Duration                 // of SlowPrepare, SlowUnprepare
	At                         string                        // of a Crash
}

// String says what is broken in a few words, without the device: "XID 79", "FailPrepare 2 times".
func (f Fault) String() string {
	text := string(f.Type)
	switch f.Type {
	case XID:
		text = fmt.Sprintf("XID %d", f.XID)
	case ECC:
		var counts []string
		if f.Correctable > 0 {
			counts = append(counts, fmt.Sprintf("%d correctable", f.Correctable))
		}
		if f.Uncorrectable > 0 {
			counts = append(counts, fmt.Sprintf("%d uncorrectable", f.Uncorrectable))
		}
		text = "ECC " + strings.Join(counts, ", ")
	case SlowPrepare, SlowUnprepare:
		text = fmt.Sprintf("%s by %s", f.Type, f.Delay)
	case Crash:
		text = "Crash at " + f.At
	}
	switch {
	case f.Times == 1:
		text += " once"
	case f.Times > 1:
		text += fmt.Sprintf(" %d times", f.Times)
	}
	return text
}

// format is a fault as it is written.
type format struct {
	ID            string `json:"id,omitempty"`
	Device        string `json:"device,omitempty"`
	Type          Type   `json:"type"`
	Created       string `json:"created,omitempty"`
	XID           *int   `json:"xid,omitempty"`
	Correctable   *int64 `json:"correctable,omitempty"`
	Uncorrectable *int64 `json:"uncorrectable,omitempty"`
	Effect        string `json:"effect,omitempty"`
	Times         *int64 `json:"times,omitempty"`
	Delay         string `json:"delay,omitempty"`
	At            string `json:"at,omitempty"`
}

type file struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Faults     []format `json:"faults"`
}

var (
	idPattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)
	// devicePattern is a DNS label, as the API wants device names.
	devicePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
)

// Decode reads the value of the annotation; "" is no faults. Its error lists all that is wrong.
func Decode(annotation string) ([]Fault, error) {
	if annotation == "" {
		return nil, nil
	}
	list, problems := decode([]byte(annotation), Kind)
	return list, problems.Err("annotation " + Annotation)
}

// DecodeConfig reads the parameters of kind FaultConfig of a claim or class, and says what is wrong with
// them.
func DecodeConfig(parameters []byte) ([]Fault, strictyaml.Faults) {
	return decode(parameters, ConfigKind)
}

// Encode writes a list as Decode reads it: compact JSON, or "" for an empty list. Its error lists all that is
// wrong with the list.
func Encode(list []Fault) (string, error) {
	if len(list) == 0 {
		return "", nil
	}
	f := file{APIVersion: APIVersion, Kind: Kind}
	for _, fault := range list {
		f.Faults = append(f.Faults, fault.format())
	}
	data, err := json.Marshal(f)
	if err != nil {
		return "", err
	}
	if _, err := Decode(string(data)); err != nil {
		return "", err
	}
	return string(data), nil
}

// MarshalJSON writes a fault as it stands in the annotation.
func (f Fault) MarshalJSON() ([]byte, error) { return json.Marshal(f.format()) }

func (f Fault) format() format {
	w := format{ID: f.ID, Device: f.Device, Type: f.Type, Effect: string(f.Effect), At: f.At}
	if !f.Created.IsZero() {
		w.Created = f.Created.UTC().Format(time.RFC3339)
	}
	if f.Type == XID || f.XID != 0 {
		w.XID = &f.XID
	}
	if f.Correctable != 0 {
		w.Correctable = &f.Correctable
	}
	if f.Uncorrectable != 0 {
		w.Uncorrectable = &f.Uncorrectable
	}
	if f.Times != 0 {
		w.Times = &f.Times
	}
	if f.Delay != 0 {
		w.Delay = f.Delay.String()
	}
	return w
}

func decode(data []byte, kind string) ([]Fault, strictyaml.Faults) {
	var f file
	problems := strictyaml.Decode(data, &f)
	if problems.At("") { // nothing was read
		return nil, problems
	}
	if f.APIVersion != APIVersion {
		problems.Add("apiVersion", "%q is not supported; known: %s", f.APIVersion, APIVersion)
	}
	if f.Kind != kind {
		problems.Add("kind", "%q is not supported; known: %s", f.Kind, kind)
	}
	if len(f.Faults) == 0 {
		problems.Add("faults", "is required")
	}
	if len(f.Faults) > Max {
		problems.Add("faults", "%d are too many: at most %d", len(f.Faults), Max)
	}
	var list []Fault
	ids := map[string]string{}
	for i, w := range f.Faults {
		path := fmt.Sprintf("faults[%d]", i)
		if kind == Kind {
			w.checkPlace(path, ids, &problems)
		} else {
			w.checkConfig(path, &problems)
		}
		list = append(list, w.fault(path, &problems))
	}
	if len(problems) > 0 {
		return nil, problems
	}
	return list, nil
}

// checkPlace checks what only a fault on a node has.
func (w format) checkPlace(path string, ids map[string]string, problems *strictyaml.Faults) {
	if !idPattern.MatchString(w.ID) {
		problems.Add(path+".id", "must be 1 to 32 characters of a-z, 0-9 and -, not %q", w.ID)
	} else if other, taken := ids[w.ID]; taken {
		problems.Add(path+".id", "%q is already the id of %s", w.ID, other)
	}
	ids[w.ID] = path
	if w.Device != "" && !devicePattern.MatchString(w.Device) {
		problems.Add(path+".device", "must be the name of a device, such as gpu-0, not %q", w.Device)
	}
	if w.Created != "" {
		if _, err := time.Parse(time.RFC3339, w.Created); err != nil {
			problems.Add(path+".created", "must be a time such as 2026-12-01T02:00:00Z, not %q", w.Created)
		}
	}
}

// checkConfig refuses what a claim cannot have.
func (w format) checkConfig(path string, problems *strictyaml.Faults) {
	for _, field := range []struct{ name, value string }{{"id", w.ID}, {"device", w.Device}, {"created", w.Created}} {
		if field.value != "" {
			problems.Add(path+"."+field.name, "is for faults on a node; those of a claim concern its own devices")
		}
	}
	if slices.Contains(types, w.Type) && !slices.Contains(configTypes, w.Type) {
		problems.Add(path+".type", "%s is not for a claim; possible: %s; put others on the node with simgpuctl fault add", w.Type, list(configTypes))
	}
}

// fields are what a type can have beside its place; the required ones first.
func (t Type) fields() (required, optional []string) {
	switch t {
	case XID:
		return []string{"xid"}, []string{"effect"}
	case ECC:
		return nil, []string{"correctable", "uncorrectable", "effect"}
	case GPULost:
		return nil, []string{"effect"}
	case SlowPrepare, SlowUnprepare:
		return []string{"delay"}, []string{"times"}
	case Crash:
		return []string{"at"}, nil
	}
	return nil, []string{"times"}
}

// fault converts what is written and notes what is wrong with it.
func (w format) fault(path string, problems *strictyaml.Faults) Fault {
	f := Fault{ID: w.ID, Device: w.Device, Type: w.Type, Effect: resourceapi.DeviceTaintEffect(w.Effect), At: w.At}
	f.Created, _ = time.Parse(time.RFC3339, w.Created)
	if !slices.Contains(types, w.Type) {
		problems.Add(path+".type", "must be one of %s, not %q", list(types), w.Type)
		return f
	}
	given := map[string]bool{
		"xid": w.XID != nil, "correctable": w.Correctable != nil, "uncorrectable": w.Uncorrectable != nil,
		"effect": w.Effect != "", "times": w.Times != nil, "delay": w.Delay != "", "at": w.At != "",
	}
	required, optional := w.Type.fields()
	for _, field := range []string{"xid", "correctable", "uncorrectable", "effect", "times", "delay", "at"} {
		switch {
		case given[field] && !slices.Contains(required, field) && !slices.Contains(optional, field):
			problems.Add(path+"."+field, "does not go with type %s", w.Type)
		case !given[field] && slices.Contains(required, field):
			problems.Add(path+"."+field, "is required by type %s", w.Type)
		}
	}

	if w.XID != nil {
		f.XID = *w.XID
		if f.XID < 1 || f.XID > maxXID {
			problems.Add(path+".xid", "must be from 1 to %d, not %d", maxXID, f.XID)
		}
	}
	count := func(field string, from int64, value *int64) int64 {
		if value == nil {
			return 0
		}
		if *value < from || *value > maxCount {
			problems.Add(path+"."+field, "must be from %d to %d, not %d", from, int64(maxCount), *value)
		}
		return *value
	}
	f.Correctable = count("correctable", 0, w.Correctable)
	f.Uncorrectable = count("uncorrectable", 0, w.Uncorrectable)
	f.Times = count("times", 1, w.Times)
	if w.Type == ECC && f.Correctable == 0 && f.Uncorrectable == 0 {
		problems.Add(path, "type ECC needs correctable or uncorrectable above 0")
	}
	if w.Effect != "" && !slices.Contains(effects, f.Effect) {
		problems.Add(path+".effect", "must be one of %s, not %q", list(effects), w.Effect)
	}
	if w.Delay != "" {
		delay, err := time.ParseDuration(w.Delay)
		if err != nil || delay <= 0 || delay > maxDelay {
			problems.Add(path+".delay", "must be a duration above 0 and up to %s, such as 5s, not %q", maxDelay, w.Delay)
		}
		f.Delay = delay
	}
	if w.At != "" && !slices.Contains(Steps(), w.At) {
		problems.Add(path+".at", "must be one of %s, not %q", list(Steps()), w.At)
	}
	return f
}

func list[T ~string](values []T) string {
	var texts []string
	for _, v := range values {
		texts = append(texts, string(v))
	}
	return strings.Join(texts, ", ")
}
