//! Resolves flags and files to [`Settings`].
//!
//! Flags and files set the fields of a [`KubeProxyConfiguration`] and of a [`KpxConfiguration`].
//! All values are merged into a tree of fields, then decoded and checked.

mod checked_run;
pub(crate) mod choice;
mod configz;
pub(crate) mod duration;
mod file_config;
mod flags;
mod gates;
mod invalid;
mod ipvs;
mod kpx;
mod kube_proxy;
mod kube_version;
pub(crate) mod logging;
pub(crate) mod node_ports;
mod traced;
mod tree;
mod validate;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::files::Files;
use crate::settings::{Settings, Tunnel};
use duration::GoDuration;
use file_config::FileConfig;
use flags::FlagValues;
use gates::Gates;
use invalid::{Fields, Invalid, InvalidConfiguration};
use proxy_datapath::Sizes;
use proxy_source::{Source, kubernetes};
use proxy_view::object_name::canonical_node_name;
use validate::{Checked, check};

pub use flags::{CheckFlags, NodeArgs, RunArgs, arguments};
pub use kpx::KpxConfiguration;
pub use kube_proxy::KubeProxyConfiguration;

/// kube-proxy's mode whose fields have another meaning in kpx.
const IPVS: &str = "ipvs";

/// The configuration in use, including defaults.
#[derive(Debug)]
pub struct Configuration {
    pub kube_proxy: KubeProxyConfiguration,
    pub kpx: KpxConfiguration,
    checked: Checked,
    files: Files,
    remarks: Remarks,
}

/// The warnings about a configuration.
#[derive(Debug, Default, PartialEq, Eq)]
struct Remarks {
    doubtful_fields: Vec<String>,
    ignored_flags: Vec<&'static str>,
    /// The flags that a `--config` file overrides.
    overruled_flags: Vec<&'static str>,
    unknown_feature_gates: Vec<String>,
    /// The configured fields without effect, with the reasons.
    fields_without_effect: Vec<(&'static str, &'static str)>,
    /// True if kube-proxy's file sets no mode: the default will change.
    awaits_mode: bool,
}

impl Configuration {
    pub fn load(args: &RunArgs) -> Result<Self> {
        Self::load_values(&args.0)
    }

    fn load_values(given: &FlagValues) -> Result<Self> {
        let mut from_files = FileConfig::default();
        let mut files = Files::default();
        let config = given.path("config");
        if let Some(path) = &config {
            from_files.read(path, files.read(path)?)?;
            let kind = KubeProxyConfiguration::KIND;
            ensure!(
                from_files.kube_proxy.is_some(),
                "{}: has no {kind}: --kpx-config takes files without",
                path.display()
            );
        }
        if let Some(path) = given.path("kpx-config") {
            let has_kube_proxy = from_files.kube_proxy.is_some();
            from_files.read(&path, files.read(&path)?)?;
            let kind = KubeProxyConfiguration::KIND;
            ensure!(
                has_kube_proxy == from_files.kube_proxy.is_some(),
                "{}: a {kind} belongs to --config",
                path.display()
            );
        }
        let mut configuration = Self::resolve(given, from_files, config.is_some())?;
        configuration.files = files;
        Ok(configuration)
    }

    /// Parses a `--config` file without flags.
    pub fn parse(text: &str) -> Result<Self> {
        let mut from_files = FileConfig::default();
        from_files.read(Path::new("text"), text)?;
        Self::resolve(&FlagValues::default(), from_files, true)
    }

