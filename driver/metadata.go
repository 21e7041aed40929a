package driver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/grpc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	draapi "k8s.io/kubelet/pkg/apis/dra/v1"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/simgpu/simgpu/internal/durable"
)

// metadataFiles are the files in which the kubeletplugin helper describes devices to containers: a folder
// per claim, and a CDI spec per request. The helper works on them through this type, because it names a
// folder <namespace>_<name>, which may be longer than a file system allows: then it could neither write
// nor remove it, and no such claim could be unprepared.
type metadataFiles struct {
	dir        string
	cdiDir     string
	driverName string
	// prepared tells whether the node has a claim.
	prepared func(types.UID) bool
}

// specCopy is the CDI spec that shows a metadata file to containers, beside that file. With it the spec can
// be renewed after the CDI folder, which is in memory, has been emptied.
const specCopy = "cdi.json"

// longestName is the longest name of a folder in all usual file systems, in bytes.
const longestName = 255

func newMetadata(dir, cdiDir, driverName string, prepared func(types.UID) bool) *metadataFiles {
	return &metadataFiles{dir: dir, cdiDir: cdiDir, driverName: driverName, prepared: prepared}
}

// openMetadata removes what interrupted writes left in the CDI folder.
func openMetadata(dir, cdiDir, driverName string, prepared func(types.UID) bool) (*metadataFiles, error) {
	m := newMetadata(dir, cdiDir, driverName, prepared)
	if err := durable.RemoveTemporary(cdiDir, m.specPrefix()); err != nil {
		return nil, fmt.Errorf("device metadata: remove unfinished files: %w", err)
	}
	return m, nil
}

// operations are for the helper.
func (m *metadataFiles) operations() kubeletplugin.MetadataFileOperations {
	return kubeletplugin.MetadataFileOperations{
		WriteFile: m.write,
		MkdirAll:  func(path string, perm os.FileMode) error { return os.MkdirAll(m.place(path), perm) },
		ReadFile:  func(path string) ([]byte, error) { return os.ReadFile(m.place(path)) },
		RemoveAll: m.removeAll,
		Glob:      glob,
	}
}

// glob finds the files of a folder. Unlike that of the Go library it reports a folder that it cannot read,
// so that files to be removed are not overlooked.
func glob(pattern string) ([]string, error) {
	dir, name := filepath.Split(pattern)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var found []string
	for _, e := range entries {
		matches, err := filepath.Match(name, e.Name())
		if err != nil {
			return nil, err
		}
		if matches {
			found = append(found, filepath.Join(dir, e.Name()))
		}
	}
	return found, nil
}

// removeAll removes the folder of a claim, unless it has become that of another: the helper names it after
// the claim's name, and a claim of that name may have been deleted and created again. What is the new one's
// must survive that the old one is unprepared late.
func (m *metadataFiles) removeAll(path string) error {
	path = m.place(path)
	files, err := filepath.Glob(filepath.Join(path, "*", "metadata.json"))
	if err != nil {
		return err
	}
	for _, file := range files {
		if object, err := readObject(file); err == nil && m.prepared(object.UID) {
			return nil
		}
	}
	return os.RemoveAll(path)
}

func readObject(file string) (*metav1.PartialObjectMetadata, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	object := &metav1.PartialObjectMetadata{}
	return object, json.NewDecoder(f).Decode(object)
}

// write does not wait for the disk: a machine that crashes takes all containers with it, and the kubelet has
// their claims prepared anew, which writes the files again.
func (m *metadataFiles) write(path string, data []byte, perm os.FileMode) error {
	if filepath.Dir(path) == filepath.Clean(m.cdiDir) {
		var err error
		var of string
		if data, of, err = m.placeMounts(data); err != nil {
			return fmt.Errorf("device metadata: %s: %w", path, err)
		}
		if of != "" {
			if err := durable.Replace(filepath.Join(filepath.Dir(of), specCopy), data, perm); err != nil {
				return fmt.Errorf("device metadata: %w", err)
			}
		}
	}
	return durable.Replace(m.place(path), data, perm)
}

// place is where a path of the helper is on disk.
func (m *metadataFiles) place(path string) string {
	inside, ok := strings.CutPrefix(path, m.dir+string(filepath.Separator))
	if !ok {
		return path
	}
	folder, rest, _ := strings.Cut(inside, string(filepath.Separator))
	return filepath.Join(m.dir, shortName(folder), rest)
}

// placeMounts makes a CDI spec of the helper mount files from where they are, and returns the last of these.
func (m *metadataFiles) placeMounts(data []byte) (placed []byte, file string, err error) {
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, "", err
	}
	moved := false
	for _, device := range spec.Devices {
		for _, mount := range device.ContainerEdits.Mounts {
			file = m.place(mount.HostPath)
			if file != mount.HostPath {
				mount.HostPath, moved = file, true
			}
		}
	}
	if !moved {
		return data, file, nil
	}
	placed, err = json.Marshal(spec)
	return placed, file, err
}

