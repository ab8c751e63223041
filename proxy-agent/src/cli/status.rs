//! `kpx status`: the state of the agent on one screen.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use comfy_table::Cell;

use super::agent_args::AgentArgs;
use super::devices;
use proxy_check::{ORPHANED, is_orphaned};
use proxy_metrics::{MapFill, old_map_name};
use proxy_view::Mode;
use proxy_view::age;
use proxy_view::counts::packets;
use proxy_view::output::{Form, OutputArgs, cell, green, list, red, yellow};
use proxy_view::reach::{api_server, out_of_reach};
use proxy_view::status::{
    NamesStatus, OptionsStatus, PodsStatus, SilentStatus, Status, TunnelFailure, TunnelStatus,
    UnheardStatus,
};

/// Show the agent's health, problems and packet counts. Exits with 1 if the agent is unhealthy or
/// does not answer.
///
/// An agent that lost its API server stays healthy, and the first line shows since when: Services
/// keep their last known state.
///
/// Shows dropped and rejected packets; --output wide adds passed packets, pods, devices, programs
/// and maps.
#[derive(Args, Debug)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(super) async fn status(args: &StatusArgs) -> Result<ExitCode> {
    let status = match args.agent.client().status().await {
        Err(error) if is_orphaned().await.unwrap_or(false) => {
            bail!(
                "{ORPHANED}. Start kpx, or wait if it restarts; kpx cleanup removes it for good ({error:#})"
            )
        }
        status => status?,
    };
    args.output.print(&status, |form| text(&status, form))?;
    Ok(if status.healthy {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn text(status: &Status, form: Form) -> String {
    let sections = [
        (None, head(status, form)),
        (Some("PROBLEMS"), problems(status, form)),
        (
            None,
            out_of_reach(
                &status.cut_off,
                &status.cut_off_ports,
                &status.unreachable,
                form,
            ),
        ),
        (
            Some("TO REACH THEM"),
            proxy_trace::steps_to_reach(status)
                .into_iter()
                .fold(String::new(), |text, step| text + &step + "\n"),
        ),
        (None, families(status, form)),
        (None, maps(status, form)),
        (
            None,
            packets(&status.events, &status.reasons, proxy_trace::meaning, form),
        ),
        (
            None,
            if form.wide {
                pods(status, form)
            } else {
                String::new()
            },
        ),
        (
            None,
            if form.wide {
                devices::text(&status.devices, form)
            } else {
                String::new()
            },
        ),
        (
            None,
            if form.wide {
                programs(status, form)
            } else {
                String::new()
            },
        ),
    ];
    let sections = sections.into_iter().filter(|(_, text)| !text.is_empty());
    let sections: Vec<_> = sections
        .map(|(heading, text)| heading.map_or(String::new(), |h| format!("{h}\n")) + &text)
        .collect();
    sections.join("\n")
}

/// Formats the agent's global state.
fn head(status: &Status, form: Form) -> String {
    let mut by_role = BTreeMap::<_, usize>::new();
    status
        .devices
        .iter()
        .for_each(|device| *by_role.entry(device.role.as_str()).or_default() += 1);
    let last_sync = status
        .last_sync
        .map(|last| format!("{} ago ({} in all)", age::since(last), status.syncs));
    let rows = [
        ("Health:", health(status)),
        (
            "Node:",
            cell(format!("{} ({} mode)", status.node_name, status.mode)),
        ),
        ("Addresses:", cell(list(&status.node_addresses))),
        (
            "Version:",
            cell(format!(
                "{}, up {}",
                status.version,
                age::since(status.started)
            )),
        ),
        ("Last sync:", cell(last_sync.unwrap_or_default())),
        (
            "Devices:",
            cell(
                by_role
                    .iter()
                    .map(|(role, n)| counted(*n, role))
                    .collect::<Vec<_>>()
                    .join(", "),
            ),
        ),
        // The options follow, one per row.
        ("Options:", Cell::new("")),
    ];
    let is_node = status.mode != Mode::Host.to_string();
    let options = options(status, is_node)
        .into_iter()
        .map(|(name, value)| (name, cell(value)));
    let restarts = is_node.then(|| {
        let (paint, text) = restarts(status);
        ("Restarts:", paint(text))
    });
    let server = status.api_server.as_ref().map(|url| {
        (
            "API server:",
            api_server(url, status.unheard.as_ref(), &status.problems),
        )
    });
    let silent =
        (!status.silent_backends.is_empty()).then(|| ("Silent:", silent(&status.silent_backends)));
    let rows = rows
        .into_iter()
        .chain(options)
        .chain(restarts)
        .chain(server)
        .chain(silent);
    let rows = rows.chain(
        status
            .names
            .as_ref()
            .map(|names| ("Names:", cell(served_names(names)))),
    );
    let rows = rows.chain(
        status
            .tunnel
            .as_ref()
            .map(|tunnel| ("Tunnel:", tunnelled(tunnel))),
    );
    let rows = rows.chain(status.pods.as_ref().map(|pods| ("Pods:", cell(ways(pods)))));
    let form = Form {
        headers: false,
        ..form
    };
    form.sentences(&[], rows.map(|(name, value)| vec![cell(name), value]))
}

/// Describes the node's health, and the changes that the agent misses.
fn health(status: &Status) -> Cell {
    let unheard = status.unheard.as_ref().filter(|_| status.complete).map(
        |UnheardStatus { since, kinds }| {
            let kinds = kinds
                .iter()
                .map(|kind| format!("{kind}s"))
                .collect::<Vec<_>>()
                .join(", ");
            let ago = age::since(*since);
            format!(
                "; no changes of {kinds} received for {ago}: the last known state stays programmed"
            )
        },
    );
    match (status.healthy, status.complete, unheard) {
        (true, _, None) => green("healthy"),
        (true, _, Some(unheard)) => yellow(format!("healthy{unheard}")),
        (false, true, unheard) => red(format!("unhealthy{}", unheard.unwrap_or_default())),
        (false, false, _) => yellow("waiting for the first lists"),
    }
}

/// Counts the unresponsive backends: `3 backends of 2 Services without an answer, 2 ejected`.
fn silent(backends: &[SilentStatus]) -> Cell {
    let services = backends
        .iter()
        .map(|backend| &backend.service)
        .collect::<BTreeSet<_>>()
        .len();
    let silent = backends.len();
    let ejected = backends
        .iter()
        .filter(|backend| backend.is_ejected || backend.is_aside)
        .count();
    let count = |number: usize, what: &str| {
        format!("{number} {what}{}", if number == 1 { "" } else { "s" })
    };
    yellow(format!(
        "{} of {} without an answer, {ejected} ejected (kpx backends --sort-by state)",
        count(silent, "backend"),
        count(services, "Service")
    ))
}

/// Counts devices of a role: `1 anchor`, `2 other devices`.
fn counted(number: usize, role: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    match role {
        "device" => format!("{number} other device{plural}"),
        "loopback" => format!("{number} loopback"),
        "gone" => format!("{number} that went away"),
        "unlisted" => format!("{number} of an earlier run, not listed yet"),
        role => format!("{number} {role}{plural}"),
    }
}

/// Describes the DNS server: `*.cluster.local at 127.0.0.153:53, used by systemd-resolved`.
fn served_names(names: &NamesStatus) -> String {
    let why = names
        .why_not
        .as_deref()
        .map(|why| format!("; {why}"))
        .unwrap_or_default();
    match names.address {
        Some(address) if names.asked_by_resolved => {
            format!(
                "*.{} at {address}, used by systemd-resolved{why}",
                names.domain
            )
        }
        Some(address) => format!("*.{} at {address}{why}", names.domain),
        None => format!("*.{} are not served{why}", names.domain),
    }
}

/// Describes the tunnel: `TCP through the API server: 2 streams open, 17 opened, 1 failed`.
fn tunnelled(tunnel: &TunnelStatus) -> Cell {
    let TunnelStatus {
        streams,
        opened,
        failed,
        ..
    } = tunnel;
    let text = format!(
        "TCP through the API server: {streams} streams open, {opened} opened, {failed} failed"
    );
    match &tunnel.failure {
        Some(TunnelFailure { service, why, at }) => {
            let service = service
                .as_deref()
                .map(|service| format!("{service}: "))
                .unwrap_or_default();
            yellow(format!("{text}; {} ago {service}{why}", age::since(*at)))
        }
        None => cell(text),
    }
}

/// Counts pods by how their packets are translated:
/// `3 by sockets, 1 on the host's network; by packets: 2 in a mesh`.
fn ways(pods: &PodsStatus) -> String {
    let count = |path: &str| {
        pods.pods
            .iter()
            .filter(|pod| pod.socket_path() == path)
            .count()
    };
    let mut groups = BTreeMap::<_, usize>::new();
    for pod in pods
        .pods
        .iter()
        .filter(|pod| pod.socket_path() == "packets")
    {
        *groups.entry(pod.group.as_str()).or_default() += 1;
    }
    let mut text = format!(
        "{} by sockets, {} on the host's network",
        count("sockets"),
        count("host")
    );
    if !groups.is_empty() {
        let groups: Vec<_> = groups
            .iter()
            .map(|(group, pods)| format!("{pods} {group}"))
            .collect();
        text += &format!("; by packets: {}", groups.join(", "));
    }
    match &pods.why_none {
        Some(why) if pods.pods.is_empty() => format!("translated by packets, because {why}"),
        Some(why) => format!("{text}; as before, because {why}"),
        None => text,
    }
}

/// Lists the pods with the path of their packets, and its reason.
fn pods(status: &Status, form: Form) -> String {
    let pods = status.pods.iter().flat_map(|pods| &pods.pods);
    let rows = pods.map(|pod| {
        vec![
            cell(format!("{}/{}", pod.namespace, pod.name)),
            cell(pod.socket_path()),
            cell(pod.why.as_deref().unwrap_or("")),
        ]
    });
    form.sentences(&["POD", "SOCKETS", "WHY"], rows)
}

/// Describes what happens to Services while no agent runs, with a colour.
fn restarts(status: &Status) -> (fn(&'static str) -> Cell, &'static str) {
    match status.kept_by.as_str() {
        "pins" => (
            cell,
            "no gap: the node's BPF file system keeps programs and maps",
        ),
        "unknown" => (
            yellow,
            "unknown: the BPF file system may belong to the node or to this container; mountPropagation: HostToContainer lets kpx distinguish them (docs/migration.md)",
        ),
        "filters" if status.sockets.is_some() => (
            yellow,
            "no gap for packets: filters keep programs and maps; socket load balancing ends with this container",
        ),
        "filters" => (
            cell,
            "no gap: filters keep programs and maps; this container has no BPF file system of the node",
        ),
        _ => (
            red,
            "a gap: all ends with this container; give it the node's /sys/fs/bpf (docs/migration.md)",
        ),
    }
}

/// Returns the options, restarts and pods as pairs of name and value, worded as in `kpx status`.
pub(crate) fn named_options(status: &Status) -> Vec<(&'static str, String)> {
    let is_node = status.mode != Mode::Host.to_string();
    let restarts = is_node.then(|| ("restarts", restarts(status).1.to_owned()));
    let pods = status.pods.as_ref().map(|pods| ("pods", ways(pods)));
    options(status, is_node)
        .into_iter()
        .map(|(name, value)| (name.trim().trim_end_matches(':'), value))
        .chain(restarts)
        .chain(pods)
        .collect()
}

/// Returns the options that apply in this mode, as rows below `Options:`.
fn options(status: &Status, is_node: bool) -> Vec<(&'static str, String)> {
    let OptionsStatus {
        masquerade,
        masquerade_all,
        local_pods,
        algorithm,
        fast_path,
        pod_routes,
        ..
    } = &status.options;
    let mut rows = Vec::new();
    if is_node {
        let all = if *masquerade_all {
            ", every client"
        } else {
            ""
        };
        let local_pods = if local_pods == "none" {
            "not detected"
        } else {
            local_pods
        };
        rows.extend([
            ("  masquerade:", format!("{masquerade}{all}")),
            ("  local pods:", local_pods.to_owned()),
            ("  node ports:", node_ports(&status.options)),
        ]);
        if !status.options.cluster_ip_external {
            rows.push(("  ClusterIPs:", "not for external clients".to_owned()));
        }
    }
    // Earlier versions of the agent leave the algorithm empty.
    if !matches!(algorithm.as_str(), "" | "random") {
        rows.push(("  algorithm:", algorithm.clone()));
    }
    if is_node {
        rows.push(("  fast path:", fast_path.clone()));
    } else {
        let tunnel = if status.tunnel.is_some() {
            "tcp"
        } else {
            "off"
        };
        rows.extend(pod_routes.clone().map(|routes| ("  pod routes:", routes)));
        rows.push(("  tunnel:", tunnel.to_owned()));
    }
    rows.push(("  socket LB:", socket_lb(status)));
    rows
}

/// Describes the addresses at which node ports are reachable:
/// `all addresses, and 127.0.0.1 for this host`.
fn node_ports(options: &OptionsStatus) -> String {
    let OptionsStatus {
        node_port_addresses,
        localhost_node_ports,
        ..
    } = options;
    let addresses = match node_port_addresses.as_str() {
        "all" => "all addresses",
        "primary" => "primary addresses",
        networks => networks,
    };
    let localhosts: Vec<_> = localhost_node_ports
        .iter()
        .map(ToString::to_string)
        .collect();
    if localhosts.is_empty() {
        return addresses.to_owned();
    }
    format!(
        "{addresses}, and {} for this host",
        localhosts.join(" and ")
    )
}

/// Describes the sockets that get a backend at `connect`: `auto: host, TCP, cgroup /sys/fs/cgroup`,
/// and why their connections are not counted.
fn socket_lb(status: &Status) -> String {
    let socket_lb = &status.options.socket_lb;
    match &status.sockets {
        Some(sockets) => {
            let protocols = if sockets.udp { "TCP and UDP" } else { "TCP" };
            // Earlier versions of the agent report only the scope.
            let served = if socket_lb.is_empty() {
                &sockets.scope
            } else {
                socket_lb
            };
            let counts = sockets.uncounted.as_ref().map_or_else(String::new, |why| {
                format!("; their connections are not counted: {why}")
            });
            format!("{served}, {protocols}, cgroup {}{counts}", sockets.cgroup)
        }
        None if socket_lb.is_empty() => "off".to_owned(),
        None => socket_lb.clone(),
    }
}

/// Lists the problems, the objects that are not served, and the notices.
fn problems(status: &Status, form: Form) -> String {
    let problems = status.problems.iter().map(|problem| {
        vec![
            red(&problem.what),
            cell(format!(
                "{}; for {}",
                problem.why,
                age::since(problem.since)
            )),
        ]
    });
    let skipped = status
        .skipped
        .iter()
        .map(|skipped| vec![yellow("skipped"), cell(skipped)]);
    let notices = status
        .notices
        .iter()
        .map(|notice| vec![yellow("notice"), cell(notice)]);
    Form {
        headers: false,
        ..form
    }
    .sentences(&[], problems.chain(skipped).chain(notices))
}

fn families(status: &Status, form: Form) -> String {
    let rows = status.tables.iter().map(|(family, tables)| {
        let flows = status.flows.get(family).cloned().unwrap_or_default();
        let numbers = [
            tables.services,
            tables.service_ports,
            tables.frontends,
            tables.slots,
            flows.flows,
            flows.open,
            flows.entries,
        ];
        [cell(family)]
            .into_iter()
            .chain(numbers.map(cell))
            .collect()
    });
    form.table(
        &[
            "FAMILY",
            "SERVICES",
            "PORTS",
            "FRONTENDS",
            "SLOTS",
            "FLOWS",
            "OPEN",
            "FLOW-ENTRIES",
        ],
        rows,
    )
}

/// Lists the maps that have entries; `wide` lists all maps.
fn maps(status: &Status, form: Form) -> String {
    let is_old = |name: &String| {
        status
            .map_fill
            .keys()
            .any(|map| old_map_name(map) == Some(name))
    };
    let shown = status
        .map_fill
        .iter()
        .filter(|(name, _)| !is_old(name))
        .filter(|(_, fill)| {
            form.wide && fill.max_entries > 1 || fill.entries.is_some_and(|entries| entries > 0)
        });
    let row = |(name, fill): (&String, &MapFill)| {
        let entries = fill
            .entries
            .map_or(String::new(), |entries| entries.to_string());
        vec![
            cell(name),
            cell(entries),
            cell(fill.max_entries),
            full(fill),
        ]
    };
    form.table(&["MAP", "ENTRIES", "MAX", "FULL"], shown.map(row))
}

/// Formats the fill of a map: yellow from 70 %, red from 90 %, where it needs action.
fn full(fill: &MapFill) -> Cell {
    let Some(entries) = fill.entries else {
        return cell("");
    };
    let percent = entries * 100 / fill.max_entries.max(1);
    let filled = usize::try_from(percent / 10).unwrap_or(10).min(10);
    let number = if percent == 0 && entries > 0 {
        "<1".to_owned()
    } else {
        percent.to_string()
    };
    let text = format!(
        "{number:>3}% {}{}",
        "#".repeat(filled),
        ".".repeat(10 - filled)
    );
    match percent {
        0..70 => cell(text),
        70..90 => yellow(text),
        _ => red(text),
    }
}

fn programs(status: &Status, form: Form) -> String {
    let rows = status.programs.iter();
    let rows = rows.map(|(name, program)| vec![cell(name), cell(program.id), cell(&program.tag)]);
    form.table(&["PROGRAM", "ID", "TAG"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_counted_in_words() {
        let words = [
            (1, "anchor"),
            (2, "device"),
            (1, "loopback"),
            (8, "unlisted"),
            (1, "gone"),
            (3, "pod"),
        ]
        .map(|(n, role)| counted(n, role));
        assert_eq!(
            words.join(", "),
            "1 anchor, 2 other devices, 1 loopback, 8 of an earlier run, not listed yet, 1 that went away, 3 pods"
        );
    }
}
