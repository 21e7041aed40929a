package inotify

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// newLimit is the limit, 128, of a machine whose processes hold as many instances as given.
func newLimit(t *testing.T, held ...int) Limit {
	t.Helper()
	root := t.TempDir()
	l := Limit{Setting: filepath.Join(root, "max_user_instances"), Processes: filepath.Join(root, "proc"), Account: filepath.Join(root, "account")}
	set(t, l, 128)
	for process, count := range held {
		folder := filepath.Join(l.Processes, strconv.Itoa(process+1), "fd")
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		for fd := range count + 1 {
			target := "anon_inode:inotify"
			if fd == 0 {
				target = "/dev/null"
			}
			if err := os.Symlink(target, filepath.Join(folder, strconv.Itoa(fd))); err != nil {
				t.Fatal(err)
			}
		}
	}
	return l
}

func set(t *testing.T, l Limit, value int) {
	t.Helper()
	if err := os.WriteFile(l.Setting, []byte(strconv.Itoa(value)+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

func expect(t *testing.T, l Limit, want int) {
	t.Helper()
	if got, err := l.read(); err != nil || got != want {
		t.Errorf("the limit is %d, %v, want %d", got, err, want)
	}
}

func reserve(t *testing.T, l Limit, cluster string, nodes int) {
	t.Helper()
	if err := l.Reserve(t.Context(), cluster, folder(t, l, cluster), nodes); err != nil {
		t.Fatal(err)
	}
}

// folder makes the folder of a cluster.
func folder(t *testing.T, l Limit, cluster string) string {
	t.Helper()
	path := filepath.Join(filepath.Dir(l.Account), "clusters", cluster)
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func release(t *testing.T, l Limit, cluster string) {
	t.Helper()
	if err := l.Release(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
}

func TestEnoughIsLeftAlone(t *testing.T) {
	l := newLimit(t, 10, 20)
	reserve(t, l, "one", 1)
	expect(t, l, 128)
	release(t, l, "one")
	expect(t, l, 128)
	if _, err := os.Stat(l.Account); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the account is still there: %v", err)
	}
}

func TestTooLittleIsRaisedAndRestoredByTheLast(t *testing.T) {
	l := newLimit(t, 100)
	reserve(t, l, "one", 1)
	expect(t, l, 100+24+32)
	reserve(t, l, "one", 1)
	expect(t, l, 100+24+32)
	reserve(t, l, "three", 3)
	expect(t, l, 100+48+32)
	release(t, l, "one")
	expect(t, l, 100+48+32)
	release(t, l, "three")
	expect(t, l, 128)
	release(t, l, "three")
}

func TestReservationsCountBeforeTheyAreUsed(t *testing.T) {
	l := newLimit(t)
	reserve(t, l, "big", 6)
	expect(t, l, 128)
	reserve(t, l, "other", 1)
	expect(t, l, 84+24+32)
}

func TestClusterThatNobodyTookDownDoesNotCount(t *testing.T) {
	l := newLimit(t, 100)
	reserve(t, l, "gone", 5)
	expect(t, l, 100+72+32)
	if err := os.Remove(folder(t, l, "gone")); err != nil {
		t.Fatal(err)
	}
	reserve(t, l, "one", 1)
	release(t, l, "one")
	expect(t, l, 128)
}

func TestSomebodyElsesChangeStays(t *testing.T) {
	l := newLimit(t, 100)
	reserve(t, l, "one", 1)
	set(t, l, 8192)
	release(t, l, "one")
	expect(t, l, 8192)
}

func TestLimitThatCannotBeRaised(t *testing.T) {
	l := newLimit(t, 100)
	read := l.Setting
	l.Setting = filepath.Join(t.TempDir(), "folder")
	if err := os.Mkdir(l.Setting, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := l.Reserve(t.Context(), "one", t.TempDir(), 1); err == nil {
		t.Error("reserved with a limit that cannot be read")
	}
	l.Setting = read
	if err := os.MkdirAll(l.changePath(), 0o755); err != nil { // nothing can be noted, so nothing may be changed
		t.Fatal(err)
	}
	err := l.Reserve(t.Context(), "one", t.TempDir(), 1)
	if err == nil || !strings.Contains(err.Error(), "allows root 128 inotify instances") {
		t.Errorf("got %v, want what is needed", err)
	}
	expect(t, l, 128)
}
