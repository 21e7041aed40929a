package chart

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
)

const prometheusOperator = "monitoring.coreos.com/v1"

func TestPodResourcesAreMountedOnlyForAttribution(t *testing.T) {
	const folder = "/var/lib/kubelet/pod-resources"
	for values, want := range map[string]struct{ endpoint, mount bool }{
		"":                              {true, true},
		"dcgm: {podAttribution: false}": {true, false},
		"dcgm: {enabled: false}":        {false, false},
	} {
		pod := daemonSet(t, render(t, values)).Spec.Template.Spec
		container := onlyContainer(t, pod)
		at := slices.IndexFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == folder })
		if (at >= 0) != want.mount {
			t.Errorf("%q: mounts %v", values, container.VolumeMounts)
		}
		if at >= 0 && !container.VolumeMounts[at].ReadOnly {
			t.Errorf("%q: the kubelet's folder is writable", values)
		}
		host := slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.HostPath != nil && v.HostPath.Path == folder })
		if host != want.mount {
			t.Errorf("%q: volumes %v", values, pod.Volumes)
		}
		arguments := strings.Join(container.Args, " ")
		if strings.Contains(arguments, "--dcgm-endpoint=:9400") != want.endpoint || strings.Contains(arguments, "--pod-resources-socket") != want.mount {
			t.Errorf("%q: arguments %s", values, arguments)
		}
		port := slices.ContainsFunc(container.Ports, func(p corev1.ContainerPort) bool { return p.Name == "dcgm" && p.ContainerPort == 9400 })
		if port != want.endpoint {
			t.Errorf("%q: ports %v", values, container.Ports)
		}
	}
}

func TestServiceMonitor(t *testing.T) {
	rendered := renderIn(t, namespace, "{serviceMonitor: {enabled: true, labels: {release: prometheus}, interval: 15s}, http: {port: 8081}, dcgm: {port: 9401}}", prometheusOperator)
	service := get[*corev1.Service](t, rendered, "simgpu-kubelet-plugin-metrics")
	pod := daemonSet(t, rendered).Spec.Template
	if service.Spec.ClusterIP != corev1.ClusterIPNone || !service.Spec.PublishNotReadyAddresses {
		t.Errorf("service %+v", service.Spec)
	}
	if !labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(pod.Labels)) {
		t.Errorf("the service selects %v, the pods are %v", service.Spec.Selector, pod.Labels)
	}
	ports := map[string]int32{}
	for _, port := range service.Spec.Ports {
		if port.TargetPort.StrVal != port.Name {
			t.Errorf("port %+v leads to another one", port)
		}
		ports[port.Name] = port.Port
	}
	if want := map[string]int32{"http": 8081, "dcgm": 9401}; !maps.Equal(ports, want) {
		t.Errorf("ports %v, want %v", ports, want)
	}

	monitor := get[*unstructured.Unstructured](t, rendered, "simgpu-kubelet-plugin")
	if got := monitor.GetLabels()["release"]; got != "prometheus" {
		t.Errorf("labels %v", monitor.GetLabels())
	}
	selector, _, err := unstructured.NestedStringMap(monitor.Object, "spec", "selector", "matchLabels")
	if err != nil || !labels.SelectorFromSet(selector).Matches(labels.Set(service.Labels)) {
		t.Errorf("%v: the monitor selects %v, the service is %v", err, selector, service.Labels)
	}
	var scraped []string
	for _, endpoint := range endpoints(t, rendered) {
		scraped = append(scraped, endpoint["port"].(string))
		if endpoint["path"] != "/metrics" || endpoint["interval"] != "15s" {
			t.Errorf("endpoint %v", endpoint)
		}
	}
	if !slices.Equal(scraped, []string{"http", "dcgm"}) {
		t.Errorf("scrapes %v", scraped)
	}
}

// endpoints are those of the ServiceMonitor.
func endpoints(t *testing.T, rendered objects) []map[string]any {
	t.Helper()
	all, _, err := unstructured.NestedSlice(get[*unstructured.Unstructured](t, rendered, "simgpu-kubelet-plugin").Object, "spec", "endpoints")
	if err != nil {
		t.Fatal(err)
	}
	var typed []map[string]any
	for _, endpoint := range all {
		typed = append(typed, endpoint.(map[string]any))
	}
	return typed
}

func TestServiceMonitorOfTheDriverAlone(t *testing.T) {
	rendered := renderIn(t, namespace, "{serviceMonitor: {enabled: true}, dcgm: {enabled: false}}", prometheusOperator)
	if all := endpoints(t, rendered); len(all) != 1 {
		t.Errorf("endpoints %v", all)
	}
	if ports := get[*corev1.Service](t, rendered, "simgpu-kubelet-plugin-metrics").Spec.Ports; len(ports) != 1 {
		t.Errorf("ports %v", ports)
	}
}

func TestGrafanaDashboard(t *testing.T) {
	dashboard := func(values string) map[string]any {
		t.Helper()
		config := get[*corev1.ConfigMap](t, render(t, values), "simgpu-dashboard")
		if config.Labels["grafana_dashboard"] != "1" {
			t.Errorf("%s: labels %v", values, config.Labels)
		}
		var parsed map[string]any
		if err := json.Unmarshal([]byte(config.Data["simgpu.json"]), &parsed); err != nil {
			t.Fatalf("%s: %v", values, err)
		}
		return parsed
	}
	usual := dashboard("grafanaDashboard: {enabled: true}")
	kept := dashboard("{grafanaDashboard: {enabled: true}, serviceMonitor: {honorLabels: true}}")
	text := func(dashboard map[string]any) string {
		data, err := json.Marshal(dashboard)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if !strings.Contains(text(usual), "exported_pod") {
		t.Error("no panel names the pods that use GPUs")
	}
	if strings.Contains(text(kept), "exported_") || reflect.DeepEqual(usual, kept) {
		t.Error("labels that are kept are looked for under their other names")
	}
	more := get[*corev1.ConfigMap](t, render(t, "grafanaDashboard: {enabled: true, labels: {team: ml}, annotations: {grafana_folder: GPUs}}"), "simgpu-dashboard")
	if more.Labels["team"] != "ml" || more.Annotations["grafana_folder"] != "GPUs" {
		t.Errorf("labels %v, annotations %v", more.Labels, more.Annotations)
	}
}
