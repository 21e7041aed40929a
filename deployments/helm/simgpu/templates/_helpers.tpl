{{/* Prefix of all object names: the release name where it says simgpu already, else release and chart name. */}}
{{- define "simgpu.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "simgpu.kubeletPlugin" -}}
{{ include "simgpu.fullname" . }}-kubelet-plugin
{{- end -}}

{{- define "simgpu.inventoryConfigMap" -}}
{{ include "simgpu.fullname" . }}-inventory
{{- end -}}

{{- define "simgpu.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "simgpu.kubeletPlugin" .) }}
{{- end -}}

{{/* What finds the driver's pods; a DaemonSet's selector can never change, so nothing that may change belongs here. */}}
{{- define "simgpu.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: kubelet-plugin
{{- end -}}

{{- define "simgpu.labels" -}}
{{ include "simgpu.selectorLabels" . }}
{{ include "simgpu.releaseLabels" . }}
{{- end -}}

{{/* What all objects have, of whatever component. */}}
{{- define "simgpu.releaseLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* The driver's folder on the node: state, sockets, tools. */}}
{{- define "simgpu.pluginDir" -}}
{{ .Values.kubeletRoot }}/plugins/{{ .Values.driverName }}
{{- end -}}

{{/* Where the kubelet tells which pods use which devices. */}}
{{- define "simgpu.podResourcesDir" -}}
{{ .Values.kubeletRoot }}/pod-resources
{{- end -}}

{{/* Whether the driver asks the kubelet who uses what: for metrics, and to know when GPUs of the device plugin are free. */}}
{{- define "simgpu.asksPodResources" -}}
{{- if or (and .Values.dcgm.enabled .Values.dcgm.podAttribution) .Values.devicePlugin.enabled }}true{{ end -}}
{{- end -}}

{{/* The vendor's domain, which the class of the partitions and the extended resource are named after. */}}
{{- define "simgpu.domain" -}}
{{ trimPrefix "gpu." .Values.driverName }}
{{- end -}}

{{- define "simgpu.gpuClass" -}}
{{ .Values.driverName }}
{{- end -}}

{{- define "simgpu.migClass" -}}
mig.{{ include "simgpu.domain" . }}
{{- end -}}

{{/* The user's affinity. "Not beside a real GPU" is added to every one of its node selector terms, since terms are alternatives. */}}
{{- define "simgpu.affinity" -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- if not .Values.forceBesideRealGPU -}}
  {{- $noRealGPU := dict "key" "nvidia.com/gpu.present" "operator" "NotIn" "values" (list "true") -}}
  {{- $nodeAffinity := $affinity.nodeAffinity | default dict -}}
  {{- $required := $nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution | default dict -}}
  {{- $terms := list -}}
  {{- range $required.nodeSelectorTerms | default (list dict) -}}
    {{- $terms = append $terms (set . "matchExpressions" (append (.matchExpressions | default list) $noRealGPU)) -}}
  {{- end -}}
  {{- $_ := set $nodeAffinity "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
  {{- $_ := set $affinity "nodeAffinity" $nodeAffinity -}}
{{- end -}}
{{- with $affinity }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* Of the job that looks for users; not what finds the driver's pods. */}}
{{- define "simgpu.inUseLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: in-use
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* A hook of that weight which is run before the release is deleted. */}}
{{- define "simgpu.inUseHook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded,hook-failed
{{- end -}}

{{- define "simgpu.managedDRA" -}}
{{ include "simgpu.fullname" . }}-managed-dra
{{- end -}}

{{- define "simgpu.managedDRASelectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: managed-dra-controller
{{- end -}}

{{- define "simgpu.managedDRALabels" -}}
{{ include "simgpu.managedDRASelectorLabels" . }}
{{ include "simgpu.releaseLabels" . }}
{{- end -}}
