//! `cargo xtask cluster`: a Kubernetes cluster of genuine parts on one machine. Kubernetes, etcd,
//! containerd, runc, the CNI plugins and CoreDNS are built from their published Go modules.

mod addons;
mod clients;
mod command;
mod control_plane;
mod dns;
mod e2e;
mod faults;
mod images;
mod init;
mod load;
mod matrix;
mod migration;
mod network;
mod nodes;
mod outcomes;
mod parts;
mod reboot;
mod release;
mod state;
mod test;
mod tools;
mod up;
mod web;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask cluster",
    bin_name = "cargo xtask cluster",
    about = "A Kubernetes cluster of genuine parts on this machine"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the genuine parts from their Go modules; `up` does so by itself
    Parts {
        /// The minor version of Kubernetes
        #[arg(long, default_value = parts::DEFAULT_KUBERNETES)]
        kubernetes: String,
    },
    /// Start the cluster
    Up(up::Options),
    /// Stop the cluster and remove everything it made
    Down,
    /// Print the path of the administrator's kubeconfig, which works on this machine
    Kubeconfig,
    /// Run kubectl, of the cluster's version, as the administrator
    Kubectl {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Run a command in the network of the control plane, a node (`n1`) or the client outside (`x`)
    Exec {
        /// `control`, `n1`, `n2`, … or `x`
        host: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
    /// Start a cluster, run all tests that fit its proxy, and stop it; a test that this commit has run
    /// keeps its result
    Test(test::Options),
    /// Run Kubernetes' own network tests against the cluster, and compare the outcomes with those of
    /// other proxies
    E2e(e2e::Options),
    /// Migrate from kube-proxy to kpx and back under load, and count what clients lose
    Migration(migration::Options),
    /// Ask each kind of Service from each kind of client, and compare the answers with those of other
    /// proxies
    Matrix(matrix::Options),
    /// Ask CoreDNS through its ClusterIP while its pods come and go, and count lost answers
    Dns(dns::Options),
    /// Run the commands of `kubectl kpx` from the client outside, and `kpx check` on each node
    Tools,
    /// End a node and start it again, while clients elsewhere use a Service
    Reboot(reboot::Options),
    /// Kill the API server and etcd, restore an older snapshot, and replace the authority of the API
    /// server's certificate, while clients use a Service
    Faults(faults::Options),
    /// Use a Service from all clients, and count failures
    Load(web::Options),
    /// Install a release from a registry in the place of kube-proxy, as its documentation says; with
    /// --from, begin with an earlier release, upgrade it, and go back
    Release(release::Options),
    /// The first process of a process namespace: sets it up, and keeps its programs running
    #[command(hide = true)]
    Init { plan: PathBuf },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Parts { kubernetes } => {
            let parts = parts::build(&kubernetes)?;
            println!("{}", parts.dir().display());
        }
        Command::Up(options) => up::up(&options)?,
        Command::Down => up::down()?,
        Command::Kubeconfig => println!("{}", state::State::running()?.admin().display()),
        Command::Kubectl { args } => return state::State::running()?.kubectl_of_user(&args),
        Command::Exec { host, command } => {
            return state::State::running()?.exec_of_user(&host, &command);
        }
        Command::Test(options) => return test::run(&options),
        Command::E2e(options) => return e2e::run(&options),
        Command::Migration(options) => return migration::run(&options),
        Command::Matrix(options) => return matrix::run(&options),
        Command::Dns(options) => return dns::run(&options),
        Command::Tools => return tools::run(),
        Command::Reboot(options) => return reboot::run(&options),
        Command::Faults(options) => return faults::run(&options),
        Command::Load(options) => return web::run(&options),
        Command::Release(options) => return release::run(&options),
        Command::Init { plan } => init::run(&plan)?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
