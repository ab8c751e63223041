//! Sets up the log: its level and its format.

use std::io::stderr;

use proxy_core::model::algorithm_name;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::Configuration;
use super::kube_proxy::Logging;
use crate::config::gates::Gates;
use crate::settings::{Mode, Settings};
use proxy_view::output::has_colours;

/// Starts logging to standard error. RUST_LOG overrides the configuration.
pub(crate) fn start(logging: &Logging) {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new(filter(logging.verbosity)));
    let subscriber = tracing_subscriber::registry().with(filter);
    // Module names help only readers of debug lines.
    let has_modules = logging.verbosity >= 4 || std::env::var_os("RUST_LOG").is_some();
    let form = tracing_subscriber::fmt::layer().with_writer(stderr);
    // An earlier logger of this process stays in use.
    let _started = match logging.format.as_str() {
        "json" => subscriber.with(form.json()).try_init(),
        _ => subscriber
            .with(
                form.with_target(has_modules)
                    .with_ansi(has_colours(&stderr())),
            )
            .try_init(),
    };
}

impl Configuration {
    /// Logs the configuration in use, and its warnings.
    #[expect(
        clippy::cognitive_complexity,
        reason = "a list of lines, each with its condition; the lint counts what the log's macros expand to"
    )]
    pub(crate) fn log(&self, settings: &Settings) {
        let remarks = &self.remarks;
        let common = self.checked.common;
        if !remarks.doubtful_fields.is_empty() {
            warn!(
                fields = remarks.doubtful_fields.join(", "),
                "fields of the configuration are unknown, or given twice"
            );
        }
        if !remarks.ignored_flags.is_empty() {
            info!(
                flags = remarks.ignored_flags.join(", "),
                "flags of kube-proxy without effect in kpx are ignored"
            );
        }
        if !remarks.overruled_flags.is_empty() {
            warn!(
                flags = remarks.overruled_flags.join(", "),
                "flags are ignored, because the file of --config overrides them"
            );
        }
        if !remarks.unknown_feature_gates.is_empty() {
            warn!(
                gates = remarks.unknown_feature_gates.join(", "),
                "unknown feature gates"
            );
        }
        let gates = Gates {
            set: &self.kube_proxy.feature_gates,
            version: self.kpx.version(),
        };
        if self.kube_proxy.mode == "ipvs" && !gates.ipvs() {
            warn!(
                "kube-proxy would not start in mode ipvs, because the feature gate KubeProxyIPVS is off; kpx does"
            );
        }
        if settings.model.ignores_external_ips {
            info!(
                "Services' ExternalIPs are not served, because the feature gate AllowServiceExternalIPs is off"
            );
        }
        for (field, why) in &remarks.fields_without_effect {
            info!(field, why, "a field of kube-proxy is without effect in kpx");
        }
        for notice in &settings.node.notices {
            warn!(notice, "approximating kube-proxy's configuration");
        }
        info!(
            from = self.files.names(),
            mode = %settings.mode,
            proxy_mode = self.kube_proxy.mode,
            masquerade = %settings.node.masquerade,
            masquerade_all = settings.node.masquerade_all,
            local_pods = %settings.node.detector,
            node_ports = %settings.node.node_ports,
            algorithm = algorithm_name(settings.model.algorithm),
            min_sync_period = %common.min_sync_period,
            "configuration"
        );
        if remarks.awaits_mode && settings.mode == Mode::Node {
            info!(
                "kube-proxy's file has no mode, whose default changes to nftables in Kubernetes 1.40: set one"
            );
        }
    }
}

/// Returns the log filter for a verbosity. Omits kube's own log lines: kube logs each failure, and
/// kpx logs a lasting failure once, as a problem.
pub(super) fn filter(verbosity: u32) -> &'static str {
    match verbosity {
        0..=1 => "info,kube_client=off,kube_runtime=error",
        2..=3 => "info,proxy_source=debug,kube_client=off,kube_runtime=error",
        4..=5 => {
            "info,proxy_agent=debug,proxy_datapath=debug,proxy_net=debug,proxy_source=debug,kpx=debug,kube_client=warn,kube_runtime=warn"
        }
        _ => {
            "debug,proxy_agent=trace,proxy_datapath=trace,proxy_net=trace,proxy_source=trace,kpx=trace"
        }
    }
}
