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

	"golang.org/x/sys/unix"

	"github.com/simgpu/simgpu/e2e/image"
	"github.com/simgpu/simgpu/e2e/internal/cgroup"
	"github.com/simgpu/simgpu/e2e/internal/debian"
	"github.com/simgpu/simgpu/e2e/internal/inotify"
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
	c := &Cluster{dirs: config.Dirs, record: record{Name: config.Name}}
	held, err := c.lock(ctx, out)
	if err != nil {
		return nil, err
	}
	defer held.Release()

	existing, err := Open(config.Dirs, config.Name)
	isNew := errors.Is(err, ErrNotFound)
	if err != nil && !isNew {
		return nil, err
	}
	if !isNew {
		if err := existing.matches(config); err != nil {
			return nil, err
		}
		c = existing
	}
	down, err := c.nodesDown()
	if err != nil {
		return nil, err
	}
	var stock *stock
	if isNew || len(down) > 0 {
		if stock, err = prepare(ctx, config.Dirs, out); err != nil {
			return nil, err
		}
	}
	if isNew {
		if !config.Retain {
			defer func() {
				if err != nil {
					out.Step("Taking down what was started (--retain keeps it)")
					err = errors.Join(err, c.down(context.WithoutCancel(ctx)), held.Remove())
				}
			}()
		}
		if err := c.create(config); err != nil {
			return nil, fmt.Errorf("make cluster %s: %w", config.Name, err)
		}
		down = c.Nodes()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, config.Timeout, fmt.Errorf("not up within %s", config.Timeout))
	defer cancel()
	if err := c.start(ctx, down, stock, out); err != nil {
		return nil, fmt.Errorf("cluster %s: %w", config.Name, err)
	}
	return c, nil
}

// stock is what is the same for all clusters.
type stock struct {
	// programs are executables by their name.
	programs map[string]string
	// pause is the archive of the pause image.
	pause string
}

// prepare gets what all clusters need, installing and building what is missing.
func prepare(ctx context.Context, dirs Dirs, out *progress.Printer) (*stock, error) {
	if err := debian.Install(ctx, dirs.Cache, out); err != nil {
		return nil, err
	}
	programs, err := buildPrograms(ctx, dirs, out)
	if err != nil {
		return nil, err
	}
	pause, err := BuildImage(ctx, dirs, out, image.Pause)
	if err != nil {
		return nil, err
	}
	return &stock{programs: programs, pause: pause}, nil
}

// Build gets everything that clusters need without making one, so that the next Up takes seconds.
func Build(ctx context.Context, config Config) error {
	config, err := config.complete()
	if err != nil {
		return err
	}
	_, err = prepare(ctx, config.Dirs, progress.New(config.Progress))
	return err
}

// matches refuses a config that asks for another cluster than this one.
func (c *Cluster) matches(config Config) error {
	var differ []string
	if config.Nodes != 0 && c.record.Nodes != config.Nodes {
		differ = append(differ, fmt.Sprintf("nodes: %d (asked for: %d)", c.record.Nodes, config.Nodes))
	}
	if config.FeatureGates != nil && !maps.Equal(c.record.FeatureGates, config.FeatureGates) {
		differ = append(differ, fmt.Sprintf("feature gates: %v (asked for: %v)", c.record.FeatureGates, config.FeatureGates))
	}
	if config.RuntimeConfig != nil && !maps.Equal(c.record.RuntimeConfig, config.RuntimeConfig) {
		differ = append(differ, fmt.Sprintf("runtime config: %v (asked for: %v)", c.record.RuntimeConfig, config.RuntimeConfig))
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

// create writes everything that a cluster consists of before its first start. What it is comes last: a folder without
// it is the rest of an earlier attempt.
func (c *Cluster) create(config Config) error {
	if err := os.RemoveAll(c.Dir()); err != nil {
		return err
	}
	listener, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return fmt.Errorf("find a port for the API server: %w", err)
	}
	defer listener.Close()
	c.record = record{
		Name:          config.Name,
		Nodes:         max(1, config.Nodes),
		FeatureGates:  config.FeatureGates,
		RuntimeConfig: config.RuntimeConfig,
		Port:          listener.Addr().(*net.TCPAddr).Port,
		Created:       time.Now().UTC().Truncate(time.Second),
	}
	if err := os.MkdirAll(c.Dir(), 0o755); err != nil {
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
	return c.save()
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
		PauseImage:       image.Pause.Reference,
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

// nodesDown are the nodes that do not run.
func (c *Cluster) nodesDown() ([]*Node, error) {
	var down []*Node
	for _, n := range c.Nodes() {
		p, err := n.process()
		if err != nil {
			return nil, err
		}
		if !p.alive() {
			down = append(down, n)
		}
	}
	return down, nil
}

// start starts the nodes that are down and what does not run in the others, in the order in which one thing needs
// another, and waits until the cluster is usable. It needs the stock only for nodes that are down.
func (c *Cluster) start(ctx context.Context, down []*Node, stock *stock, out *progress.Printer) error {
	if len(down) > 0 {
		if err := inotify.OfMachine().Reserve(ctx, c.group(), c.Dir(), c.record.Nodes); err != nil {
			return err
		}
		if err := c.linkPrograms(stock.programs); err != nil {
			return err
		}
		if err := c.startNodes(ctx, down, stock.programs); err != nil {
			return err
		}
		out.Step("Started %s", plural(len(down), "node"))
	}
	for _, n := range c.Nodes() {
		client, err := n.client()
		if err != nil {
			return err
		}
		if err := client.StartAll(ctx); err != nil {
			return fmt.Errorf("start the components of %s: %w", n.Name(), err)
		}
	}
	for _, n := range down {
		if err := c.waitComponent(ctx, out, n, kubernetes.Containerd); err != nil {
			return err
		}
		if _, err := n.LoadImage(ctx, stock.pause); err != nil {
			return err
		}
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
	return nil
}

// startNodes starts nodes that do not run, all at once, and joins them to those that do.
func (c *Cluster) startNodes(ctx context.Context, down []*Node, programs map[string]string) (err error) {
	groups, err := cgroup.Discover()
	if err != nil {
		return err
	}
	settings, err := c.settings()
	if err != nil {
		return err
	}
	var started []*launched
	defer func() {
		for _, l := range started {
			err = errors.Join(err, l.abandon())
		}
	}()
	for _, n := range down {
		l, err := c.launch(ctx, n, programs, settings, groups)
		if err != nil {
			return err
		}
		started = append(started, l)
	}
	var members []network.Node
	for _, n := range c.Nodes() {
		p, err := n.process()
		if err != nil {
			return err
		}
		members = append(members, network.Node{Index: n.index, PID: p.PID})
	}
	if err := network.Join(members); err != nil {
		return err
	}
	for len(started) > 0 {
		l := started[0]
		started = started[1:]
		if err := l.release(ctx); err != nil {
			return err
		}
	}
	return nil
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

// linkPrograms gives the machine kubectl and helm in the versions of the cluster, to keep as long as the cluster is there.
func (c *Cluster) linkPrograms(programs map[string]string) error {
	if err := os.MkdirAll(c.BinDir(), 0o755); err != nil {
		return err
	}
	for _, name := range clientPrograms {
		path := filepath.Join(c.BinDir(), name)
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		// The cache forgets what nobody uses any more; a hard link does not mind. It cannot lead to another file system.
		err := os.Link(programs[programKube], path)
		if errors.Is(err, unix.EXDEV) {
			err = os.Symlink(programs[programKube], path)
		}
		if err != nil {
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
