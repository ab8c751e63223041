//! Completes the command line with the running agent's names: namespaces, Services, pods, nodes,
//! devices.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Command;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};

use super::runtime::wait_for;
use proxy_view::client::Client;
use proxy_view::object_name::full_name;
use proxy_view::{RUN_DIR, ServiceView};

/// The environment variable with which the script of `kpx completions` requests candidates.
pub(super) const ASKS: &str = "KPX_COMPLETE";

/// The time limit for the agent. After it the shell completes nothing, silently.
const PATIENCE: Duration = Duration::from_secs(1);

/// The arguments with values from the agent, of all commands.
const KNOWN: [(&str, Names); 6] = [
    ("namespace", namespaces),
    ("service_namespace", namespaces),
    ("service", services),
    ("from", ends),
    ("to", ends),
    ("in_device", devices),
];

/// Queries the agent for names.
type Names = fn(&Client) -> BTreeSet<String>;

/// Adds completers to a command and its subcommands. The `--namespace` of `kpx cluster` itself is
/// the namespace of kpx's pods, so it gets no completer.
pub(super) fn with_names(command: Command) -> Command {
    let is_of_cluster = command.get_name() == "cluster";
    let mut command = command;
    for (argument, names) in KNOWN {
        let has = command.get_arguments().any(|one| one.get_id() == argument);
        if has && !is_of_cluster {
            let completer =
                ArgValueCompleter::new(move |current: &OsStr| candidates(current, names));
            command = command.mut_arg(argument, |one| one.add(completer));
        }
    }
    command.mut_subcommands(with_names)
}

fn candidates(current: &OsStr, names: Names) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else {
        return Vec::new();
    };
    let client = Client::new(&run_dir(std::env::args().skip(1)));
    let begin = |name: &String| name.starts_with(current);
    names(&client)
        .into_iter()
        .filter(begin)
        .map(CompletionCandidate::new)
        .collect()
}

fn run_dir(mut words: impl Iterator<Item = String>) -> PathBuf {
    while let Some(word) = words.next() {
        let value = match word.split_once('=') {
            Some(("--run-dir", value)) => Some(value.to_owned()),
            None if word == "--run-dir" => words.next(),
            _ => None,
        };
        if let Some(dir) = value.filter(|dir| !dir.is_empty()) {
            return dir.into();
        }
    }
    RUN_DIR.into()
}

fn all(client: &Client) -> Vec<ServiceView> {
    let answer = wait_for(async { Ok(tokio::time::timeout(PATIENCE, client.services()).await) });
    answer
        .ok()
        .and_then(|answer| answer.ok()?.ok())
        .unwrap_or_default()
}

fn namespaces(client: &Client) -> BTreeSet<String> {
    all(client)
        .into_iter()
        .map(|service| service.namespace)
        .collect()
}

fn services(client: &Client) -> BTreeSet<String> {
    all(client).iter().map(full_name).collect()
}

/// Returns the possible endpoints of a trace: Services, their pods, and the nodes of these pods.
fn ends(client: &Client) -> BTreeSet<String> {
    let services = all(client);
    let backends = || {
        services
            .iter()
            .flat_map(|service| &service.ports)
            .flat_map(|port| &port.backends)
    };
    let pods = backends().filter_map(|backend| Some(format!("pod/{}", backend.pod.as_ref()?)));
    let nodes = backends().filter_map(|backend| Some(format!("node/{}", backend.node.as_ref()?)));
    services
        .iter()
        .map(|service| format!("svc/{}", full_name(service)))
        .chain(pods)
        .chain(nodes)
        .collect()
}

fn devices(client: &Client) -> BTreeSet<String> {
    let answer = wait_for(async { Ok(tokio::time::timeout(PATIENCE, client.status()).await) });
    let status = answer.ok().and_then(|answer| answer.ok()?.ok());
    status
        .into_iter()
        .flat_map(|status| status.devices)
        .map(|device| device.name)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completed_line_names_its_run_directory() {
        let of = |line: &str| run_dir(line.split(' ').map(str::to_owned));
        assert_eq!(of("-- kpx services -n"), PathBuf::from(RUN_DIR));
        assert_eq!(
            of("-- kpx services --run-dir /run/other -n"),
            PathBuf::from("/run/other")
        );
        assert_eq!(
            of("-- kpx --run-dir=/run/other services"),
            PathBuf::from("/run/other")
        );
        assert_eq!(of("-- kpx services --run-dir"), PathBuf::from(RUN_DIR));
    }
}
