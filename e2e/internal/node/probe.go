package node

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

const (
	probeInterval = 100 * time.Millisecond
	probeTimeout  = 2 * time.Second
)

// wait asks until the answer is yes. It ends early only with ctx, and then says what the last answer was.
func (p Probe) wait(ctx context.Context) error {
	for {
		err := p.ask(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; last answer: %w", context.Cause(ctx), err)
		case <-time.After(probeInterval):
		}
	}
}

// ask returns nil for yes.
func (p Probe) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	if p.Socket != "" {
		connection, err := (&net.Dialer{}).DialContext(ctx, "unix", p.Socket)
		if err != nil {
			return err
		}
		return connection.Close()
	}
	config, err := p.tls()
	if err != nil {
		return err
	}
	// One connection for one question: the server may be another one the next time.
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.URL, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", p.URL, response.Status)
	}
	return nil
}

func (p Probe) tls() (*tls.Config, error) {
	config := &tls.Config{InsecureSkipVerify: p.CA == ""}
	if p.CA != "" {
		content, err := os.ReadFile(p.CA)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(content) {
			return nil, errors.New(p.CA + " holds no certificate")
		}
	}
	if p.Certificate != "" {
		pair, err := tls.LoadX509KeyPair(p.Certificate, p.Key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}
