{{- define "kpx.fullname" -}}
{{- .Values.fullnameOverride | default "kpx" }}
{{- end }}

{{- define "kpx.labels" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "kpx" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Each node has only one, even with several names of releases. */ -}}
{{- define "kpx.selectorLabels" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "kpx" }}
{{- end }}

{{- define "kpx.serviceAccountName" -}}
{{- (.Values.serviceAccount).name | default (ternary (include "kpx.fullname" .) "default" (ne (toString (.Values.serviceAccount).create) "false")) }}
{{- end }}

{{- /* The kernel's programs translate the sockets of pods that socketLB chooses, and local redirects choose pods by labels. */ -}}
{{- define "kpx.readsPods" -}}
{{- $config := .Values.kpxConfig | default dict }}
{{- $socketLB := ternary (toString $config.socketLB) "auto" (hasKey $config "socketLB") }}
{{- $args := join " " (.Values.extraArgs | default list) }}
{{- if or (include "kpx.readsRedirects" .) (eq $socketLB "auto") .Values.existingConfigMap (contains "--socket-lb" $args) }}true{{ end }}
{{- end }}

{{- /* Arguments may switch local redirects on as well. */ -}}
{{- define "kpx.readsRedirects" -}}
{{- $args := .Values.extraArgs | default list }}
{{- if or (.Values.kpxConfig | default dict).localRedirect (has "--local-redirect" $args) (has "--local-redirect=true" $args) }}true{{ end }}
{{- end }}

{{- /* Nodes that hand clients over find each other by Leases. */ -}}
{{- define "kpx.handsOver" -}}
{{- $args := .Values.extraArgs | default list }}
{{- if or (eq (toString (.Values.kpxConfig | default dict).externalForwarding) "dsr") (has "--external-forwarding=dsr" $args) }}true{{ end }}
{{- end }}

{{- define "kpx.configFolder" -}}
{{- if .Values.existingConfigMap }}/var/lib/kube-proxy{{ else }}/etc/kpx{{ end }}
{{- end }}

{{- define "kpx.image" -}}
{{- $repository := required "Set image.repository to the name of kpx's image: REGISTRY/kpx, or the name that cargo xtask dist gave, where it was loaded into every node" (.Values.image).repository }}
{{- $digest := (.Values.image).digest }}
{{- $tag := (.Values.image).tag | default (ternary "" .Chart.AppVersion (not (empty $digest))) }}
{{- $repository }}{{ with $tag }}:{{ . }}{{ end }}{{ with $digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "kpx.kpxConfiguration" -}}
apiVersion: kpx.dev/v1alpha1
kind: KpxConfiguration
{{- with .Values.kpxConfig }}
{{ toYaml . }}
{{- end }}
{{- end }}
