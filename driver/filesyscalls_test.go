package driver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fileSyscalls are the system calls with which a program changes or reads files, folders and sockets, as
// the Go library makes them.
var fileSyscalls = map[uint32]string{
	unix.SYS_OPENAT:     "openat",
	unix.SYS_READ:       "read",
	unix.SYS_WRITE:      "write",
	unix.SYS_CLOSE:      "close",
	unix.SYS_FSYNC:      "fsync",
	unix.SYS_RENAMEAT:   "renameat",
	unix.SYS_RENAMEAT2:  "renameat2",
	unix.SYS_UNLINKAT:   "unlinkat",
	unix.SYS_MKDIRAT:    "mkdirat",
	unix.SYS_FCHMOD:     "fchmod",
	unix.SYS_FCHMODAT:   "fchmodat",
	unix.SYS_FSTAT:      "fstat",
	unix.SYS_NEWFSTATAT: "newfstatat",
	unix.SYS_GETDENTS64: "getdents64",
	unix.SYS_BIND:       "bind",
	unix.SYS_LISTEN:     "listen",
}

// fileSyscall is a call that is about to be made.
type fileSyscall struct {
	number int // from 1
	name   string
	// changes something that others can see; opening a file may.
	changes bool
}

// atFileSyscall runs do and has each of its file system calls wait for what decide says: an error that the
// call fails with instead of being made, or none. Only what do does itself is
// watched, not what other goroutines do for it; of its goroutine nothing else must be wanted afterwards.
//
// It is done with a seccomp filter that notifies this very process, which needs no privilege.
func atFileSyscall(decide func(fileSyscall) unix.Errno, do func()) error {
	ended := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with the goroutine, and with it the filter.
		runtime.LockOSThread()
		done, err := watchFileSyscalls(decide)
		if err == nil {
			do()
			err = done()
		}
		ended <- err
	}()
	return <-ended
}

// watchFileSyscalls does that for the current thread, to which the calling goroutine must be locked, for
// the rest of its life. The function that it returns says whether all went well so far.
func watchFileSyscalls(decide func(fileSyscall) unix.Errno) (done func() error, err error) {
	listener := make(chan int)
	failed := make(chan error, 1)
	go func() { superviseSyscalls(<-listener, decide, failed) }()
	fd, err := installFilter()
	if err != nil {
		close(listener)
		return nil, fmt.Errorf("seccomp filter: %w", err)
	}
	listener <- fd
	return func() error {
		select {
		case err := <-failed:
			return err
		default:
			return nil
		}
	}, nil
}

func installFilter() (fd int, err error) {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return 0, err
	}
	const (
		offsetNumber = 0
		offsetFD     = 16 // low half of the first argument
		offsetCount  = 32 // of the third
	)
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	jump := func(kind uint16, value uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | kind | unix.BPF_K, K: value, Jt: yes, Jf: no}
	}
	answer := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	filter := []unix.SockFilter{
		load(offsetNumber),
		jump(unix.BPF_JEQ, unix.SYS_READ, 1, 0),
		jump(unix.BPF_JEQ, unix.SYS_WRITE, 0, 5),
		// The scheduler of Go wakes itself with 8 bytes, and must not wait for a goroutine. What goes to the
		// terminal is of no interest.
		load(offsetCount),
		jump(unix.BPF_JEQ, 8, 2, 0),
		load(offsetFD),
		jump(unix.BPF_JGT, 2, 1, 0),
		answer(unix.SECCOMP_RET_ALLOW),
		load(offsetNumber),
	}
	for number := range fileSyscalls {
		filter = append(filter, jump(unix.BPF_JEQ, number, 0, 1), answer(unix.SECCOMP_RET_USER_NOTIF))
	}
	filter = append(filter, answer(unix.SECCOMP_RET_ALLOW))
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	listener, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return 0, errno
	}
	return int(listener), nil
}

// superviseSyscalls answers until the filtered thread has ended.
func superviseSyscalls(listener int, decide func(fileSyscall) unix.Errno, failed chan<- error) {
	if listener == 0 {
		return
	}
	defer unix.Close(listener)
	for number := 0; ; {
		poll := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			failed <- fmt.Errorf("wait for a system call: %w", err)
			return
		}
		if poll[0].Revents&unix.POLLIN == 0 {
			return
		}
		// struct seccomp_notif and seccomp_notif_resp of seccomp_unotify(2).
		var call struct {
			id         uint64
			pid, flags uint32
			number     int32
			arch       uint32
			ip         uint64
			arguments  [6]uint64
		}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&call))); errno != 0 {
			if errno == unix.EINTR || errno == unix.ENOENT {
				continue
			}
			failed <- fmt.Errorf("receive a system call: %w", errno)
			return
		}
		answer := struct {
			id     uint64
			value  int64
			errno  int32
			action uint32
		}{id: call.id}
		name := fileSyscalls[uint32(call.number)]
		changes := !slices.Contains([]string{"read", "close", "fsync", "fstat", "newfstatat", "getdents64", "listen"}, name)
		if name == "openat" {
			changes = call.arguments[2]&unix.O_CREAT != 0
		}
		answer.action = unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE
		if name != "write" || !isTestLog(int(call.arguments[0])) {
			number++
			if errno := decide(fileSyscall{number, name, changes}); errno != 0 {
				answer.errno, answer.action = -int32(errno), 0
			}
		}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&answer))); errno != 0 && errno != unix.ENOENT {
			failed <- fmt.Errorf("answer a system call: %w", errno)
			return
		}
	}
}

// isTestLog recognizes the file in which the test framework itself notes which files a test has read.
func isTestLog(fd int) bool {
	var path [unix.PathMax]byte
	n, err := unix.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd), path[:])
	return err == nil && filepath.Base(string(path[:n])) == "testlog.txt"
}

func TestFileSyscallsFailOneByOne(t *testing.T) {
	file := t.TempDir() + "/file"
	for number := 1; ; number++ {
		var failing atomic.Pointer[string]
		var err error
		watchErr := atFileSyscall(func(call fileSyscall) unix.Errno {
			if call.number == number {
				failing.Store(&call.name)
				return unix.EIO
			}
			return 0
		}, func() { err = os.WriteFile(file, []byte("content"), 0o600) })
		if watchErr != nil {
			t.Fatal(watchErr)
		}
		failed := failing.Load()
		if failed == nil {
			if number != 4 || err != nil { // openat, write, close
				t.Errorf("%d system calls, %v", number-1, err)
			}
			return
		}
		if !errors.Is(err, unix.EIO) {
			t.Errorf("with %s failed: %v", *failed, err)
		}
	}
}
