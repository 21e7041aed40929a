package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ComponentStatus is how a component of a node is.
type ComponentStatus struct {
	Node      string `json:"node"`
	Component string `json:"component"`
	// State is waiting, starting, ready, exited, stopped, or, of a node that does not run, down.
	State string `json:"state"`
	// PID is the process as this machine counts, 0 when there is none.
	PID int `json:"pid,omitempty"`
	// RSS is the memory that the process has in RAM, in bytes.
	RSS int64 `json:"rssBytes,omitempty"`
	// Starts is how often the component was started since the node was.
	Starts int `json:"starts,omitempty"`
	// Exit says how the last process ended, if it did.
	Exit string `json:"exit,omitempty"`
	// LogTail is the end of the log of a component that has exited.
	LogTail []string `json:"logTail,omitempty"`
}

// stateDown is the state of everything in a node that does not run.
const stateDown = "down"

// Status returns how every component is, node by node, in the order in which they start.
func (c *Cluster) Status(ctx context.Context) ([]ComponentStatus, error) {
	var all []ComponentStatus
	for _, n := range c.Nodes() {
		statuses, err := n.Status(ctx)
		if err != nil {
			return nil, err
		}
		all = append(all, statuses...)
	}
	return all, nil
}

// Status returns how every component of the node is; the first is the node's own first process.
func (n *Node) Status(ctx context.Context) ([]ComponentStatus, error) {
	p, err := n.process()
	if err != nil {
		return nil, err
	}
	if !p.alive() {
		return []ComponentStatus{{Node: n.Name(), Component: initComponent, State: stateDown}}, nil
	}
	client, err := n.client()
	if err != nil {
		return nil, err
	}
	statuses, err := client.Status(ctx)
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", n.Name(), err)
	}
	inside, err := processesOf(p.PID)
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", n.Name(), err)
	}
	all := []ComponentStatus{{Node: n.Name(), Component: initComponent, State: "ready", PID: p.PID, RSS: residentSet(p.PID), Starts: 1}}
	for _, s := range statuses {
		one := ComponentStatus{Node: n.Name(), Component: s.Name, State: string(s.State), PID: inside[s.PID], Starts: s.Starts, Exit: s.Exit}
		if one.PID != 0 {
			one.RSS = residentSet(one.PID)
		}
		if one.Exit != "" && one.State == "exited" {
			one.LogTail, _ = tail(n.LogPath(s.Name), tailLines) // the state is worth showing without it
		}
		all = append(all, one)
	}
	return all, nil
}

// processesOf returns the processes in the process namespace of process pid: as this machine counts them, by how that
// namespace counts them.
func processesOf(pid int) (map[int]int, error) {
	namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
	if err != nil {
		return nil, err
	}
	folders, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	inside := map[int]int{}
	for _, folder := range folders {
		if of, err := os.Readlink(folder + "/ns/pid"); err != nil || of != namespace {
			continue // another namespace, or a process that has just ended
		}
		ids := strings.Fields(statusField(folder, "NSpid:"))
		outer, err := strconv.Atoi(filepath.Base(folder))
		if err != nil || len(ids) == 0 {
			continue
		}
		if inner, err := strconv.Atoi(ids[len(ids)-1]); err == nil {
			inside[inner] = outer
		}
	}
	return inside, nil
}

// residentSet returns the bytes that a process has in RAM, 0 when it has ended.
func residentSet(pid int) int64 {
	fields := strings.Fields(statusField(fmt.Sprintf("/proc/%d", pid), "VmRSS:"))
	if len(fields) == 0 {
		return 0
	}
	kilobytes, err := strconv.ParseInt(fields[0], 10, 64)
	if err != nil {
		return 0
	}
	return kilobytes * 1024
}

// statusField returns a field of a process's status file, empty when the process has ended.
func statusField(folder, field string) string {
	content, err := os.ReadFile(folder + "/status")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(line, field); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
