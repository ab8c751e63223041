//! `kpx flows`.

mod read;

use std::io::{Write, stderr};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use clap::Args;
use comfy_table::Cell;
use nix::unistd::Uid;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::flow::State;
use serde::Serialize;

use super::age::span;
use super::agent_args::AgentArgs;
use super::output::{Form, OutputArgs, cell, green, yellow};
use crate::view::NameView;
use read::Wanted;

/// List the flows that pass this node, as the kernel programs have them just now. Needs root.
#[derive(Args, Debug)]
pub(super) struct FlowsArgs {
    /// Only of this Service.
    #[arg(long, value_name = "NAMESPACE/NAME")]
    service: Option<String>,
    /// Only of this client.
    #[arg(long, value_name = "IP")]
    client: Option<IpAddr>,
    /// Only to this backend.
    #[arg(long, value_name = "IP")]
    backend: Option<IpAddr>,
    /// At most so many; 0 for all.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    limit: usize,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// One flow. The form is kept: fields may be added, none is renamed or taken away.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
struct FlowView {
    /// The protocol: `TCP`, `UDP` or `SCTP`.
    protocol: String,
    client: SocketAddr,
    /// What the client dialled.
    frontend: SocketAddr,
    backend: SocketAddr,
    /// What the backend sees.
    source: SocketAddr,
    /// The client's address was replaced by the node's.
    masqueraded: bool,
    /// A socket of this node opened it.
    from_node: bool,
    /// `new`, `answered` (by the backend, and the client silent since), `established`, `halfClosed`, `closed` or `reset`.
    state: &'static str,
    /// Since a packet of the client passed, in seconds.
    idle_secs: u32,
    /// Silent for so many seconds in this state, it is forgotten.
    timeout_secs: u32,
    /// Null if no Service has this frontend any more.
    service: Option<FlowService>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
struct FlowService {
    namespace: String,
    name: String,
    /// The name of the port; empty if the port has none.
    port_name: String,
}

impl FlowService {
    fn new(name: &NameView) -> Self {
        Self { namespace: name.namespace.clone(), name: name.name.clone(), port_name: name.port_name.clone() }
    }
}

pub(super) async fn flows(args: &FlowsArgs) -> Result<()> {
    ensure!(Uid::effective().is_root(), "kpx flows reads the kernel's maps, which takes root");
    let client = args.agent.client();
    let (status, names) = (client.status().await?, client.names().await?);
    let wanted = Wanted { service: args.service()?, client: args.client, backend: args.backend, names: &names };
    let limit = if args.limit == 0 { usize::MAX } else { args.limit };
    let mut flows = read::flows::<Addr4>(&status.maps, &wanted, limit)?;
    flows.extend(read::flows::<Addr6>(&status.maps, &wanted, limit - flows.len())?);
    args.output.print(&flows, |form| text(&flows, form))?;
    if flows.len() == limit {
        let _told = writeln!(stderr(), "there may be more than --limit {limit}");
    }
    Ok(())
}

impl FlowsArgs {
    /// Namespace and name.
    fn service(&self) -> Result<Option<(&str, &str)>> {
        let Some(service) = &self.service else { return Ok(None) };
        service.split_once('/').map(Some).with_context(|| format!("--service {service}: say NAMESPACE/NAME"))
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
    // Only what the backend sees otherwise than the client has it.
    let source = if flow.source == flow.client { String::new() } else { flow.source.to_string() };
    let mut row = vec![
        cell(&flow.protocol),
        cell(flow.client),
        cell(flow.frontend),
        cell(service.unwrap_or_default()),
        cell(flow.backend),
        match flow.state {
            "established" => green(flow.state),
            "reset" => yellow(flow.state),
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

const fn state_name(state: State) -> &'static str {
    match state {
        State::New => "new",
        State::Answered => "answered",
        State::Established => "established",
        State::HalfClosed => "halfClosed",
        State::Closed => "closed",
        State::Reset => "reset",
    }
}
