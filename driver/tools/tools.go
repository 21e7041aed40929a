// Package tools puts the programs that containers get mounted (nvidia-smi and the like) where the
// container runtime can reach them: it copies them from the driver's image into a folder of the host
// that is named after their content. It does not decide where they show up in a container.
//
// A folder is complete or absent, and never changed: a container that was started with an older set
// keeps it, and one that is started later gets the set of the running driver.
package tools

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/simgpu/simgpu/internal/durable"
)

const (
	hashLength = 16 // hex digits of the SHA-256 of names and contents
	unfinished = ".unfinished-"
)

// Install copies the named programs from one folder into <to>/<content hash>/ and returns that folder.
// Nothing is copied where it exists already.
func Install(from, to string, names []string) (string, error) {
	names = slices.Sorted(slices.Values(names))
	if err := os.MkdirAll(to, 0o755); err != nil {
		return "", fmt.Errorf("tools: %w", err)
	}
	hash, err := contentHash(from, names)
	if err != nil {
		return "", fmt.Errorf("tools: %w", err)
	}
	dir := filepath.Join(to, hash)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := copyAll(from, to, dir, names); err != nil {
		return "", fmt.Errorf("tools: %w", err)
	}
	return dir, nil
}

// Prune removes every folder but the one to keep, and what an interrupted Install left. A program that
// runs, or is mounted, stays usable after its folder is gone.
func Prune(to, keep string) error {
	entries, err := os.ReadDir(to)
	if err != nil {
		return fmt.Errorf("tools: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if path := filepath.Join(to, e.Name()); path != filepath.Clean(keep) {
			errs = append(errs, os.RemoveAll(path))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("tools: remove old versions: %w", err)
	}
	return nil
}

func contentHash(from string, names []string) (string, error) {
	all := sha256.New()
	for _, name := range names {
		f, err := os.Open(filepath.Join(from, name))
		if err != nil {
			return "", err
		}
		one := sha256.New()
		_, err = io.Copy(one, f)
		if err = errors.Join(err, f.Close()); err != nil {
			return "", fmt.Errorf("read %s: %w", f.Name(), err)
		}
		fmt.Fprintf(all, "%s %x\n", name, one.Sum(nil))
	}
	return hex.EncodeToString(all.Sum(nil))[:hashLength], nil
}

func copyAll(from, to, dir string, names []string) (err error) {
	tmp, err := os.MkdirTemp(to, unfinished)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	for _, name := range names {
		if err := copyProgram(filepath.Join(from, name), filepath.Join(tmp, name)); err != nil {
			return fmt.Errorf("copy %s: %w", name, err)
		}
	}
	// Containers run as any user.
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}
	if err := durable.SyncDir(tmp); err != nil {
		return err
	}
	return durable.Rename(tmp, dir)
}

func copyProgram(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err == nil {
		err = out.Chmod(fs.FileMode(0o755))
	}
	if err == nil {
		err = out.Sync()
	}
	return errors.Join(err, out.Close())
}
