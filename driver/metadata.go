package driver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

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
	index    specIndex
}

// specCopy is the CDI spec that shows a metadata file to containers, beside that file. With it the spec can
// be renewed after the CDI folder, which is in memory, has been emptied.
const specCopy = "cdi.json"

// longestName is the longest name of a folder in all usual file systems, in bytes.
const longestName = 255

func newMetadata(dir, cdiDir, driverName string, prepared func(types.UID) bool) *metadataFiles {
	return &metadataFiles{dir: dir, cdiDir: cdiDir, driverName: driverName, prepared: prepared}
}

// openMetadata is newMetadata, ready to be worked with.
func openMetadata(dir, cdiDir, driverName string, prepared func(types.UID) bool) (*metadataFiles, error) {
	m := newMetadata(dir, cdiDir, driverName, prepared)
	return m, m.open()
}

// open begins to work with what there is: it removes what interrupted writes left in the CDI folder.
func (m *metadataFiles) open() error {
	m.index.mu.Lock()
	m.index.known = nil // another driver may have worked meanwhile
	m.index.mu.Unlock()
	if err := durable.RemoveTemporary(m.cdiDir, m.specPrefix()); err != nil {
		return fmt.Errorf("device metadata: remove unfinished files: %w", err)
	}
	return nil
}

// operations are for the helper.
func (m *metadataFiles) operations() kubeletplugin.MetadataFileOperations {
	return kubeletplugin.MetadataFileOperations{
		WriteFile: m.write,
		MkdirAll:  func(path string, perm os.FileMode) error { return os.MkdirAll(m.place(path), perm) },
		ReadFile:  func(path string) ([]byte, error) { return os.ReadFile(m.place(path)) },
		RemoveAll: m.removeAll,
		Glob:      m.glob,
		Remove:    m.remove,
	}
}

// specIndex is the names of the specs in the CDI folder, by the UID of their claim, so that the specs of a claim
// are found without looking through those of all others. It is read from the folder when it is first needed.
type specIndex struct {
	mu    sync.Mutex
	known map[string]map[string]bool // nil: not read yet
}

// glob finds the specs that a pattern of the helper is about, "<prefix><UID of the claim>_*.json".
func (m *metadataFiles) glob(pattern string) ([]string, error) {
	uid, ok := strings.CutPrefix(filepath.Base(pattern), m.specPrefix())
	uid, end, _ := strings.Cut(uid, "_")
	if !ok || end != "*.json" || filepath.Dir(pattern) != filepath.Clean(m.cdiDir) {
		return nil, fmt.Errorf("device metadata: %q is no pattern for the specs of one claim", pattern)
	}
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	if err := m.readIndex(); err != nil {
		return nil, err
	}
	var found []string
	for _, name := range slices.Sorted(maps.Keys(m.index.known[uid])) {
		found = append(found, filepath.Join(m.cdiDir, name))
	}
	return found, nil
}

// readIndex fails for a folder that cannot be read, so that files to be removed are not overlooked. The caller
// holds the mutex of the index.
func (m *metadataFiles) readIndex() error {
	if m.index.known != nil {
		return nil
	}
	entries, err := os.ReadDir(m.cdiDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	m.index.known = map[string]map[string]bool{}
	for _, e := range entries {
		m.enter(e.Name())
	}
	return nil
}

// enter notes a file of the CDI folder, if it is a spec of the helper. The caller holds the mutex of the index.
func (m *metadataFiles) enter(name string) {
	spec, ok := strings.CutPrefix(name, m.specPrefix())
	if !ok || m.index.known == nil {
		return
	}
	uid, _, _ := strings.Cut(spec, "_")
	if m.index.known[uid] == nil {
		m.index.known[uid] = map[string]bool{}
	}
	m.index.known[uid][name] = true
}

// noteSpec keeps the index up when a spec is written.
func (m *metadataFiles) noteSpec(path string) {
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	m.enter(filepath.Base(path))
}

// remove removes a spec.
func (m *metadataFiles) remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	spec := strings.TrimPrefix(filepath.Base(path), m.specPrefix())
	uid, _, _ := strings.Cut(spec, "_")
	delete(m.index.known[uid], filepath.Base(path))
	if len(m.index.known[uid]) == 0 {
		delete(m.index.known, uid)
	}
	return nil
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
	if err := durable.Replace(m.place(path), data, perm); err != nil {
		return err
	}
	if filepath.Dir(path) == filepath.Clean(m.cdiDir) {
		m.noteSpec(path)
	}
	return nil
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

// discard removes an orphan.
func (m *metadataFiles) discard(path string) error {
	if filepath.Dir(path) == filepath.Clean(m.cdiDir) {
		return m.remove(path)
	}
	return os.RemoveAll(path)
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
	if err := durable.Replace(path, data, 0o644); err != nil {
		return fmt.Errorf("device metadata: %w", err)
	}
	m.noteSpec(path)
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
