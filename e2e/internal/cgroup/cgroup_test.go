package cgroup

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for name, test := range map[string]struct {
		mountinfo string
		want      Hierarchies
	}{
		"version 2": {
			mountinfo: "24 22 0:22 / /proc rw - proc proc rw\n" +
				"30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
			want: Hierarchies{{MountPoint: "/sys/fs/cgroup", V2: true}},
		},
		"version 1 with joint controllers and the unified hierarchy": {
			mountinfo: "31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n" +
				"32 30 0:28 / /sys/fs/cgroup/systemd rw shared:9 master:2 - cgroup cgroup rw,xattr,name=systemd\n" +
				"33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n",
			want: Hierarchies{
				{MountPoint: "/sys/fs/cgroup/cpu,cpuacct", Options: "cpu,cpuacct"},
				{MountPoint: "/sys/fs/cgroup/systemd", Options: "name=systemd"},
				{MountPoint: "/sys/fs/cgroup/unified", V2: true},
			},
		},
		"the same hierarchy mounted twice": {
			mountinfo: "33 30 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
				"50 30 0:29 / /other/memory rw - cgroup cgroup rw,memory\n",
			want: Hierarchies{{MountPoint: "/sys/fs/cgroup/memory", Options: "memory"}},
		},
		"none": {mountinfo: "24 22 0:22 / /proc rw - proc proc rw\nbroken\n"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parse(strings.NewReader(test.mountinfo))
			if err != nil || !slices.Equal(got, test.want) {
				t.Errorf("got %v, %v, want %v", got, err, test.want)
			}
		})
	}
}

// realGroup makes a control group of this machine that is gone after the test.
func realGroup(t *testing.T) (Hierarchies, string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make control groups")
	}
	groups, err := Discover()
	if err != nil {
		t.Fatal(err)
	}
	group := "simgpu-test-" + strconv.Itoa(os.Getpid())
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
		defer cancel()
		if err := groups.Remove(ctx, group); err != nil {
			t.Error(err)
		}
	})
	return groups, group
}

// sleeper starts a process in the group.
func sleeper(t *testing.T, groups Hierarchies, group string) *exec.Cmd {
	t.Helper()
	process := exec.CommandContext(t.Context(), "sleep", "60")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(process) })
	if err := groups.Add(group, process.Process.Pid); err != nil {
		t.Fatal(err)
	}
	return process
}

func end(process *exec.Cmd) {
	_ = process.Process.Kill()
	_ = process.Wait()
}

func exists(groups Hierarchies, group string) (there []string) {
	for _, h := range groups {
		if _, err := os.Stat(filepath.Join(h.MountPoint, group)); err == nil {
			there = append(there, h.MountPoint)
		}
	}
	return there
}

func TestGroupHoldsProcessesUntilTheyEnd(t *testing.T) {
	groups, group := realGroup(t)
	inner := group + "/a/b"
	for range 2 {
		if err := groups.Create(inner); err != nil {
			t.Fatal(err)
		}
	}
	if got := exists(groups, inner); len(got) != len(groups) {
		t.Fatalf("made in %v only", got)
	}
	process := sleeper(t, groups, inner)

	reason := errors.New("enough")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, reason)
	defer cancel()
	err := groups.Remove(ctx, group)
	if !errors.Is(err, reason) || !strings.Contains(err.Error(), strconv.Itoa(process.Process.Pid)) {
		t.Errorf("removing a group in use: got %v, want the process and the reason", err)
	}

	end(process)
	for range 2 {
		if err := groups.Remove(t.Context(), group); err != nil {
			t.Fatal(err)
		}
	}
	if got := exists(groups, group); len(got) > 0 {
		t.Errorf("still there in %v", got)
	}
}

func TestRemoveChildrenKeepsOne(t *testing.T) {
	groups, group := realGroup(t)
	for _, child := range []string{"kept", "pods/one", "pods/two"} {
		if err := groups.Create(group + "/" + child); err != nil {
			t.Fatal(err)
		}
	}
	if err := groups.RemoveChildren(t.Context(), group, "kept"); err != nil {
		t.Fatal(err)
	}
	if got := exists(groups, group+"/kept"); len(got) != len(groups) {
		t.Errorf("the group to keep is left in %v only", got)
	}
	if got := exists(groups, group+"/pods"); len(got) > 0 {
		t.Errorf("the others are still there in %v", got)
	}
}
