package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/simgpu/simgpu/driver"
)

// lookAgain is how often claims are looked at that pods may be about to give up.
const lookAgain = time.Second

// newInUseCommand makes the command that the chart runs before it is uninstalled. The kubelet needs the driver
// to end pods; without it they stay.
func newInUseCommand() *cobra.Command {
	var kubeconfig, driverName string
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "in-use --driver-name NAME",
		Short: "Fail, and name the pods, while pods use devices of the driver",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := newClient(kubeconfig, driver.NewAPIRequests())
			if err != nil {
				return err
			}
			return waitUntilUnused(cmd.Context(), client, driverName, wait, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&driverName, "driver-name", "", "DRA driver name")
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file (default: the service account of the pod)")
	cmd.Flags().DurationVar(&wait, "wait", 0, "how long to wait for pods to end")
	_ = cmd.MarkFlagRequired("driver-name")
	return cmd
}

// waitUntilUnused fails once it has waited in vain.
func waitUntilUnused(ctx context.Context, client kubernetes.Interface, driverName string, wait time.Duration, out io.Writer) error {
	deadline := time.Now().Add(wait)
	for {
		users, err := usersOf(ctx, client, driverName)
		if err != nil {
			return err
		}
		if len(users) == 0 {
			fmt.Fprintf(out, "Nothing uses devices of %s\n", driverName)
			return nil
		}
		if time.Now().After(deadline) {
			for _, user := range users {
				fmt.Fprintln(out, user)
			}
			return fmt.Errorf("%d users of devices of %s, and only the driver can end them: delete these pods first", len(users), driverName)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(lookAgain):
		}
	}
}

// usersOf says who uses devices of the driver, in the order of the API. A claim that nobody uses is nobody's:
// it is not prepared.
func usersOf(ctx context.Context, client kubernetes.Interface, driverName string) ([]string, error) {
	var users []string
	options := metav1.ListOptions{Limit: 500}
	for {
		page, err := client.ResourceV1().ResourceClaims("").List(ctx, options)
		if err != nil {
			return nil, fmt.Errorf("look for claims: %w", err)
		}
		for _, claim := range page.Items {
			if !hasDevices(claim, driverName) {
				continue
			}
			for _, consumer := range claim.Status.ReservedFor {
				users = append(users, fmt.Sprintf("%s %s/%s has claim %s", consumer.Resource, claim.Namespace, consumer.Name, claim.Name))
			}
		}
		if page.Continue == "" {
			return users, nil
		}
		options.Continue = page.Continue
	}
}

func hasDevices(claim resourceapi.ResourceClaim, driverName string) bool {
	if claim.Status.Allocation == nil {
		return false
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == driverName {
			return true
		}
	}
	return false
}
