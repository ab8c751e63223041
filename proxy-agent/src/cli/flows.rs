//! `kpx flows`.

use std::collections::BTreeMap;
use std::io::{Write, stderr};
use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use clap::Args;
use comfy_table::Cell;

use super::age::span;
use super::agent_args::AgentArgs;
use super::output::{Form, OutputArgs, cell, green, yellow};
use crate::control::FlowFilter;
use crate::control::client::Lines;
use crate::view::{FlowService, FlowView};

/// List the flows that pass this node, as the kernel programs have them just now.
#[derive(Args, Debug)]
pub(super) struct FlowsArgs {
    /// Only flows of this Service.
    #[arg(long, value_name = "NAMESPACE/NAME")]
    service: Option<String>,
    /// Only flows of this client.
    #[arg(long, value_name = "IP")]
    client: Option<IpAddr>,
    /// Only flows to this backend.
    #[arg(long, value_name = "IP")]
    backend: Option<IpAddr>,
    /// At most this many flows; 0 for all.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    limit: usize,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(super) async fn flows(args: &FlowsArgs) -> Result<()> {
    let filter = FlowFilter { service: args.service()?, client: args.client, backend: args.backend };
    let limit = if args.limit == 0 { usize::MAX } else { args.limit };
    let flows = first(args.agent.client().lines(&filter.path()).await?, limit).await?;
    args.output.print(&flows, |form| text(&flows, form))?;
    if flows.len() == limit {
        let _told = writeln!(stderr(), "there may be more than --limit {limit}");
    }
    Ok(())
}

/// Returns the first flows in the order of their clients, IPv4 before IPv6. The agent has them in no order.
async fn first(mut lines: Lines, limit: usize) -> Result<Vec<FlowView>> {
    let mut flows = BTreeMap::new();
    while let Some(line) = lines.next().await? {
        let flow: FlowView = serde_json::from_slice(&line).context("the running kpx is of another version")?;
        let (client, frontend) = (flow.client, flow.frontend);
        let ports = (client.port(), frontend.port());
        flows.insert((client.ip(), frontend.ip(), ports, flow.protocol.clone(), flow.from_node), flow);
        if flows.len() > limit {
            flows.pop_last();
        }
    }
    Ok(flows.into_values().collect())
}

impl FlowsArgs {
    fn service(&self) -> Result<Option<String>> {
        let Some(service) = &self.service else { return Ok(None) };
        let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '.' | '/');
        let is_name = service.matches('/').count() == 1 && service.chars().all(is_of_name);
        ensure!(is_name, "--service {service}: say NAMESPACE/NAME");
        Ok(Some(service.clone()))
    }
}

fn text(flows: &[FlowView], form: Form) -> String {
    let mut header = vec!["PROTOCOL", "CLIENT", "FRONTEND", "SERVICE", "BACKEND", "STATE", "IDLE", "SOURCE"];
    if form.wide {
        header.extend(["EXPIRES", "FROM-NODE"]);
    }
    form.table(&header, flows.iter().map(|flow| row(flow, form.wide)))
}

fn row(flow: &FlowView, wide: bool) -> Vec<Cell> {
    let service = flow.service.as_ref().map(|FlowService { namespace, name, port_name }| match port_name.as_str() {
        "" => format!("{namespace}/{name}"),
        port_name => format!("{namespace}/{name}:{port_name}"),
    });
    // Shown only where the backend sees another source than the client's own.
    let source = if flow.source == flow.client { String::new() } else { flow.source.to_string() };
    let mut row = vec![
        cell(&flow.protocol),
        cell(flow.client),
        cell(flow.frontend),
        cell(service.unwrap_or_default()),
        cell(flow.backend),
        match flow.state.as_str() {
            "established" => green("established"),
            "reset" => yellow("reset"),
            state => cell(state),
        },
        cell(span(flow.idle_secs.into())),
        cell(source),
    ];
    if wide {
        let expires = flow.timeout_secs.saturating_sub(flow.idle_secs);
        row.extend([cell(span(expires.into())), cell(if flow.from_node { "yes" } else { "no" })]);
    }
    row
}
