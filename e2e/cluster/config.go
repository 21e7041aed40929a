package cluster

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/simgpu/simgpu/e2e/internal/build"
	"github.com/simgpu/simgpu/e2e/internal/network"
)

// DefaultName is the name of a cluster when none is given.
const DefaultName = "demo"

// Config says what cluster is wanted. The zero value of every field but Dirs is a good default.
type Config struct {
	Dirs Dirs
	// Name tells clusters apart. Default: DefaultName.
	Name string
	// Nodes is how many nodes the cluster has. Default: as many as it has, 1 for a new one.
	Nodes int
	// FeatureGates are set on every Kubernetes component. Nil takes a cluster as it is; a new one then has none.
	FeatureGates map[string]bool
	// RuntimeConfig serves API versions that are off by default, or the reverse. Nil is as with FeatureGates.
	RuntimeConfig map[string]string
	// Retain keeps a cluster that did not come up, to look into it.
	Retain bool
	// Timeout bounds the time from the first process to a usable cluster; building is not counted. Default: DefaultTimeout.
	Timeout time.Duration
	// Progress is where to tell what is going on. Default: nowhere.
	Progress io.Writer
}

// DefaultTimeout is far more than a cluster needs on a slow machine that does other work.
const DefaultTimeout = 5 * time.Minute

// Dirs are the folders of this machine that clusters use.
type Dirs struct {
	// State has a folder for each cluster.
	State string
	// Cache has built programs and images.
	Cache string
	// Source is the folder of the module of this package. It is needed to build, thus by Up and Build only.
	Source string
}

// ModulePath is the module of this package.
const ModulePath = "github.com/simgpu/simgpu/e2e"

// DefaultDirs are the usual folders: below XDG_STATE_HOME and XDG_CACHE_HOME, and the checkout that work lies in, if it does.
func DefaultDirs(getenv func(string) string, work string) (Dirs, error) {
	base := func(variable, fallback string) (string, error) {
		if value := getenv(variable); filepath.IsAbs(value) {
			return filepath.Join(value, "simgpu"), nil
		}
		home := getenv("HOME")
		if !filepath.IsAbs(home) {
			return "", fmt.Errorf("neither %s nor HOME names a folder to keep things in", variable)
		}
		return filepath.Join(home, fallback, "simgpu"), nil
	}
	state, err := base("XDG_STATE_HOME", ".local/state")
	if err != nil {
		return Dirs{}, err
	}
	cache, err := base("XDG_CACHE_HOME", ".cache")
	if err != nil {
		return Dirs{}, err
	}
	source, _ := build.FindModule(work, ModulePath) // told when something has to be built
	return Dirs{State: filepath.Join(state, "clusters"), Cache: cache, Source: source}, nil
}

// validName keeps names usable as a folder, a control group and part of a kubeconfig context.
var validName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$`)

func checkName(name string) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("cluster name %q: use at most 40 lower-case letters, digits and dashes, with no dash at an end", name)
	}
	return nil
}

// complete fills in the defaults and returns all that is wrong.
func (c Config) complete() (Config, error) {
	if c.Name == "" {
		c.Name = DefaultName
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	var wrong []error
	if err := checkName(c.Name); err != nil {
		wrong = append(wrong, err)
	}
	if c.Nodes < 0 || c.Nodes > network.MaxNodes {
		wrong = append(wrong, fmt.Errorf("%d nodes: a cluster has 1 to %d", c.Nodes, network.MaxNodes))
	}
	if c.Dirs.State == "" || c.Dirs.Cache == "" {
		wrong = append(wrong, errors.New("no folders given for state and cache"))
	}
	if os.Geteuid() != 0 {
		wrong = append(wrong, errors.New("a cluster needs root, to make namespaces and control groups: use sudo"))
	}
	return c, errors.Join(wrong...)
}
