package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Spec is the content of an image. All paths in the image are absolute.
type Spec struct {
	// Files are executables of this machine by their path in the image.
	Files map[string]string `json:"files"`
	// Links are symbolic links, path to destination.
	Links      map[string]string `json:"links,omitempty"`
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Command    []string          `json:"command,omitempty"`
	// Environment adds to the PATH that every image has.
	Environment map[string]string `json:"environment,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	// User runs the image unless the pod says otherwise; "" is root.
	User string `json:"user,omitempty"`
}

// defaultPath has every folder in which images have programs.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// epoch is the time of everything in an image, since any other would differ between two builds.
var epoch = time.Unix(0, 0)

// Assemble makes the image for the architecture of this machine.
func Assemble(s Spec) (v1.Image, error) {
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return s.layer(), nil })
	if err != nil {
		return nil, fmt.Errorf("make the layer of the image: %w", err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return nil, fmt.Errorf("put the layer into the image: %w", err)
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("read the configuration of the image: %w", err)
	}
	file = file.DeepCopy()
	file.Architecture, file.OS = runtime.GOARCH, "linux"
	file.Created = v1.Time{Time: epoch}
	file.Config = v1.Config{
		Cmd:        s.Command,
		Entrypoint: s.Entrypoint,
		Env:        []string{"PATH=" + defaultPath},
		Labels:     s.Labels,
		User:       s.User,
		WorkingDir: "/",
	}
	for _, variable := range slices.Sorted(maps.Keys(s.Environment)) {
		file.Config.Env = append(file.Config.Env, variable+"="+s.Environment[variable])
	}
	image, err = mutate.ConfigFile(image, file)
	if err != nil {
		return nil, fmt.Errorf("write the configuration of the image: %w", err)
	}
	return image, nil
}

// layer streams the layer's tar archive.
func (s Spec) layer() io.ReadCloser {
	reader, writer := io.Pipe()
	go func() {
		archive := tar.NewWriter(writer)
		err := s.write(archive)
		writer.CloseWithError(errors.Join(err, archive.Close()))
	}()
	return reader
}

// write writes folders, files and links, sorted by path.
func (s Spec) write(archive *tar.Writer) error {
	entries := map[string]func() error{}
	folder := func(at string) {
		mode := int64(0o755)
		if at == "/tmp" {
			mode = 0o1777
		}
		entries[at] = func() error {
			return archive.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: relative(at) + "/", Mode: mode, ModTime: epoch})
		}
	}
	folder("/tmp")
	add := func(at string, write func() error) error {
		if !path.IsAbs(at) || path.Clean(at) != at {
			return fmt.Errorf("%q is not an absolute, clean path in the image", at)
		}
		for parent := path.Dir(at); parent != "/"; parent = path.Dir(parent) {
			if _, ok := entries[parent]; !ok {
				folder(parent)
			}
		}
		entries[at] = write
		return nil
	}
	for at, source := range s.Files {
		if err := add(at, func() error { return writeFile(archive, at, source) }); err != nil {
			return err
		}
	}
	for at, destination := range s.Links {
		err := add(at, func() error {
			return archive.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: relative(at), Linkname: destination, Mode: 0o777, ModTime: epoch})
		})
		if err != nil {
			return err
		}
	}
	for _, at := range slices.Sorted(maps.Keys(entries)) {
		if err := entries[at](); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(archive *tar.Writer, at, source string) error {
	file, err := os.Open(source)
	if err != nil {
		return err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err
	}
	err = archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: relative(at), Size: info.Size(), Mode: 0o755, ModTime: epoch})
	if err != nil {
		return err
	}
	if _, err := io.Copy(archive, file); err != nil {
		return fmt.Errorf("put %s into the image: %w", source, err)
	}
	return nil
}

func relative(at string) string { return strings.TrimPrefix(at, "/") }

// Save writes the image as a docker-archive, which Docker, containerd and kind load, under these names.
func Save(file string, image v1.Image, references ...string) error {
	tags := map[name.Tag]v1.Image{}
	for _, reference := range references {
		tag, err := name.NewTag(reference)
		if err != nil {
			return fmt.Errorf("name of an image: %w", err)
		}
		tags[tag] = image
	}
	if err := tarball.MultiWriteToFile(file, tags); err != nil {
		return fmt.Errorf("write the image to %s: %w", file, err)
	}
	return nil
}
