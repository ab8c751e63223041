//! `kubectl kpx monitor`: the streams of several nodes, line by line.

use std::io::{ErrorKind, Write, stdout};
use std::net::IpAddr;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::answers::name_failed;
use crate::connect::ConnectArgs;
use crate::exec;
use crate::pods::{Cluster, NodePod};
use proxy_view::output::escaped;

/// The lines that may wait for the terminal.
const QUEUE: usize = 1_024;
/// The seconds in which the stream of a node must begin.
const START: u64 = 20;
/// The most bytes of standard error that are kept.
const LONGEST_STDERR: u64 = 4_096;

/// Show packets that open flows or are dropped or rejected on the nodes, until stopped.
#[derive(Args, Debug)]
pub(crate) struct MonitorArgs {
    /// Show only packets to this Service.
    #[arg(long, value_name = "[svc/][NAMESPACE/]NAME")]
    service: Option<String>,
    /// Show only packets to Services of this namespace.
    #[arg(long, value_name = "NAMESPACE")]
    service_namespace: Option<String>,
    /// Show only packets from this address.
    #[arg(long, value_name = "IP")]
    client: Option<IpAddr>,
    /// Show only packets dropped or rejected for this reason.
    #[arg(long, value_name = "REASON", conflicts_with = "decisions")]
    reason: Option<String>,
    /// Show only packets that are dropped or rejected.
    #[arg(long, conflicts_with = "decisions")]
    unserved: bool,
    /// Show only packets that open flows.
    #[arg(long)]
    decisions: bool,
    /// The number of lines per second of each node; packets beyond it are counted as lost.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    limit_per_second: u32,
    /// End after so many packets of all nodes together.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Print for each packet a line for people, or a line of JSON with the fields node and event.
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    output: Output,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    #[default]
    Text,
    Json,
}

pub(crate) async fn monitor(connect: &ConnectArgs, args: &MonitorArgs) -> Result<ExitCode> {
    let cluster = Cluster::find(connect).await?;
    let width = cluster.nodes.iter().map(|at| at.node.len()).max().unwrap_or_default();
    let (sender, mut lines) = mpsc::channel(QUEUE);
    let arguments = args.arguments();
    let mut streams: FuturesUnordered<_> =
        cluster.nodes.iter().map(|at| watch(&cluster, connect, at, &arguments, sender.clone())).collect();
    drop(sender);
    let (mut failed, mut shown) = (Vec::new(), 0);
    let mut stopped = std::pin::pin!(tokio::signal::ctrl_c());
    while args.count.is_none_or(|count| shown < count) {
        tokio::select! {
            line = lines.recv() => match line {
                Some((node, line)) if args.print(&node, &line, width)? => shown += 1,
                _ => break,
            },
            Some(ended) = streams.next(), if !streams.is_empty() => {
                let (node, error): (&str, anyhow::Error) = ended;
                name_failed(cluster.nodes.len(), &[(node, &error)]);
                failed.push(node);
                if failed.len() == cluster.nodes.len() {
                    break;
                }
            }
            _ = &mut stopped => break,
        }
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Hands on the lines of a node until they end, and returns why they ended.
async fn watch<'a>(
    cluster: &Cluster,
    connect: &ConnectArgs,
    at: &'a NodePod,
    arguments: &[String],
    lines: mpsc::Sender<(String, String)>,
) -> (&'a str, anyhow::Error) {
    let work = async {
        let limit = connect.timeout(START);
        let started = timeout(limit, exec::start(&cluster.client, at, arguments)).await;
        let mut process = started.map_err(|_| anyhow!("no answer within {} s", limit.as_secs()))??;
        let mut stdout = BufReader::new(process.stdout().context("kpx has no output")?).lines();
        while let Some(line) = stdout.next_line().await.context("read the output of kpx")? {
            if lines.send((at.node.clone(), line)).await.is_err() {
                return Ok(());
            }
        }
        let mut words = String::new();
        if let Some(stderr) = process.stderr() {
            stderr.take(LONGEST_STDERR).read_to_string(&mut words).await.context("read what kpx says")?;
        }
        bail!("{}", if words.trim().is_empty() { "kpx has ended" } else { words.trim() })
    };
    let ended: Result<()> = work.await;
    (&at.node, ended.err().unwrap_or_else(|| anyhow!("stopped")))
}

impl MonitorArgs {
    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["monitor".to_owned(), format!("--limit-per-second={}", self.limit_per_second)];
        arguments.extend(self.service.iter().map(|name| format!("--service={name}")));
        arguments.extend(self.service_namespace.iter().map(|namespace| format!("--namespace={namespace}")));
        arguments.extend(self.client.iter().map(|client| format!("--client={client}")));
        arguments.extend(self.reason.iter().map(|reason| format!("--reason={reason}")));
        let switches = [
            (self.unserved, "--unserved"),
            (self.decisions, "--decisions"),
            (self.output == Output::Json, "--output=json"),
        ];
        arguments.extend(switches.iter().filter(|(is_set, _)| *is_set).map(|(_, switch)| (*switch).to_owned()));
        arguments
    }

    /// Prints a line. Returns false if the reader has closed the pipe.
    fn print(&self, node: &str, line: &str, width: usize) -> Result<bool> {
        let text = match self.output {
            Output::Text => format!("{node:width$}  {}", escaped(line)),
            Output::Json => {
                let event: Value = serde_json::from_str(line).with_context(|| format!("read an event of {node}"))?;
                json!({ "node": node, "event": event }).to_string()
            }
        };
        let mut stdout = stdout().lock();
        match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
            result => result.map(|()| true).context("write to standard output"),
        }
    }
}
