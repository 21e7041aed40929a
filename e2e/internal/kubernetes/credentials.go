package kubernetes

import (
	"fmt"
	"net"

	clientcmd "k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/simgpu/simgpu/e2e/internal/network"
	"github.com/simgpu/simgpu/e2e/internal/pki"
)

// frontProxyClient is the name by which the API server shows itself to aggregated API servers.
const frontProxyClient = "front-proxy-client"

// Credentials are the secrets of a cluster. They exist once, when the cluster is made.
type Credentials struct {
	authority  *pki.Authority
	frontProxy *pki.Authority
	// serviceAccount signs the tokens of service accounts.
	serviceAccount struct{ private, public []byte }
}

// NewCredentials makes the authorities of a cluster.
func NewCredentials() (*Credentials, error) {
	c := &Credentials{}
	var err error
	if c.authority, err = pki.NewAuthority("kubernetes"); err != nil {
		return nil, err
	}
	if c.frontProxy, err = pki.NewAuthority("front-proxy"); err != nil {
		return nil, err
	}
	c.serviceAccount.private, c.serviceAccount.public, err = pki.NewKey()
	return c, err
}

// identity is who a component says it is. RBAC knows these names by itself.
type identity struct {
	kubeconfig string
	user       string
	groups     []string
}

// Files are the certificates, keys and kubeconfigs of a node by their path inside it.
func (c *Credentials) Files(index int) (map[string]string, error) {
	name := NodeName(index)
	files := map[string]string{pkiDir + "/ca.crt": string(c.authority.Certificate)}
	put := func(file string, authority *pki.Authority, r pki.Request) error {
		pair, err := authority.Issue(r)
		if err != nil {
			return err
		}
		files[pkiDir+"/"+file+".crt"] = string(pair.Certificate)
		files[pkiDir+"/"+file+".key"] = string(pair.Key)
		return nil
	}
	kubeletClient := pki.Request{CommonName: "system:node:" + name, Organizations: []string{"system:nodes"}}
	if err := put("kubelet-client", c.authority, kubeletClient); err != nil {
		return nil, err
	}
	err := put("kubelet", c.authority, pki.Request{
		CommonName: name, Server: true, Names: []string{name, "localhost"},
		Addresses: []net.IP{network.NodeIP(index).AsSlice(), net.IPv4(127, 0, 0, 1)},
	})
	if err != nil {
		return nil, err
	}
	identities := []identity{
		{"kubelet.conf", kubeletClient.CommonName, kubeletClient.Organizations},
		{"kube-proxy.conf", "system:kube-proxy", nil},
	}
	if index == 1 {
		identities = append(identities,
			identity{"admin.conf", "kubernetes-admin", []string{"system:masters"}},
			identity{"controller-manager.conf", "system:kube-controller-manager", nil},
			identity{"coredns.conf", "system:coredns", nil},
			identity{"scheduler.conf", "system:kube-scheduler", nil},
		)
		files[pkiDir+"/ca.key"] = string(c.authority.Key)
		files[pkiDir+"/front-proxy-ca.crt"] = string(c.frontProxy.Certificate)
		files[pkiDir+"/sa.key"] = string(c.serviceAccount.private)
		files[pkiDir+"/sa.pub"] = string(c.serviceAccount.public)
		err := put("apiserver", c.authority, pki.Request{
			CommonName: "kube-apiserver", Server: true,
			Names: []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", name, "localhost"},
			// The last is what the machine sees.
			Addresses: []net.IP{net.ParseIP(network.APIService), network.NodeIP(index).AsSlice(), net.IPv4(127, 0, 0, 1)},
		})
		if err != nil {
			return nil, err
		}
		err = put("apiserver-kubelet-client", c.authority, pki.Request{CommonName: "kube-apiserver-kubelet-client", Organizations: []string{"system:masters"}})
		if err != nil {
			return nil, err
		}
		if err := put(frontProxyClient, c.frontProxy, pki.Request{CommonName: frontProxyClient}); err != nil {
			return nil, err
		}
	}
	for _, id := range identities {
		content, err := c.kubeconfig(id, "https://"+APIAddress(), "simgpu")
		if err != nil {
			return nil, err
		}
		files[configDir+"/"+id.kubeconfig] = string(content)
	}
	return files, nil
}

// AdminKubeconfig gives the machine every right in the cluster, whose API it reaches at server.
func (c *Credentials) AdminKubeconfig(server, clusterName string) ([]byte, error) {
	return c.kubeconfig(identity{user: "kubernetes-admin", groups: []string{"system:masters"}}, server, clusterName)
}

func (c *Credentials) kubeconfig(id identity, server, name string) ([]byte, error) {
	pair, err := c.authority.Issue(pki.Request{CommonName: id.user, Organizations: id.groups})
	if err != nil {
		return nil, err
	}
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: c.authority.Certificate}
	config.AuthInfos[id.user] = &clientcmdapi.AuthInfo{ClientCertificateData: pair.Certificate, ClientKeyData: pair.Key}
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: id.user}
	config.CurrentContext = name
	content, err := clientcmd.Write(*config)
	if err != nil {
		return nil, fmt.Errorf("write the kubeconfig of %s: %w", id.user, err)
	}
	return content, nil
}
