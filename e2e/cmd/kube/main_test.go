package main

import (
	"flag"
	"slices"
	"strings"
	"testing"
)

func TestChoose(t *testing.T) {
	for name, test := range map[string]struct {
		args, want []string
		wrong      string
	}{
		"by link":             {args: []string{"/opt/bin/kubectl", "get", "pods"}, want: []string{"/opt/bin/kubectl", "get", "pods"}},
		"by argument":         {args: []string{"/opt/bin/kube", "kubectl", "get", "pods"}, want: []string{"kubectl", "get", "pods"}},
		"link wins":           {args: []string{"etcd", "kubelet"}, want: []string{"etcd", "kubelet"}},
		"no component":        {args: []string{"kube"}, wrong: "no component"},
		"unknown component":   {args: []string{"kube", "kubeadm"}, wrong: `"kubeadm"`},
		"component with path": {args: []string{"kube", "/bin/etcd"}, wrong: `"/bin/etcd"`},
	} {
		t.Run(name, func(t *testing.T) {
			run, got, err := choose(test.args)
			if test.wrong != "" {
				if err == nil || !strings.Contains(err.Error(), test.wrong) {
					t.Errorf("got %v, want %q", err, test.wrong)
				}
				return
			}
			if err != nil || run == nil || !slices.Equal(got, test.want) {
				t.Errorf("got %q, %v, want %q", got, err, test.want)
			}
		})
	}
}

func TestUsageNamesComponentsInOrder(t *testing.T) {
	var out strings.Builder
	_, _, err := choose([]string{"kube"})
	usage(&out, err)
	if want := "components: coredns, etcd, helm, kube-apiserver, kube-controller-manager, kube-proxy, kube-scheduler, kubectl, kubelet\n"; !strings.HasSuffix(out.String(), want) {
		t.Errorf("got %q, want %q at its end", out.String(), want)
	}
}

func TestFlagsOfCoreDNSAreLeftOut(t *testing.T) {
	for _, name := range corednsFlags {
		if flag.CommandLine.Lookup(name) == nil {
			t.Errorf("CoreDNS has no flag %s any more", name)
		}
	}
	kept := without(flag.CommandLine, corednsFlags)
	flag.VisitAll(func(f *flag.Flag) {
		if left := kept.Lookup(f.Name) == nil; left != slices.Contains(corednsFlags, f.Name) {
			t.Errorf("flag %s: left out is %t", f.Name, left)
		}
	})
}
