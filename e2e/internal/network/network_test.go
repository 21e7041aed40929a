package network

import (
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestAddressesOfNodesDoNotOverlap(t *testing.T) {
	nodes, pods, services := netip.MustParsePrefix(NodeCIDR), netip.MustParsePrefix(PodCIDR), netip.MustParsePrefix(ServiceCIDR)
	if nodes.Overlaps(pods) || nodes.Overlaps(services) || pods.Overlaps(services) {
		t.Errorf("the ranges %s, %s and %s overlap", nodes, pods, services)
	}
	seen := map[netip.Prefix]bool{}
	for index := 1; index <= MaxNodes; index++ {
		if !nodes.Contains(NodeIP(index)) {
			t.Errorf("node %d has %s, which is not in %s", index, NodeIP(index), nodes)
		}
		cidr := NodePodCIDR(index)
		if seen[cidr] || !pods.Contains(cidr.Addr()) || cidr.Masked() != cidr {
			t.Errorf("the pods of node %d have %s", index, cidr)
		}
		seen[cidr] = true
	}
	for _, address := range []string{APIService, DNSService} {
		if !services.Contains(netip.MustParseAddr(address)) {
			t.Errorf("%s is not in %s", address, services)
		}
	}
}

// newNode starts a process in a network namespace of its own.
func newNode(t *testing.T, index int) (Node, func()) {
	t.Helper()
	process := exec.CommandContext(t.Context(), "sleep", "60")
	process.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	end := func() {
		_ = process.Process.Kill()
		_ = process.Wait()
	}
	t.Cleanup(end)
	return Node{Index: index, PID: process.Process.Pid}, end
}

// state reads the addresses and routes of a node.
func state(t *testing.T, n Node) (addresses, routes []string) {
	t.Helper()
	h, err := open(n)
	if err != nil {
		t.Fatal(err)
	}
	defer h.close()
	addrs, err := h.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		addresses = append(addresses, a.Label+" "+a.IPNet.String())
	}
	list, err := h.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range list {
		route := r.Dst.String()
		if r.Gw != nil {
			route += " via " + r.Gw.String()
		}
		routes = append(routes, route)
	}
	slices.Sort(addresses)
	slices.Sort(routes)
	return addresses, routes
}

func TestJoin(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	before, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	one, _ := newNode(t, 1)
	two, endTwo := newNode(t, 2)
	three, _ := newNode(t, 3)

	check := func(nodes ...Node) {
		t.Helper()
		for range 2 { // the second time, everything is there already
			if err := Join(nodes); err != nil {
				t.Fatal(err)
			}
		}
		for _, test := range []struct {
			node              Node
			addresses, routes []string
		}{
			{
				nodes[0],
				[]string{"br0 10.99.0.1/24", "lo 127.0.0.1/8"},
				[]string{"10.244.2.0/24 via 10.99.0.2", "10.244.3.0/24 via 10.99.0.3", "10.96.0.0/16", "10.99.0.0/24"},
			},
			{
				nodes[1],
				[]string{"eth0 10.99.0.2/24", "lo 127.0.0.1/8"},
				[]string{"10.244.1.0/24 via 10.99.0.1", "10.244.3.0/24 via 10.99.0.3", "10.96.0.0/16", "10.99.0.0/24"},
			},
			{
				nodes[2],
				[]string{"eth0 10.99.0.3/24", "lo 127.0.0.1/8"},
				[]string{"10.244.1.0/24 via 10.99.0.1", "10.244.2.0/24 via 10.99.0.2", "10.96.0.0/16", "10.99.0.0/24"},
			},
		} {
			addresses, routes := state(t, test.node)
			if !slices.Equal(addresses, test.addresses) {
				t.Errorf("node %d has addresses %q, want %q", test.node.Index, addresses, test.addresses)
			}
			if !slices.Equal(routes, test.routes) {
				t.Errorf("node %d has routes %q, want %q", test.node.Index, routes, test.routes)
			}
		}
	}
	check(one, two, three)

	t.Log("node 2 is started anew")
	endTwo()
	two, _ = newNode(t, 2)
	check(one, two, three)

	after, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	names := func(links []netlink.Link) (names []string) {
		for _, link := range links {
			names = append(names, link.Attrs().Name)
		}
		return names
	}
	// Others may add devices to this machine meanwhile, but none with the names of a cluster.
	for _, name := range names(after) {
		if !slices.Contains(names(before), name) && (name == "br0" || name == "node2" || name == "node3" || name == "eth0") {
			t.Errorf("the machine has got the device %s", name)
		}
	}
}

func TestJoinNeedsTheFirstNode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	two, _ := newNode(t, 2)
	if err := Join([]Node{two}); err == nil {
		t.Error("joined a node to a bridge that is not there")
	}
}
