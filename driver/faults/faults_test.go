package faults

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

func document(entries ...string) string {
	return `{"apiVersion":"simgpu.dev/v1alpha1","kind":"NodeFaults","faults":[` + strings.Join(entries, ",") + `]}`
}

func TestEncodedFaultsDecodeToThemselves(t *testing.T) {
	list := []Fault{
		{ID: "a", Device: "gpu-0", Type: XID, XID: 79, Effect: "NoExecute", Created: time.Date(2026, 12, 1, 2, 0, 0, 0, time.UTC)},
		{ID: "b", Type: ECC, Correctable: 3, Uncorrectable: 1},
		{ID: "c", Device: "gpu-0-mig-1g10gb-19-0", Type: GPULost},
		{ID: "d", Type: FailPrepare, Times: 2},
		{ID: "e", Type: HangUnprepare},
		{ID: "f", Type: SlowPrepare, Delay: 1500 * time.Millisecond, Times: 1},
		{ID: "g", Type: Crash, At: "SpecWritten"},
	}
	text, err := Encode(list)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(text)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, list) {
		t.Errorf("got %+v\nwant %+v", got, list)
	}
}

func TestNoFaultsAreNoAnnotation(t *testing.T) {
	text, err := Encode(nil)
	if err != nil || text != "" {
		t.Errorf("encoded as %q, %v", text, err)
	}
	list, err := Decode("")
	if err != nil || list != nil {
		t.Errorf("decoded as %v, %v", list, err)
	}
}

func TestYAMLIsReadAsWell(t *testing.T) {
	list, err := Decode("apiVersion: simgpu.dev/v1alpha1\nkind: NodeFaults\nfaults:\n- id: a\n  type: XID\n  xid: 48\n")
	if err != nil || len(list) != 1 || list[0].XID != 48 {
		t.Errorf("got %+v, %v", list, err)
	}
}

func TestProblemsNameTheField(t *testing.T) {
	for name, test := range map[string]struct{ annotation, want string }{
		"not YAML":            {`{`, "not valid YAML"},
		"another version":     {`{"apiVersion":"simgpu.dev/v9","kind":"NodeFaults","faults":[{"id":"a","type":"GPULost"}]}`, `apiVersion: "simgpu.dev/v9"`},
		"another kind":        {`{"apiVersion":"simgpu.dev/v1alpha1","kind":"Faults","faults":[{"id":"a","type":"GPULost"}]}`, `kind: "Faults"`},
		"empty":               {document(), "faults: is required"},
		"unknown field":       {document(`{"id":"a","type":"XID","xid":1,"sid":2}`), "faults[0].sid: unknown field"},
		"unknown type":        {document(`{"id":"a","type":"Melt"}`), `faults[0].type: must be one of XID, ECC`},
		"no id":               {document(`{"type":"GPULost"}`), "faults[0].id: must be"},
		"id twice":            {document(`{"id":"a","type":"GPULost"}`, `{"id":"a","type":"GPULost"}`), `faults[1].id: "a" is already the id of faults[0]`},
		"device":              {document(`{"id":"a","type":"GPULost","device":"../gpu"}`), "faults[0].device: must be the name"},
		"created":             {document(`{"id":"a","type":"GPULost","created":"now"}`), "faults[0].created: must be a time"},
		"no number":           {document(`{"id":"a","type":"XID"}`), "faults[0].xid: is required by type XID"},
		"number too small":    {document(`{"id":"a","type":"XID","xid":0}`), "faults[0].xid: must be from 1"},
		"number too large":    {document(`{"id":"a","type":"XID","xid":65536}`), "faults[0].xid: must be from 1"},
		"field of another":    {document(`{"id":"a","type":"XID","xid":1,"times":2}`), "faults[0].times: does not go with type XID"},
		"no counts":           {document(`{"id":"a","type":"ECC"}`), "faults[0]: type ECC needs"},
		"negative count":      {document(`{"id":"a","type":"ECC","correctable":-1}`), "faults[0].correctable: must be from 0"},
		"effect":              {document(`{"id":"a","type":"GPULost","effect":"Evict"}`), "faults[0].effect: must be one of NoSchedule, NoExecute, None"},
		"times":               {document(`{"id":"a","type":"FailPrepare","times":0}`), "faults[0].times: must be from 1"},
		"no delay":            {document(`{"id":"a","type":"SlowPrepare"}`), "faults[0].delay: is required"},
		"delay":               {document(`{"id":"a","type":"SlowPrepare","delay":"soon"}`), "faults[0].delay: must be a duration"},
		"delay of a day":      {document(`{"id":"a","type":"SlowPrepare","delay":"24h"}`), "faults[0].delay: must be a duration"},
		"crash nowhere":       {document(`{"id":"a","type":"Crash"}`), "faults[0].at: is required"},
		"crash at no step":    {document(`{"id":"a","type":"Crash","at":"Lunch"}`), "faults[0].at: must be one of IntentWritten"},
		"crash several times": {document(`{"id":"a","type":"Crash","at":"SpecWritten","times":2}`), "faults[0].times: does not go"},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := Decode(test.annotation)
			if err == nil {
				t.Fatalf("accepted as %+v", list)
			}
			if !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), Annotation) {
				t.Errorf("%q does not say %q", err, test.want)
			}
			if list != nil {
				t.Error("a list beside an error")
			}
		})
	}
}

