// Package kubernetes describes the components of a Kubernetes node as data: command lines, configuration files and
// how to tell that a component is ready. It decides and writes nothing on disk; package node runs what is described here.
//
// Node 1 has the control plane (etcd, API server, controller manager, scheduler, DNS) and is a worker like the others.
package kubernetes

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/simgpu/simgpu/e2e/internal/network"
	"github.com/simgpu/simgpu/e2e/internal/node"
)

// Config is what may differ between clusters.
type Config struct {
	// FeatureGates are given to every Kubernetes component.
	FeatureGates map[string]bool
	// RuntimeConfig turns API versions on and off (resource.k8s.io/v1alpha3: true).
	RuntimeConfig map[string]string
	// PauseImage is the image that holds a pod's namespaces. Every node must have it before its first pod.
	PauseImage string
	// Snapshotter is how containerd keeps the file systems of containers: overlayfs, or native where a node's folder is itself on an overlay.
	Snapshotter string
	// RestrictOOMScore is for machines whose root may not protect processes from the out-of-memory killer (no CAP_SYS_RESOURCE).
	RestrictOOMScore bool
}

// Port of the API server on node 1.
const apiPort = 6443

// APIAddress is where the API server listens in the nodes' network.
func APIAddress() string { return fmt.Sprintf("%s:%d", network.NodeIP(1), apiPort) }

// Names of the components, as people use them.
const (
	Etcd              = "etcd"
	APIServer         = "kube-apiserver"
	ControllerManager = "kube-controller-manager"
	Scheduler         = "kube-scheduler"
	CoreDNS           = "coredns"
	Containerd        = "containerd"
	Kubelet           = "kubelet"
	Proxy             = "kube-proxy"
)

// ContainerdSocket is where containerd listens inside a node.
const ContainerdSocket = "/run/containerd/containerd.sock"

const (
	configDir = "/etc/kubernetes"
	pkiDir    = configDir + "/pki"
	// volumePluginDir replaces a folder below /usr, which nodes cannot write.
	volumePluginDir = "/var/lib/kubelet/volume-plugins"
)

// NodeName is the name of a node.
func NodeName(index int) string { return fmt.Sprintf("node-%d", index) }

// Components are the components of a node, in the order in which to start them.
func Components(c Config, index int) []node.Component {
	all := []node.Component{containerd()}
	if index == 1 {
		all = append(all, etcd(), apiServer(c), controllerManager(c), scheduler(c), coreDNS())
	}
	return append(all, kubelet(index), proxy(index))
}

// GatedCommand is the command of a component of the node whose arguments have the feature gates.
func GatedCommand(c Config, index int, component string) ([]string, error) {
	var gated []string
	for _, one := range Components(Config{FeatureGates: map[string]bool{"Any": true}}, index) {
		if strings.HasPrefix(one.Command[len(one.Command)-1], gatesFlag) {
			gated = append(gated, one.Name)
		}
	}
	if !slices.Contains(gated, component) {
		return nil, fmt.Errorf("no component %q of %s has feature gates on its command line: these have: %s", component, NodeName(index), strings.Join(gated, ", "))
	}
	all := Components(c, index)
	return all[slices.IndexFunc(all, func(one node.Component) bool { return one.Name == component })].Command, nil
}

func etcd() node.Component {
	const client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
	return node.Component{
		Name: Etcd,
		Command: []string{
			"etcd",
			"--name=" + NodeName(1),
			"--data-dir=/var/lib/etcd",
			"--listen-client-urls=" + client,
			"--advertise-client-urls=" + client,
			"--listen-peer-urls=" + peer,
			"--initial-advertise-peer-urls=" + peer,
			"--initial-cluster=" + NodeName(1) + "=" + peer,
			"--log-level=warn",
			"--unsafe-no-fsync", // a cluster for tests need not survive the end of the machine's power
		},
		Ready: node.Probe{URL: client + "/health"},
	}
}

