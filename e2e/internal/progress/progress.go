// Package progress tells a person what a long command is doing: finished steps as lines with the time since the start,
// and a status that changes while a step runs.
package progress

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/term"
)

// quietInterval is how often the status is written where it cannot replace itself, as in a log file.
const quietInterval = 10 * time.Second

// Printer writes progress. The nil Printer writes nothing. All methods may be called at the same time.
type Printer struct {
	mu         sync.Mutex
	out        io.Writer
	terminal   bool
	start      time.Time
	now        func() time.Time
	lastStatus time.Time
	dirty      bool // the terminal's current line holds a status
}

// New returns a Printer on out. A nil out gives a silent one.
func New(out io.Writer) *Printer {
	if out == nil {
		return nil
	}
	file, ok := out.(*os.File)
	return newPrinter(out, ok && term.IsTerminal(int(file.Fd())), time.Now)
}

func newPrinter(out io.Writer, terminal bool, now func() time.Time) *Printer {
	return &Printer{out: out, terminal: terminal, now: now, start: now(), lastStatus: now()}
}

// Step writes a line: something is finished or has begun.
func (p *Printer) Step(format string, args ...any) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	fmt.Fprintf(p.out, "%s %s\n", p.elapsed(), fmt.Sprintf(format, args...))
	p.lastStatus = p.now()
}

// Status says how far the current step is. On a terminal it replaces the status before; elsewhere it is
// written as a line when ten seconds have passed since the last line.
func (p *Printer) Status(format string, args ...any) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	text := fmt.Sprintf(format, args...)
	switch {
	case p.terminal:
		p.clear()
		fmt.Fprintf(p.out, "%s %s", p.elapsed(), text)
		p.dirty = true
	case p.now().Sub(p.lastStatus) >= quietInterval:
		fmt.Fprintf(p.out, "%s %s\n", p.elapsed(), text)
		p.lastStatus = p.now()
	}
}

// clear empties the terminal's line where a status stands on it.
func (p *Printer) clear() {
	if p.dirty {
		fmt.Fprint(p.out, "\r\x1b[K")
		p.dirty = false
	}
}

func (p *Printer) elapsed() string {
	return fmt.Sprintf("[%5.1fs]", p.now().Sub(p.start).Seconds())
}

// Elapsed is the time since the Printer was made.
func (p *Printer) Elapsed() time.Duration {
	if p == nil {
		return 0
	}
	return p.now().Sub(p.start)
}