func TestTooManyFaults(t *testing.T) {
	var list []Fault
	for i := range Max + 1 {
		list = append(list, Fault{ID: fmt.Sprintf("f%d", i), Type: GPULost})
	}
	if _, err := Encode(list[:Max]); err != nil {
		t.Errorf("%d: %v", Max, err)
	}
	if _, err := Encode(list); err == nil {
		t.Errorf("%d are accepted", len(list))
	}
}

func TestConfigOfAClaim(t *testing.T) {
	config := func(entry string) []byte {
		return []byte(`{"apiVersion":"simgpu.dev/v1alpha1","kind":"FaultConfig","faults":[` + entry + `]}`)
	}
	list, problems := DecodeConfig(config(`{"type":"FailPrepare","times":2}`))
	if want := []Fault{{Type: FailPrepare, Times: 2}}; len(problems) > 0 || !reflect.DeepEqual(list, want) {
		t.Errorf("got %+v, %v", list, problems)
	}
	for name, test := range map[string]struct{ entry, want string }{
		"harms others":    {`{"type":"Crash","at":"SpecWritten"}`, "faults[0].type: Crash is not for a claim; possible: FailPrepare, HangPrepare, SlowPrepare"},
		"of a device":     {`{"type":"XID","xid":79}`, "faults[0].type: XID is not for a claim"},
		"at an unprepare": {`{"type":"FailUnprepare"}`, "faults[0].type"},
		"another device":  {`{"type":"FailPrepare","device":"gpu-1"}`, "faults[0].device: is for faults on a node"},
		"with an id":      {`{"type":"FailPrepare","id":"a"}`, "faults[0].id: is for faults on a node"},
	} {
		t.Run(name, func(t *testing.T) {
			_, problems := DecodeConfig(config(test.entry))
			if err := problems.Err("config"); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestInWords(t *testing.T) {
	for want, fault := range map[string]Fault{
		"XID 79":                             {Type: XID, XID: 79},
		"ECC 3 correctable, 1 uncorrectable": {Type: ECC, Correctable: 3, Uncorrectable: 1},
		"GPULost":                            {Type: GPULost},
		"FailPrepare":                        {Type: FailPrepare},
		"FailPrepare once":                   {Type: FailPrepare, Times: 1},
		"FailPrepare 2 times":                {Type: FailPrepare, Times: 2},
		"SlowUnprepare by 5s":                {Type: SlowUnprepare, Delay: 5 * time.Second},
		"Crash at SpecWritten":               {Type: Crash, At: "SpecWritten"},
	} {
		if got := fault.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