func apiServer(c Config) node.Component {
	command := []string{
		"kube-apiserver",
		"--advertise-address=" + network.NodeIP(1).String(),
		"--allow-privileged=true",
		"--anonymous-auth=false",
		"--authorization-mode=Node,RBAC",
		"--bind-address=" + network.NodeIP(1).String(),
		"--client-ca-file=" + pkiDir + "/ca.crt",
		"--enable-admission-plugins=NodeRestriction",
		"--etcd-servers=http://127.0.0.1:2379",
		"--kubelet-certificate-authority=" + pkiDir + "/ca.crt",
		"--kubelet-client-certificate=" + pkiDir + "/apiserver-kubelet-client.crt",
		"--kubelet-client-key=" + pkiDir + "/apiserver-kubelet-client.key",
		"--kubelet-preferred-address-types=InternalIP",
		"--proxy-client-cert-file=" + pkiDir + "/front-proxy-client.crt",
		"--proxy-client-key-file=" + pkiDir + "/front-proxy-client.key",
		"--requestheader-allowed-names=" + frontProxyClient,
		"--requestheader-client-ca-file=" + pkiDir + "/front-proxy-ca.crt",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-username-headers=X-Remote-User",
		fmt.Sprintf("--secure-port=%d", apiPort),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + pkiDir + "/sa.pub",
		"--service-account-signing-key-file=" + pkiDir + "/sa.key",
		"--service-cluster-ip-range=" + network.ServiceCIDR,
		"--shutdown-delay-duration=0s",
		"--tls-cert-file=" + pkiDir + "/apiserver.crt",
		"--tls-private-key-file=" + pkiDir + "/apiserver.key",
	}
	if len(c.RuntimeConfig) > 0 {
		command = append(command, "--runtime-config="+join(c.RuntimeConfig))
	}
	return node.Component{
		Name:    APIServer,
		Command: append(command, gates(c)...),
		After:   []node.Probe{etcd().Ready},
		Ready:   apiReady(),
	}
}

// apiReady asks the API server as the node that asks: every node may.
func apiReady() node.Probe {
	return node.Probe{
		URL:         "https://" + APIAddress() + "/readyz",
		CA:          pkiDir + "/ca.crt",
		Certificate: pkiDir + "/kubelet-client.crt",
		Key:         pkiDir + "/kubelet-client.key",
	}
}

func controllerManager(c Config) node.Component {
	kubeconfig := configDir + "/controller-manager.conf"
	return node.Component{
		Name: ControllerManager,
		Command: append([]string{
			"kube-controller-manager",
			"--authentication-kubeconfig=" + kubeconfig,
			"--authorization-kubeconfig=" + kubeconfig,
			"--bind-address=127.0.0.1",
			"--cluster-signing-cert-file=" + pkiDir + "/ca.crt",
			"--cluster-signing-key-file=" + pkiDir + "/ca.key",
			"--flex-volume-plugin-dir=" + volumePluginDir,
			"--kube-api-burst=400", // with the default, the manager takes five seconds to start its controllers
			"--kube-api-qps=200",
			"--kubeconfig=" + kubeconfig,
			"--leader-elect=false",
			"--node-monitor-period=1s", // a new node can be used as soon as it is ready
			"--root-ca-file=" + pkiDir + "/ca.crt",
			"--service-account-private-key-file=" + pkiDir + "/sa.key",
			"--use-service-account-credentials=true",
		}, gates(c)...),
		After: []node.Probe{apiReady()},
		Ready: node.Probe{URL: "https://127.0.0.1:10257/healthz"},
	}
}

func scheduler(c Config) node.Component {
	kubeconfig := configDir + "/scheduler.conf"
	return node.Component{
		Name: Scheduler,
		Command: append([]string{
			"kube-scheduler",
			"--authentication-kubeconfig=" + kubeconfig,
			"--authorization-kubeconfig=" + kubeconfig,
			"--bind-address=127.0.0.1",
			"--config=" + configDir + "/scheduler.yaml",
		}, gates(c)...),
		After: []node.Probe{apiReady()},
		Ready: node.Probe{URL: "https://127.0.0.1:10259/readyz"},
	}
}

