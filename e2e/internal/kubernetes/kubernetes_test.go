package kubernetes

import (
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// golden compares with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test -update rewrites it); got:\n%s", path, got)
	}
}

var configs = map[string]Config{
	"plain": {PauseImage: "pause.test/pause:1", Snapshotter: "overlayfs"},
	"gates": {
		PauseImage:       "pause.test/pause:1",
		Snapshotter:      "native",
		RestrictOOMScore: true,
		FeatureGates:     map[string]bool{"Second": false, "First": true},
		RuntimeConfig:    map[string]string{"resource.k8s.io/v1alpha3": "true", "apps/v1": "true"},
	},
}

func TestComponentsAndFiles(t *testing.T) {
	for name, config := range configs {
		for _, index := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s node %d", name, index), func(t *testing.T) {
				var b strings.Builder
				for _, c := range Components(config, index) {
					fmt.Fprintf(&b, "== %s\n%s\n", c.Name, strings.Join(c.Command, "\n  "))
					for _, probe := range c.After {
						fmt.Fprintf(&b, "after %s%s\n", probe.URL, probe.Socket)
					}
					fmt.Fprintf(&b, "ready %s%s\n", c.Ready.URL, c.Ready.Socket)
				}
				files, err := Files(config, index)
				if err != nil {
					t.Fatal(err)
				}
				for _, path := range slices.Sorted(maps.Keys(files)) {
					fmt.Fprintf(&b, "== %s\n%s", path, files[path])
				}
				golden(t, fmt.Sprintf("%s-%d.txt", name, index), b.String())
			})
		}
	}
}

// mentioned returns the files below /etc that command lines, probes and configuration files name.
func mentioned(t *testing.T, config Config, index int) []string {
	t.Helper()
	var texts []string
	for _, c := range Components(config, index) {
		for _, argument := range c.Command {
			_, value, _ := strings.Cut(argument, "=")
			texts = append(texts, value)
		}
		for _, probe := range append(c.After, c.Ready) {
			texts = append(texts, probe.CA, probe.Certificate, probe.Key)
		}
	}
	files, err := Files(config, index)
	if err != nil {
		t.Fatal(err)
	}
	for _, content := range files {
		texts = append(texts, strings.Fields(content)...)
	}
	var paths []string
	for _, text := range texts {
		if strings.HasPrefix(text, "/etc/") && filepath.Ext(text) != "" && filepath.Ext(text) != ".d" {
			paths = append(paths, text)
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}

func TestEveryFileThatIsNamedExists(t *testing.T) {
	credentials, err := NewCredentials()
	if err != nil {
		t.Fatal(err)
	}
	for _, index := range []int{1, 2} {
		files, err := Files(configs["plain"], index)
		if err != nil {
			t.Fatal(err)
		}
		secret, err := credentials.Files(index)
		if err != nil {
			t.Fatal(err)
		}
		paths := mentioned(t, configs["plain"], index)
		if len(paths) < 5 {
			t.Fatalf("found only %v", paths)
		}
		for _, path := range paths {
			if files[path] == "" && secret[path] == "" {
				t.Errorf("node %d: %s is named and not written", index, path)
			}
		}
	}
}

func TestKeysOfTheClusterStayOnTheControlPlane(t *testing.T) {
	credentials, err := NewCredentials()
	if err != nil {
		t.Fatal(err)
	}
	files, err := credentials.Files(2)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"/etc/kubernetes/kube-proxy.conf", "/etc/kubernetes/kubelet.conf",
		"/etc/kubernetes/pki/ca.crt", "/etc/kubernetes/pki/kubelet-client.crt", "/etc/kubernetes/pki/kubelet-client.key",
		"/etc/kubernetes/pki/kubelet.crt", "/etc/kubernetes/pki/kubelet.key",
	}
	if got := slices.Sorted(maps.Keys(files)); !slices.Equal(got, want) {
		t.Errorf("node 2 gets %v, want %v", got, want)
	}
}

func TestKubeconfigs(t *testing.T) {
	credentials, err := NewCredentials()
	if err != nil {
		t.Fatal(err)
	}
	files, err := credentials.Files(1)
	if err != nil {
		t.Fatal(err)
	}
	admin, err := credentials.AdminKubeconfig("https://127.0.0.1:1234", "simgpu-x")
	if err != nil {
		t.Fatal(err)
	}
	files["machine"] = string(admin)
	for path, want := range map[string]struct {
		server, user string
		groups       []string
	}{
		"/etc/kubernetes/kubelet.conf":            {"https://10.99.0.1:6443", "system:node:node-1", []string{"system:nodes"}},
		"/etc/kubernetes/kube-proxy.conf":         {"https://10.99.0.1:6443", "system:kube-proxy", nil},
		"/etc/kubernetes/scheduler.conf":          {"https://10.99.0.1:6443", "system:kube-scheduler", nil},
		"/etc/kubernetes/controller-manager.conf": {"https://10.99.0.1:6443", "system:kube-controller-manager", nil},
		"/etc/kubernetes/coredns.conf":            {"https://10.99.0.1:6443", "system:coredns", nil},
		"/etc/kubernetes/admin.conf":              {"https://10.99.0.1:6443", "kubernetes-admin", []string{"system:masters"}},
		"machine":                                 {"https://127.0.0.1:1234", "kubernetes-admin", []string{"system:masters"}},
	} {
		config, err := clientcmd.RESTConfigFromKubeConfig([]byte(files[path]))
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		pair, err := tls.X509KeyPair(config.CertData, config.KeyData)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		certificate, err := x509.ParseCertificate(pair.Certificate[0])
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		if config.Host != want.server || certificate.Subject.CommonName != want.user || !slices.Equal(certificate.Subject.Organization, want.groups) {
			t.Errorf("%s: %s as %s, want %v", path, config.Host, certificate.Subject, want)
		}
	}
}

func TestGatedCommand(t *testing.T) {
	for name, test := range map[string]struct {
		component string
		index     int
		want      string // the last argument, or the error
	}{
		"scheduler":          {Scheduler, 1, "--feature-gates=A=true,B=false"},
		"API server":         {APIServer, 1, "--feature-gates=A=true,B=false"},
		"gates in a file":    {Kubelet, 1, `no component "kubelet" of node-1 has feature gates on its command line: these have: kube-apiserver, kube-controller-manager, kube-scheduler`},
		"no gates":           {Etcd, 1, `no component "etcd" of node-1`},
		"not on a worker":    {Scheduler, 2, `no component "kube-scheduler" of node-2`},
		"no such thing":      {"kube-sheduler", 1, "kube-scheduler"},
		"controller manager": {ControllerManager, 1, "--feature-gates=A=true,B=false"},
	} {
		t.Run(name, func(t *testing.T) {
			command, err := GatedCommand(Config{FeatureGates: map[string]bool{"B": false, "A": true}}, test.index, test.component)
			got := fmt.Sprint(err)
			if err == nil {
				got = command[len(command)-1]
				if command[0] != test.component {
					t.Errorf("the command is that of %s", command[0])
				}
			}
			if !strings.Contains(got, test.want) {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}
