// Package cgroup gives each node of a cluster a control group of its own, in every hierarchy of the machine: version 1,
// version 2, or both side by side. Everything that runs in the node, its pods included, is below that group, so that
// removing it leaves nothing behind.
package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Hierarchy is one mounted tree of control groups.
type Hierarchy struct {
	// MountPoint is where it is mounted.
	MountPoint string
	// V2 tells the unified hierarchy from those of version 1.
	V2 bool
	// Options are the mount options of a version 1 hierarchy: its controllers (cpu,cpuacct) or its name (name=systemd).
	Options string
}

// Hierarchies are the mounted trees of a machine, sorted by mount point.
type Hierarchies []Hierarchy

// Discover reads which hierarchies this machine has mounted. A hierarchy mounted twice counts once.
func Discover() (Hierarchies, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find control groups: %w", err)
	}
	defer file.Close()
	found, err := parse(file)
	if err != nil {
		return nil, fmt.Errorf("find control groups in /proc/self/mountinfo: %w", err)
	}
	if len(found) == 0 {
		return nil, errors.New("no control groups are mounted: the kubelet needs them at /sys/fs/cgroup")
	}
	return found, nil
}

// parse reads mountinfo: id, parent, device, root, mount point, options, tags, "-", type, source, super options.
func parse(mountinfo io.Reader) (Hierarchies, error) {
	var found Hierarchies
	seen := map[string]bool{}
	scanner := bufio.NewScanner(mountinfo)
	for scanner.Scan() {
		fields := strings.Fields(scanner.Text())
		dash := slices.Index(fields, "-")
		if dash < 6 || len(fields) < dash+4 {
			continue
		}
		h := Hierarchy{MountPoint: fields[4]}
		switch fields[dash+1] {
		case "cgroup2":
			h.V2 = true
		case "cgroup":
			var options []string
			for option := range strings.SplitSeq(fields[dash+3], ",") {
				if !slices.Contains([]string{"rw", "ro", "xattr", "clone_children"}, option) && !strings.HasPrefix(option, "release_agent=") {
					options = append(options, option)
				}
			}
			h.Options = strings.Join(options, ",")
		default:
			continue
		}
		if identity := fields[dash+1] + " " + h.Options; !seen[identity] {
			seen[identity] = true
			found = append(found, h)
		}
	}
	slices.SortFunc(found, func(a, b Hierarchy) int { return strings.Compare(a.MountPoint, b.MountPoint) })
	return found, scanner.Err()
}

// Create makes the group path in every hierarchy and passes the controllers on to it. A group that exists is fine.
func (hs Hierarchies) Create(path string) error {
	for _, h := range hs {
		if err := h.create(path); err != nil {
			return fmt.Errorf("make control group %s: %w", path, err)
		}
	}
	return nil
}

func (h Hierarchy) create(path string) error {
	group := h.MountPoint
	for element := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		if h.V2 {
			if err := delegate(group); err != nil {
				return err
			}
		}
		if err := h.mkdir(group, element); err != nil {
			return err
		}
		group = filepath.Join(group, element)
	}
	return nil
}

// mkdir makes one group below parent.
func (h Hierarchy) mkdir(parent, name string) error {
	group := filepath.Join(parent, name)
	if err := os.Mkdir(group, 0o755); errors.Is(err, fs.ErrExist) {
		return nil
	} else if err != nil {
		return err
	}
	if h.V2 {
		return nil
	}
	// A new cpuset of version 1 has no processors, and nothing can run in it.
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(parent, file))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		} else if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(group, file), value, 0); err != nil {
			return err
		}
	}
	return nil
}

// Settle moves a process from the root of every hierarchy, as a node sees them, into a group of its own, so that the
// root may have further groups: in version 2 a group has either processes or children that share its resources.
func (hs Hierarchies) Settle(leaf string, pid int) error {
	for _, h := range hs {
		if err := h.mkdir(h.MountPoint, leaf); err != nil {
			return fmt.Errorf("make control group %s: %w", leaf, err)
		}
	}
	if err := hs.Add(leaf, pid); err != nil {
		return err
	}
	for _, h := range hs {
		if h.V2 {
			if err := delegate(h.MountPoint); err != nil {
				return err
			}
		}
	}
	return nil
}

// needed are the controllers of version 2 that a kubelet and runc use.
var needed = []string{"cpu", "cpuset", "hugetlb", "io", "memory", "pids"}

