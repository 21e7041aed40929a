package node

import (
	"context"
	"encoding/pem"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestProbe(t *testing.T) {
	answer := func(status int) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) })
	}
	good := httptest.NewServer(answer(http.StatusOK))
	defer good.Close()
	bad := httptest.NewServer(answer(http.StatusInternalServerError))
	defer bad.Close()
	secure := httptest.NewTLSServer(answer(http.StatusOK))
	defer secure.Close()
	ca := filepath.Join(t.TempDir(), "ca.crt")
	write := func(path string, content []byte) {
		t.Helper()
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}))
	empty := filepath.Join(t.TempDir(), "empty.crt")
	write(empty, nil)
	t.Chdir(t.TempDir()) // a relative path is short: that of a socket ends at 108 bytes
	const socket = "socket"
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()

	for name, test := range map[string]struct {
		probe Probe
		wrong string // part of the error, "" for a yes
	}{
		"200":                        {Probe{URL: good.URL}, ""},
		"500":                        {Probe{URL: bad.URL}, "500"},
		"nobody there":               {Probe{URL: "http://127.0.0.1:1/"}, "refused"},
		"known authority":            {Probe{URL: secure.URL, CA: ca}, ""},
		"authority without content":  {Probe{URL: secure.URL, CA: empty}, "no certificate"},
		"authority does not matter":  {Probe{URL: secure.URL}, ""},
		"missing client certificate": {Probe{URL: secure.URL, Certificate: "/no/such/file"}, "/no/such/file"},
		"socket":                     {Probe{Socket: socket}, ""},
		"no socket":                  {Probe{Socket: socket + "x"}, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			err := test.probe.ask(t.Context())
			if test.wrong == "" && err != nil || test.wrong != "" && (err == nil || !strings.Contains(err.Error(), test.wrong)) {
				t.Errorf("got %v, want %q", err, test.wrong)
			}
		})
	}
}

func TestProbeGivesUpWithTheReason(t *testing.T) {
	reason := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTeapot)
		cancel(reason)
	}))
	defer server.Close()
	if err := (Probe{URL: server.URL}).wait(ctx); !errors.Is(err, reason) {
		t.Errorf("got %v, want the reason", err)
	}
}

func TestReadSpec(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.json")
	for name, test := range map[string]struct{ content, wrong string }{
		"complete":      {`{"name": "n", "root": "/r", "programs": {"a": "/a"}, "components": [{"name": "c", "command": ["c"], "ready": {"socket": "/s"}}]}`, ""},
		"unknown field": {`{"name": "n", "rooot": "/r"}`, "rooot"},
		"no JSON":       {`name: n`, path},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(path, []byte(test.content), 0o600); err != nil {
				t.Fatal(err)
			}
			spec, err := ReadSpec(path)
			if test.wrong == "" && (err != nil || spec.Components[0].Ready.Socket != "/s") {
				t.Errorf("got %+v, %v", spec, err)
			}
			if test.wrong != "" && (err == nil || !strings.Contains(err.Error(), test.wrong)) {
				t.Errorf("got %v, want %q in it", err, test.wrong)
			}
		})
	}
}

func TestMainIsForProcessOneOnly(t *testing.T) {
	if err := Main([]string{"simgpu-node", "run", "/no/such/file"}); err == nil || !strings.Contains(err.Error(), "simgpu-cluster") {
		t.Errorf("got %v, want a hint at the command to use", err)
	}
}

func TestNewUUID(t *testing.T) {
	form := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	one, two := NewUUID(), NewUUID()
	if !form.MatchString(one) || one == two {
		t.Errorf("got %s and %s", one, two)
	}
}

func TestUnescape(t *testing.T) {
	if got, want := unescape(`/a\040b\134c`), `/a b\c`; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestForwardCarriesBothWaysUntilBothEnd(t *testing.T) {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		connection, err := server.Accept()
		if err != nil {
			return
		}
		defer connection.Close()
		// The answer comes only after the end of the question has arrived.
		question := make([]byte, 64)
		n := 0
		for {
			read, err := connection.Read(question[n:])
			n += read
			if err != nil {
				break
			}
		}
		if _, err := connection.Write([]byte(strings.ToUpper(string(question[:n])))); err != nil {
			t.Error(err)
		}
	}()
	outside, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	go forward(outside, server.Addr().String())

	client, err := net.Dial("tcp", outside.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := client.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 64)
	n, err := client.Read(answer)
	if err != nil || string(answer[:n]) != "HELLO" {
		t.Errorf("got %q, %v", answer[:n], err)
	}
}
