// Package chat is the client side of the model server: what `vllm chat --quick` does. It asks one question of any
// OpenAI-compatible server and prints the answer, which is all that an image without a shell and without curl needs
// to show that a model server answers. It knows nothing of devices.
package chat

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// ErrUsage marks a command line that cannot be understood. What is wrong with it has been printed.
var ErrUsage = errors.New("see vllm chat --help")

// maxAnswer bounds what is read of an answer, in bytes.
const maxAnswer = 4 << 20

// Run asks the question of the command line args, which follow `vllm chat`, and prints the answer to stdout.
func Run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var base, model, question, system, key string
	flags := flag.NewFlagSet("vllm chat", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&base, "url", "http://localhost:8000/v1", "the server, up to and with /v1")
	flags.StringVar(&model, "model-name", "", "the model; default: the first that the server lists")
	flags.StringVar(&question, "quick", "", "the question; required")
	flags.StringVar(&question, "q", "", "short for --quick")
	flags.StringVar(&system, "system-prompt", "", "put before the question")
	flags.StringVar(&key, "api-key", "", "sent as a bearer token")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return ErrUsage
	}
	if flags.NArg() > 0 || question == "" {
		fmt.Fprintln(stderr, "vllm chat asks one question: vllm chat [--url URL] [--model-name NAME] --quick QUESTION")
		return ErrUsage
	}

	// The time of a long answer from a busy server.
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	s := server{base: strings.TrimSuffix(base, "/"), key: key}
	if model == "" {
		var err error
		if model, err = s.firstModel(ctx); err != nil {
			return err
		}
	}
	answer, err := s.ask(ctx, model, system, question)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(stdout, answer)
	return err
}

type server struct{ base, key string }

func (s server) firstModel(ctx context.Context) (string, error) {
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := s.call(ctx, http.MethodGet, "/models", nil, &list); err != nil {
		return "", err
	}
	if len(list.Data) == 0 {
		return "", fmt.Errorf("%s/models lists no model", s.base)
	}
	return list.Data[0].ID, nil
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

func (s server) ask(ctx context.Context, model, system, question string) (string, error) {
	var request struct {
		Model    string    `json:"model"`
		Messages []message `json:"messages"`
	}
	request.Model = model
	if system != "" {
		request.Messages = append(request.Messages, message{"system", system})
	}
	request.Messages = append(request.Messages, message{"user", question})
	var completion struct {
		Choices []struct {
			Message message `json:"message"`
		} `json:"choices"`
	}
	if err := s.call(ctx, http.MethodPost, "/chat/completions", request, &completion); err != nil {
		return "", err
	}
	if len(completion.Choices) == 0 {
		return "", fmt.Errorf("%s/chat/completions answered without a choice", s.base)
	}
	return completion.Choices[0].Message.Content, nil
}

// call sends request as JSON and decodes the answer. An answer other than 200 is an error that carries its text.
func (s server) call(ctx context.Context, method, path string, request, answer any) error {
	var body io.Reader
	if request != nil {
		encoded, err := json.Marshal(request)
		if err != nil {
			return err
		}
		body = bytes.NewReader(encoded)
	}
	req, err := http.NewRequestWithContext(ctx, method, s.base+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	if s.key != "" {
		req.Header.Set("Authorization", "Bearer "+s.key)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, req.URL, err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s: %s", method, req.URL, resp.Status, strings.TrimSpace(string(text)))
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("%s %s: not the JSON of an OpenAI-compatible server: %w", method, req.URL, err)
	}
	return nil
}
