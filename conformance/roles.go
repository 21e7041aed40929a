package conformance

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	rbacv1 "k8s.io/api/rbac/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// ReadRoles reads the Roles and ClusterRoles in a manifest, which may hold anything else as well.
func ReadRoles(file string) ([]rbacv1.ClusterRole, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var roles []rbacv1.ClusterRole
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		var role rbacv1.ClusterRole
		if err := yaml.Unmarshal(document, &role.TypeMeta); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if role.Kind != "ClusterRole" && role.Kind != "Role" {
			continue
		}
		if err := yaml.Unmarshal(document, &role); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		roles = append(roles, role)
	}
	if len(roles) == 0 {
		return nil, fmt.Errorf("%s has no Role and no ClusterRole", file)
	}
	return roles, nil
}
