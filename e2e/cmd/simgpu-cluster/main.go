// Command simgpu-cluster runs real Kubernetes clusters on this machine, without Docker.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/simgpu/simgpu/e2e/cmd/simgpu-cluster/app"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := app.Run(ctx, os.Args[1:], app.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	stop()
	os.Exit(code)
}