// delegate passes the controllers that a version 2 group has on to its children, as far as a node needs them. It stays
// that way: somebody else may have come to rely on it.
func delegate(group string) error {
	available, err := os.ReadFile(filepath.Join(group, "cgroup.controllers"))
	if err != nil {
		return err
	}
	enabled, err := os.ReadFile(filepath.Join(group, "cgroup.subtree_control"))
	if err != nil {
		return err
	}
	for _, controller := range strings.Fields(string(available)) {
		if !slices.Contains(needed, controller) || slices.Contains(strings.Fields(string(enabled)), controller) {
			continue
		}
		err := os.WriteFile(filepath.Join(group, "cgroup.subtree_control"), []byte("+"+controller), 0)
		if errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("%s holds processes, so that its controllers cannot be passed on: move them to a group below it", group)
		} else if err != nil {
			return fmt.Errorf("pass on controller %s of %s: %w", controller, group, err)
		}
	}
	return nil
}

// Add moves a process into the group in every hierarchy.
func (hs Hierarchies) Add(path string, pid int) error {
	for _, h := range hs {
		if err := os.WriteFile(filepath.Join(h.MountPoint, path, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return fmt.Errorf("move process %d to control group %s: %w", pid, path, err)
		}
	}
	return nil
}

// Remove removes the group and all below it from every hierarchy. The processes in it must have been told to end:
// Remove waits for them until ctx ends. A group that does not exist is removed already.
func (hs Hierarchies) Remove(ctx context.Context, path string) error {
	var all []error
	for _, h := range hs {
		if err := removeTree(ctx, filepath.Join(h.MountPoint, path)); err != nil {
			all = append(all, fmt.Errorf("remove control group: %w", err))
		}
	}
	return errors.Join(all...)
}

// RemoveChildren removes all groups below path but keep, in the same way.
func (hs Hierarchies) RemoveChildren(ctx context.Context, path, keep string) error {
	var all []error
	for _, h := range hs {
		group := filepath.Join(h.MountPoint, path)
		children, err := os.ReadDir(group)
		if err != nil {
			all = append(all, err)
			continue
		}
		for _, child := range children {
			if child.IsDir() && child.Name() != keep {
				all = append(all, removeTree(ctx, filepath.Join(group, child.Name())))
			}
		}
	}
	return errors.Join(all...)
}

func removeTree(ctx context.Context, group string) error {
	entries, err := os.ReadDir(group)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.IsDir() {
			if err := removeTree(ctx, filepath.Join(group, entry.Name())); err != nil {
				return err
			}
		}
	}
	for {
		// rmdir, since the files of a control group cannot be removed.
		err := unix.Rmdir(group)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return &fs.PathError{Op: "rmdir", Path: group, Err: err}
		}
		select {
		case <-ctx.Done():
			processes, _ := os.ReadFile(filepath.Join(group, "cgroup.procs"))
			return fmt.Errorf("%s is still in use by processes %s: %w", group, strings.Join(strings.Fields(string(processes)), " "), context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Mount mounts the hierarchies below target as a process sees them whose control group namespace begins at its node's group:
// the node's group is the root. It returns them with their new places.
func (hs Hierarchies) Mount(target string) (Hierarchies, error) {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if len(hs) == 1 && hs[0].V2 {
		if err := unix.Mount("cgroup2", target, "cgroup2", flags, ""); err != nil {
			return nil, fmt.Errorf("mount control groups at %s: %w", target, err)
		}
		return Hierarchies{{MountPoint: target, V2: true}}, nil
	}
	if err := unix.Mount("tmpfs", target, "tmpfs", flags, "mode=755"); err != nil {
		return nil, fmt.Errorf("mount a folder for control groups at %s: %w", target, err)
	}
	var mounted Hierarchies
	for _, h := range hs {
		place := filepath.Join(target, filepath.Base(h.MountPoint))
		if err := os.Mkdir(place, 0o755); err != nil {
			return nil, err
		}
		kind := "cgroup"
		if h.V2 {
			kind = "cgroup2"
		}
		if err := unix.Mount(kind, place, kind, flags, h.Options); err != nil {
			return nil, fmt.Errorf("mount control groups %s at %s: %w", h.Options, place, err)
		}
		mounted = append(mounted, Hierarchy{MountPoint: place, V2: h.V2, Options: h.Options})
	}
	// The kubelet and runc look for each controller under its own name.
	for _, h := range mounted {
		for controller := range strings.SplitSeq(h.Options, ",") {
			link := filepath.Join(target, controller)
			if h.V2 || strings.Contains(controller, "=") || link == h.MountPoint {
				continue
			}
			if err := os.Symlink(filepath.Base(h.MountPoint), link); err != nil && !errors.Is(err, fs.ErrExist) {
				return nil, err
			}
		}
	}
	return mounted, nil
}
