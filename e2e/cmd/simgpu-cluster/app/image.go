package app

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/simgpu/simgpu/e2e/cluster"
	"github.com/simgpu/simgpu/e2e/image"
	"github.com/simgpu/simgpu/e2e/internal/progress"
)

func buildImageCommand(o *options) *cobra.Command {
	var references []string
	command := &cobra.Command{
		Use:       "build-image NAME...",
		Short:     "Make images of this repository and print their archives: " + strings.Join(image.Names(), ", "),
		Args:      cobra.MatchAll(cobra.MinimumNArgs(1), cobra.OnlyValidArgs),
		ValidArgs: image.Names(),
		RunE: func(command *cobra.Command, args []string) error {
			out := progress.New(o.Err)
			for _, name := range args {
				recipe, err := image.Find(name)
				if err != nil {
					return err
				}
				archive, err := cluster.BuildImage(command.Context(), o.dirs, out, recipe, references...)
				if err != nil {
					return err
				}
				fmt.Fprintln(o.Out, archive)
			}
			return nil
		},
	}
	command.Flags().StringSliceVar(&references, "as", nil, "names to give the image instead of its own")
	return command
}

func loadImageCommand(o *options) *cobra.Command {
	var references []string
	command := &cobra.Command{
		Use:   "load-image NAME|ARCHIVE...",
		Short: "Put images on every node: archives, or images of this repository by name",
		Long: "Puts images on every node. An argument is a docker-archive or OCI archive (.tar), or the name of an image that is\nmade from this repository: " +
			strings.Join(image.Names(), ", ") + ".",
		Args: cobra.MinimumNArgs(1),
		RunE: func(command *cobra.Command, args []string) error {
			c, err := o.cluster()
			if err != nil {
				return err
			}
			out := progress.New(o.Err)
			for _, arg := range args {
				archive := arg
				if _, err := os.Stat(arg); err != nil || !strings.HasSuffix(arg, ".tar") {
					recipe, err := image.Find(arg)
					if err != nil {
						return fmt.Errorf("%w; or give the path of an archive ending in .tar", err)
					}
					if archive, err = cluster.BuildImage(command.Context(), o.dirs, out, recipe, references...); err != nil {
						return err
					}
				}
				names, err := c.LoadImage(command.Context(), archive)
				if err != nil {
					return err
				}
				out.Step("Loaded %s", strings.Join(names, ", "))
			}
			return nil
		},
	}
	command.Flags().StringSliceVar(&references, "as", nil, "names to give images of this repository instead of their own")
	return command
}