    fn resolve(given: &FlagValues, from_files: FileConfig, has_file: bool) -> Result<Self> {
        let nothing = || Value::Object(Map::new());
        let mut kube_proxy = from_files.kube_proxy.unwrap_or_else(nothing);
        let mut kpx = from_files.kpx.unwrap_or_else(nothing);
        given.apply(&mut kube_proxy, &mut kpx, has_file);
        if kpx["mode"] == "host" {
            kube_proxy = tree::merge(host_mode_defaults(), kube_proxy);
            // In host mode nobody drains the host, and no next agent takes over at once.
            kpx = tree::merge(json!({ "cleanupOnExit": true }), kpx);
        }
        let chooses_algorithm = kpx.get("lbAlgorithm").is_some();
        kpx = tree::merge(ipvs::defaults(&kube_proxy), kpx);
        let mut own = Fields::of(KpxConfiguration::KIND);
        own.take_unknown_choices(&mut kpx);
        let kpx: KpxConfiguration = decode(kpx, KpxConfiguration::KIND, given)?;
        let mut kube_proxy: KubeProxyConfiguration =
            decode(kube_proxy, KubeProxyConfiguration::KIND, given)?;
        kube_proxy.complete(kpx.version());
        let mut checked = check(&kube_proxy, &kpx, own).map_err(|invalid| {
            let with_flag = |invalid: Invalid| {
                let flag = given.flag_of(invalid.kind, &invalid.field, has_file);
                Invalid { flag, ..invalid }
            };
            InvalidConfiguration(invalid.into_iter().map(with_flag).collect())
        })?;
        if kube_proxy.mode == IPVS && !chooses_algorithm {
            checked.node.notices.extend(ipvs::notice(&kube_proxy.ipvs));
        }
        let gates = Gates {
            set: &kube_proxy.feature_gates,
            version: kpx.version(),
        };
        let remarks = Remarks::new(given, from_files.doubtful, gates, &kube_proxy, has_file);
        Ok(Self {
            kube_proxy,
            kpx,
            checked,
            files: Files::default(),
            remarks,
        })
    }

    pub fn settings(&self) -> Result<Settings> {
        let Self {
            kube_proxy,
            kpx,
            checked,
            ..
        } = self;
        let period = |duration: GoDuration| duration.std().unwrap_or(Duration::ZERO);
        let size = |entries: u32| (entries > 0).then_some(entries);
        Ok(Settings {
            node_name: self.node_name()?,
            mode: kpx.mode,
            source: self
                .source(kpx.local_redirect || checked.sockets.is_some_and(|sockets| sockets.pods)),
            node: checked.node.clone(),
            model: checked.model.clone(),
            attach: kpx.attach,
            run_dir: PathBuf::from(&kpx.run_dir),
            bpf_dir: PathBuf::from(&kpx.bpf_dir),
            cleanup_on_exit: kpx.cleanup_on_exit,
            healthz_address: checked.healthz_address,
            metrics_address: checked.metrics_address,
            bind_address_hard_fail: kube_proxy.bind_address_hard_fail,
            ui: kpx.ui,
            service_metrics: kpx.service_metrics as usize,
            monitor_history: kpx.monitor_history as usize,
            bpf_stats: kpx.bpf_stats,
            socket_group: checked.socket_group,
            sync_period: period(checked.common.sync_period),
            min_sync_period: period(checked.common.min_sync_period),
            conntrack: checked.conntrack.clone(),
            node_timeout: period(kpx.node_timeout),
            oom_score_adj: Some(kube_proxy.oom_score_adj),
            configz: configz::configz(kube_proxy, kpx),
            sizes: Sizes {
                flows: size(kpx.flow_table_size),
                services: size(kpx.service_table_size),
                endpoints: size(kpx.endpoint_table_size),
                memory: None,
            },
            sockets: checked.sockets,
            names: checked.names.clone(),
            ipvs_excluded: ipvs::excluded(kube_proxy),
            tunnel: self.tunnel(),
            cgroup_root: (!kpx.cgroup_root.is_empty()).then(|| PathBuf::from(&kpx.cgroup_root)),
            files: self.files.clone(),
        })
    }

