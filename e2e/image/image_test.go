package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// newSpec has two files, a link and every setting.
func newSpec(t *testing.T) Spec {
	t.Helper()
	folder := t.TempDir()
	files := map[string]string{}
	for _, program := range []string{"b", "a"} {
		source := filepath.Join(folder, program)
		if err := os.WriteFile(source, []byte("program "+program), 0o600); err != nil {
			t.Fatal(err)
		}
		files["/usr/bin/"+program] = source
	}
	return Spec{
		Files:       files,
		Links:       map[string]string{"/usr/bin/c": "a"},
		Entrypoint:  []string{"a", "serve"},
		Command:     []string{"-x"},
		Environment: map[string]string{"Z": "1", "A": "2"},
		Labels:      map[string]string{"label": "value"},
		User:        "1:2",
	}
}

// content lists the files of the image's only layer as mode, owner, name and what is in it.
func content(t *testing.T, image v1.Image) []string {
	t.Helper()
	layers, err := image.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, %v", len(layers), err)
	}
	reader, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	var entries []string
	for archive := tar.NewReader(reader); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return entries
		} else if err != nil {
			t.Fatal(err)
		}
		if header.ModTime.Unix() != 0 {
			t.Errorf("%s has the time %s", header.Name, header.ModTime)
		}
		text, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		entries = append(entries, strings.TrimSpace(fmt.Sprintf("%c %o %d:%d %s %s%s", header.Typeflag, header.Mode, header.Uid, header.Gid, header.Name, header.Linkname, text)))
	}
}

func TestAssemble(t *testing.T) {
	image, err := Assemble(newSpec(t))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"5 1777 0:0 tmp/",
		"5 755 0:0 usr/",
		"5 755 0:0 usr/bin/",
		"0 755 0:0 usr/bin/a program a",
		"0 755 0:0 usr/bin/b program b",
		"2 777 0:0 usr/bin/c a",
	}
	if got := content(t, image); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	file, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config := file.Config
	if !slices.Equal(config.Entrypoint, []string{"a", "serve"}) || !slices.Equal(config.Cmd, []string{"-x"}) || config.User != "1:2" || config.Labels["label"] != "value" {
		t.Errorf("got %+v", config)
	}
	if want := []string{"PATH=" + defaultPath, "A=2", "Z=1"}; !slices.Equal(config.Env, want) {
		t.Errorf("environment %q, want %q", config.Env, want)
	}
	if file.OS != "linux" || file.Architecture == "" {
		t.Errorf("it is for %q %q", file.OS, file.Architecture)
	}
}

func TestSameInputGivesSameBytes(t *testing.T) {
	var digests []string
	for range 2 {
		image, err := Assemble(newSpec(t))
		if err != nil {
			t.Fatal(err)
		}
		digest, err := image.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest.String())
	}
	if digests[0] != digests[1] {
		t.Errorf("got %v", digests)
	}
}

func TestBadPathsAreRefused(t *testing.T) {
	for _, at := range []string{"usr/bin/a", "/usr/../a", "/usr/bin/"} {
		spec := newSpec(t)
		spec.Links = map[string]string{at: "x"}
		if _, err := Assemble(spec); err == nil || !strings.Contains(err.Error(), at) {
			t.Errorf("%q: got %v", at, err)
		}
	}
}

func TestMissingFileIsAnError(t *testing.T) {
	spec := newSpec(t)
	spec.Files["/usr/bin/d"] = "/no/such/file"
	if _, err := Assemble(spec); err == nil || !strings.Contains(err.Error(), "/no/such/file") {
		t.Errorf("got %v", err)
	}
}

func TestSaveWritesAllNames(t *testing.T) {
	image, err := Assemble(newSpec(t))
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "image.tar")
	references := []string{"simgpu/x:1", "vllm/y:v2"}
	if err := Save(archive, image, references...); err != nil {
		t.Fatal(err)
	}
	for _, reference := range references {
		tag, err := name.NewTag(reference)
		if err != nil {
			t.Fatal(err)
		}
		loaded, err := tarball.ImageFromPath(archive, &tag)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := content(t, loaded), content(t, image); !slices.Equal(got, want) {
			t.Errorf("%s has %q, want %q", reference, got, want)
		}
	}
	if err := Save(archive, image, "Not A Name"); err == nil {
		t.Error("saved under an impossible name")
	}
}

func TestRecipesAreConsistent(t *testing.T) {
	for _, recipe := range recipes {
		found, err := Find(recipe.Name)
		if err != nil || found.Reference != recipe.Reference {
			t.Errorf("%s: found %v, %v", recipe.Name, found.Reference, err)
		}
		if _, err := name.NewTag(recipe.Reference); err != nil {
			t.Errorf("%s: %v", recipe.Name, err)
		}
		there := map[string]bool{}
		for _, source := range recipe.Programs {
			there[path.Base(source.Package)] = true
		}
		for at, destination := range recipe.Spec.Links {
			if !there[destination] {
				t.Errorf("%s: %s leads to %s, which is not in the image", recipe.Name, at, destination)
			}
			there[path.Base(at)] = true
		}
		if command := slices.Concat(recipe.Spec.Entrypoint, recipe.Spec.Command); !there[command[0]] {
			t.Errorf("%s: it runs %s, which is not in the image", recipe.Name, command[0])
		}
	}
	if _, err := Find("nothing"); err == nil || !strings.Contains(err.Error(), "pause") {
		t.Errorf("got %v, want the names that there are", err)
	}
}
