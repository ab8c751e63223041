//! kpx: reaches Kubernetes Services by eBPF, in place of kube-proxy.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use proxy_agent::cli::Cli;
use proxy_agent::config::arguments;

fn main() -> ExitCode {
    Cli::read(arguments(std::env::args_os())).execute()
}
