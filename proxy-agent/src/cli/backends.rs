//! `kpx backends`.

use std::cmp::Reverse;

use anyhow::Result;
use clap::{Args, ValueEnum};
use comfy_table::Cell;
use serde::Serialize;

use super::agent_args::AgentArgs;
use proxy_view::list::{Listed, WatchArgs, show};
use proxy_view::output::{NamedOutputArgs, cell, green, list, yellow};
use proxy_view::select_args::SelectArgs;
use proxy_view::{BackendView, ServiceView, latency};

/// List the endpoints of Services, and which of them take traffic here.
///
/// SETS names the sets from which new flows get a backend: `cluster` for clients of the whole cluster, `local` under a
/// traffic policy Local. A drained backend has the weight 0: it keeps its flows and gets no new ones. STATE is `silent` where a backend
/// gives this node no answer, and `set aside` where it takes no new connections because of that. CONNECT-P50 and CONNECT-P99 are the times
/// within which the backend answered that part of the TCP connections.
#[derive(Args, Debug)]
pub(super) struct BackendsArgs {
    #[command(flatten)]
    select: SelectArgs,
    /// The column to sort by.
    #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
    sort_by: Order,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: NamedOutputArgs,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Order {
    /// By namespace, Service and port.
    #[default]
    Service,
    Address,
    Node,
    /// Those that are not ready or silent first.
    State,
    /// Those with the most flows first.
    Flows,
}

/// A backend and its service port.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    namespace: String,
    service: String,
    /// The name of the port; empty if the port has none.
    port_name: String,
    protocol: String,
    port: u16,
    #[serde(flatten)]
    backend: BackendView,
}

pub(super) async fn backends(args: &BackendsArgs) -> Result<()> {
    let client = args.agent.client();
    let read = async |is_first| {
        let services = args.select.select(client.services().await?, is_first)?;
        let mut rows: Vec<_> = services.into_iter().flat_map(rows).collect();
        match args.sort_by {
            Order::Service => {}
            Order::Address => rows.sort_by_key(|row| row.backend.address),
            Order::Node => rows.sort_by_cached_key(|row| row.backend.node.clone()),
            Order::State => {
                rows.sort_by_key(|row| row.backend.ready && !row.backend.terminating && !row.backend.silent)
            }
            Order::Flows => rows.sort_by_key(|row| Reverse(row.backend.flows)),
        }
        Ok(rows)
    };
    show(args.output.kind(), &args.watch, read).await
}

fn rows(service: ServiceView) -> impl Iterator<Item = Row> {
    let (namespace, name) = (service.namespace, service.name);
    service.ports.into_iter().flat_map(move |port| {
        let (namespace, service) = (namespace.clone(), name.clone());
        port.backends.into_iter().map(move |backend| Row {
            namespace: namespace.clone(),
            service: service.clone(),
            port_name: port.name.clone(),
            protocol: port.protocol.clone(),
            port: port.port,
            backend,
        })
    })
}

impl Listed for Row {
    fn header(wide: bool) -> Vec<&'static str> {
        let mut header =
            vec!["NAMESPACE", "SERVICE", "PORT", "ADDRESS", "POD", "NODE", "ZONE", "STATE", "LOCAL", "SETS", "FLOWS"];
        if wide {
            header.extend(["WEIGHT", "CONNECT-P50", "CONNECT-P99", "FAILED", "READY", "SERVING", "TERMINATING"]);
        }
        header
    }

    fn cells(&self, wide: bool) -> Vec<Cell> {
        let Self { backend, .. } = self;
        let port = if self.port_name.is_empty() { self.port.to_string() } else { self.port_name.clone() };
        let sets = [
            (backend.in_cluster_set, "cluster"),
            (backend.in_local_set, "local"),
            (backend.in_redirect_set, "redirect"),
        ];
        let mut cells = vec![
            cell(&self.namespace),
            cell(&self.service),
            cell(format!("{port}/{}", self.protocol)),
            cell(backend.address),
            cell(backend.pod.as_deref().unwrap_or_default()),
            cell(backend.node.as_deref().unwrap_or_default()),
            cell(backend.zone.as_deref().unwrap_or_default()),
            state(backend),
            cell(yes(backend.local)),
            cell(list(sets.iter().filter(|(is_in, _)| *is_in).map(|(_, set)| set))),
            cell(backend.flows),
        ];
        if wide {
            let connect = &backend.connect;
            cells.push(if backend.weight == 0 { yellow(0) } else { cell(backend.weight) });
            cells.extend([connect.connect_p50, connect.connect_p99].map(|time| cell(latency(time))));
            cells.push(cell(connect.failed));
            cells.extend([backend.ready, backend.serving, backend.terminating].map(|condition| cell(yes(condition))));
        }
        cells
    }

    fn way(&self) -> Option<Cell> {
        let way = self.backend.way.as_deref()?;
        Some(if way == "unreachable" { yellow(way) } else { cell(way) })
    }

    fn key(&self) -> String {
        let Self { namespace, service, protocol, port, backend, .. } = self;
        format!("{namespace}/{service} {port}/{protocol} {}", backend.address)
    }

    /// Returns the pod, or the address of a backend that is none.
    fn name(&self) -> String {
        match &self.backend.pod {
            Some(pod) => format!("pod/{pod}"),
            None => self.backend.address.to_string(),
        }
    }
}

/// Returns one word for the three conditions and the weight 0, or for a silence beside them.
fn state(backend: &BackendView) -> Cell {
    if backend.set_aside {
        return yellow("set aside");
    }
    if backend.silent {
        return yellow("silent");
    }
    match (backend.ready, backend.serving, backend.terminating) {
        (true, _, false) if backend.weight == 0 => yellow("drained"),
        (true, _, false) => green("ready"),
        (_, true, true) => yellow("terminating"),
        (_, false, true) => yellow("terminated"),
        (false, _, false) => yellow("unready"),
    }
}

const fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}