func coreDNS() node.Component {
	return node.Component{
		Name:    CoreDNS,
		Command: []string{"coredns", "-conf=/etc/coredns/Corefile"},
		After:   []node.Probe{apiReady()},
		Ready:   node.Probe{URL: "http://127.0.0.1:8181/ready"},
	}
}

func containerd() node.Component {
	return node.Component{
		Name:    Containerd,
		Command: []string{"containerd"},
		Ready:   node.Probe{Socket: ContainerdSocket},
	}
}

func kubelet(index int) node.Component {
	return node.Component{
		Name: Kubelet,
		Command: []string{
			"kubelet",
			"--config=" + configDir + "/kubelet.yaml",
			"--hostname-override=" + NodeName(index),
			"--kubeconfig=" + configDir + "/kubelet.conf",
			"--node-ip=" + network.NodeIP(index).String(),
		},
		After: []node.Probe{containerd().Ready, apiReady()},
		Ready: node.Probe{URL: "http://127.0.0.1:10248/healthz"},
	}
}

func proxy(index int) node.Component {
	return node.Component{
		Name:    Proxy,
		Command: []string{"kube-proxy", "--config=" + configDir + "/kube-proxy.yaml", "--hostname-override=" + NodeName(index)},
		After:   []node.Probe{apiReady()},
		Ready:   node.Probe{URL: "http://127.0.0.1:10256/livez"},
	}
}

const gatesFlag = "--feature-gates="

func gates(c Config) []string {
	if len(c.FeatureGates) == 0 {
		return nil
	}
	values := map[string]string{}
	for gate, on := range c.FeatureGates {
		values[gate] = fmt.Sprint(on)
	}
	return []string{gatesFlag + join(values)}
}

func join(values map[string]string) string {
	var pairs []string
	for _, key := range slices.Sorted(maps.Keys(values)) {
		pairs = append(pairs, key+"="+values[key])
	}
	return strings.Join(pairs, ",")
}

// Files are the configuration files of a node by their path inside it. Certificates and what holds them come from Credentials.
func Files(c Config, index int) (map[string]string, error) {
	name := NodeName(index)
	files := map[string]string{
		"/etc/hostname":    name + "\n",
		"/etc/hosts":       fmt.Sprintf("127.0.0.1 localhost\n::1 localhost\n%s %s\n", network.NodeIP(index), name),
		"/etc/resolv.conf": "nameserver " + network.DNSService + "\n",

		"/etc/containerd/config.toml":        containerdConfig(c),
		"/etc/cni/net.d/10-cluster.conflist": cniConfig(index),
	}
	for path, object := range map[string]map[string]any{
		configDir + "/kubelet.yaml":    kubeletConfig(c),
		configDir + "/kube-proxy.yaml": proxyConfig(c),
	} {
		content, err := yaml.Marshal(object)
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", path, err)
		}
		files[path] = string(content)
	}
	if index == 1 {
		content, err := yaml.Marshal(schedulerConfig())
		if err != nil {
			return nil, fmt.Errorf("write the configuration of the scheduler: %w", err)
		}
		files[configDir+"/scheduler.yaml"] = string(content)
		files["/etc/coredns/Corefile"] = corefile()
	}
	return files, nil
}

