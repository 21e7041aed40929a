package progress

import (
	"bytes"
	"testing"
	"time"
)

// clock is a time that moves when told to.
type clock struct{ now time.Time }

func (c *clock) read() time.Time { return c.now }

func TestLogFileGetsStepsAndOneStatusEveryTenSeconds(t *testing.T) {
	var out bytes.Buffer
	c := &clock{now: time.Unix(1000, 0)}
	p := newPrinter(&out, false, c.read)
	p.Step("begin %d", 1)
	for range 25 {
		c.now = c.now.Add(time.Second)
		p.Status("working")
	}
	p.Step("end")
	want := "[  0.0s] begin 1\n[ 10.0s] working\n[ 20.0s] working\n[ 25.0s] end\n"
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestTerminalStatusReplacesItself(t *testing.T) {
	var out bytes.Buffer
	c := &clock{now: time.Unix(1000, 0)}
	p := newPrinter(&out, true, c.read)
	p.Status("one")
	p.Status("two")
	p.Step("done")
	want := "[  0.0s] one" + "\r\x1b[K" + "[  0.0s] two" + "\r\x1b[K" + "[  0.0s] done\n"
	if out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func TestWithoutWriterNothingHappens(t *testing.T) {
	p := New(nil)
	p.Step("step")
	p.Status("status")
	if p != nil {
		t.Errorf("New(nil) = %v, want the silent printer", p)
	}
}
