package main

import (
	"encoding/json"
	"io"

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
