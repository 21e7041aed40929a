package webhook

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// Certificates makes the webhook's certificate and its authority, keeps them in a Secret that all replicas share, and tells
// the API server of the authority. Nothing else signs with the authority, whose key is thrown away.
type Certificates struct {
	// Client reads and writes past caches.
	Client client.Client
	// Secret has the certificate.
	Secret client.ObjectKey
	// Configuration is the ValidatingWebhookConfiguration whose calls are to be trusted.
	Configuration string
	// Service is the name and namespace by which the API server calls.
	Service client.ObjectKey
	// Dir is where the server reads tls.crt and tls.key.
	Dir string
	// Lifetime of a certificate. It is replaced when a third of it is left.
	Lifetime time.Duration
}

const authorityKey = "ca.crt"

// Start looks after the certificate until the context ends.
func (c *Certificates) Start(ctx context.Context) error {
	const hourly = time.Hour
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(min(hourly, c.Lifetime/6)):
			if err := c.Ensure(ctx); err != nil {
				log.FromContext(ctx).Error(err, "Looking after the webhook's certificate; it will be tried again")
			}
		}
	}
}

// NeedLeaderElection is false: each replica serves, and needs the files.
func (c *Certificates) NeedLeaderElection() bool { return false }

// Ensure makes the certificate if there is none that is good for long enough, writes the files, and sets the authority in
// the webhook configuration.
func (c *Certificates) Ensure(ctx context.Context) error {
	secret, err := c.secret(ctx)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return err
	}
	for _, key := range []string{corev1.TLSPrivateKeyKey, corev1.TLSCertKey} {
		if err := replaceFile(filepath.Join(c.Dir, key), secret.Data[key]); err != nil {
			return err
		}
	}
	return c.trust(ctx, secret.Data[authorityKey])
}

// secret returns a Secret that is good, made by this or another replica.
func (c *Certificates) secret(ctx context.Context) (*corev1.Secret, error) {
	for range 5 {
		secret := &corev1.Secret{}
		err := c.Client.Get(ctx, c.Secret, secret)
		missing := apierrors.IsNotFound(err)
		if err != nil && !missing {
			return nil, fmt.Errorf("reading Secret %s: %w", c.Secret, err)
		}
		if !missing && c.good(secret) {
			return secret, nil
		}
		data, err := c.generate()
		if err != nil {
			return nil, err
		}
		// Replicas that have not seen the new certificate yet serve with the old one: both are trusted.
		data[authorityKey] = append(data[authorityKey], firstBlock(secret.Data[authorityKey])...)
		secret.Name, secret.Namespace, secret.Type, secret.Data = c.Secret.Name, c.Secret.Namespace, corev1.SecretTypeTLS, data
		if missing {
			err = c.Client.Create(ctx, secret)
		} else {
			err = c.Client.Update(ctx, secret)
		}
		switch {
		case err == nil:
			log.FromContext(ctx).Info("Made a certificate for the webhook", "secret", c.Secret, "lifetime", c.Lifetime)
			return secret, nil
		case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err): // another replica was faster
		default:
			return nil, fmt.Errorf("writing Secret %s: %w", c.Secret, err)
		}
	}
	return nil, fmt.Errorf("somebody else changes Secret %s all the time", c.Secret)
}

func (c *Certificates) dnsName() string { return c.Service.Name + "." + c.Service.Namespace + ".svc" }

// good is true if the certificate is for this service, signed by the authority, and has a third of its life left.
func (c *Certificates) good(secret *corev1.Secret) bool {
	block, _ := pem.Decode(secret.Data[corev1.TLSCertKey])
	key, _ := pem.Decode(secret.Data[corev1.TLSPrivateKeyKey])
	if block == nil || key == nil {
		return false
	}
	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return false
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(secret.Data[authorityKey])
	_, err = certificate.Verify(x509.VerifyOptions{DNSName: c.dnsName(), Roots: roots, CurrentTime: time.Now().Add(c.Lifetime / 3)})
	return err == nil
}

// generate makes an authority and a certificate of it.
func (c *Certificates) generate() (map[string][]byte, error) {
	now := time.Now()
	serial := func() *big.Int { return new(big.Int).SetInt64(now.UnixNano()) }
	authority := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "managed-dra-controller " + now.UTC().Format(time.RFC3339)},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(c.Lifetime),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: c.dnsName()}, DNSNames: []string{c.dnsName()},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(c.Lifetime),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	authorityPrivate, err1 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	leafPrivate, err2 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	authorityDER, err1 := x509.CreateCertificate(rand.Reader, authority, authority, authorityPrivate.Public(), authorityPrivate)
	leafDER, err2 := x509.CreateCertificate(rand.Reader, leaf, authority, leafPrivate.Public(), authorityPrivate)
	keyDER, err3 := x509.MarshalPKCS8PrivateKey(leafPrivate)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, err
	}
	return map[string][]byte{
		authorityKey:            pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: authorityDER}),
		corev1.TLSCertKey:       pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leafDER}),
		corev1.TLSPrivateKeyKey: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}),
	}, nil
}

// trust has the API server accept what the authority has signed.
func (c *Certificates) trust(ctx context.Context, authority []byte) error {
	configuration := &admissionregistrationv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: c.Configuration}}
	if err := c.Client.Get(ctx, client.ObjectKeyFromObject(configuration), configuration); err != nil {
		return fmt.Errorf("reading ValidatingWebhookConfiguration %s: %w", c.Configuration, err)
	}
	before := configuration.DeepCopy()
	for i := range configuration.Webhooks {
		configuration.Webhooks[i].ClientConfig.CABundle = authority
	}
	for i := range before.Webhooks {
		if !bytes.Equal(before.Webhooks[i].ClientConfig.CABundle, authority) {
			return c.Client.Patch(ctx, configuration, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
		}
	}
	return nil
}

// firstBlock is the newest authority of a bundle.
func firstBlock(bundle []byte) []byte {
	if block, _ := pem.Decode(bundle); block != nil {
		return pem.EncodeToMemory(block)
	}
	return nil
}

// replaceFile writes a file in one step, since the server may read it at any time, and not if it is the same already.
func replaceFile(path string, content []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, content) {
		return nil
	}
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
