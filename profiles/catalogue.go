package profiles

import (
	"cmp"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
)

//go:embed catalogue/*/*.yaml
var embedded embed.FS

// vendorFile is the file in a vendor's folder that is no model.
const vendorFile = "vendor.yaml"

// Catalogue is a validated set of GPU models and their vendors.
type Catalogue struct {
	models  map[string]*Model
	vendors []*Vendor
}

// Load returns the catalogue built into the binary. It is read once; nobody may change it.
func Load() (*Catalogue, error) { return loadEmbedded() }

var loadEmbedded = sync.OnceValues(func() (*Catalogue, error) {
	fsys, err := fs.Sub(embedded, "catalogue")
	if err != nil {
		return nil, err
	}
	return LoadFS(fsys)
})

// LoadFS reads a catalogue laid out as <vendor>/vendor.yaml and <vendor>/<model id>.yaml; other files
// are ignored. Its error lists every fault of every file, each with its file and field path.
func LoadFS(fsys fs.FS) (*Catalogue, error) {
	folders, err := fs.ReadDir(fsys, ".")
	if err != nil {
		return nil, fmt.Errorf("read catalogue: %w", err)
	}
	catalogue := &Catalogue{models: map[string]*Model{}}
	var faults []error
	for _, folder := range folders {
		if !folder.IsDir() {
			continue
		}
		if err := catalogue.loadVendor(fsys, folder.Name()); err != nil {
			faults = append(faults, err)
		}
	}
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	return catalogue, nil
}

func (c *Catalogue) loadVendor(fsys fs.FS, folder string) error {
	file := path.Join(folder, vendorFile)
	data, err := fs.ReadFile(fsys, file)
	if err != nil {
		return fmt.Errorf("read vendor: %w", err)
	}
	vendor, err := decodeVendor(file, data)
	if err != nil {
		return err
	}
	vendor.Name = folder
	c.vendors = append(c.vendors, vendor)

	files, err := fs.Glob(fsys, path.Join(folder, "*.yaml"))
	if err != nil {
		return fmt.Errorf("list models: %w", err)
	}
	var faults []error
	for _, file := range files {
		if path.Base(file) == vendorFile {
			continue
		}
		data, err := fs.ReadFile(fsys, file)
		if err != nil {
			faults = append(faults, fmt.Errorf("read model: %w", err))
			continue
		}
		model, err := decodeModel(file, data, vendor)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		if other, taken := c.models[model.ID]; taken {
			faults = append(faults, fmt.Errorf("%s: id: %q is also a model of vendor %s", file, model.ID, other.Vendor.Name))
			continue
		}
		c.models[model.ID] = model
	}
	return errors.Join(faults...)
}

// Model returns the model with the given id, or an error that lists the known ids.
func (c *Catalogue) Model(id string) (*Model, error) {
	if model, known := c.models[id]; known {
		return model, nil
	}
	return nil, fmt.Errorf("unknown model %q; known models: %s", id, strings.Join(slices.Sorted(maps.Keys(c.models)), ", "))
}

// Models returns all models, sorted by id.
func (c *Catalogue) Models() []*Model {
	return slices.SortedFunc(maps.Values(c.models), func(a, b *Model) int { return cmp.Compare(a.ID, b.ID) })
}

// Vendors returns all vendors, sorted by name.
func (c *Catalogue) Vendors() []*Vendor {
	return slices.Clone(c.vendors)
}
