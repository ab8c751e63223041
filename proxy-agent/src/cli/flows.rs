//! `kpx flows`.

use std::collections::BTreeMap;
use std::io::{Write, stderr};

use anyhow::{Context, Result};
use clap::Args;
use comfy_table::Cell;

use super::agent_args::AgentArgs;
use super::list::{Listed, WatchArgs, show};
use crate::control::FlowFilter;
use proxy_view::FlowView;
use proxy_view::age::span;
use proxy_view::client::Lines;
use proxy_view::flow_args::{FlowArgs, state_cell};
use proxy_view::object_name::full_name;
use proxy_view::output::{OutputArgs, cell};
use proxy_view::select_args::NamespaceArgs;

/// List the flows that pass this node, as the kernel programs have them just now. Those whose clients spoke last come first.
#[derive(Args, Debug)]
pub(super) struct FlowsArgs {
    #[command(flatten)]
    flows: FlowArgs,
    #[command(flatten)]
    within: NamespaceArgs,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(super) async fn flows(args: &FlowsArgs) -> Result<()> {
    let client = args.agent.client();
    let service = match &args.flows.service {
        Some(name) => {
            let name = name.clone().within(args.within.namespace.as_deref());
            Some(full_name(name.find(&client.services().await?)?))
        }
        None => None,
    };
    let filter = FlowFilter { service, client: args.flows.client, backend: args.flows.backend };
    let limit = args.flows.limit();
    let read = async |is_first| {
        let mut flows = args.newest(client.lines(&filter.path()).await?, limit).await?;
        if is_first && flows.len() == limit {
            let _told = writeln!(stderr(), "there may be more than --limit {limit}");
        }
        args.flows.sort(&mut flows, |flow| flow);
        Ok(flows)
    };
    show(args.output.kind(), &args.watch, read).await
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
        let is_within = match &flow.service {
            Some(service) => self.within.has(&service.namespace),
            None => self.within.namespace.is_none(),
        };
        is_within && self.flows.has_state(flow)
    }
}

impl Listed for FlowView {
    fn header(wide: bool) -> Vec<&'static str> {
        let mut header = vec!["PROTOCOL", "CLIENT", "FRONTEND", "SERVICE", "BACKEND", "STATE", "IDLE", "SOURCE"];
        if wide {
            header.extend(["EXPIRES", "FROM-NODE"]);
        }
        header
    }

    fn cells(&self, wide: bool) -> Vec<Cell> {
        // Shown only where the backend sees another source than the client's own.
        let source = if self.source == self.client { String::new() } else { self.source.to_string() };
        let mut row = vec![
            cell(&self.protocol),
            cell(self.client),
            cell(self.frontend),
            cell(self.service_name()),
            cell(self.backend),
            state_cell(self),
            cell(span(self.idle_secs.into())),
            cell(source),
        ];
        if wide {
            let expires = self.timeout_secs.saturating_sub(self.idle_secs);
            row.extend([cell(span(expires.into())), cell(if self.from_node { "yes" } else { "no" })]);
        }
        row
    }

    fn key(&self) -> String {
        format!("{} {} {} {}", self.protocol, self.client, self.frontend, self.from_node)
    }

    fn name(&self) -> String {
        self.key()
    }
}
