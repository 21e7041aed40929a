package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
)

// serve answers the machine on the init's socket.
func (i *initProcess) serve(socket net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(i.supervisor.statuses()) // fails when nobody listens any more
	})
	mux.HandleFunc("POST /start/{component}", answer(func(r *http.Request) error {
		return i.supervisor.start(r.Context(), r.PathValue("component"))
	}))
	mux.HandleFunc("POST /stop/{component}", answer(func(r *http.Request) error {
		return i.supervisor.stop(r.Context(), r.PathValue("component"))
	}))
	mux.HandleFunc("POST /command/{component}", answer(func(r *http.Request) error {
		var command []string
		if err := json.NewDecoder(r.Body).Decode(&command); err != nil {
			return err
		}
		return i.supervisor.setCommand(r.PathValue("component"), command)
	}))
	mux.HandleFunc("POST /start", answer(func(*http.Request) error {
		i.supervisor.startAll()
		return nil
	}))
	mux.HandleFunc("POST /reboot", answer(func(*http.Request) error {
		return i.reboot()
	}))
	return http.Serve(socket, mux)
}

// answer turns an error into a response.
func answer(do func(*http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := do(r); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}
}

// Client speaks to a node's init from the machine.
type Client struct {
	http *http.Client
}

// NewClient returns a client of the init with this process id of the machine.
func NewClient(pid int) *Client {
	// Through /proc the path is short, however deep the node's root is: a socket's path ends at 108 bytes.
	path := fmt.Sprintf("/proc/%d/root%s", pid, socketPath)
	return &Client{http: &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
	}}}
}

// Status returns how the components are, in the order in which they start.
func (c *Client) Status(ctx context.Context) ([]Status, error) {
	answer, err := c.do(ctx, http.MethodGet, "/status", nil)
	if err != nil {
		return nil, err
	}
	var statuses []Status
	if err := json.Unmarshal(answer, &statuses); err != nil {
		return nil, fmt.Errorf("read the state of the node's components: %w", err)
	}
	return statuses, nil
}

// Start starts a component that does not run and waits until it is ready.
func (c *Client) Start(ctx context.Context, component string) error {
	_, err := c.do(ctx, http.MethodPost, "/start/"+component, nil)
	return err
}

// StartAll begins to start every component that does not run.
func (c *Client) StartAll(ctx context.Context) error {
	_, err := c.do(ctx, http.MethodPost, "/start", nil)
	return err
}

// Stop ends a component and waits until its process is gone.
func (c *Client) Stop(ctx context.Context, component string) error {
	_, err := c.do(ctx, http.MethodPost, "/stop/"+component, nil)
	return err
}

// SetCommand changes how a component that does not run is started, for as long as the init lives.
func (c *Client) SetCommand(ctx context.Context, component string, command []string) error {
	body, err := json.Marshal(command)
	if err != nil {
		return err
	}
	_, err = c.do(ctx, http.MethodPost, "/command/"+component, bytes.NewReader(body))
	return err
}

// Reboot ends everything in the node and begins to start its components again.
func (c *Client) Reboot(ctx context.Context) error {
	_, err := c.do(ctx, http.MethodPost, "/reboot", nil)
	return err
}

func (c *Client) do(ctx context.Context, method, path string, content io.Reader) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, method, "http://init"+path, content)
	if err != nil {
		return nil, err
	}
	response, err := c.http.Do(request)
	if err != nil {
		return nil, fmt.Errorf("ask the node's init: %w", err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("ask the node's init: %w", err)
	}
	if response.StatusCode != http.StatusOK {
		return nil, errors.New(strings.TrimSpace(string(bytes.TrimSpace(body))))
	}
	return body, nil
}
