package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/simgpu/simgpu/internal/durable"
)

const (
	extension           = ".json"
	unreadableExtension = ".unreadable"
)

// Store is a folder of claims. Its methods may be called concurrently for different claims.
type Store struct {
	dir string
}

// Unreadable is a claim whose file was damaged or written by an unknown version.
type Unreadable struct {
	UID types.UID
	// Stray is a file that is no claim's: the API server gives out no such UID, and nothing in it speaks of
	// a device. It is left where it is.
	Stray bool
	// Path is where the file has been set aside.
	Path string
	// Err says what is wrong with it.
	Err error
	// Claim and Devices are what the file seems to say. They may be empty, incomplete or wrong.
	Claim   types.NamespacedName
	Devices []string
}

// Open creates the folder if necessary and removes what interrupted writes left in it. No other
// process may use the folder.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("checkpoint folder: %w", err)
	}
	if err := durable.RemoveTemporary(dir, ""); err != nil {
		return nil, fmt.Errorf("checkpoint folder: remove unfinished files: %w", err)
	}
	return &Store{dir: dir}, nil
}

// Load returns all claims and all claims of unknown content, both sorted by UID. Files that are not
// named after a UID are left alone. An error means that the folder cannot be read.
func (s *Store) Load() ([]Claim, []Unreadable, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("checkpoint folder: %w", err)
	}
	var claims []Claim
	var unreadable []Unreadable
	readable := map[types.UID]bool{}
	for _, e := range entries {
		uid, ok := uidOf(e.Name(), extension)
		if !ok {
			continue
		}
		claim, err := s.read(uid)
		switch {
		case err == nil:
			claims = append(claims, claim)
			readable[uid] = true
		case s.stray(uid, extension):
			unreadable = append(unreadable, Unreadable{UID: uid, Stray: true, Path: s.path(uid, extension), Err: err})
		default:
			unreadable = append(unreadable, s.setAside(uid, err))
		}
	}
	for _, e := range entries {
		uid, ok := uidOf(e.Name(), unreadableExtension)
		if readable[uid] && ok {
			// It has served its purpose, since the claim was written anew. Removing it is not urgent.
			_ = durable.Remove(s.path(uid, unreadableExtension))
			continue
		}
		if ok && !slices.ContainsFunc(unreadable, func(u Unreadable) bool { return u.UID == uid }) {
			u := s.describe(uid, errors.New("set aside by an earlier start and not settled since"))
			u.Stray = s.stray(uid, unreadableExtension)
			unreadable = append(unreadable, u)
		}
	}
	slices.SortFunc(claims, func(a, b Claim) int { return strings.Compare(string(a.UID), string(b.UID)) })
	slices.SortFunc(unreadable, func(a, b Unreadable) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return claims, unreadable, nil
}

// Write replaces the file of the claim. The bytes are read back before they get their name. With a
// prepared claim goes what was set aside of it.
func (s *Store) Write(claim Claim) error {
	if err := CheckUID(claim.UID); err != nil {
		return err
	}
	data, err := encode(claim)
	if err != nil {
		return fmt.Errorf("checkpoint of claim %s: %w", claim.UID, err)
	}
	err = durable.WriteFile(s.path(claim.UID, extension), data, 0o600, func(tmp string) error {
		stored, err := os.ReadFile(tmp)
		if err != nil {
			return err
		}
		_, err = decode(stored)
		return err
	})
	if err == nil && claim.State == Prepared {
		err = durable.Remove(s.path(claim.UID, unreadableExtension))
	}
	if err != nil {
		return fmt.Errorf("checkpoint of claim %s: %w", claim.UID, err)
	}
	return nil
}

// Has tells whether the claim has a file, whatever is in it.
func (s *Store) Has(uid types.UID) bool {
	_, err := os.Lstat(s.path(uid, extension))
	return err == nil
}

// Remove removes everything about the claim. A claim that is not there is no error.
func (s *Store) Remove(uid types.UID) error {
	if err := CheckUID(uid); err != nil {
		return err
	}
	err := errors.Join(
		durable.Remove(s.path(uid, unreadableExtension)),
		durable.Remove(s.path(uid, extension)),
	)
	if err != nil {
		return fmt.Errorf("checkpoint of claim %s: %w", uid, err)
	}
	return nil
}

// uuid is how the API server makes UIDs.
var uuid = regexp.MustCompile("^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$")

func (s *Store) stray(uid types.UID, extension string) bool {
	if uuid.MatchString(string(uid)) {
		return false
	}
	data, err := os.ReadFile(s.path(uid, extension))
	if err != nil {
		return false
	}
	_, devices := salvage(data)
	return len(devices) == 0
}

func (s *Store) read(uid types.UID) (Claim, error) {
	data, err := os.ReadFile(s.path(uid, extension))
	if err != nil {
		return Claim{}, err
	}
	claim, err := decode(data)
	if err != nil {
		return Claim{}, err
	}
	if claim.UID != uid {
		return Claim{}, fmt.Errorf("the file is about claim %s", claim.UID)
	}
	return claim, nil
}

func (s *Store) setAside(uid types.UID, reason error) Unreadable {
	if err := durable.Rename(s.path(uid, extension), s.path(uid, unreadableExtension)); err != nil {
		reason = errors.Join(reason, fmt.Errorf("set aside: %w", err))
	}
	return s.describe(uid, reason)
}

func (s *Store) describe(uid types.UID, reason error) Unreadable {
	u := Unreadable{UID: uid, Path: s.path(uid, unreadableExtension), Err: reason}
	if data, err := os.ReadFile(u.Path); err == nil {
		u.Claim, u.Devices = salvage(data)
	}
	return u
}

func (s *Store) path(uid types.UID, extension string) string {
	return filepath.Join(s.dir, string(uid)+extension)
}

func uidOf(name, extension string) (types.UID, bool) {
	uid, ok := strings.CutSuffix(name, extension)
	return types.UID(uid), ok && CheckUID(types.UID(uid)) == nil
}

// CheckUID fails for a UID that no claim of the API has, and that could lead out of the folder.
func CheckUID(uid types.UID) error {
	if problems := validation.IsDNS1123Label(string(uid)); len(problems) > 0 {
		return fmt.Errorf("claim UID %q: %s", uid, strings.Join(problems, "; "))
	}
	return nil
}
