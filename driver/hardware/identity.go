package hardware

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"

	"github.com/simgpu/simgpu/profiles"
)

// identity is what the UUIDs and the serial number of a GPU are functions of.
type identity struct {
	nodeName string
	index    int
	seed     string
}

// digest hashes the identity together with what the result is for. Lengths keep neighbouring parts
// apart.
func (i identity) digest(purpose ...string) [sha256.Size]byte {
	hash := sha256.New()
	for _, part := range append(purpose, i.nodeName, strconv.Itoa(i.index), i.seed) {
		fmt.Fprintf(hash, "%d:%s,", len(part), part)
	}
	return [sha256.Size]byte(hash.Sum(nil))
}

func (i identity) uuid() string {
	return formatUUID(i.digest("gpu"))
}

func (i identity) partitionUUID(p *profiles.Partition) string {
	return formatUUID(i.digest("partition", strconv.Itoa(p.Profile.ID), strconv.Itoa(p.Start)))
}

// formatUUID makes a UUID of version 8 (RFC 9562), the one for values of one's own making.
func formatUUID(digest [sha256.Size]byte) string {
	b := digest[:16]
	b[6] = b[6]&0x0f | 0x80
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16])
}

// serial has thirteen digits and the first ones of a real board's.
func (i identity) serial() string {
	digest := i.digest("serial")
	return fmt.Sprintf("165%010d", binary.BigEndian.Uint64(digest[:8])%1e10)
}

// Each GPU has a PCIe root of its own unless its group says otherwise. Roots stand 16 buses apart,
// like the sockets of a server: 10, 20, ... f0 in one PCI domain, then the next domain.
const (
	rootDistance   = 0x10
	rootsPerDomain = 0x100/rootDistance - 1
	devicesPerBus  = 32
)

// pciAddress places a GPU below its root: on the first bus, as device 0, if the root is its own;
// below a shared root as the device of its index, which keeps the GPUs apart, 32 on each bus.
func pciAddress(index int, sharedRoot string) (root, address string, err error) {
	if sharedRoot == "" {
		domain, bus := index/rootsPerDomain, rootDistance*(1+index%rootsPerDomain)
		return fmt.Sprintf("pci%04x:%02x", domain, bus), fmt.Sprintf("%04x:%02x:00.0", domain, bus+1), nil
	}
	digits, isRoot := strings.CutPrefix(sharedRoot, "pci")
	domain, bus, _ := strings.Cut(digits, ":")
	_, domainErr := strconv.ParseUint(domain, 16, 16)
	first, busErr := strconv.ParseUint(bus, 16, 8)
	if !isRoot || domainErr != nil || busErr != nil {
		return "", "", fmt.Errorf("%q is not a PCIe root like pci0000:40", sharedRoot)
	}
	below := int(first) + 1 + index/devicesPerBus
	if below > 0xff {
		return "", "", fmt.Errorf("PCIe root %s has no bus for GPU %d; choose one with a lower number", sharedRoot, index)
	}
	return sharedRoot, fmt.Sprintf("%s:%02x:%02x.0", domain, below, index%devicesPerBus), nil
}
