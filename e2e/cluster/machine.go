package cluster

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// snapshotterFor chooses how containerd keeps the file systems of containers below this folder: as layers over each other,
// which needs a file system that is not made that way itself, else as copies.
func snapshotterFor(folder string) (string, error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(folder, &stat); err != nil {
		return "", fmt.Errorf("find out the file system of %s: %w", folder, err)
	}
	if stat.Type == unix.OVERLAYFS_SUPER_MAGIC {
		return "native", nil
	}
	return "overlayfs", nil
}

// canProtect tells whether this process may protect others from the out-of-memory killer, for which CAP_SYS_RESOURCE is needed.
func canProtect() (bool, error) {
	content, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(line, "CapEff:"); ok {
			capabilities, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			if err != nil {
				return false, fmt.Errorf("read the capabilities of this process: %w", err)
			}
			return capabilities&(1<<unix.CAP_SYS_RESOURCE) != 0, nil
		}
	}
	return false, nil
}
