// Package validate has the API server code of other Kubernetes versions judge ResourceSlices. The code of one version only
// fits into a program, so there is a program for each: this package writes a module that requires that version, has the Go
// command build it, and keeps what it has built.
package validate

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/semver"
)

//go:embed program/main.go
var program []byte

// Verdict is what an API server does with a slice.
type Verdict struct {
	Name string `json:"name"`
	// Refused is why it would not be stored, "" if it would.
	Refused string `json:"refused,omitempty"`
	// Dropped are fields that would not be stored: the API server does not know them or has their feature disabled.
	Dropped []string `json:"dropped,omitempty"`
}

// Validator is the code of one version.
type Validator struct{ program string }

// Build returns the validator for a version of Kubernetes, such as 1.36.3. The first time it is built, which needs the Go
// command and takes minutes; programs are kept in the folder. What the Go command says goes to progress.
func Build(ctx context.Context, kubernetes, dir string, progress io.Writer) (*Validator, error) {
	version := "v" + strings.TrimPrefix(kubernetes, "v")
	if !semver.IsValid(version) || strings.Count(version, ".") < 2 || semver.Major(version) != "v1" {
		return nil, fmt.Errorf("%q is no version of Kubernetes; they are like 1.36.3", kubernetes)
	}
	built := filepath.Join(dir, fmt.Sprintf("validate-%s-%x", version, sha256.Sum256(program))[:len("validate-")+len(version)+9])
	if _, err := os.Stat(built); err == nil {
		return &Validator{built}, nil
	}
	source, err := os.MkdirTemp("", "dra-validate")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(source)
	if err := os.WriteFile(filepath.Join(source, "main.go"), program, 0o600); err != nil {
		return nil, err
	}
	module, err := requirements(ctx, version)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(source, "go.mod"), module, 0o600); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	fmt.Fprintf(progress, "Building the validation of Kubernetes %s\n", version)
	cmd := exec.CommandContext(ctx, "go", "build", "-mod=mod", "-o", built, ".")
	cmd.Dir = source
	cmd.Env = append(os.Environ(), "GOWORK=off", "CGO_ENABLED=0")
	cmd.Stdout, cmd.Stderr = progress, progress
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("build the validation of Kubernetes %s: %w", version, err)
	}
	return &Validator{built}, nil
}

// requirements is a go.mod for that version. Its own says v0.0.0 for modules that are released together with it.
func requirements(ctx context.Context, version string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", "k8s.io/kubernetes@"+version)
	cmd.Dir = os.TempDir()
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	var downloaded struct{ GoMod, Error string }
	if decoded := json.Unmarshal(output, &downloaded); err != nil || decoded != nil || downloaded.Error != "" {
		return nil, fmt.Errorf("get k8s.io/kubernetes %s: %w %s %s", version, errors.Join(err, decoded), downloaded.Error, stderr.Bytes())
	}
	data, err := os.ReadFile(downloaded.GoMod)
	if err != nil {
		return nil, err
	}
	theirs, err := modfile.Parse(downloaded.GoMod, data, nil)
	if err != nil {
		return nil, err
	}
	ours := &modfile.File{}
	if err := errors.Join(ours.AddModuleStmt("validate"), ours.AddGoStmt(theirs.Go.Version), ours.AddRequire("k8s.io/kubernetes", version)); err != nil {
		return nil, err
	}
	released := "v0" + strings.TrimPrefix(version, "v1")
	for _, require := range theirs.Require {
		if require.Mod.Version == "v0.0.0" {
			require.Mod.Version = released
		}
		if err := ours.AddRequire(require.Mod.Path, require.Mod.Version); err != nil {
			return nil, err
		}
	}
	return ours.Format()
}

// Judge returns a verdict for each slice of a ResourceSliceList in JSON. Gates are feature gates like
// DRAPartitionableDevices=false.
func (v *Validator) Judge(ctx context.Context, list []byte, gates ...string) ([]Verdict, error) {
	cmd := exec.CommandContext(ctx, v.program, gates...)
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(list), &stderr
	output, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	var verdicts []Verdict
	return verdicts, json.Unmarshal(output, &verdicts)
}