// shortName replaces the end of a name that is too long by a digest of all of it. No name of an object
// holds the tilde, so that the result is none of another claim.
func shortName(name string) string {
	if len(name) <= longestName {
		return name
	}
	digest := sha256.Sum256([]byte(name))
	end := "~" + hex.EncodeToString(digest[:16])
	return name[:longestName-len(end)] + end
}

// specPrefix is how the names of the helper's CDI specs begin; the UID of the claim follows, and then
// another underscore.
func (m *metadataFiles) specPrefix() string { return m.driverName + "_metadata_" }

// names returns the names under which the metadata knows a claim.
func (m *metadataFiles) names(uid types.UID) ([]types.NamespacedName, error) {
	files, err := filepath.Glob(filepath.Join(m.dir, "*", "*", "metadata.json"))
	if err != nil {
		return nil, err
	}
	var keys []types.NamespacedName
	for _, file := range files {
		object, err := readObject(file)
		if err != nil {
			continue
		}
		key := types.NamespacedName{Namespace: object.Namespace, Name: object.Name}
		if object.UID == uid && !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

// list returns the paths of all specs and claim folders.
func (m *metadataFiles) list() ([]string, error) {
	specs, err := filepath.Glob(filepath.Join(m.cdiDir, m.specPrefix()+"*.json"))
	if err != nil {
		return nil, fmt.Errorf("device metadata: %w", err)
	}
	folders, err := filepath.Glob(filepath.Join(m.dir, "*"))
	if err != nil {
		return nil, fmt.Errorf("device metadata: %w", err)
	}
	return append(specs, folders...), nil
}

// orphans are those of the paths that belong to no claim.
func (m *metadataFiles) orphans(paths []string, now present) []string {
	folders := map[string]bool{}
	for _, key := range now.known {
		folders[shortName(key.Namespace+"_"+key.Name)] = true
	}
	var orphans []string
	for _, path := range paths {
		used := folders[filepath.Base(path)] || len(now.unsettled) > 0 // any folder may tell the name of such a claim
		if spec, ok := strings.CutPrefix(filepath.Base(path), m.specPrefix()); ok && filepath.Dir(path) != m.dir {
			uid, _, _ := strings.Cut(spec, "_")
			used = now.has(types.UID(uid))
		}
		if !used {
			orphans = append(orphans, path)
		}
	}
	return orphans
}

// renewSpecs writes the specs that are missing of claims that the node has.
func (m *metadataFiles) renewSpecs(now present) error {
	copies, err := filepath.Glob(filepath.Join(m.dir, "*", "*", specCopy))
	if err != nil {
		return fmt.Errorf("device metadata: %w", err)
	}
	var errs []error
	for _, file := range copies {
		errs = append(errs, m.renewSpec(file, now))
	}
	return errors.Join(errs...)
}

func (m *metadataFiles) renewSpec(file string, now present) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("device metadata: %w", err)
	}
	var spec specs.Spec
	if broken := json.Unmarshal(data, &spec) != nil || len(spec.Devices) != 1; broken {
		return nil // the next prepare writes it anew
	}
	name := spec.Devices[0].Name // <UID of the claim>_<request>
	uid, _, _ := strings.Cut(name, "_")
	if _, known := now.known[types.UID(uid)]; !known {
		return nil
	}
	path := filepath.Join(m.cdiDir, m.specPrefix()+filepath.Base(name)+".json")
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := durable.WriteFile(path, data, 0o644, nil); err != nil {
		return fmt.Errorf("device metadata: %w", err)
	}
	return nil
}

// checkAnswers makes an error of an answer to the kubelet that lacks metadata: where the helper fails to
// write it, it only logs that, and a container would start without what its manifest counts on.
func (m *metadataFiles) checkAnswers(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	answer, err := handle(ctx, request)
	response, ok := answer.(*draapi.NodePrepareResourcesResponse)
	if !ok || err != nil {
		return answer, err
	}
	for uid, claim := range response.Claims {
		var ids []string
		for _, device := range claim.Devices {
			ids = append(ids, device.CdiDeviceIds...)
		}
		for _, device := range claim.Devices {
			for _, request := range device.RequestNames {
				if slices.Contains(ids, m.driverName+"/metadata="+uid+"_"+request) {
					continue
				}
				response.Claims[uid] = &draapi.NodePrepareResourceResponse{Error: fmt.Sprintf(
					"the file that describes the devices of request %s to containers could not be written: the log of the driver says why, and the kubelet tries again", request)}
			}
		}
	}
	return response, nil
}
