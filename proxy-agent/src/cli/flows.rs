//! `kpx flows`.

use std::collections::BTreeMap;
use std::io::{Write, stderr};
use std::net::IpAddr;

use anyhow::{Context, Result};
use clap::Args;
use clap::builder::PossibleValuesParser;
use comfy_table::Cell;

use super::agent_args::AgentArgs;
use crate::control::FlowFilter;
use proxy_view::age::span;
use proxy_view::client::Lines;
use proxy_view::object_name::{ServiceName, full_name};
use proxy_view::output::{Form, OutputArgs, cell, green, yellow};
use proxy_view::{FlowService, FlowView, STATES};

/// List the flows that pass this node, as the kernel programs have them just now. Those whose clients spoke last come first.
#[derive(Args, Debug)]
pub(super) struct FlowsArgs {
    /// Only flows of this Service.
    #[arg(long, value_name = "[svc/][NAMESPACE/]NAME")]
    service: Option<ServiceName>,
    /// Only flows of Services of this namespace.
    #[arg(long, short, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Only flows in one of these states.
    #[arg(long, value_parser = PossibleValuesParser::new(STATES), value_delimiter = ',', value_name = "STATE,…")]
    state: Vec<String>,
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
    let client = args.agent.client();
    let service = match &args.service {
        Some(name) => {
            let name = name.clone().within(args.namespace.as_deref());
            Some(full_name(name.find(&client.services().await?)?))
        }
        None => None,
    };
    let filter = FlowFilter { service, client: args.client, backend: args.backend };
    let limit = if args.limit == 0 { usize::MAX } else { args.limit };
    let flows = args.newest(client.lines(&filter.path()).await?, limit).await?;
    args.output.print(&flows, |form| text(&flows, form))?;
    if flows.len() == limit {
        let _told = writeln!(stderr(), "there may be more than --limit {limit}");
    }
    Ok(())
}

impl FlowsArgs {
    /// Returns the flows whose clients spoke last, these first. The agent has them in no order.
    async fn newest(&self, mut lines: Lines, limit: usize) -> Result<Vec<FlowView>> {
        let mut flows = BTreeMap::new();
        while let Some(line) = lines.next().await? {
            let flow: FlowView = serde_json::from_slice(&line).context("the running kpx is of another version")?;
            if !self.wants(&flow) {
                continue;
            }
            let (client, frontend) = (flow.client, flow.frontend);
            flows.insert((flow.idle_secs, client, frontend, flow.protocol.clone(), flow.from_node), flow);
            if flows.len() > limit {
                flows.pop_last();
            }
        }
        Ok(flows.into_values().collect())
    }

    fn wants(&self, flow: &FlowView) -> bool {
        let namespace = flow.service.as_ref().map(|service| &service.namespace);
        self.namespace.as_ref().is_none_or(|wanted| namespace == Some(wanted))
            && (self.state.is_empty() || self.state.contains(&flow.state))
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
