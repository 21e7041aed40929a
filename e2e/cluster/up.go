package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/simgpu/simgpu/e2e/image"
	"github.com/simgpu/simgpu/e2e/internal/cgroup"
	"github.com/simgpu/simgpu/e2e/internal/debian"
	"github.com/simgpu/simgpu/e2e/internal/kubernetes"
	"github.com/simgpu/simgpu/e2e/internal/lock"
	"github.com/simgpu/simgpu/e2e/internal/network"
	"github.com/simgpu/simgpu/e2e/internal/node"
	"github.com/simgpu/simgpu/e2e/internal/progress"
)

// Up makes the cluster that config asks for and returns when pods can run in it. A cluster that is there already is
// returned as it is, after whatever does not run in it was started again; one that differs from config is an error.
//
// When a new cluster does not come up, or ctx ends, it is taken down again unless config says to retain it.
func Up(ctx context.Context, config Config) (_ *Cluster, err error) {
	config, err = config.complete()
	if err != nil {
		return nil, err
	}
	out := progress.New(config.Progress)
	programs, pause, err := prepare(ctx, config.Dirs, out)
	if err != nil {
		return nil, err
	}

	c := &Cluster{dirs: config.Dirs, record: record{Name: config.Name}}
	held, err := c.lock(ctx, out)
	if err != nil {
		return nil, err
	}
	defer held.Release()
	ctx, cancel := context.WithTimeoutCause(ctx, config.Timeout, fmt.Errorf("the cluster was not up within %s", config.Timeout))
	defer cancel()

	existing, err := Open(config.Dirs, config.Name)
	switch {
	case errors.Is(err, ErrNotFound):
		defer func() {
			if err != nil && !config.Retain {
				out.Step("Taking down what was started (--retain keeps it)")
				err = errors.Join(err, c.down(context.WithoutCancel(ctx)))
			}
		}()
		if err := c.create(config, programs); err != nil {
			return nil, fmt.Errorf("make cluster %s: %w", config.Name, err)
		}
	case err != nil:
		return nil, err
	default:
		if err := existing.matches(config); err != nil {
			return nil, err
		}
		c = existing
	}
	if err := c.start(ctx, programs, pause, out); err != nil {
		return nil, fmt.Errorf("cluster %s: %w", config.Name, err)
	}
	return c, nil
}

// prepare gets everything that is the same for all clusters: packages, programs and the pause image.
func prepare(ctx context.Context, dirs Dirs, out *progress.Printer) (programs map[string]string, pause string, err error) {
	if err := debian.Install(ctx, dirs.Cache, out); err != nil {
		return nil, "", err
	}
	if programs, err = buildPrograms(ctx, dirs, out); err != nil {
		return nil, "", err
	}
	pause, err = BuildImage(ctx, dirs, out, image.Pause)
	return programs, pause, err
}

// Build gets everything that clusters need without making one, so that the next Up takes seconds.
func Build(ctx context.Context, config Config) error {
	config, err := config.complete()
	if err != nil {
		return err
	}
	_, _, err = prepare(ctx, config.Dirs, progress.New(config.Progress))
	return err
}

// matches refuses a config that asks for another cluster than this one.
func (c *Cluster) matches(config Config) error {
	var differ []string
	if c.record.Nodes != config.Nodes {
		differ = append(differ, fmt.Sprintf("%d nodes (asked for: %d)", c.record.Nodes, config.Nodes))
	}
	if !maps.Equal(c.record.FeatureGates, config.FeatureGates) {
		differ = append(differ, fmt.Sprintf("feature gates %v (asked for: %v)", c.record.FeatureGates, config.FeatureGates))
	}
	if !maps.Equal(c.record.RuntimeConfig, config.RuntimeConfig) {
		differ = append(differ, fmt.Sprintf("runtime config %v (asked for: %v)", c.record.RuntimeConfig, config.RuntimeConfig))
	}
	if len(differ) == 0 {
		return nil
	}
	return fmt.Errorf("cluster %s exists with %s: `simgpu-cluster down --name %s` removes it, another name makes a second one",
		c.Name(), strings.Join(differ, ", "), c.Name())
}

