//! Sets up the log: its level and its form.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::kube_proxy::Logging;

/// Starts logging to standard error. RUST_LOG overrides the configuration.
pub(super) fn start(logging: &Logging) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(filter(logging.verbosity)));
    let subscriber = tracing_subscriber::registry().with(filter);
    let form = tracing_subscriber::fmt::layer().with_writer(stderr);
    // An earlier logger of this process stays in use.
    let _started = match logging.format.as_str() {
        "json" => subscriber.with(form.json()).try_init(),
        _ => subscriber.with(form.with_ansi(stderr().is_terminal())).try_init(),
    };
}

/// Returns the filter. kube's own log lines are left out, because kube logs each failure, and kpx logs a lasting
/// failure once as a problem.
pub(super) fn filter(verbosity: u32) -> &'static str {
    match verbosity {
        0..=1 => "info,kube_client=off,kube_runtime=error",
        2..=3 => "info,proxy_agent::source=debug,kube_client=off,kube_runtime=error",
        4..=5 => "info,proxy_agent=debug,kpx=debug,kube_client=warn,kube_runtime=warn",
        _ => "debug,proxy_agent=trace,kpx=trace",
    }
}
