//! `kpx run`: reads the configuration, and does what the command line asks for.

use std::io::{Write as _, stdout};

use anyhow::{Context, Result};
use tracing::{info, warn};

use super::{Configuration, RunArgs, logging};
use crate::cli::{CleanupArgs, cleanup};
use crate::control;
use crate::run::run;
use crate::settings::Settings;

/// Serves this node until stopped, or does what else `args` ask for.
pub async fn start(args: &RunArgs) -> Result<()> {
    let RunArgs(given) = args;
    if given.is_set("version") {
        let line = concat!("kpx ", env!("CARGO_PKG_VERSION"), "\n");
        return stdout().write_all(line.as_bytes()).context("write to standard output");
    }
    let configuration = Configuration::load(args)?;
    let settings = configuration.settings()?;
    if let Some(path) = given.path("write-config-to") {
        return configuration.write_to(&path);
    }
    logging::start(&configuration.kube_proxy.logging);
    configuration.log(&settings);
    if given.is_set("cleanup") {
        cleanup(&CleanupArgs::AS_KUBE_PROXY).await?;
        return control::unlisten(&settings.run_dir);
    }
    adjust_oom_score(settings.oom_score_adj);
    if given.is_set("init-only") {
        return Ok(());
    }
    run(settings).await
}

/// It is no reason not to serve.
fn adjust_oom_score(score: Option<i32>) {
    const FILE: &str = "/proc/self/oom_score_adj";
    let Some(score) = score else { return };
    if let Err(error) = std::fs::write(FILE, score.to_string()) {
        warn!(%error, score, file = FILE, "oom score not adjusted");
    }
}

impl Configuration {
    /// What is in force, and what was not taken as it stands.
    fn log(&self, settings: &Settings) {
        let (remarks, common) = (&self.remarks, self.checked.common);
        if !remarks.doubtful_fields.is_empty() {
            warn!(
                fields = remarks.doubtful_fields.join(", "),
                "fields of the configuration are unknown, or given twice"
            );
        }
        if !remarks.ignored_flags.is_empty() {
            info!(flags = remarks.ignored_flags.join(", "), "flags of kube-proxy that mean nothing to kpx are ignored");
        }
        if !remarks.overruled_flags.is_empty() {
            warn!(flags = remarks.overruled_flags.join(", "), "flags are ignored, as the file of --config says it all");
        }
        if !remarks.unknown_feature_gates.is_empty() {
            warn!(gates = remarks.unknown_feature_gates.join(", "), "unknown feature gates");
        }
        info!(
            from = self.files.names(),
            mode = %settings.mode,
            proxy_mode = self.kube_proxy.mode,
            masquerade = %settings.node.masquerade,
            masquerade_all = settings.node.masquerade_all,
            local_pods = %settings.node.detector,
            node_ports = %settings.node.node_ports,
            min_sync_period = %common.min_sync_period,
            "configuration"
        );
    }
}
