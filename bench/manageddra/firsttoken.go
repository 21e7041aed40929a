package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/simgpu/simgpu/manageddra/api"
)

// firstToken creates the service of a manifest and asks it, through the API server's proxy, until a token comes.
func firstToken(ctx context.Context, config *rest.Config, manifest string, rounds int) error {
	content, err := os.ReadFile(manifest)
	if err != nil {
		return err
	}
	wanted := &api.LLMInferenceService{}
	if err := yaml.UnmarshalStrict(content, wanted); err != nil {
		return fmt.Errorf("%s: %w", manifest, err)
	}
	b, err := newBench(config, 1)
	if err != nil {
		return err
	}
	viaProxy, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	wanted.Namespace = namespace
	if err := b.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
		return fmt.Errorf("the namespace, which has to be new: %w", err)
	}
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "round\tall pods ready\tfirst token\tall gone\t")
	for round := 1; round <= rounds && err == nil; round++ {
		var ready, token, gone time.Duration
		if ready, token, err = b.serve(ctx, viaProxy, config.Host, wanted.DeepCopy()); err == nil {
			gone, err = b.remove(ctx, wanted)
		}
		if err == nil {
			fmt.Fprintf(table, "%d\t%v\t%v\t%v\t\n", round, ready.Round(10*time.Millisecond), token.Round(10*time.Millisecond), gone.Round(10*time.Millisecond))
		}
	}
	return errors.Join(err, table.Flush(), b.clean(context.WithoutCancel(ctx)))
}

// serve creates a service and returns after how long it was ready, and after how long a first token came.
func (b *bench) serve(ctx context.Context, c *http.Client, host string, s *api.LLMInferenceService) (ready, token time.Duration, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 3*time.Minute, errors.New("not within 3 minutes"))
	defer cancel()
	begun := time.Now()
	if err := b.client.Create(ctx, s); err != nil {
		return 0, 0, err
	}
	isReady := make(chan error, 1)
	go func() {
		isReady <- wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			err := b.client.Get(ctx, client.ObjectKeyFromObject(s), s)
			for _, condition := range s.Status.Conditions {
				if condition.Type == api.ConditionReady && condition.Status == corev1.ConditionTrue {
					ready = time.Since(begun)
					return true, nil
				}
			}
			return false, err
		})
	}()
	path := fmt.Sprintf("/api/v1/namespaces/%s/services/http:%s:8000/proxy/v1/chat/completions", s.Namespace, api.WorkloadServiceName(s.Name))
	model := s.Name
	if s.Spec.Model.Name != nil {
		model = *s.Spec.Model.Name
	}
	question := fmt.Sprintf(`{"model":%q,"stream":true,"messages":[{"role":"user","content":"What is Dynamic Resource Allocation?"}]}`, model)
	var last error
	err = wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		last = ask(ctx, c, host+path, question)
		return last == nil, nil
	})
	token = time.Since(begun)
	if err = errors.Join(err, <-isReady); err != nil {
		return 0, 0, fmt.Errorf("service %s: %w; last answer: %w", s.Name, context.Cause(ctx), last)
	}
	return ready, token, nil
}

// ask for a completion and wait for its first token.
func ask(ctx context.Context, c *http.Client, url, question string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(question))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	answer, err := c.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return errors.New(answer.Status)
	}
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		if strings.Contains(lines.Text(), `"content":"`) && !strings.Contains(lines.Text(), `"content":""`) {
			return nil
		}
	}
	return errors.New("the answer ended without a token")
}

// remove deletes a service and returns after how long its claims are gone.
func (b *bench) remove(ctx context.Context, s *api.LLMInferenceService) (time.Duration, error) {
	begun := time.Now()
	if err := b.client.Delete(ctx, s); client.IgnoreNotFound(err) != nil {
		return 0, err
	}
	err := wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, 3*time.Minute, true, func(ctx context.Context) (bool, error) {
		var left resourceapi.ResourceClaimList
		err := b.client.List(ctx, &left, client.InNamespace(namespace))
		return err == nil && len(left.Items) == 0, err
	})
	return time.Since(begun), err
}
