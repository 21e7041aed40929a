// Command vllm-sim is the entry point of the image that stands in for
// vllm/vllm-openai, where it is installed as vllm: `vllm serve` is package
// modelserver, `vllm chat` package chat, and this is their wiring to the process.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/simgpu/simgpu/modelserver"
	"github.com/simgpu/simgpu/modelserver/chat"
)

func main() {
	os.Exit(exitCode(run()))
}

func run() error {
	if len(os.Args) > 1 && os.Args[1] == "chat" {
		return chat.Run(context.Background(), os.Args[2:], os.Stdout, os.Stderr)
	}
	opts, err := modelserver.OptionsFromEnv(os.LookupEnv)
	if err != nil {
		return err
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)

	opts.Args = os.Args[1:]
	opts.Stdout, opts.Stderr = os.Stdout, os.Stderr
	opts.Signals = signals
	opts.Environ = os.Environ()
	opts.ReapChildren = os.Getpid() == 1
	return modelserver.Run(context.Background(), opts)
}

// exitCode prints the error and picks the code: that of argparse for a bad command
// line, that of the simulator where it ended by itself, else 1 as an uncaught
// exception of Python.
func exitCode(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	var usage *modelserver.UsageError
	var exit *modelserver.ExitError
	switch {
	case errors.As(err, &usage), errors.Is(err, chat.ErrUsage):
		return 2
	case errors.As(err, &exit):
		return exit.Code
	default:
		return 1
	}
}
