//! `kpx backends`.

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use serde::Serialize;

use super::agent_args::AgentArgs;
use super::select::SelectArgs;
use proxy_view::output::{Form, OutputArgs, cell, green, list, yellow};
use proxy_view::{BackendView, ServiceView};

/// List the endpoints of Services, and which of them take traffic here.
///
/// SETS names the sets from which new flows get a backend: `cluster` for clients of the whole cluster, `local` under a
/// traffic policy Local.
#[derive(Args, Debug)]
pub(super) struct BackendsArgs {
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// A backend and its service port.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row<'a> {
    namespace: &'a str,
    service: &'a str,
    /// The name of the port; empty if the port has none.
    port_name: &'a str,
    protocol: &'a str,
    port: u16,
    #[serde(flatten)]
    backend: &'a BackendView,
}

pub(super) async fn backends(args: &BackendsArgs) -> Result<()> {
    let services = args.select.select(args.agent.client().services().await?)?;
    let rows: Vec<_> = services.iter().flat_map(rows).collect();
    args.output.print(&rows, |form| text(&rows, form))
}

fn rows(service: &ServiceView) -> impl Iterator<Item = Row<'_>> {
    service.ports.iter().flat_map(move |port| {
        port.backends.iter().map(move |backend| Row {
            namespace: &service.namespace,
            service: &service.name,
            port_name: &port.name,
            protocol: &port.protocol,
            port: port.port,
            backend,
        })
    })
}

fn text(rows: &[Row<'_>], form: Form) -> String {
    let mut header =
        vec!["NAMESPACE", "SERVICE", "PORT", "ADDRESS", "POD", "NODE", "ZONE", "STATE", "LOCAL", "SETS", "FLOWS"];
    if form.wide {
        header.extend(["READY", "SERVING", "TERMINATING"]);
    }
    form.table(&header, rows.iter().map(|row| cells(row, form.wide)))
}

fn cells(row: &Row<'_>, wide: bool) -> Vec<Cell> {
    let Row { backend, .. } = row;
    let port = if row.port_name.is_empty() { row.port.to_string() } else { row.port_name.to_owned() };
    let sets = [(backend.in_cluster_set, "cluster"), (backend.in_local_set, "local")];
    let mut cells = vec![
        cell(row.namespace),
        cell(row.service),
        cell(format!("{port}/{}", row.protocol)),
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
        cells.extend([backend.ready, backend.serving, backend.terminating].map(|condition| cell(yes(condition))));
    }
    cells
}

/// Returns one word for the three conditions.
fn state(backend: &BackendView) -> Cell {
    match (backend.ready, backend.serving, backend.terminating) {
        (true, _, false) => green("ready"),
        (_, true, true) => yellow("terminating"),
        (_, false, true) => yellow("terminated"),
        (false, _, false) => yellow("unready"),
    }
}

const fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}