func kubeletConfig(c Config) map[string]any {
	return withGates(c, map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false},
			"webhook":   map[string]any{"enabled": true},
			"x509":      map[string]any{"clientCAFile": pkiDir + "/ca.crt"},
		},
		"authorization":            map[string]any{"mode": "Webhook"},
		"cgroupDriver":             "cgroupfs",
		"clusterDNS":               []string{network.DNSService},
		"clusterDomain":            "cluster.local",
		"containerRuntimeEndpoint": "unix://" + ContainerdSocket,
		"evictionHard":             map[string]string{"memory.available": "100Mi", "nodefs.available": "1%", "nodefs.inodesFree": "1%", "imagefs.available": "1%", "imagefs.inodesFree": "1%"},
		"failCgroupV1":             false, // machines with version 1 of control groups are still around
		"failSwapOn":               false,
		// Images come from files on this machine: what is removed does not come back by itself.
		"imageGCHighThresholdPercent": 100,
		"imageGCLowThresholdPercent":  99,
		"imageMaximumGCAge":           "0s",
		"makeIPTablesUtilChains":      false,
		"nodeStatusUpdateFrequency":   "5s",
		"oomScoreAdj":                 0,
		"resolvConf":                  "/etc/resolv.conf",
		"syncFrequency":               "2s", // how long a changed ConfigMap takes to reach a container
		"tlsCertFile":                 pkiDir + "/kubelet.crt",
		"tlsPrivateKeyFile":           pkiDir + "/kubelet.key",
		"volumePluginDir":             volumePluginDir,
	})
}

func proxyConfig(c Config) map[string]any {
	return withGates(c, map[string]any{
		"apiVersion":         "kubeproxy.config.k8s.io/v1alpha1",
		"kind":               "KubeProxyConfiguration",
		"clientConnection":   map[string]any{"kubeconfig": configDir + "/kube-proxy.conf"},
		"clusterCIDR":        network.PodCIDR,
		"conntrack":          map[string]any{"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
		"healthzBindAddress": "127.0.0.1:10256",
		"metricsBindAddress": "127.0.0.1:10249",
		"mode":               "nftables",
		"nftables":           map[string]any{"minSyncPeriod": "100ms"}, // Services follow their pods at once
		"oomScoreAdj":        0,
	})
}

func schedulerConfig() map[string]any {
	return map[string]any{
		"apiVersion":       "kubescheduler.config.k8s.io/v1",
		"kind":             "KubeSchedulerConfiguration",
		"clientConnection": map[string]any{"kubeconfig": configDir + "/scheduler.conf", "qps": 200, "burst": 400},
		"leaderElection":   map[string]any{"leaderElect": false},
	}
}

func withGates(c Config, config map[string]any) map[string]any {
	if len(c.FeatureGates) > 0 {
		config["featureGates"] = c.FeatureGates
	}
	return config
}

func containerdConfig(c Config) string {
	var b bytes.Buffer
	fmt.Fprintf(&b, `version = 3
disabled_plugins = [
  "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.snapshotter.v1.zfs",
]

[plugins."io.containerd.cri.v1.images"]
  snapshotter = %[1]q

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = %[2]q

[plugins."io.containerd.cri.v1.runtime"]
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  disable_apparmor = true
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = %[3]t
  tolerate_missing_hugetlb_controller = true

[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  BinaryName = "/usr/sbin/runc"
  SystemdCgroup = false
`, c.Snapshotter, c.PauseImage, c.RestrictOOMScore)
	return b.String()
}

// cniConfig gives each pod a link of its own to the node and an address of the node's range. The route has to be in
// the part of the address management, or pods reach nothing.
func cniConfig(index int) string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "cluster",
  "plugins": [
    {
      "type": "ptp",
      "ipMasq": false,
      "ipam": {
        "type": "host-local",
        "dataDir": "/run/cni/networks",
        "ranges": [[{"subnet": %q}]],
        "routes": [{"dst": "0.0.0.0/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`, network.NodePodCIDR(index))
}

// corefile serves the names of the cluster. There is nobody outside to ask: all other names do not exist.
func corefile() string {
	return fmt.Sprintf(`cluster.local in-addr.arpa ip6.arpa {
    bind %[1]s
    errors
    health 127.0.0.1:8080
    ready 127.0.0.1:8181
    prometheus 127.0.0.1:9153
    kubernetes {
        kubeconfig %[2]s/coredns.conf
        pods insecure
        ttl 5
    }
    cache 5
    loadbalance
}

. {
    bind %[1]s
    errors
    template ANY ANY {
        rcode NXDOMAIN
    }
}
`, network.NodeIP(1), configDir)
}
