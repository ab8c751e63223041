//! `kpx flows`.

use std::io::{Write, stderr};

use anyhow::{Context, Result};
use clap::{ArgGroup, Args};

use super::agent_args::AgentArgs;
use crate::control::{EndedFlows, FlowFilter};
use proxy_view::FlowView;
use proxy_view::client::Lines;
use proxy_view::flow_args::FlowArgs;
use proxy_view::list::{WatchArgs, show};
use proxy_view::object_name::full_name;
use proxy_view::output::OutputArgs;
use proxy_view::select_args::NamespaceArgs;

/// List the flows of this node, most recently active first.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("selected").args(SELECTORS).arg("all").multiple(true))]
pub(super) struct FlowsArgs {
    #[command(flatten)]
    flows: FlowArgs,
    #[command(flatten)]
    within: NamespaceArgs,
    /// End the selected flows and print their number: later packets of an ended TCP connection
    /// reach no backend; new connections select a backend again. Needs root, and a selecting flag
    /// or --all.
    #[arg(long, requires = "selected", conflicts_with_all = ["watch", "limit", "sort_by"])]
    end: bool,
    /// With --end: select all flows of this node.
    #[arg(long, requires = "end", conflicts_with_all = SELECTORS)]
    all: bool,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    agent: AgentArgs,
    #[command(flatten)]
    output: OutputArgs,
}

const SELECTORS: [&str; 5] = ["service", "state", "client", "backend", "namespace"];

pub(super) async fn flows(args: &FlowsArgs) -> Result<()> {
    let client = args.agent.client();
    let service = match &args.flows.service {
        Some(name) => {
            let name = name.clone().within(args.within.namespace.as_deref());
            Some(full_name(name.find(&client.services_to_name().await?)?))
        }
        None => None,
    };
    let filter = FlowFilter {
        service,
        client: args.flows.client,
        backend: args.flows.backend,
        namespace: args.within.namespace.clone(),
        states: args.flows.states(),
    };
    if args.end {
        let ended: EndedFlows = client.delete(&filter.path()).await?;
        return args
            .output
            .print(&ended, |_| format!("{} flows ended\n", ended.ended));
    }
    let limit = args.flows.limit();
    let read = async |is_first| {
        let mut flows = args
            .newest(client.lines(&filter.path()).await?, limit)
            .await?;
        if is_first && flows.len() == limit {
            let _told = writeln!(stderr(), "there may be more than --limit {limit}");
        }
        args.flows.sort(&mut flows, |flow| flow);
        Ok(flows)
    };
    let nothing = args.within.nothing("flows");
    show(&client, args.output.kind(), &args.watch, &nothing, read).await
}

impl FlowsArgs {
    /// Returns the flows with the most recent packets of the client, newest first. The agent sends
    /// flows unsorted.
    async fn newest(&self, mut lines: Lines, limit: usize) -> Result<Vec<FlowView>> {
        let mut flows = Vec::new();
        while let Some(line) = lines.next().await? {
            let flow: FlowView =
                serde_json::from_slice(&line).context("the running kpx has another version")?;
            if !self.wants(&flow) {
                continue;
            }
            flows.push(flow);
            // Sorting whenever the buffer is twice the limit bounds the memory.
            if flows.len() >= limit.saturating_mul(2) {
                keep_newest(&mut flows, limit);
            }
        }
        keep_newest(&mut flows, limit);
        Ok(flows)
    }

    fn wants(&self, flow: &FlowView) -> bool {
        let is_within = match &flow.service {
            Some(service) => self.within.has(&service.namespace),
            None => self.within.namespace.is_none(),
        };
        is_within && self.flows.has_state(flow)
    }
}

/// Sorts and deduplicates the flows, and keeps the first `limit`.
fn keep_newest(flows: &mut Vec<FlowView>, limit: usize) {
    let key = |flow: &FlowView| (flow.idle_secs, flow.client, flow.frontend, flow.from_node);
    flows.sort_unstable_by(|a, b| {
        key(a)
            .cmp(&key(b))
            .then_with(|| a.protocol.cmp(&b.protocol))
    });
    flows.dedup_by(|a, b| key(a) == key(b) && a.protocol == b.protocol);
    flows.truncate(limit);
}
