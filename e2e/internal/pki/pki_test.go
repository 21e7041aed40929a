package pki

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net"
	"slices"
	"testing"
)

func parse(t *testing.T, certificate []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(certificate)
	if block == nil {
		t.Fatalf("not PEM: %s", certificate)
	}
	parsed, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

func TestIssuedCertificates(t *testing.T) {
	authority, err := NewAuthority("ours")
	if err != nil {
		t.Fatal(err)
	}
	other, err := NewAuthority("theirs")
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		request       Request
		usage, notFor x509.ExtKeyUsage
		host          string
	}{
		"client with groups": {
			request: Request{CommonName: "somebody", Organizations: []string{"group"}},
			usage:   x509.ExtKeyUsageClientAuth,
			notFor:  x509.ExtKeyUsageServerAuth,
		},
		"server by name": {
			request: Request{CommonName: "server", Server: true, Names: []string{"server.test"}},
			usage:   x509.ExtKeyUsageServerAuth,
			notFor:  x509.ExtKeyUsageClientAuth,
			host:    "server.test",
		},
		"server by address": {
			request: Request{CommonName: "server", Server: true, Addresses: []net.IP{net.IPv4(10, 0, 0, 1)}},
			usage:   x509.ExtKeyUsageServerAuth,
			notFor:  x509.ExtKeyUsageClientAuth,
			host:    "10.0.0.1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			pair, err := authority.Issue(test.request)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tls.X509KeyPair(pair.Certificate, pair.Key); err != nil {
				t.Errorf("certificate and key do not belong together: %v", err)
			}
			certificate := parse(t, pair.Certificate)
			if certificate.Subject.CommonName != test.request.CommonName || !slices.Equal(certificate.Subject.Organization, test.request.Organizations) {
				t.Errorf("subject is %s", certificate.Subject)
			}
			pool := x509.NewCertPool()
			pool.AppendCertsFromPEM(authority.Certificate)
			options := x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{test.usage}, DNSName: test.host}
			if _, err := certificate.Verify(options); err != nil {
				t.Errorf("not good for what it was asked for: %v", err)
			}
			options.KeyUsages = []x509.ExtKeyUsage{test.notFor}
			if _, err := certificate.Verify(options); err == nil {
				t.Error("good for the other use, too")
			}
			stranger := x509.NewCertPool()
			stranger.AppendCertsFromPEM(other.Certificate)
			if _, err := certificate.Verify(x509.VerifyOptions{Roots: stranger, KeyUsages: []x509.ExtKeyUsage{test.usage}}); err == nil {
				t.Error("another authority vouches for it")
			}
		})
	}
}
