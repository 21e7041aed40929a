package driver

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// inOwnMounts runs the calling test in a process whose mounts are its own, and returns true there.
func inOwnMounts(t *testing.T) bool {
	t.Helper()
	const env = "SIMGPU_TEST_OWN_MOUNTS"
	if os.Getenv(env) != "" {
		return true
	}
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1", "-test.v")
	child.Env = append(os.Environ(), env+"=1")
	child.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if os.Getuid() != 0 {
		child.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
			UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		}
	}
	output, err := child.CombinedOutput()
	if errors.Is(err, unix.EPERM) {
		t.Skip("neither root nor user namespaces: no file system can be mounted")
	}
	if err != nil {
		t.Errorf("%v\n%s", err, output)
	}
	return false
}

// nodeOnOwnDisk is a node with all its files on a small file system of its own.
func nodeOnOwnDisk(t *testing.T) (n *wholeNode, root string) {
	t.Helper()
	root, err := os.MkdirTemp("", "sg") //nolint:usetesting // t.TempDir has too long a name for sockets
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("simgpu", root, "tmpfs", 0, "size=192k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(root, unix.MNT_DETACH), os.Remove(root)); err != nil {
			t.Error(err)
		}
	})
	a, b := uuidClaim("a", left0), uuidClaim("b", right0)
	return wholeNodeIn(t, root, a, b), root
}

func TestFullDisk(t *testing.T) {
	if !inOwnMounts(t) {
		return
	}
	a, b := uuidClaim("a", left0), uuidClaim("b", right0)
	n, root := nodeOnOwnDisk(t)
	m := n.startMachinery()
	answer := m.mustPrepare(t, a)
	filler := filepath.Join(root, "filler")
	fill := func() {
		t.Helper()
		file, err := os.OpenFile(filler, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		for err == nil {
			_, err = file.Write(make([]byte, 4096))
		}
		if err := errors.Join(file.Close(), err); !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}

	fill()
	_, err := m.prepareAll(t.Context(), b)
	expectError(t, err, "no space left on device")
	m.expectConsistent(t, "on a full disk")
	// A restart finds it as full, and a full disk keeps nobody from freeing it.
	m.stop()
	fill()
	m = n.startMachinery()
	m.expectConsistent(t, "after a restart on a full disk")
	m.mustUnprepare(t, a)
	if left := n.contents(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	m.mustPrepare(t, b)
	m.expectAnswers(t, answer, a)
	m.mustUnprepare(t, a, b)
}

func TestReadOnlyDisk(t *testing.T) {
	if !inOwnMounts(t) {
		return
	}
	a, b := uuidClaim("a", left0), uuidClaim("b", right0)
	n, root := nodeOnOwnDisk(t)
	m := n.startMachinery()
	answer := m.mustPrepare(t, a)
	remount := func(flags uintptr) {
		t.Helper()
		if err := unix.Mount("", root, "", unix.MS_REMOUNT|flags, ""); err != nil {
			t.Fatal(err)
		}
	}

	remount(unix.MS_RDONLY)
	_, err := m.prepareAll(t.Context(), b)
	expectError(t, err, "read-only file system")
	if err := m.unprepareAll(t.Context(), a); err == nil {
		t.Error("unprepared on a read-only disk")
	}
	remount(0)
	// The kubelet tries all of it again.
	m.mustPrepare(t, b)
	m.mustUnprepare(t, a)
	m.expectConsistent(t, "writable again")
	m.expectAnswers(t, answer, a)
	m.mustUnprepare(t, a, b)
	if left := n.contents(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}
