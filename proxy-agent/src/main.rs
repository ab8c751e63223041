//! kpx: a kube-proxy replacement in eBPF.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use proxy_agent::cli::Cli;
use proxy_agent::config::arguments;

fn main() -> ExitCode {
    Cli::read(arguments(std::env::args_os())).execute()
}
