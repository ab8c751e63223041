//! `kubectl kpx flows`.

use std::net::IpAddr;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;
use comfy_table::Cell;
use proxy_view::age::span;
use proxy_view::output::{Form, OutputArgs, cell, green, yellow};
use proxy_view::{FlowService, FlowView, STATES};

use crate::answers::{Answers, ask};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;

/// List the flows that pass the nodes. Those whose clients spoke last come first.
#[derive(Args, Debug)]
pub(crate) struct FlowsArgs {
    /// Only flows of this Service.
    #[arg(long, value_name = "[svc/][NAMESPACE/]NAME")]
    service: Option<String>,
    /// Only flows of Services of this namespace.
    #[arg(long, value_name = "NAMESPACE")]
    service_namespace: Option<String>,
    /// Only flows in one of these states.
    #[arg(long, value_parser = PossibleValuesParser::new(STATES), value_delimiter = ',', value_name = "STATE,…")]
    state: Vec<String>,
    /// Only flows of this client.
    #[arg(long, value_name = "IP")]
    client: Option<IpAddr>,
    /// Only flows to this backend.
    #[arg(long, value_name = "IP")]
    backend: Option<IpAddr>,
    /// At most this many flows of each node; 0 for all.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    limit: usize,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn flows(connect: &ConnectArgs, args: &FlowsArgs) -> Result<ExitCode> {
    let cluster = Cluster::find(connect).await?;
    let mut arguments = vec!["flows".to_owned(), format!("--limit={}", args.limit)];
    arguments.extend(args.service.iter().map(|name| format!("--service={name}")));
    arguments.extend(args.service_namespace.iter().map(|namespace| format!("--namespace={namespace}")));
    arguments.extend(args.state.iter().map(|state| format!("--state={state}")));
    arguments.extend(args.client.iter().map(|client| format!("--client={client}")));
    arguments.extend(args.backend.iter().map(|backend| format!("--backend={backend}")));
    let answers: Answers<Vec<FlowView>> = ask(&cluster, connect, &arguments).await;
    answers.print(&args.output, |form| text(&answers, form))
}

fn text(answers: &Answers<Vec<FlowView>>, form: Form) -> String {
    let mut header = vec!["NODE", "CLIENT", "SERVICE", "BACKEND", "STATE", "IDLE"];
    if form.wide {
        header.extend(["PROTOCOL", "FRONTEND", "SOURCE"]);
    }
    let mut flows: Vec<_> =
        answers.answered().flat_map(|(node, flows)| flows.iter().map(move |flow| (node, flow))).collect();
    flows.sort_by_key(|(node, flow)| (flow.idle_secs, *node));
    form.table(&header, flows.into_iter().map(|(node, flow)| row(node, flow, form.wide)))
}

fn row(node: &str, flow: &FlowView, wide: bool) -> Vec<Cell> {
    // The Service stands for the frontend, as far as there is one.
    let service = match &flow.service {
        Some(FlowService { namespace, name, port_name }) if port_name.is_empty() => format!("{namespace}/{name}"),
        Some(FlowService { namespace, name, port_name }) => format!("{namespace}/{name}:{port_name}"),
        None => flow.frontend.to_string(),
    };
    let mut row = vec![
        cell(node),
        cell(flow.client),
        cell(service),
        cell(flow.backend),
        match flow.state.as_str() {
            "established" => green("established"),
            "reset" => yellow("reset"),
            state => cell(state),
        },
        cell(span(flow.idle_secs.into())),
    ];
    if wide {
        let source = if flow.source == flow.client { String::new() } else { flow.source.to_string() };
        row.extend([cell(&flow.protocol), cell(flow.frontend), cell(source)]);
    }
    row
}
