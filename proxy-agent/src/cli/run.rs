//! `kpx run`: reads the configuration, and executes the requested action.

use std::fs;
use std::io::{Write as _, stdout};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use caps::Capability;
use nix::unistd::geteuid;
use tracing::warn;

use super::cleanup::{CleanupArgs, cleanup};
use super::runtime::wait_for;
use crate::config::{Configuration, RunArgs, logging};
use crate::privileges::{confine, demand};
use crate::run::{prepare, run};
use crate::settings::Settings;
use crate::{conntrack, control};
use proxy_datapath::object;
use proxy_net::changes::Changes;
use proxy_source::events::Events;

/// Serves this node until stopped, or executes another action of `args`. The process must be
/// single-threaded.
pub(super) fn start(args: &RunArgs) -> Result<()> {
    let RunArgs(given) = args;
    if given.is_set("version") {
        let line = concat!("kpx ", env!("CARGO_PKG_VERSION"), "\n");
        return stdout()
            .write_all(line.as_bytes())
            .context("write to standard output");
    }
    let configuration = Configuration::load(args)?;
    let settings = configuration.settings()?;
    if let Some(path) = given.path("write-config-to") {
        return configuration.write_to(&path);
    }
    logging::start(&configuration.kube_proxy.logging);
    configuration.log(&settings);
    if given.is_set("cleanup") {
        wait_for(cleanup(&CleanupArgs::as_kube_proxy(&settings)))?;
        return control::unlisten(&settings.run_dir);
    }
    adjust_oom_score(settings.oom_score_adj);
    if given.is_set("init-only") {
        std::fs::create_dir_all(&settings.run_dir)
            .with_context(|| format!("create {}", settings.run_dir.display()))?;
        let changes = Changes::new(&settings.run_dir);
        conntrack::sysctl::apply(
            &settings.conntrack,
            &changes,
            &Events::new(&settings.node_name).0,
        );
        return Ok(());
    }
    let object = object::chosen(given.path("bpf-object").as_deref())?;
    demand()?;
    // Everything that needs more capabilities than serving happens in `prepare`.
    let prepared = prepare(&settings, &object)?;
    confine(&further_capabilities(&settings))?;
    wait_for(run(settings, &object, prepared))
}

/// Returns the additional capabilities that serving needs with these settings.
fn further_capabilities(settings: &Settings) -> Vec<Capability> {
    let mut capabilities = Vec::new();
    if settings.bpf_stats {
        capabilities.push(Capability::CAP_SYS_ADMIN);
    }
    let names = settings.names.as_ref().map(|names| names.address);
    let addresses = [settings.healthz_address, settings.metrics_address, names];
    let ports = addresses
        .into_iter()
        .flatten()
        .map(|address| address.port());
    if ports.into_iter().any(|port| port < FIRST_UNPRIVILEGED_PORT) {
        capabilities.push(Capability::CAP_NET_BIND_SERVICE);
    }
    let own = geteuid().as_raw();
    let of_others = |path: &Path| {
        fs::metadata(path)
            .ok()
            .filter(|metadata| metadata.uid() != own)
    };
    // A home directory without `x` for others hides the files below it, even files of other users.
    let is_closed =
        |folder: &Path| of_others(folder).is_some_and(|metadata| metadata.mode() & 0o001 == 0);
    let takes_more = |path: &PathBuf| {
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        let mut folders = path
            .ancestors()
            .chain(target.ancestors())
            .filter(|folder| **folder != *path);
        of_others(path).is_some() || folders.any(is_closed)
    };
    // The configuration files are read again to detect changes.
    if settings
        .source
        .paths()
        .iter()
        .chain(settings.files.paths())
        .any(takes_more)
    {
        capabilities.push(Capability::CAP_DAC_READ_SEARCH); // Under `sudo`, the kubeconfig may belong to the user who called it.
    }
    capabilities
}

/// The kernel's default of `net.ipv4.ip_unprivileged_port_start`.
const FIRST_UNPRIVILEGED_PORT: u16 = 1024;

/// Sets the OOM score. Only logs a failure: the agent serves without it.
fn adjust_oom_score(score: Option<i32>) {
    const FILE: &str = "/proc/self/oom_score_adj";
    let Some(score) = score else { return };
    if let Err(error) = fs::write(FILE, score.to_string()) {
        warn!(%error, score, file = FILE, "oom score not adjusted: to lower it takes CAP_SYS_RESOURCE");
    }
}
