// Package network joins the nodes of a cluster. It works on the network namespaces of the nodes from outside and never
// touches the network of the machine: node 1 holds a bridge, each further node hangs on it by a pair of virtual
// Ethernet devices whose two ends are both inside nodes, and every node has a route to the pods of every other.
package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Node is one node as the network sees it.
type Node struct {
	// Index counts from 1. Node 1 holds the bridge.
	Index int
	// PID is a process in the node's network namespace.
	PID int
}

// The addresses of a cluster. They exist inside the nodes alone, so that every cluster can use the same.
const (
	// MaxNodes is how many nodes the addresses below reach for.
	MaxNodes = 200

	NodeCIDR    = "10.99.0.0/24"
	PodCIDR     = "10.244.0.0/16"
	ServiceCIDR = "10.96.0.0/16"
	// APIService is the first address of ServiceCIDR, which the API server takes for the kubernetes Service.
	APIService = "10.96.0.1"
	// DNSService is where pods find DNS.
	DNSService = "10.96.0.10"

	bridge   = "br0"
	uplink   = "eth0"
	loopback = "lo"
)

// NodeIP is the address of a node.
func NodeIP(index int) netip.Addr { return netip.AddrFrom4([4]byte{10, 99, 0, byte(index)}) }

// NodePodCIDR is the range of the pods of a node.
func NodePodCIDR(index int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(index), 0}), 24)
}

// Join brings the network of the nodes to the state described above. It may be called again at any time, and repairs
// what is missing after a node was started anew.
func Join(nodes []Node) error {
	handles := map[int]*handle{}
	for _, n := range nodes {
		h, err := open(n)
		if err != nil {
			return fmt.Errorf("open the network of node %d: %w", n.Index, err)
		}
		defer h.close()
		handles[n.Index] = h
	}
	first, ok := handles[1]
	if !ok {
		return errors.New("join nodes: node 1, which holds the bridge, is not among them")
	}
	for _, n := range nodes {
		h := handles[n.Index]
		if err := h.up(loopback); err != nil {
			return fmt.Errorf("network of node %d: %w", n.Index, err)
		}
		device := bridge
		var err error
		if n.Index == 1 {
			err = h.ensureBridge()
		} else {
			device = uplink
			err = first.ensurePair(h)
		}
		if err == nil {
			err = h.ensureAddress(device)
		}
		if err == nil {
			err = h.ensureRoutes(device, nodes)
		}
		if err != nil {
			return fmt.Errorf("network of node %d: %w", n.Index, err)
		}
	}
	return nil
}

// handle is an open way into a node's network namespace.
type handle struct {
	*netlink.Handle
	node Node
	ns   netns.NsHandle
}

func open(n Node) (*handle, error) {
	ns, err := netns.GetFromPid(n.PID)
	if err != nil {
		return nil, err
	}
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, err
	}
	return &handle{Handle: h, node: n, ns: ns}, nil
}

func (h *handle) close() {
	h.Close()
	h.ns.Close()
}

func (h *handle) up(name string) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring up %s: %w", name, err)
	}
	return nil
}

func (h *handle) ensureBridge() error {
	err := h.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge}})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("make bridge %s: %w", bridge, err)
	}
	return h.up(bridge)
}

// ensurePair connects another node to the bridge.
func (h *handle) ensurePair(other *handle) error {
	port := fmt.Sprintf("node%d", other.node.Index)
	if _, err := other.LinkByName(uplink); err != nil {
		master, err := h.LinkByName(bridge)
		if err != nil {
			return fmt.Errorf("find %s: %w", bridge, err)
		}
		// The pair of a node that was started anew vanishes with the old namespace, but the kernel takes its time.
		if old, err := h.LinkByName(port); err == nil {
			if err := h.LinkDel(old); err != nil && !errors.Is(err, unix.ENODEV) {
				return fmt.Errorf("remove the old %s: %w", port, err)
			}
		}
		err = h.LinkAdd(&netlink.Veth{
			LinkAttrs:     netlink.LinkAttrs{Name: port, MasterIndex: master.Attrs().Index},
			PeerName:      uplink,
			PeerNamespace: netlink.NsFd(other.ns),
		})
		if err != nil {
			return fmt.Errorf("connect %s to %s: %w", uplink, bridge, err)
		}
	}
	if err := h.up(port); err != nil {
		return err
	}
	return other.up(uplink)
}

func (h *handle) ensureAddress(device string) error {
	link, err := h.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s: %w", device, err)
	}
	address := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(NodeIP(h.node.Index), netip.MustParsePrefix(NodeCIDR).Bits()))}
	if err := h.AddrReplace(link, address); err != nil {
		return fmt.Errorf("give %s the address %s: %w", device, address, err)
	}
	return nil
}

// ensureRoutes makes the pods of the other nodes reachable, and Services routable: kube-proxy rewrites the address of
// a Service only after the kernel has found a route for it. Nothing else has a route, so that what a simulated
// cluster cannot reach fails at once instead of timing out.
func (h *handle) ensureRoutes(device string, nodes []Node) error {
	link, err := h.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s: %w", device, err)
	}
	routes := []netlink.Route{{LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: ipNet(netip.MustParsePrefix(ServiceCIDR))}}
	for _, other := range nodes {
		if other.Index != h.node.Index {
			routes = append(routes, netlink.Route{
				LinkIndex: link.Attrs().Index,
				Dst:       ipNet(NodePodCIDR(other.Index)),
				Gw:        NodeIP(other.Index).AsSlice(),
			})
		}
	}
	for _, route := range routes {
		if err := h.RouteReplace(&route); err != nil {
			return fmt.Errorf("route to %s: %w", route.Dst, err)
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
