package node

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
)

// Places inside a node.
const (
	// BinDir is where the programs of Spec are, and first in the PATH of every component.
	BinDir = "/opt/simgpu/bin"
	// LogDir is where each component's output goes, to NAME.log.
	LogDir = "/var/log/simgpu"

	// socketPath is where the init listens.
	socketPath = "/opt/simgpu/init.sock"
	// maskDir holds the files that stand in for some of /proc.
	maskDir = "/opt/simgpu/proc"
)

// Spec says what a node is. The init reads it once, when it starts.
type Spec struct {
	// Name is the host name.
	Name string `json:"name"`
	// Root is the folder of the machine that becomes the root of the node.
	Root string `json:"root"`
	// Programs are executables of the machine by the name under which they are found in BinDir.
	Programs map[string]string `json:"programs"`
	// Links are further names in BinDir for a program, by name.
	Links map[string]string `json:"links,omitempty"`
	// Components are started in this order, each when what it waits for is there.
	Components []Component `json:"components"`
	// Proxy is an address in the node's network. The init passes it the connections to the listener that it was given.
	Proxy string `json:"proxy,omitempty"`
}

// Component is a process of a node.
type Component struct {
	Name string `json:"name"`
	// Command is the program, found in BinDir or on the PATH, and its arguments.
	Command []string `json:"command"`
	// After must all answer before the component starts.
	After []Probe `json:"after,omitempty"`
	// Ready tells when the component is ready.
	Ready Probe `json:"ready"`
}

// Probe is a question with a yes or no answer: does this URL answer 200, or does something accept connections at this socket?
type Probe struct {
	URL string `json:"url,omitempty"`
	// CA is the file with the authority that the server's certificate must come from. Without it the certificate is not checked.
	CA string `json:"ca,omitempty"`
	// Certificate and Key are the files to show who asks.
	Certificate string `json:"certificate,omitempty"`
	Key         string `json:"key,omitempty"`

	Socket string `json:"socket,omitempty"`
}

// State is what a component is doing.
type State string

const (
	// Waiting: what the component starts after does not answer yet.
	Waiting State = "waiting"
	// Starting: the process runs and is not ready yet.
	Starting State = "starting"
	// Ready: the process runs and has been ready.
	Ready State = "ready"
	// Exited: the process ended by itself.
	Exited State = "exited"
	// Stopped: the process was ended on request.
	Stopped State = "stopped"
)

// Status is how a component is.
type Status struct {
	Name  string `json:"name"`
	State State  `json:"state"`
	// PID is the process as the node counts, 0 when there is none.
	PID int `json:"pid,omitempty"`
	// Exit says how the process ended.
	Exit string `json:"exit,omitempty"`
	// Starts is how often it was started since the node was.
	Starts int `json:"starts"`
}

// ReadSpec reads a Spec and refuses fields that it does not know.
func ReadSpec(path string) (*Spec, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the specification of the node: %w", err)
	}
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.DisallowUnknownFields()
	spec := &Spec{}
	if err := decoder.Decode(spec); err != nil {
		return nil, fmt.Errorf("read the specification of the node from %s: %w", path, err)
	}
	return spec, nil
}
