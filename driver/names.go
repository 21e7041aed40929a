package driver

import (
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/simgpu/simgpu/driver/checkpoint"
)

// Names of claims and of their requests become names of files, here and in the kubeletplugin helper. The API
// server admits none that could lead out of a folder; what it would not admit is refused before anything is
// done with it, whoever sends it.

// checkClaimName fails for a claim that no API server has.
func checkClaimName(namespace, name string, uid types.UID) error {
	if err := checkpoint.CheckUID(uid); err != nil {
		return err
	}
	for _, part := range []struct {
		what, value string
		problems    []string
	}{
		{"namespace", namespace, validation.IsDNS1123Label(namespace)},
		{"name", name, validation.IsDNS1123Subdomain(name)},
	} {
		if len(part.problems) > 0 {
			return fmt.Errorf("claim of UID %s: %s %q: %s", uid, part.what, part.value, strings.Join(part.problems, "; "))
		}
	}
	return nil
}

// checkRequestName fails for a result whose request, "name" or "name/subrequest", no claim has. Devices and
// pools need no such check: they are looked up.
func checkRequestName(r resourceapi.DeviceRequestAllocationResult) error {
	parts := strings.Split(r.Request, "/")
	for _, part := range parts {
		if problems := validation.IsDNS1123Label(part); len(problems) > 0 || len(parts) > 2 {
			return fmt.Errorf("request %q: %s", r.Request, strings.Join(append(problems, "a name, or two with a slash between them"), "; "))
		}
	}
	return nil
}
