// Package debian installs the few programs of a node that come from the distribution instead of from Go modules.
package debian

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/simgpu/simgpu/e2e/internal/lock"
	"github.com/simgpu/simgpu/e2e/internal/progress"
)

// need is a file that a node uses and the package that has it.
type need struct{ file, pkg string }

var needs = []need{
	{"/usr/sbin/runc", "runc"},
	{"/usr/sbin/nft", "nftables"},
	{"/usr/lib/cni/host-local", "containernetworking-plugins"},
	{"/usr/lib/cni/loopback", "containernetworking-plugins"},
	{"/usr/lib/cni/portmap", "containernetworking-plugins"},
	{"/usr/lib/cni/ptp", "containernetworking-plugins"},
	{"/usr/bin/mount", "mount"},
	{"/usr/bin/nsenter", "util-linux"},
}

// Install installs the packages of which something is missing, with apt-get. What apt-get writes is shown only when it fails.
func Install(ctx context.Context, lockFolder string, out *progress.Printer) error {
	if len(missing("/")) == 0 {
		return nil
	}
	held, err := lock.Acquire(ctx, filepath.Join(lockFolder, "packages.lock"), func() { out.Step("Waiting for another installation of packages") })
	if err != nil {
		return err
	}
	defer held.Release()
	packages := missing("/")
	if len(packages) == 0 {
		return nil
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("this machine has no apt-get to install %s: install them by hand, so that these files exist: %s",
			strings.Join(packages, ", "), strings.Join(missingFiles("/"), ", "))
	}
	out.Step("Installing Debian packages: %s", strings.Join(packages, ", "))
	for _, args := range [][]string{
		{"update"},
		slices.Concat([]string{"install", "--yes", "--no-install-recommends"}, packages),
	} {
		command := exec.CommandContext(ctx, "apt-get", args...)
		command.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		var output bytes.Buffer
		command.Stdout, command.Stderr = &output, &output
		if err := command.Run(); err != nil {
			return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, output.String())
		}
	}
	if files := missingFiles("/"); len(files) > 0 {
		return fmt.Errorf("the packages %s are installed, but these files are still missing: %s", strings.Join(packages, ", "), strings.Join(files, ", "))
	}
	return nil
}

// missing returns the packages to install, each once, in the order of needs.
func missing(root string) []string {
	var packages []string
	for _, n := range needs {
		if !exists(root, n.file) && !slices.Contains(packages, n.pkg) {
			packages = append(packages, n.pkg)
		}
	}
	return packages
}

func missingFiles(root string) []string {
	var files []string
	for _, n := range needs {
		if !exists(root, n.file) {
			files = append(files, n.file)
		}
	}
	return files
}

func exists(root, file string) bool {
	_, err := os.Stat(filepath.Join(root, file))
	return !errors.Is(err, os.ErrNotExist)
}
