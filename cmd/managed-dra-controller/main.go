// Command managed-dra-controller runs LLMInferenceServices on a plain cluster and gives their pods the devices that their
// annotations ask for (package manageddra). It runs as a Deployment; one replica at a time works, all of them answer
// admission reviews.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	ctrlwebhook "sigs.k8s.io/controller-runtime/pkg/webhook"

	"github.com/simgpu/simgpu/manageddra/api"
	"github.com/simgpu/simgpu/manageddra/controller"
	"github.com/simgpu/simgpu/manageddra/webhook"
)

type options struct {
	namespace      string
	metricsAddress string
	healthAddress  string
	leaderElect    bool
	image          string
	webhook        string
	webhookPort    int
	certDir        string
	certLifetime   time.Duration
}

func main() {
	o := options{}
	flags := pflag.NewFlagSet("managed-dra-controller", pflag.ExitOnError)
	flags.StringVar(&o.namespace, "namespace", os.Getenv("POD_NAMESPACE"), "the controller's own namespace, for its Lease and its Secret [POD_NAMESPACE]")
	flags.StringVar(&o.metricsAddress, "metrics-address", ":8080", "address of /metrics, 0 for none")
	flags.StringVar(&o.healthAddress, "health-address", ":8081", "address of /healthz and /readyz")
	flags.BoolVar(&o.leaderElect, "leader-elect", true, "work only while holding the Lease, so that several replicas can run")
	flags.StringVar(&o.image, "model-server-image", "vllm/vllm-openai:v0.19.1", "image that serves where a service names none; takes vLLM's arguments")
	flags.StringVar(&o.webhook, "webhook", "", "name of the ValidatingWebhookConfiguration and of the Service that it calls; without it there is no admission")
	flags.IntVar(&o.webhookPort, "webhook-port", 9443, "port of the admission webhook")
	flags.StringVar(&o.certDir, "cert-dir", "/run/managed-dra-controller/certs", "folder for the webhook's certificate, which the controller makes itself")
	flags.DurationVar(&o.certLifetime, "cert-lifetime", 90*24*time.Hour, "lifetime of the webhook's certificate, replaced when a third of it is left")
	logFlags := flag.NewFlagSet("", flag.ContinueOnError)
	klog.InitFlags(logFlags)
	flags.AddGoFlagSet(logFlags)
	_ = flags.Parse(os.Args[1:]) // exits

	ctrl.SetLogger(klog.Background())
	if err := run(ctrl.SetupSignalHandler(), o); err != nil {
		fmt.Fprintln(os.Stderr, "managed-dra-controller:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	if o.namespace == "" {
		return fmt.Errorf("the controller does not know its namespace: set POD_NAMESPACE or --namespace")
	}
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return err
	}
	if err := api.AddToScheme(scheme); err != nil {
		return err
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	config.QPS, config.Burst = -1, 0 // the API server's priority and fairness decides
	managed := controller.ManagerOptions()
	managed.Scheme = scheme
	managed.Metrics = server.Options{BindAddress: o.metricsAddress}
	managed.HealthProbeBindAddress = o.healthAddress
	managed.LeaderElection = o.leaderElect
	managed.LeaderElectionID = "managed-dra-controller"
	managed.LeaderElectionNamespace = o.namespace
	managed.LeaderElectionReleaseOnCancel = true
	managed.WebhookServer = ctrlwebhook.NewServer(ctrlwebhook.Options{Port: o.webhookPort, CertDir: o.certDir})
	mgr, err := ctrl.NewManager(config, managed)
	if err != nil {
		return err
	}
	if err := controller.SetupWithManager(ctx, mgr, controller.Options{Image: o.image, Rediscover: 15 * time.Second}); err != nil {
		return err
	}
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return err
	}
	if o.webhook == "" {
		if err := mgr.AddReadyzCheck("ping", healthz.Ping); err != nil {
			return err
		}
		return mgr.Start(ctx)
	}
	direct, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	certificates := &webhook.Certificates{
		Client:        direct,
		Secret:        client.ObjectKey{Namespace: o.namespace, Name: o.webhook},
		Service:       client.ObjectKey{Namespace: o.namespace, Name: o.webhook},
		Configuration: o.webhook,
		Dir:           o.certDir,
		Lifetime:      o.certLifetime,
	}
	if err := certificates.Ensure(ctx); err != nil {
		return err
	}
	if err := mgr.Add(certificates); err != nil {
		return err
	}
	mgr.GetWebhookServer().Register(webhook.Path, &ctrlwebhook.Admission{Handler: &webhook.Validator{Reader: direct}})
	if err := mgr.AddReadyzCheck("webhook", mgr.GetWebhookServer().StartedChecker()); err != nil {
		return err
	}
	return mgr.Start(ctx)
}
