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
func (in *inputs) key(toolchain, linkFlags string) string {
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
	GoFiles, CgoFiles, CFiles, HFiles, SFiles, EmbedFiles []string
}

const listedFields = "ImportPath,Dir,DepOnly,Standard,Module,GoFiles,CgoFiles,CFiles,HFiles,SFiles,EmbedFiles"

// inputs asks the go command for what the package is made of. It downloads modules that are not there yet.
func (b *Builder) inputs(ctx context.Context, pkg string) (*inputs, error) {
	output, err := b.goCommand(ctx, "list", "-deps", "-json="+listedFields, pkg)
	if err != nil {
		return nil, err
	}
	in := &inputs{modules: Modules{}}
	for decoder := json.NewDecoder(bytes.NewReader(output)); ; {
		var p listed
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("read the answer of go list: %w", err)
		}
		if !p.DepOnly {
			in.importPath = p.ImportPath
		}
		if p.Standard || p.Module == nil {
			continue
		}
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
					return nil, err
				}
				in.lines = append(in.lines, fmt.Sprintf("file %s/%s %x", p.ImportPath, file, sha256.Sum256(content)))
			}
		}
	}
	slices.Sort(in.lines)
	in.lines = slices.Compact(in.lines)
	return in, nil
}
