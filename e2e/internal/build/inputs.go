package build

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// inputs is what a program is made of.
type inputs struct {
	importPath string
	modules    Modules
	// lines describe every module and every own file, sorted.
	lines []string
}

// key identifies the outcome of building these inputs in this way.
func (in *inputs) key(toolchain, linkFlags string, environment []string) string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%s\n%s\n%s\n%s\n", in.importPath, toolchain, linkFlags, strings.Join(environment, "\n"))
	for _, line := range in.lines {
		fmt.Fprintln(sum, line)
	}
	return hex.EncodeToString(sum.Sum(nil))[:16]
}

// listed is one package as go list describes it.
type listed struct {
	ImportPath string
	Dir        string
	DepOnly    bool
	Standard   bool
	Module     *struct {
		Path    string
		Version string
		Time    time.Time
		Main    bool
		Replace *struct{ Path, Version string }
	}
	Imports                                               []string
	ImportMap                                             map[string]string
	GoFiles, CgoFiles, CFiles, HFiles, SFiles, EmbedFiles []string
}

const listedFields = "ImportPath,Dir,DepOnly,Standard,Module,Imports,ImportMap,GoFiles,CgoFiles,CFiles,HFiles,SFiles,EmbedFiles"

// inputs asks the go command what the programs are made of, in their order. It downloads modules that are not there yet.
func (b *Builder) inputs(ctx context.Context, programs []Program) ([]*inputs, error) {
	args := []string{"list", "-deps", "-json=" + listedFields}
	for _, p := range programs {
		args = append(args, p.Package)
	}
	output, _, err := b.run(ctx, downloads, args...)
	if err != nil {
		return nil, err
	}
	packages := map[string]*listed{}
	for decoder := json.NewDecoder(bytes.NewReader(output)); ; {
		p := &listed{}
		if err := decoder.Decode(p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("read the answer of go list: %w", err)
		}
		packages[p.ImportPath] = p
	}
	var all []*inputs
	for _, p := range programs {
		root, err := b.root(packages, p.Package)
		if err != nil {
			return nil, err
		}
		in := &inputs{importPath: root.ImportPath, modules: Modules{}}
		if err := in.add(root, packages, map[string]bool{}); err != nil {
			return nil, err
		}
		slices.Sort(in.lines)
		in.lines = slices.Compact(in.lines)
		all = append(all, in)
	}
	return all, nil
}

// root finds the package that was asked for by its import path or by its path relative to the module.
func (b *Builder) root(packages map[string]*listed, asked string) (*listed, error) {
	if p, ok := packages[asked]; ok {
		return p, nil
	}
	folder, err := filepath.Abs(filepath.Join(b.Module, asked))
	if err != nil {
		return nil, err
	}
	for _, p := range packages {
		if !p.DepOnly && p.Dir == folder {
			return p, nil
		}
	}
	return nil, fmt.Errorf("go list says nothing of %s in %s", asked, b.Module)
}

// add notes what a package and all that it imports consist of. The standard library belongs to the Go version.
func (in *inputs) add(p *listed, packages map[string]*listed, seen map[string]bool) error {
	if seen[p.ImportPath] || p.Standard || p.Module == nil {
		return nil
	}
	seen[p.ImportPath] = true
	in.modules[p.Module.Path] = Module{Version: p.Module.Version, Time: p.Module.Time}
	line := "module " + p.Module.Path + " " + p.Module.Version
	if p.Module.Replace != nil {
		line += " => " + p.Module.Replace.Path + " " + p.Module.Replace.Version
	}
	in.lines = append(in.lines, line)
	// Only versioned modules are unchangeable.
	if p.Module.Main || p.Module.Replace != nil && p.Module.Replace.Version == "" {
		for _, file := range slices.Concat(p.GoFiles, p.CgoFiles, p.CFiles, p.HFiles, p.SFiles, p.EmbedFiles) {
			content, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				return err
			}
			in.lines = append(in.lines, fmt.Sprintf("file %s/%s %x", p.ImportPath, file, sha256.Sum256(content)))
		}
	}
	for _, imported := range p.Imports {
		if mapped, ok := p.ImportMap[imported]; ok {
			imported = mapped
		}
		if dependency, ok := packages[imported]; ok {
			if err := in.add(dependency, packages, seen); err != nil {
				return err
			}
		}
	}
	return nil
}
