{{- define "kpx.labels" -}}
app.kubernetes.io/name: kpx
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Each node has only one, even with several names of releases. */ -}}
{{- define "kpx.selectorLabels" -}}
app.kubernetes.io/name: kpx
{{- end }}

{{- define "kpx.configFolder" -}}
{{- if .Values.existingConfigMap }}/var/lib/kube-proxy{{ else }}/etc/kpx{{ end }}
{{- end }}

{{- define "kpx.image" -}}
{{- $repository := required "Set image.repository to the name of kpx's image: REGISTRY/kpx, or localhost/kpx where it was loaded into every node" (.Values.image).repository }}
{{- printf "%s:%s" $repository ((.Values.image).tag | default .Chart.AppVersion) }}
{{- end }}

{{- define "kpx.kpxConfiguration" -}}
apiVersion: kpx.dev/v1alpha1
kind: KpxConfiguration
{{- with .Values.kpxConfig }}
{{ toYaml . }}
{{- end }}
{{- end }}
