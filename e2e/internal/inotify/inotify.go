// Package inotify makes sure that clusters do not run into the kernel's limit of inotify instances per user, by default
// 128 for everything that root runs. A node with the control plane holds 20 of them, any other node 9, and a kubelet
// or containerd that gets none stays half alive.
//
// The limit is raised only when it is too low, and goes back to what it was with the last cluster of the machine.
package inotify

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/simgpu/simgpu/e2e/internal/lock"
)

const (
	// perControlPlane and perNode are what was counted, and some for pods.
	perControlPlane = 24
	perNode         = 12
	// others is what is left to everything else that root runs.
	others = 32
)

// Limit is the kernel's limit and the account of who needs how much of it.
type Limit struct {
	// Setting is the file with the limit.
	Setting string
	// Processes is the folder with the processes of this machine.
	Processes string
	// Account is the folder that the clusters of this machine share, whatever state folder they have. Like the limit, it is gone after a reboot.
	Account string
}

// OfMachine is the limit of this machine.
func OfMachine() Limit {
	return Limit{Setting: "/proc/sys/fs/inotify/max_user_instances", Processes: "/proc", Account: "/run/simgpu-cluster"}
}

// reservation is what a cluster has reserved, in a file of the account.
type reservation struct {
	Instances int `json:"instances"`
	// Folder is that of the cluster. A reservation without its folder is of a cluster that nobody has taken down.
	Folder string `json:"folder"`
}

// Reserve sees to it that a cluster with this many nodes, kept in folder, finds enough instances. Reserving again for
// the same cluster changes nothing.
func (l Limit) Reserve(ctx context.Context, cluster, folder string, nodes int) error {
	held, err := lock.Acquire(ctx, l.lockPath(), nil)
	if err != nil {
		return err
	}
	defer held.Release()
	reserved, err := l.reservations()
	if err != nil {
		return err
	}
	want := perControlPlane + perNode*(nodes-1)
	if reserved[cluster].Instances == want {
		return nil
	}
	delete(reserved, cluster)
	elsewhere := 0
	for _, r := range reserved {
		elsewhere += r.Instances
	}
	limit, err := l.read()
	if err != nil {
		return err
	}
	// Clusters that are about to start have reserved what they do not hold yet.
	used := max(l.count(), elsewhere)
	if needed := used + want + others; limit < needed {
		if err := l.raise(limit, needed); err != nil {
			return fmt.Errorf("the kernel allows root %d inotify instances (%s), %d are taken, and the cluster needs %d more: %w", limit, l.Setting, used, want, err)
		}
	}
	content, err := json.Marshal(reservation{Instances: want, Folder: folder})
	if err != nil {
		return err
	}
	return os.WriteFile(l.reservationPath(cluster), content, 0o644)
}

// Release gives back what a cluster has reserved. The last one restores the limit, unless somebody else has changed it since.
func (l Limit) Release(ctx context.Context, cluster string) error {
	if _, err := os.Stat(l.Account); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	held, err := lock.Acquire(ctx, l.lockPath(), nil)
	if err != nil {
		return err
	}
	defer held.Release()
	if err := os.Remove(l.reservationPath(cluster)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	reserved, err := l.reservations()
	if err != nil || len(reserved) > 0 {
		return err
	}
	change, err := l.change()
	if err != nil {
		return err
	}
	if now, err := l.read(); err != nil {
		return err
	} else if change != nil && now == change.To {
		if err := l.write(change.From); err != nil {
			return err
		}
	}
	return os.RemoveAll(l.Account) // the lock's file too: whoever waits for it makes a new one
}

// raised is what was done to the limit, in changed.json of the account.
type raised struct {
	From int `json:"from"`
	To   int `json:"to"`
}

func (l Limit) lockPath() string   { return filepath.Join(l.Account, "lock") }
func (l Limit) changePath() string { return filepath.Join(l.Account, "changed.json") }

func (l Limit) reservationPath(cluster string) string {
	return filepath.Join(l.Account, cluster+".reservation")
}

// raise writes down what the limit was before it changes it.
func (l Limit) raise(from, to int) error {
	change, err := l.change()
	if err != nil {
		return err
	}
	if change != nil && change.To == from {
		from = change.From
	}
	content, err := json.Marshal(raised{From: from, To: to})
	if err != nil {
		return err
	}
	if err := os.WriteFile(l.changePath(), content, 0o644); err != nil {
		return err
	}
	return l.write(to)
}

// change returns what was done to the limit, nil for nothing.
func (l Limit) change() (*raised, error) {
	content, err := os.ReadFile(l.changePath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	change := &raised{}
	if err := json.Unmarshal(content, change); err != nil {
		return nil, fmt.Errorf("read %s: %w", l.changePath(), err)
	}
	return change, nil
}

// reservations are those of the clusters that exist, by cluster. It removes the others.
func (l Limit) reservations() (map[string]reservation, error) {
	files, err := filepath.Glob(l.reservationPath("*"))
	if err != nil {
		return nil, err
	}
	reserved := map[string]reservation{}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var r reservation
		if err := json.Unmarshal(content, &r); err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
		if _, err := os.Stat(r.Folder); errors.Is(err, fs.ErrNotExist) {
			if err := os.Remove(file); err != nil {
				return nil, err
			}
			continue
		}
		reserved[strings.TrimSuffix(filepath.Base(file), ".reservation")] = r
	}
	return reserved, nil
}

// count returns how many instances processes of this machine hold. One that ends meanwhile does not count.
func (l Limit) count() int {
	files, err := filepath.Glob(filepath.Join(l.Processes, "[0-9]*", "fd", "*"))
	if err != nil {
		return 0
	}
	count := 0
	for _, file := range files {
		if target, err := os.Readlink(file); err == nil && target == "anon_inode:inotify" {
			count++
		}
	}
	return count
}

func (l Limit) read() (int, error) { return readNumber(l.Setting) }

func (l Limit) write(value int) error { return os.WriteFile(l.Setting, []byte(strconv.Itoa(value)), 0) }

func readNumber(file string) (int, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	value, err := strconv.Atoi(strings.TrimSpace(string(content)))
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", file, err)
	}
	return value, nil
}
