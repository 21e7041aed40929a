// Package controlplane is a real API server with its etcd, inside this process. It listens on loopback and keeps
// everything in one folder. No controllers run: what they would do is up to the caller.
//
// Kubernetes keeps its feature gates in globals of the process, so a process has one control plane at a time.
package controlplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/server/v3/embed"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/wait"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	apiserverapp "k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
)

// startWithin is how long etcd and the API server may take to be ready. They take a few seconds.
const startWithin = 2 * time.Minute

// Options say what the API server serves.
type Options struct {
	// FeatureGates as in --feature-gates. They are set for the whole process.
	FeatureGates map[string]bool
	// RuntimeConfig as in --runtime-config.
	RuntimeConfig map[string]string
}

// ControlPlane is a running API server with its etcd.
type ControlPlane struct {
	// Admin may do everything.
	Admin *rest.Config

	stop  func()
	done  chan error
	etcd  *embed.Etcd
	audit string // file
}

// Start starts etcd and the API server in the folder and waits until they are ready.
func Start(ctx context.Context, dir string, opts Options) (_ *ControlPlane, err error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c := &ControlPlane{stop: cancel, done: make(chan error, 1)}
	defer func() {
		if err != nil {
			cancel()
			if c.etcd != nil {
				c.etcd.Close()
			}
		}
	}()
	if c.etcd, err = startEtcd(filepath.Join(dir, "etcd")); err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	if err := c.startAPIServer(ctx, dir, opts); err != nil {
		return nil, fmt.Errorf("kube-apiserver: %w", err)
	}
	return c, nil
}

// Stop stops both and waits for their end.
func (c *ControlPlane) Stop() {
	c.stop()
	<-c.done //nolint:errcheck // how it ends does not matter any more
	c.etcd.Close()
}

func startEtcd(dir string) (*embed.Etcd, error) {
	config := embed.NewConfig()
	config.Dir = dir
	config.LogLevel = "fatal"   // it calls its own end an error
	config.UnsafeNoFsync = true // what is in it is not needed any more when this process ends
	anyPort := []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	config.ListenClientUrls, config.ListenPeerUrls = anyPort, anyPort
	server, err := embed.StartEtcd(config)
	if err != nil {
		return nil, err
	}
	select {
	case <-server.Server.ReadyNotify():
		return server, nil
	case err := <-server.Err():
		server.Close()
		return nil, err
	case <-time.After(startWithin):
		server.Close()
		return nil, fmt.Errorf("not ready after %v", startWithin)
	}
}

func (c *ControlPlane) startAPIServer(ctx context.Context, dir string, opts Options) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	address := listener.Addr().(*net.TCPAddr)
	pki, err := writePKI(filepath.Join(dir, "pki"))
	if err != nil {
		return err
	}

	server := options.NewServerRunOptions()
	flags := pflag.NewFlagSet("kube-apiserver", pflag.ContinueOnError)
	for _, set := range server.Flags().FlagSets {
		flags.AddFlagSet(set)
	}
	c.audit = filepath.Join(dir, "audit.log")
	policy := filepath.Join(dir, "audit-policy.json")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		return err
	}
	args := []string{
		"--audit-log-mode=blocking",
		"--audit-log-path=" + c.audit,
		"--audit-policy-file=" + policy,
		"--authorization-mode=Node,RBAC",
		"--anonymous-auth=false",
		"--enable-admission-plugins=NodeRestriction",
		// Nobody runs the controller that makes default service accounts and their tokens.
		"--disable-admission-plugins=ServiceAccount",
		"--endpoint-reconciler-type=none",
		"--etcd-servers=http://" + c.etcd.Clients[0].Addr().String(),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + pki.serviceAccountKey,
		"--service-account-signing-key-file=" + pki.serviceAccountKey,
		"--service-cluster-ip-range=10.96.0.0/24",
		"--shutdown-delay-duration=0s",
		"--tls-cert-file=" + pki.cert,
		"--tls-private-key-file=" + pki.key,
		"--token-auth-file=" + pki.tokens,
	}
	for gate, on := range opts.FeatureGates {
		args = append(args, fmt.Sprintf("--feature-gates=%s=%v", gate, on))
	}
	for api, on := range opts.RuntimeConfig {
		args = append(args, fmt.Sprintf("--runtime-config=%s=%s", api, on))
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	server.SecureServing.Listener = listener
	server.SecureServing.BindPort = address.Port
	server.SecureServing.BindAddress = address.IP
	server.SecureServing.ExternalAddress = address.IP

	if err := server.GenericServerRunOptions.ComponentGlobalsRegistry.Set(); err != nil {
		return err
	}
	completed, err := server.Complete(ctx)
	if err != nil {
		return err
	}
	if faults := completed.Validate(); len(faults) > 0 {
		return utilerrors.NewAggregate(faults)
	}
	// Names of informers are unique in a process, and an API server that makes its own name never gives it back.
	name, err := cache.NewInformerName("kube-apiserver")
	if err != nil {
		return err
	}
	completed.InformerName = name
	go func() {
		err := apiserverapp.Run(ctx, completed)
		name.Release()
		c.done <- err
	}()

	c.Admin = &rest.Config{
		Host:            "https://" + address.String(),
		BearerToken:     pki.adminToken,
		TLSClientConfig: rest.TLSClientConfig{CAData: pki.ca},
		QPS:             -1,
	}
	return c.waitReady(ctx)
}

