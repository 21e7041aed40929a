package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/simgpu/simgpu/conformance/internal/validate"
)

func newValidateCommand() *cobra.Command {
	var file string
	var versions, gates []string
	cmd := &cobra.Command{
		Use:   "validate --slices FILE --kubernetes VERSION",
		Short: "Have the API server code of other Kubernetes versions judge ResourceSlices",
		Long: `Have the API server code of other Kubernetes versions judge ResourceSlices, as if each were created there.

FILE is a list in YAML or JSON, as "kubectl get resourceslices -o yaml" prints it and "dra-conformance run --report-dir"
leaves it in resourceslices.json. Drivers may publish something else on another version; have the slices from there then.

The code of each version is built the first time, which needs the Go command and takes minutes, and kept in the user's
cache folder. Exit code 1: a slice is refused, or stored without some of its fields.`,
		Example: "  dra-conformance validate --slices slices.yaml --kubernetes 1.34.3,1.35.4,1.36.3\n" +
			"  dra-conformance validate --slices slices.yaml --kubernetes 1.37.2 --feature-gates DRAPartitionableDevices=false",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			data, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			list, err := yaml.YAMLToJSON(data)
			if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			var items struct {
				Items []json.RawMessage `json:"items"`
			}
			if err := json.Unmarshal(list, &items); err != nil || len(items.Items) == 0 {
				return fmt.Errorf("%s is no list of ResourceSlices (\"items\") %w", file, err)
			}
			cache, err := os.UserCacheDir()
			if err != nil {
				return err
			}
			wrong := false
			for _, version := range versions {
				validator, err := validate.Build(cmd.Context(), version, filepath.Join(cache, "dra-conformance"), cmd.ErrOrStderr())
				if err != nil {
					return err
				}
				verdicts, err := validator.Judge(cmd.Context(), list, gates...)
				if err != nil {
					return fmt.Errorf("validation of Kubernetes %s: %w", version, err)
				}
				good := 0
				for _, v := range verdicts {
					switch {
					case v.Refused != "":
						fmt.Fprintf(cmd.OutOrStdout(), "%s: %s is refused: %s\n", version, v.Name, v.Refused)
					case len(v.Dropped) > 0:
						fmt.Fprintf(cmd.OutOrStdout(), "%s: %s is stored without %s\n", version, v.Name, strings.Join(v.Dropped, ", "))
					default:
						good++
					}
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s: %d of %d slices are stored as they are\n", version, good, len(verdicts))
				wrong = wrong || good < len(verdicts)
			}
			if wrong {
				return errFailed
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&file, "slices", "", "file with the ResourceSlices (required)")
	flags.StringSliceVar(&versions, "kubernetes", nil, "versions of Kubernetes, like 1.36.3 (required)")
	flags.StringSliceVar(&gates, "feature-gates", nil, "feature gates other than by default, like DRAPartitionableDevices=false")
	for _, name := range []string{"slices", "kubernetes"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err)
		}
	}
	return cmd
}
