package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// openAI answers like a server with one model, and repeats what it was asked.
func openAI(t *testing.T) *httptest.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"data": [{"id": "llama"}]}`)
	})
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		var request struct {
			Model    string
			Messages []message
		}
		if err := json.NewDecoder(r.Body).Decode(&request); err != nil {
			t.Error(err)
		}
		if request.Model != "llama" {
			http.Error(w, "no such model", http.StatusNotFound)
			return
		}
		said := r.Header.Get("Authorization")
		for _, m := range request.Messages {
			said += "|" + m.Role + ":" + m.Content
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"choices": []any{map[string]any{"message": message{"assistant", said}}}})
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server
}

func TestRun(t *testing.T) {
	url := openAI(t).URL + "/v1"
	for name, tc := range map[string]struct {
		args  []string
		want  string // printed
		fails string // in the error
	}{
		"the only model":  {args: []string{"--url", url, "--quick", "hello"}, want: "|user:hello\n"},
		"slash at end":    {args: []string{"--url", url + "/", "-q", "hello"}, want: "|user:hello\n"},
		"all options":     {args: []string{"--url", url, "--model-name=llama", "--system-prompt", "be brief", "--api-key", "k", "-q", "hi"}, want: "Bearer k|system:be brief|user:hi\n"},
		"another model":   {args: []string{"--url", url, "--model-name", "qwen", "-q", "hi"}, fails: "no such model"},
		"another server":  {args: []string{"--url", url + "/x", "-q", "hi"}, fails: "404"},
		"no question":     {args: []string{"--url", url}, fails: ErrUsage.Error()},
		"words left over": {args: []string{"-q", "hi", "there"}, fails: ErrUsage.Error()},
		"unknown flag":    {args: []string{"--colour", "blue"}, fails: ErrUsage.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			err := Run(t.Context(), tc.args, &stdout, &stderr)
			if tc.fails == "" && err != nil || tc.fails != "" && (err == nil || !strings.Contains(err.Error(), tc.fails)) {
				t.Fatalf("error %v, want %q", err, tc.fails)
			}
			if errors.Is(err, ErrUsage) && stderr.Len() == 0 {
				t.Error("nothing says what is wrong with the command line")
			}
			if stdout.String() != tc.want {
				t.Errorf("printed %q, want %q", &stdout, tc.want)
			}
		})
	}
}
