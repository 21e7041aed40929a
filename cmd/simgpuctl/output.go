package main

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// writeAs writes a value for programs.
func writeAs(w io.Writer, format string, value any) error {
	marshal := yaml.Marshal
	if format == "json" {
		marshal = func(v any) ([]byte, error) {
			data, err := json.MarshalIndent(v, "", "  ")
			return append(data, '\n'), err
		}
	}
	data, err := marshal(value)
	if err != nil {
		return err
	}
	_, err = w.Write(data)
	return err
}

// outputFlag adds the flag by which programs ask for something else than a table.
func outputFlag(cmd *cobra.Command, output *string) {
	cmd.Flags().StringVarP(output, "output", "o", "table", "table, json or yaml")
}

// printAs writes a value for programs, or what people read in its place.
func printAs(w io.Writer, format string, value any, table func(io.Writer) error) error {
	switch format {
	case "table":
		return table(w)
	case "json", "yaml":
		return writeAs(w, format, value)
	}
	return fmt.Errorf("--output %q is not known: use table, json or yaml", format)
}
