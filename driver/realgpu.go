package driver

import (
	"os"
	"path/filepath"
)

// realGPUTraces are files that only a driver of real GPUs makes.
func realGPUTraces() []string {
	return []string{"/proc/driver/nvidia", "/sys/module/nvidia", "/dev/nvidiactl"}
}

// findRealGPU returns the first trace of a driver of real GPUs, "" if there is none.
func findRealGPU(root string) string {
	for _, trace := range realGPUTraces() {
		if _, err := os.Stat(filepath.Join(root, trace)); err == nil {
			return trace
		}
	}
	return ""
}
