package cluster

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// record is what is written down of a cluster, in cluster.json of its folder.
type record struct {
	Name          string            `json:"name"`
	Nodes         int               `json:"nodes"`
	FeatureGates  map[string]bool   `json:"featureGates,omitempty"`
	RuntimeConfig map[string]string `json:"runtimeConfig,omitempty"`
	// Port of 127.0.0.1 is the way to the API server.
	Port    int       `json:"port"`
	Created time.Time `json:"created"`
}

// Cluster is a cluster on this machine, running or not.
type Cluster struct {
	dirs   Dirs
	record record
}

// Name is the cluster's name.
func (c *Cluster) Name() string { return c.record.Name }

// Dir is the folder of the cluster.
func (c *Cluster) Dir() string { return filepath.Join(c.dirs.State, c.record.Name) }

// KubeconfigPath is the file that gives every right in the cluster to clients on this machine.
func (c *Cluster) KubeconfigPath() string { return filepath.Join(c.Dir(), "kubeconfig") }

// BinDir is a folder with kubectl and helm in the versions of the cluster.
func (c *Cluster) BinDir() string { return filepath.Join(c.Dir(), "bin") }

// Nodes are the nodes of the cluster in order.
func (c *Cluster) Nodes() []*Node {
	nodes := make([]*Node, c.record.Nodes)
	for i := range nodes {
		nodes[i] = &Node{cluster: c, index: i + 1}
	}
	return nodes
}

// Node returns a node by its number, which counts from 1. Node 1 has the control plane.
// It panics for a number that the cluster does not have.
func (c *Cluster) Node(number int) *Node { return c.Nodes()[number-1] }

// NodeByName returns a node by its name.
func (c *Cluster) NodeByName(name string) (*Node, error) {
	var names []string
	for _, n := range c.Nodes() {
		if n.Name() == name {
			return n, nil
		}
		names = append(names, n.Name())
	}
	return nil, fmt.Errorf("cluster %s has no node %q; it has %s", c.Name(), name, strings.Join(names, ", "))
}

// group is the control group of the cluster. Clusters of the same name in different state folders are different clusters.
func (c *Cluster) group() string {
	return fmt.Sprintf("simgpu-%s-%x", c.record.Name, sha256.Sum256([]byte(c.dirs.State)))[:len("simgpu-")+len(c.record.Name)+1+6]
}

func (c *Cluster) lockPath() string { return filepath.Join(c.dirs.State, "."+c.record.Name+".lock") }

// ErrNotFound is the error for a cluster that does not exist.
var ErrNotFound = errors.New("no such cluster")

// Open finds a cluster that Up has made.
func Open(dirs Dirs, name string) (*Cluster, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	c := &Cluster{dirs: dirs, record: record{Name: name}}
	if err := readJSON(filepath.Join(c.Dir(), "cluster.json"), &c.record); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("cluster %s: %w (in %s)", name, ErrNotFound, dirs.State)
	} else if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	return c, nil
}

// List returns the names of all clusters, sorted.
func List(dirs Dirs) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(dirs.State, "*", "cluster.json"))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, file := range files {
		names = append(names, filepath.Base(filepath.Dir(file)))
	}
	slices.Sort(names)
	return names, nil
}

func (c *Cluster) save() error { return writeJSON(filepath.Join(c.Dir(), "cluster.json"), c.record) }

// process identifies a process for longer than its id is its own.
type process struct {
	PID int `json:"pid"`
	// Start is when it started, in the kernel's clock ticks since boot.
	Start uint64 `json:"start"`
	// Boot is the boot of the machine that Start belongs to.
	Boot string `json:"boot"`
}

// identify describes a process that exists.
func identify(pid int) (process, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}, err
	}
	// The name, in parentheses, may contain anything. After it, the start is the 20th field.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return process{}, fmt.Errorf("process %d: unexpected content of its stat file", pid)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return process{}, fmt.Errorf("process %d has ended: %w", pid, fs.ErrNotExist)
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return process{}, fmt.Errorf("process %d: %w", pid, err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return process{}, err
	}
	return process{PID: pid, Start: start, Boot: strings.TrimSpace(string(boot))}, nil
}

// alive tells whether it is still this process that has the id.
func (p process) alive() bool {
	if p.PID == 0 {
		return false
	}
	now, err := identify(p.PID)
	return err == nil && now == p
}

// kill ends the process by force.
func (p process) kill() error {
	if !p.alive() {
		return nil
	}
	if err := unix.Kill(p.PID, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("end process %d: %w", p.PID, err)
	}
	return nil
}

func readJSON(path string, into any) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(content, into); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

func writeJSON(path string, value any) error {
	content, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(path, append(content, '\n'), 0o600)
}

// writeFile replaces a file in one step, so that nobody reads half of it.
func writeFile(path string, content []byte, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	temporary, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return err
	}
	_, err = temporary.Write(content)
	err = errors.Join(err, temporary.Chmod(mode), temporary.Close())
	if err == nil {
		err = os.Rename(temporary.Name(), path)
	}
	if err != nil {
		os.Remove(temporary.Name())
	}
	return err
}
