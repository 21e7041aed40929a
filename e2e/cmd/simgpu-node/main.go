// Command simgpu-node is process 1 of a node of the local cluster. simgpu-cluster starts it.
package main

import (
	"fmt"
	"os"

	"github.com/simgpu/simgpu/e2e/internal/node"
)

func main() {
	if err := node.Main(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, "simgpu-node:", err)
		os.Exit(1)
	}
}