func (c *Cluster) lock(ctx context.Context, out *progress.Printer) (*lock.Lock, error) {
	return lock.Acquire(ctx, c.lockPath(), func() { out.Step("Waiting for another command on cluster %s", c.Name()) })
}

// create writes everything that a cluster consists of before its first start.
func (c *Cluster) create(config Config, programs map[string]string) error {
	listener, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return fmt.Errorf("find a port for the API server: %w", err)
	}
	defer listener.Close()
	c.record = record{
		Name:          config.Name,
		Nodes:         config.Nodes,
		FeatureGates:  config.FeatureGates,
		RuntimeConfig: config.RuntimeConfig,
		Port:          listener.Addr().(*net.TCPAddr).Port,
		Created:       time.Now().UTC().Truncate(time.Second),
	}
	if err := os.MkdirAll(c.Dir(), 0o755); err != nil {
		return err
	}
	if err := c.save(); err != nil {
		return err
	}
	credentials, err := kubernetes.NewCredentials()
	if err != nil {
		return err
	}
	kubeconfig, err := credentials.AdminKubeconfig(fmt.Sprintf("https://127.0.0.1:%d", c.record.Port), "simgpu-"+c.Name())
	if err != nil {
		return err
	}
	if err := writeFile(c.KubeconfigPath(), kubeconfig, 0o600); err != nil {
		return err
	}
	settings, err := c.settings()
	if err != nil {
		return err
	}
	for _, n := range c.Nodes() {
		if err := n.create(settings, credentials); err != nil {
			return fmt.Errorf("node %s: %w", n.Name(), err)
		}
	}
	return nil
}

func (c *Cluster) settings() (kubernetes.Config, error) {
	snapshotter, err := snapshotterFor(c.Dir())
	if err != nil {
		return kubernetes.Config{}, err
	}
	protect, err := canProtect()
	return kubernetes.Config{
		FeatureGates:     c.record.FeatureGates,
		RuntimeConfig:    c.record.RuntimeConfig,
		Snapshotter:      snapshotter,
		RestrictOOMScore: !protect,
	}, err
}

// create writes the files of the node.
func (n *Node) create(settings kubernetes.Config, credentials *kubernetes.Credentials) error {
	files, err := kubernetes.Files(settings, n.index)
	if err != nil {
		return err
	}
	secret, err := credentials.Files(n.index)
	if err != nil {
		return err
	}
	for path, content := range files {
		if err := writeFile(filepath.Join(n.rootfs(), path), []byte(content), 0o644); err != nil {
			return err
		}
	}
	for path, content := range secret {
		if err := writeFile(filepath.Join(n.rootfs(), path), []byte(content), 0o600); err != nil {
			return err
		}
	}
	for _, folder := range []string{"/etc/cdi"} {
		if err := os.MkdirAll(filepath.Join(n.rootfs(), folder), 0o755); err != nil {
			return err
		}
	}
	return n.identity()
}

// identity gives the node a machine id of its own and says which system its programs come from.
func (n *Node) identity() error {
	id := strings.ReplaceAll(node.NewUUID(), "-", "")
	if err := writeFile(filepath.Join(n.rootfs(), "etc/machine-id"), []byte(id+"\n"), 0o444); err != nil {
		return err
	}
	release, err := os.ReadFile("/etc/os-release")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	return writeFile(filepath.Join(n.rootfs(), "etc/os-release"), release, 0o644)
}

