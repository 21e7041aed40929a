package faults

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// FuzzDecode checks that a list that is accepted can be written, and means the same then.
func FuzzDecode(f *testing.F) {
	const head = "apiVersion: simgpu.dev/v1alpha1\nkind: NodeFaults\nfaults:\n"
	for _, seed := range []string{
		"", "{}", "null", head,
		head + "- {id: x7k2p, device: gpu-0, type: XID, xid: 79, created: \"2026-12-01T02:00:00Z\"}\n",
		head + "- {id: a, type: ECC, correctable: 3, uncorrectable: 1, effect: NoExecute}\n- {id: b, type: SlowPrepare, delay: 5s, times: 2}\n",
		head + "- {id: a, type: Crash, at: SpecWritten}\n",
		head + "- {id: a, type: SlowPrepare, delay: 99999999999h}\n",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, annotation string) {
		list, err := Decode(annotation)
		if err != nil {
			if list != nil {
				t.Errorf("%v with %v", list, err)
			}
			return
		}
		encoded, err := Encode(list)
		if err != nil {
			t.Fatalf("accepted and cannot be written: %v", err)
		}
		again, err := Decode(encoded)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(list, again); diff != "" {
			t.Errorf("written and read again: %s", diff)
		}
		for _, fault := range list {
			if fault.String() == "" {
				t.Errorf("%+v has no words", fault)
			}
		}
	})
}

// FuzzDecodeConfig checks that parameters of a claim are accepted without faults or refused with some.
func FuzzDecodeConfig(f *testing.F) {
	const head = "apiVersion: simgpu.dev/v1alpha1\nkind: FaultConfig\nfaults:\n"
	for _, seed := range []string{"", "{}", head, head + "- {type: FailPrepare, times: 2}\n", head + "- {type: SlowPrepare, delay: 1s}\n- {type: HangPrepare}\n", head + "- {id: a, type: XID}\n"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, parameters []byte) {
		list, problems := DecodeConfig(parameters)
		if (len(list) > 0) == (len(problems) > 0) {
			t.Errorf("%v with %v", list, problems)
		}
	})
}
