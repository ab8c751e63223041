//! Manifests rendered by their users' tools, and decoded strictly, as by an API server.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub(crate) fn deploy_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

/// Returns `kubectl kustomize` of a folder.
pub(crate) fn kustomize(folder: &Path) -> Result<Objects> {
    let mut kubectl = Command::new("kubectl");
    kubectl.arg("kustomize").arg(folder);
    Objects::read(&output(kubectl).context("is kubectl installed?")?)
}

/// The qualified image name of the manifests, which no registry serves.
pub(crate) const IMAGE: &str = "localhost/kpx";

/// Returns `helm template` of the chart with a file of values. An image that the values leave to a
/// registry gets the manifests' name.
pub(crate) fn helm(values: &Path) -> Result<Objects> {
    let mut args: Vec<OsString> = vec!["--values".into(), values.into()];
    if !std::fs::read_to_string(values)?.contains("repository: ") {
        args.push(format!("--set=image.repository={IMAGE}").into());
    }
    Objects::read(&helm_output(&args)?)
}

pub(crate) fn helm_output(args: &[OsString]) -> Result<String> {
    // `cargo xtask test` installs helm and sets its path.
    let mut helm = Command::new(std::env::var_os("HELM").unwrap_or_else(|| "helm".into()));
    helm.args(["template", "kpx"])
        .arg(deploy_dir().join("helm/kpx"))
        .args(["--namespace", "kube-system"])
        .args(args);
    output(helm).context("is helm installed? `cargo xtask setup` does it")
}

fn output(mut command: Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).context("output in UTF-8")
}

/// The objects of a set of manifests, at most one of each kind.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Objects {
    pub(crate) service_account: Option<ServiceAccount>,
    pub(crate) cluster_role: Option<ClusterRole>,
    pub(crate) cluster_role_binding: Option<ClusterRoleBinding>,
    pub(crate) config_map: Option<ConfigMap>,
    pub(crate) daemon_set: Option<DaemonSet>,
    pub(crate) pod_monitor: Option<PodMonitor>,
    pub(crate) custom_resource: Option<CustomResourceDefinition>,
}

impl Objects {
    pub(crate) fn read(text: &str) -> Result<Self> {
        let documents: Vec<Value> = serde_saphyr::from_multiple(text).context("read YAML")?;
        let mut objects = Self::default();
        for document in documents.iter().filter(|document| !document.is_null()) {
            let kind = document["kind"].as_str().unwrap_or_default();
            let read = match kind {
                "ServiceAccount" => put(&mut objects.service_account, document),
                "ClusterRole" => put(&mut objects.cluster_role, document),
                "ClusterRoleBinding" => put(&mut objects.cluster_role_binding, document),
                "ConfigMap" => put(&mut objects.config_map, document),
                "DaemonSet" => put(&mut objects.daemon_set, document),
                "PodMonitor" => put(&mut objects.pod_monitor, document),
                "CustomResourceDefinition" => put(&mut objects.custom_resource, document),
                _ => bail!("an object of the kind {kind:?}"),
            };
            read.with_context(|| format!("the {kind}"))?;
        }
        Ok(objects)
    }
}

fn put<T: DeserializeOwned>(place: &mut Option<T>, document: &Value) -> Result<()> {
    ensure!(place.is_none(), "there are two");
    let mut unknown = Vec::new();
    let object = serde_ignored::deserialize(document, |path| unknown.push(path.to_string()))?;
    ensure!(unknown.is_empty(), "the API knows no fields {unknown:?}");
    *place = Some(object);
    Ok(())
}

/// The part of the Prometheus operator's API that kpx uses.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PodMonitor {
    api_version: String,
    kind: String,
    pub(crate) metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
    pub(crate) spec: PodMonitorSpec,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PodMonitorSpec {
    pub(crate) selector: Selector,
    pub(crate) pod_metrics_endpoints: Vec<PodMetricsEndpoint>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Selector {
    pub(crate) match_labels: BTreeMap<String, String>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PodMetricsEndpoint {
    pub(crate) port: String,
    interval: Option<String>,
    relabelings: Vec<Relabeling>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Relabeling {
    source_labels: Vec<String>,
    target_label: String,
}