    fn node_name(&self) -> Result<String> {
        let name = match self.kube_proxy.hostname_override.as_str() {
            "" => nix::unistd::gethostname()
                .context("read the host name")?
                .to_string_lossy()
                .into_owned(),
            name => name.to_owned(),
        };
        let name = canonical_node_name(&name);
        if name.is_empty() {
            bail!("the node's name is empty: set --hostname-override");
        }
        Ok(name)
    }

    /// Returns the source of objects; `pods` requests the node's Pods.
    fn source(&self, pods: bool) -> Source {
        let given = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let connection = &self.kube_proxy.client_connection;
        match given(&self.kpx.manifests) {
            Some(folder) => Source::Manifests(folder.into()),
            None => Source::Kubernetes(kubernetes::Options {
                kubeconfig: given(&connection.kubeconfig).map(PathBuf::from),
                context: given(&self.kpx.context),
                master: given(&self.kpx.master),
                rate: kubernetes::Rate::new(connection.qps, connection.burst),
                pods,
                redirects: self.kpx.local_redirect,
                headless: self.checked.names.is_some(),
            }),
        }
    }

    /// Returns the API server for connections to pods, if the tunnel is enabled.
    fn tunnel(&self) -> Option<kubernetes::Options> {
        match self.source(false) {
            Source::Kubernetes(options) if self.kpx.tunnel == Tunnel::Tcp => Some(options),
            Source::Kubernetes(_) | Source::Manifests(_) => None,
        }
    }

    /// Writes both documents as a `--config` file. Omits kpx's document if all its fields are
    /// defaults, except in mode ipvs, where the defaults depend on kube-proxy's document.
    pub fn to_yaml(&self) -> Result<String> {
        let mut text = serde_saphyr::to_string(&self.kube_proxy)
            .context("write the KubeProxyConfiguration")?;
        if self.kpx != KpxConfiguration::default() || self.kube_proxy.mode == IPVS {
            text.push_str("---\n");
            text.push_str(
                &serde_saphyr::to_string(&self.kpx).context("write the KpxConfiguration")?,
            );
        }
        Ok(text)
    }

    pub(crate) fn write_to(&self, path: &Path) -> Result<()> {
        std::fs::write(path, self.to_yaml()?).with_context(|| format!("write {}", path.display()))
    }
}

/// Decodes a document. Files were already decoded, so an error here comes from a flag.
fn decode<T: DeserializeOwned>(value: Value, kind: &'static str, given: &FlagValues) -> Result<T> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let field = error.path().to_string();
        let flag = given
            .flag_of(kind, &field, false)
            .map(|flag| format!(" (--{flag})"))
            .unwrap_or_default();
        anyhow::anyhow!("{kind}.{field}{flag}: {}", error.into_inner())
    })
}

/// Returns the defaults of host mode. The host keeps its conntrack settings, and nobody reads its
/// health or metrics.
fn host_mode_defaults() -> Value {
    json!({
        "healthzBindAddress": "0.0.0.0:0",
        "metricsBindAddress": "127.0.0.1:0",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    })
}

impl Remarks {
    fn new(
        given: &FlagValues,
        doubtful_fields: Vec<String>,
        gates: Gates<'_>,
        kube_proxy: &KubeProxyConfiguration,
        has_file: bool,
    ) -> Self {
        let flags = || given.flags().map(|(flag, _)| flag);
        Self {
            doubtful_fields,
            ignored_flags: flags()
                .filter(|flag| !flag.is_obeyed)
                .map(|flag| flag.name)
                .collect(),
            overruled_flags: flags()
                .filter(|flag| flag.is_obeyed && has_file && flag.effect.is_overruled_by_file())
                .map(|flag| flag.name)
                .collect(),
            unknown_feature_gates: gates.unknown(),
            fields_without_effect: match kube_proxy.mode.as_str() {
                IPVS => ipvs::without_effect(&kube_proxy.ipvs).collect(),
                _ => Vec::new(),
            },
            awaits_mode: has_file && !kube_proxy.mode_is_given && kube_proxy.mode.is_empty(),
        }
    }
}
