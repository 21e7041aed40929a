// Package durable replaces and removes single files so that a crash at any moment, also of the
// whole machine, leaves the old file or the new one, and what was reported as done stays done.
// It knows nothing of what the files contain.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const tempSuffix = ".tmp"

// WriteFile replaces path with data: a temporary file in the same folder is written, synced, handed
// to verify (if that is not nil) and renamed, and then the folder is synced. Unless the folder sync
// fails, an error means that path is as it was.
func WriteFile(path string, data []byte, perm fs.FileMode, verify func(tmp string) error) error {
	if err := replace(path, data, perm, (*os.File).Sync, verify); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// Replace is WriteFile for what need not outlast the machine: readers see the old file or the new one, but a
// crash of the machine, not of the process, may leave an empty or an older one.
func Replace(path string, data []byte, perm fs.FileMode) error {
	return replace(path, data, perm, func(*os.File) error { return nil }, nil)
}

func replace(path string, data []byte, perm fs.FileMode, sync func(*os.File) error, verify func(tmp string) error) (err error) {
	dir := filepath.Dir(path)
	tmp, err := os.CreateTemp(dir, tempPrefix(filepath.Base(path))+".*"+tempSuffix)
	if err != nil {
		return fmt.Errorf("create temporary file for %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removeIfExists(tmp.Name()))
		}
	}()

	_, err = tmp.Write(data)
	if err == nil {
		err = tmp.Chmod(perm)
	}
	if err == nil {
		err = sync(tmp)
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if verify != nil {
		if err := verify(tmp.Name()); err != nil {
			return err
		}
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	return nil
}

// Rename moves a file inside its folder.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(to))
}

// Remove removes a file. A file that is not there is no error.
func Remove(path string) error {
	if err := os.Remove(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// SyncDir makes the names in a folder durable.
func SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("sync folder %s: %w", dir, err)
	}
	return nil
}

// RemoveTemporary removes what writes of files with this name prefix left behind in a crash.
// Nothing may write such a file at the same time.
func RemoveTemporary(dir, prefix string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix(prefix)) && strings.HasSuffix(e.Name(), tempSuffix) {
			errs = append(errs, removeIfExists(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// tempPrefix hides temporary files from whoever reads the folder by suffix or skips hidden files.
func tempPrefix(base string) string { return "." + base }

func removeIfExists(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