// auditPolicy has what service accounts ask for, without contents.
const auditPolicy = `{
	"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
	"rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}]
}`

// Audit is what service accounts have asked for, in the words of the API server's audit log and in its order. A request
// that takes long, such as a watch, is there twice.
func (c *ControlPlane) Audit() ([]auditv1.Event, error) {
	file, err := os.Open(c.audit)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var events []auditv1.Event
	decoder := json.NewDecoder(file)
	for {
		var event auditv1.Event
		err := decoder.Decode(&event)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // it is being written
			return events, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.audit, err)
		}
		events = append(events, event)
	}
}

func (c *ControlPlane) waitReady(ctx context.Context) error {
	client, err := kubernetes.NewForConfig(c.Admin)
	if err != nil {
		return err
	}
	var last error
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, startWithin, true, func(ctx context.Context) (bool, error) {
		select {
		case err := <-c.done:
			c.done <- err
			return false, errors.Join(errors.New("it ended"), err)
		default:
		}
		if _, last = client.RESTClient().Get().AbsPath("/readyz").DoRaw(ctx); last != nil {
			return false, nil //nolint:nilerr // asked again
		}
		_, last = client.CoreV1().Namespaces().Get(ctx, metav1.NamespaceDefault, metav1.GetOptions{})
		return last == nil, nil
	})
	if err != nil {
		return errors.Join(err, last)
	}
	return nil
}

// pki is the files that the API server starts with.
type pki struct {
	cert, key, serviceAccountKey, tokens string
	ca                                   []byte
	adminToken                           string
}

func writePKI(dir string) (pki, error) {
	p := pki{
		cert:              filepath.Join(dir, "apiserver.crt"),
		key:               filepath.Join(dir, "apiserver.key"),
		serviceAccountKey: filepath.Join(dir, "service-accounts.key"),
		tokens:            filepath.Join(dir, "tokens.csv"),
		adminToken:        rand.String(40),
	}
	cert, key, err := certutil.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, []string{"localhost"})
	if err != nil {
		return pki{}, err
	}
	p.ca = cert
	signing, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return pki{}, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return pki{}, err
	}
	admin := fmt.Sprintf("%s,%s,admin,%q\n", p.adminToken, AdminUser, "system:masters")
	for file, data := range map[string][]byte{p.cert: cert, p.key: key, p.serviceAccountKey: signing, p.tokens: []byte(admin)} {
		if err := os.WriteFile(file, data, 0o600); err != nil {
			return pki{}, err
		}
	}
	return p, nil
}

// AdminUser is who Admin is for the API server.
const AdminUser = "dra-conformance"
