//! `kubectl kpx flows`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use proxy_view::FlowView;
use proxy_view::age::span;
use proxy_view::flow_args::{FlowArgs, state_cell};
use proxy_view::list::Listed;
use proxy_view::output::{Form, OutputArgs, cell, nothing};

use crate::answers::{Answers, ask};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;
use crate::select;
use crate::watch::{WatchArgs, watch};

/// List the flows of the nodes, most recently active first.
#[derive(Args, Debug)]
pub(crate) struct FlowsArgs {
    #[command(flatten)]
    flows: FlowArgs,
    /// Only flows of Services of this namespace.
    #[arg(long, value_name = "NAMESPACE")]
    service_namespace: Option<String>,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn flows(connect: &ConnectArgs, args: &FlowsArgs) -> Result<ExitCode> {
    let mut arguments = vec!["flows".to_owned()];
    arguments.extend(args.flows.arguments());
    arguments.extend(select::in_namespace(&args.service_namespace));
    if args.watch.watch {
        return watch(
            connect,
            args.output.kind(),
            &arguments,
            |flows: Vec<FlowView>| flows,
        )
        .await;
    }
    let cluster = Cluster::find(connect).await?;
    let answers: Answers<Vec<FlowView>> = ask(&cluster, connect, &arguments).await;
    let nothing = nothing("flows", args.service_namespace.as_deref());
    answers.print(&args.output, &nothing, |form| {
        text(&answers, &args.flows, form)
    })
}

pub(crate) fn text(answers: &Answers<Vec<FlowView>>, args: &FlowArgs, form: Form) -> String {
    let mut header = vec!["NODE", "CLIENT", "SERVICE", "BACKEND", "STATE", "IDLE"];
    if form.wide {
        header.extend(["PROTOCOL", "FRONTEND", "SOURCE"]);
    }
    let mut flows: Vec<_> = answers
        .answered()
        .flat_map(|(node, flows)| flows.iter().map(move |flow| (node, flow)))
        .collect();
    flows.sort_by_key(|(node, flow)| (flow.idle_secs, *node));
    args.sort(&mut flows, |(_, flow)| flow);
    form.narrowed(
        &header,
        FlowView::NARROW,
        flows
            .into_iter()
            .map(|(node, flow)| row(node, flow, form.wide)),
    )
}

fn row(node: &str, flow: &FlowView, wide: bool) -> Vec<Cell> {
    // The Service replaces the frontend's address, if the flow has a Service.
    let service = if flow.service.is_some() {
        flow.service_name()
    } else {
        flow.frontend.to_string()
    };
    let mut row = vec![
        cell(node),
        cell(flow.client),
        cell(service),
        cell(flow.backend),
        state_cell(flow),
        cell(span(flow.idle_secs.into())),
    ];
    if wide {
        let source = if flow.source == flow.client {
            String::new()
        } else {
            flow.source.to_string()
        };
        row.extend([cell(&flow.protocol), cell(flow.frontend), cell(source)]);
    }
    row
}
