package modelserver

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
)

// lines writes a log in the manner of vLLM's, so that what people grep a real
// server's log for is found: level, time, source, message.
type lines struct {
	mu    *sync.Mutex
	out   io.Writer
	attrs []slog.Attr
}

func newLogger(out io.Writer) *slog.Logger {
	return slog.New(&lines{mu: &sync.Mutex{}, out: out})
}

func (l *lines) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

func (l *lines) Handle(_ context.Context, r slog.Record) error {
	level := r.Level.String()
	if r.Level == slog.LevelWarn {
		level = "WARNING" // as Python spells it
	}
	var line bytes.Buffer
	fmt.Fprintf(&line, "%s %s [vllm-sim] %s", level, r.Time.Format("01-02 15:04:05"), r.Message)
	write := func(a slog.Attr) bool {
		fmt.Fprintf(&line, " %s=%v", a.Key, a.Value)
		return true
	}
	for _, a := range l.attrs {
		write(a)
	}
	r.Attrs(write)
	line.WriteByte('\n')

	l.mu.Lock()
	defer l.mu.Unlock()
	_, err := l.out.Write(line.Bytes())
	return err
}

func (l *lines) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &lines{mu: l.mu, out: l.out, attrs: append(l.attrs[:len(l.attrs):len(l.attrs)], attrs...)}
}

// WithGroup keeps the keys as they are: lines are for people.
func (l *lines) WithGroup(string) slog.Handler { return l }
