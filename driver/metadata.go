package driver

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
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
}

// longestName is the longest name of a folder in all usual file systems, in bytes.
const longestName = 255

// openMetadata removes what interrupted writes left in the CDI folder.
func openMetadata(dir, cdiDir, driverName string) (*metadataFiles, error) {
	m := &metadataFiles{dir: dir, cdiDir: cdiDir, driverName: driverName}
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
		RemoveAll: func(path string) error { return os.RemoveAll(m.place(path)) },
	}
}

func (m *metadataFiles) write(path string, data []byte, perm os.FileMode) error {
	if filepath.Dir(path) == filepath.Clean(m.cdiDir) {
		var err error
		if data, err = m.placeMounts(data); err != nil {
			return fmt.Errorf("device metadata: %s: %w", path, err)
		}
	}
	return durable.WriteFile(m.place(path), data, perm, nil)
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

// placeMounts makes a CDI spec of the helper mount files from where they are.
func (m *metadataFiles) placeMounts(data []byte) ([]byte, error) {
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, err
	}
	moved := false
	for _, device := range spec.Devices {
		for _, mount := range device.ContainerEdits.Mounts {
			if at := m.place(mount.HostPath); at != mount.HostPath {
				mount.HostPath, moved = at, true
			}
		}
	}
	if !moved {
		return data, nil
	}
	return json.Marshal(spec)
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
		f, err := os.Open(file)
		if err != nil {
			continue
		}
		var object metav1.PartialObjectMetadata
		err = json.NewDecoder(f).Decode(&object)
		f.Close()
		key := types.NamespacedName{Namespace: object.Namespace, Name: object.Name}
		if err == nil && object.UID == uid && !slices.Contains(keys, key) {
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