// start starts what does not run, in the order in which one thing needs another, and waits until the cluster is usable.
func (c *Cluster) start(ctx context.Context, programs map[string]string, pause string, out *progress.Printer) error {
	if err := c.linkPrograms(programs); err != nil {
		return err
	}
	started, err := c.startNodes(ctx, programs)
	if err != nil {
		return err
	}
	if len(started) > 0 {
		out.Step("Started %s", plural(len(started), "node"))
	}
	for _, n := range c.Nodes() {
		client, err := n.client()
		if err != nil {
			return err
		}
		if err := client.StartAll(ctx); err != nil {
			return fmt.Errorf("start the components of %s: %w", n.Name(), err)
		}
		if err := c.waitComponent(ctx, out, n, kubernetes.Containerd); err != nil {
			return err
		}
	}
	if _, err := c.LoadImage(ctx, pause); err != nil {
		return err
	}
	if err := c.waitComponent(ctx, out, c.Node(1), kubernetes.APIServer); err != nil {
		return err
	}
	out.Step("The API server is ready")
	if err := c.ensureDNS(ctx); err != nil {
		return fmt.Errorf("make the DNS service: %w", err)
	}
	if err := c.waitComponents(ctx, out, c.Nodes()...); err != nil {
		return err
	}
	out.Step("All components are ready")
	if err := c.waitUsable(ctx, out); err != nil {
		return err
	}
	out.Step("Cluster %s is ready: Kubernetes %s, %s", c.Name(), c.version(), plural(c.record.Nodes, "node"))
	c.record.Usable = true
	return c.save()
}

// startNodes starts the nodes that do not run, all at once, and joins them to the others.
func (c *Cluster) startNodes(ctx context.Context, programs map[string]string) (started []*launched, err error) {
	groups, err := cgroup.Discover()
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, l := range started {
			if err != nil {
				l.gate.Close()
			}
		}
	}()
	settings, err := c.settings()
	if err != nil {
		return nil, err
	}
	var members []network.Node
	for _, n := range c.Nodes() {
		p, err := n.process()
		if err != nil {
			return started, err
		}
		if !p.alive() {
			l, err := c.launch(ctx, n, programs, settings, groups)
			if err != nil {
				return started, err
			}
			started = append(started, l)
			if p, err = n.process(); err != nil {
				return started, err
			}
		}
		members = append(members, network.Node{Index: n.index, PID: p.PID})
	}
	if err := network.Join(members); err != nil {
		return started, err
	}
	for _, l := range started {
		if err := l.release(ctx); err != nil {
			return started, err
		}
	}
	return started, nil
}

// launch writes what the node is and starts its first process.
func (c *Cluster) launch(ctx context.Context, n *Node, programs map[string]string, settings kubernetes.Config, groups cgroup.Hierarchies) (*launched, error) {
	spec := node.Spec{
		Name:       n.Name(),
		Root:       n.rootfs(),
		Programs:   map[string]string{},
		Links:      map[string]string{},
		Components: kubernetes.Components(settings, n.index),
	}
	for _, name := range []string{programKube, programContainerd, programShim} {
		spec.Programs[name] = programs[name]
	}
	for _, name := range personalities {
		spec.Links[name] = programKube
	}
	var listener *net.TCPListener
	if n.index == 1 {
		spec.Proxy = kubernetes.APIAddress()
		var err error
		listener, err = net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: c.record.Port})
		if err != nil {
			return nil, fmt.Errorf("open the way to the API server: %w: if another program has taken the port meanwhile, take the cluster down and up again", err)
		}
		defer listener.Close()
	}
	if err := writeJSON(n.specPath(), spec); err != nil {
		return nil, err
	}
	return n.launch(ctx, programs[programInit], groups, listener)
}

// linkPrograms gives the machine kubectl and helm in the versions of the cluster.
func (c *Cluster) linkPrograms(programs map[string]string) error {
	if err := os.MkdirAll(c.BinDir(), 0o755); err != nil {
		return err
	}
	for _, name := range clientPrograms {
		link := filepath.Join(c.BinDir(), name)
		if current, err := os.Readlink(link); err == nil && current == programs[programKube] {
			continue
		}
		if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := os.Symlink(programs[programKube], link); err != nil {
			return err
		}
	}
	return nil
}

func plural(count int, noun string) string {
	if count == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", count, noun)
}
