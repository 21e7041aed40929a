package webhook

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

func newCertificates(t *testing.T) *Certificates {
	t.Helper()
	configuration := &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "hook"},
		Webhooks:   []admissionregistrationv1.ValidatingWebhook{{Name: "a.example.com"}},
	}
	return &Certificates{
		Client: fake.NewClientBuilder().WithObjects(configuration).Build(),
		Secret: client.ObjectKey{Namespace: "ns", Name: "hook"}, Service: client.ObjectKey{Namespace: "ns", Name: "hook"},
		Configuration: "hook", Dir: t.TempDir(), Lifetime: time.Hour,
	}
}

// trusted is what the API server does: it has the bundle of the configuration and calls the Service's name.
func trusted(t *testing.T, c *Certificates) *x509.Certificate {
	t.Helper()
	var configuration admissionregistrationv1.ValidatingWebhookConfiguration
	if err := c.Client.Get(t.Context(), client.ObjectKey{Name: "hook"}, &configuration); err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(c.Dir, corev1.TLSCertKey), filepath.Join(c.Dir, corev1.TLSPrivateKeyKey))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(configuration.Webhooks[0].ClientConfig.CABundle)
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: "hook.ns.svc", Roots: roots}); err != nil {
		t.Fatal(err)
	}
	return pair.Leaf
}

func TestCertificate(t *testing.T) {
	c := newCertificates(t)
	ensure := func() *x509.Certificate {
		t.Helper()
		if err := c.Ensure(t.Context()); err != nil {
			t.Fatal(err)
		}
		return trusted(t, c)
	}
	first := ensure()
	if !ensure().Equal(first) {
		t.Error("a good certificate was replaced")
	}

	// Another replica takes the same.
	other := *c
	other.Dir = t.TempDir()
	if err := other.Ensure(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !trusted(t, &other).Equal(first) {
		t.Error("the replicas have different certificates")
	}

	// With less than a third of its life left it is replaced, and replicas that still serve with the old one stay trusted.
	c.Lifetime = 4 * time.Hour
	if second := ensure(); second.Equal(first) {
		t.Error("an old certificate was kept")
	}
	if !trusted(t, &other).Equal(first) {
		t.Error("the old certificate is no longer there")
	}

	// A Secret that somebody has spoiled is made anew.
	var secret corev1.Secret
	if err := c.Client.Get(t.Context(), c.Secret, &secret); err != nil {
		t.Fatal(err)
	}
	secret.Data[corev1.TLSCertKey] = []byte("nonsense")
	if err := c.Client.Update(t.Context(), &secret); err != nil {
		t.Fatal(err)
	}
	ensure()
	if info, err := os.Stat(filepath.Join(c.Dir, corev1.TLSPrivateKeyKey)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key can be read by others: %v, %v", info, err)
	}
}
