//! `kpx services`.

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;

use super::agent_args::AgentArgs;
use super::select::SelectArgs;
use proxy_view::age;
use proxy_view::output::{Form, NONE, OutputArgs, cell, list, red, yellow};
use proxy_view::{PortView, ServiceView};

/// List the Services that the running agent serves, and what of them is in force.
#[derive(Args, Debug)]
pub(super) struct ServicesArgs {
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(super) async fn services(args: &ServicesArgs) -> Result<()> {
    let services = args.select.select(args.agent.client().services().await?)?;
    args.output.print(&services, |form| text(&services, form))
}

fn text(services: &[ServiceView], form: Form) -> String {
    let mut header =
        vec!["NAMESPACE", "NAME", "TYPE", "CLUSTER-IP", "EXTERNAL-IP", "PORT(S)", "BACKENDS", "FLOWS", "AGE"];
    if form.wide {
        header.extend(["POLICY", "AFFINITY", "ALGORITHM", "HEALTH-CHECK", "CONFLICTS"]);
    }
    form.table(&header, services.iter().map(|service| row(service, form.wide)))
}

fn row(service: &ServiceView, wide: bool) -> Vec<Cell> {
    let external = service.load_balancer_ips.iter().chain(&service.external_ips);
    let mut row = vec![
        cell(&service.namespace),
        cell(&service.name),
        cell(&service.r#type),
        cell(list(&service.cluster_ips)),
        cell(list(external)),
        cell(list(service.ports.iter().map(port))),
        backends(service),
        cell(service.ports.iter().map(|port| port.counts.flows).sum::<u64>()),
        cell(service.created.map_or_else(|| NONE.to_owned(), age::since)),
    ];
    if wide {
        let conflicts: Vec<_> = conflicts(service).collect();
        row.extend([
            cell(format!("{}/{}", service.internal_traffic_policy, service.external_traffic_policy)),
            cell(service.affinity_secs.map_or(String::new(), |secs| age::span(secs.into()))),
            cell(&service.algorithm),
            cell(service.health_check_node_port.map_or(String::new(), |port| port.to_string())),
            if conflicts.is_empty() { cell("") } else { red(conflicts.join("; ")) },
        ]);
    }
    row
}

/// Formats a port as kubectl does, with an exclamation mark if not all of its frontends are in force.
fn port(port: &PortView) -> String {
    let node_port = port.node_port.map(|port| format!(":{port}")).unwrap_or_default();
    let mark = if port.frontends.iter().any(|frontend| frontend.conflict.is_some()) { "!" } else { "" };
    format!("{}{node_port}/{}{mark}", port.port, port.protocol)
}

/// Counts the backends that take traffic and all listed backends, over all ports.
fn backends(service: &ServiceView) -> Cell {
    let (in_use, all) = service.backends_in_use();
    let text = format!("{in_use}/{all}");
    if in_use == 0 { yellow(text) } else { cell(text) }
}

fn conflicts(service: &ServiceView) -> impl Iterator<Item = String> {
    let frontends = service.ports.iter().flat_map(|port| &port.frontends);
    frontends.filter_map(|frontend| frontend.conflict.clone())
}
