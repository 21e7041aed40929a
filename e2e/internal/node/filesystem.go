package node

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/simgpu/simgpu/e2e/internal/cgroup"
)

// systemFolders of the machine are the node's too, read-only. On Debian all but /usr are links into it.
var systemFolders = []string{"bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr"}

// systemFiles of the machine's /etc are the node's too, read-only: what its programs need to run at all, and how people's clocks are set.
var systemFiles = []string{
	"alternatives", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "passwd", "protocols", "services", "ssl",
}

// kernelSettings are those that a kubelet changes for the whole machine when they differ. In a node it reads and writes files of
// the node instead, which hold the values that it wants: the machine keeps its own.
var kernelSettings = map[string]string{
	"kernel/keys/root_maxbytes": "25000000",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
}

// buildRoot makes the node's file system in the current mount namespace and makes it the root. It returns the control groups as the node sees them.
func buildRoot(spec *Spec, machineGroups cgroup.Hierarchies) (cgroup.Hierarchies, error) {
	// Nothing from here on may reach the machine's own mounts.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("separate the node's mounts from the machine's: %w", err)
	}
	root := spec.Root
	if err := bind(root, root, false); err != nil {
		return nil, err
	}
	for _, folder := range []string{"dev", "etc", "opt", "proc", "root", "run", "sys", "tmp", "var/lib", "var/log", BinDir, LogDir, maskDir} {
		if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
			return nil, err
		}
	}
	if err := symlink("../run", filepath.Join(root, "var/run")); err != nil {
		return nil, err
	}
	for _, folder := range systemFolders {
		if err := share(filepath.Join("/", folder), filepath.Join(root, folder)); err != nil {
			return nil, err
		}
	}
	for _, file := range systemFiles {
		if err := share(filepath.Join("/etc", file), filepath.Join(root, "etc", file)); err != nil {
			return nil, err
		}
	}
	for name, executable := range spec.Programs {
		target := filepath.Join(root, BinDir, name)
		if err := touch(target); err != nil {
			return nil, err
		}
		if err := bind(executable, target, true); err != nil {
			return nil, err
		}
	}
	for name, program := range spec.Links {
		if err := symlink(program, filepath.Join(root, BinDir, name)); err != nil {
			return nil, err
		}
	}
	if err := unix.Mount("/dev", filepath.Join(root, "dev"), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return nil, fmt.Errorf("show the machine's devices: %w", err)
	}
	const safe = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct {
		kind, place string
		flags       uintptr
		options     string
	}{
		{"proc", "proc", safe, ""},
		{"sysfs", "sys", safe, ""},
		{"tmpfs", "dev/shm", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	} {
		if err := unix.Mount(m.kind, filepath.Join(root, m.place), m.kind, m.flags, m.options); err != nil {
			return nil, fmt.Errorf("mount /%s: %w", m.place, err)
		}
	}
	groups, err := machineGroups.Mount(filepath.Join(root, "sys/fs/cgroup"))
	if err != nil {
		return nil, err
	}
	if err := pivot(root); err != nil {
		return nil, err
	}
	for i := range groups {
		groups[i].MountPoint = strings.TrimPrefix(groups[i].MountPoint, root)
	}
	// Mounts that a pod makes for others (mountPropagation: Bidirectional) have to reach the node.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return nil, fmt.Errorf("share mounts inside the node: %w", err)
	}
	return groups, nil
}

// pivot makes root the root of this mount namespace and lets go of the machine's.
func pivot(root string) error {
	old := filepath.Join(root, ".old")
	if err := os.MkdirAll(old, 0o700); err != nil {
		return err
	}
	if err := unix.PivotRoot(root, old); err != nil {
		return fmt.Errorf("make %s the root: %w", root, err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/.old", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("let go of the machine's files: %w", err)
	}
	return os.Remove("/.old")
}

// boot gives the node what is new at every start: an empty /run and /tmp, no leftover mounts of pods, and a boot
// identifier that differs from the last one, as the kubelet and others recognise a reboot by it.
func boot() error {
	if err := unmountBelow("/run", "/tmp", "/var/lib/kubelet", "/var/lib/containerd", "/proc/sys"); err != nil {
		return err
	}
	for place, options := range map[string]string{"/run": "mode=755", "/tmp": "mode=1777"} {
		if err := unix.Mount("tmpfs", place, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
			return fmt.Errorf("mount %s: %w", place, err)
		}
		if err := unix.Mount("", place, "", unix.MS_SHARED, ""); err != nil {
			return fmt.Errorf("share %s: %w", place, err)
		}
	}
	for setting, value := range kernelSettings {
		if err := mask(filepath.Join("/proc/sys", setting), value); err != nil {
			return err
		}
	}
	return mask("/proc/sys/kernel/random/boot_id", NewUUID())
}

// mask puts a file with this content in the place of one in /proc. What this kernel does not have is left out.
func mask(path, content string) error {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	file := filepath.Join(maskDir, strings.ReplaceAll(strings.TrimPrefix(path, "/proc/"), "/", "."))
	if err := os.WriteFile(file, []byte(content+"\n"), 0o644); err != nil {
		return err
	}
	return bind(file, path, false)
}

// unmountBelow undoes all mounts at or below the places, the innermost first.
func unmountBelow(places ...string) error {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer file.Close()
	var points []string
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		fields := strings.Fields(scanner.Text())
		if len(fields) < 5 {
			continue
		}
		point := unescape(fields[4])
		if slices.ContainsFunc(places, func(place string) bool { return point == place || strings.HasPrefix(point, place+"/") }) {
			points = append(points, point)
		}
	}
	if err := scanner.Err(); err != nil {
		return err
	}
	for _, point := range slices.Backward(points) {
		if err := unix.Unmount(point, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", point, err)
		}
	}
	return nil
}

// unescape undoes the octal escapes of mountinfo.
func unescape(path string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(path)
}

// share shows a file, folder or link of the machine in the node. What the machine does not have is left out.
func share(source, target string) error {
	info, err := os.Lstat(source)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		destination, err := os.Readlink(source)
		if err != nil {
			return err
		}
		return symlink(destination, target)
	case info.IsDir():
		err = os.MkdirAll(target, 0o755)
	default:
		err = touch(target)
	}
	if err != nil {
		return err
	}
	return bind(source, target, true)
}

func bind(source, target string, readOnly bool) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("show %s at %s: %w", source, target, err)
	}
	if readOnly {
		if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("make %s read-only: %w", target, err)
		}
	}
	return nil
}

// symlink makes target a link to destination, whatever it was before.
func symlink(destination, target string) error {
	if current, err := os.Readlink(target); err == nil && current == destination {
		return nil
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Symlink(destination, target)
}

func touch(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o755)
	if err != nil {
		return err
	}
	return file.Close()
}

// NewUUID makes a random UUID (RFC 9562, version 4).
func NewUUID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16])
}
