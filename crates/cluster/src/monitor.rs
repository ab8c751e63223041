//! `kubectl kpx monitor`: the event streams of several nodes, merged line by line.

use std::future::Future;
use std::io::{ErrorKind, Write, stdout};
use std::net::IpAddr;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::Output;
use crate::answers::name_failed;
use crate::connect::ConnectArgs;
use crate::exec::{self, BROKEN};
use crate::pods::{Cluster, NodePod};
use crate::select;
use proxy_view::output::{escaped, escaped_json};
use proxy_view::reason_parser;

/// The maximum number of lines that wait for the terminal.
const QUEUE: usize = 1_024;
/// Time limit in seconds for the start of a node's stream.
const START: u64 = 20;
/// Maximum size of the kept standard error in bytes.
const LONGEST_STDERR: u64 = 4_096;
/// Maximum size of a line in bytes.
const LONGEST_LINE: u64 = 64 << 10;

/// Show packets that open flows, are dropped or are rejected on the nodes, until stopped.
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
    #[arg(long, value_name = "REASON", value_parser = reason_parser(), hide_possible_values = true, conflicts_with = "decisions")]
    reason: Option<String>,
    /// Show only dropped and rejected packets.
    #[arg(long, conflicts_with = "decisions")]
    unserved: bool,
    /// Show only packets that open flows.
    #[arg(long)]
    decisions: bool,
    /// The number of lines per second of each node; packets beyond it are counted as lost.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    limit_per_second: u32,
    /// Start with past packets of this time: 30s, 5m, 1h30m, as far as the nodes keep
    /// them (`kpx run --monitor-history`). The lines of each node are in their order, and those of
    /// different nodes mixed.
    #[arg(long, value_name = "DURATION")]
    since: Option<String>,
    /// Exit after N packets of all nodes together.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Print for each packet a line for people, or a line of JSON with the fields node and event.
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    output: Output,
}

pub(crate) async fn monitor(connect: &ConnectArgs, args: &MonitorArgs) -> Result<ExitCode> {
    let cluster = Cluster::find(connect).await?;
    let width = cluster
        .nodes
        .iter()
        .map(|at| at.node.len())
        .max()
        .unwrap_or_default();
    let (sender, mut lines) = mpsc::channel(QUEUE);
    let mut streams: FuturesUnordered<_> = cluster
        .nodes
        .iter()
        .map(|at| watch(&cluster, connect, at, args, sender.clone()))
        .collect();
    drop(sender);
    let mut failed = Vec::new();
    let mut shown = 0;
    let mut stopped = std::pin::pin!(tokio::signal::ctrl_c());
    while args.count.is_none_or(|count| shown < count) {
        tokio::select! {
            line = lines.recv() => match line {
                Some((node, line)) if args.print(node, &line, width)? => shown += 1,
                _ => break,
            },
            Some(ended) = streams.next(), if !streams.is_empty() => {
                let (node, error): (&str, anyhow::Error) = ended;
                name_failed(cluster.nodes.len(), &[(node, &error)]);
                failed.push(node);
            }
            _ = &mut stopped => break,
        }
    }
    Ok(if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Forwards the lines of a node until its stream ends, and returns the cause of the end.
async fn watch<'a>(
    cluster: &Cluster,
    connect: &ConnectArgs,
    at: &'a NodePod,
    args: &MonitorArgs,
    lines: mpsc::Sender<(&'a str, String)>,
) -> (&'a str, anyhow::Error) {
    let work = async {
        let limit = connect.timeout(START);
        let started = timeout(limit, exec::start(&cluster.client, at, &args.arguments())).await;
        let mut process =
            started.map_err(|_| anyhow!("no answer within {} s", limit.as_secs()))??;
        let status = process.take_status().context("kpx has no status")?;
        let stdout = process.stdout().context("kpx has no output")?;
        let stderr = process.stderr().context("kpx has no standard error")?;
        let events = hand_on(stdout, async |line| {
            let shown = args.form(&at.node, &line)?;
            lines
                .send((&at.node, shown))
                .await
                .map_err(|_| anyhow!("stopped"))
        });
        let words = until_end(events, stderr, status).await?;
        bail!(
            "{}",
            if words.trim().is_empty() {
                "kpx has ended"
            } else {
                words.trim()
            }
        )
    };
    let ended: Result<()> = work.await;
    (&at.node, ended.err().unwrap_or_else(|| anyhow!("stopped")))
}

/// Forwards each line. A line above the limit is an error, so that a node cannot fill the
/// operator's memory.
async fn hand_on(
    stdout: impl AsyncRead + Unpin,
    mut to: impl AsyncFnMut(String) -> Result<()>,
) -> Result<()> {
    let mut stdout = BufReader::new(stdout);
    loop {
        let mut line = Vec::new();
        let read = (&mut stdout)
            .take(LONGEST_LINE + 1)
            .read_until(b'\n', &mut line)
            .await;
        if read.context("read the output of kpx")? == 0 {
            return Ok(());
        }
        ensure!(
            line.len() as u64 <= LONGEST_LINE,
            "a line is longer than {} KiB",
            LONGEST_LINE >> 10
        );
        to(String::from_utf8_lossy(&line).trim_end().to_owned()).await?;
    }
}

/// Waits for the end of the events, and returns the standard error of kpx.
async fn until_end(
    events: impl Future<Output = Result<()>>,
    stderr: impl AsyncRead + Unpin,
    status: impl Future<Output = Option<Status>>,
) -> Result<String> {
    // After a connection error the client drops the status and leaves the outputs open.
    let status = async { status.await.context(BROKEN) };
    // `biased` polls the events first, so that events before a failure are still printed.
    let ended = async {
        tokio::try_join!(biased; events, exec::first_bytes(stderr, LONGEST_STDERR), status)
    };
    let ((), words, _status) = ended.await?;
    Ok(String::from_utf8_lossy(&words).into_owned())
}

impl MonitorArgs {
    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            "monitor".to_owned(),
            format!("--limit-per-second={}", self.limit_per_second),
        ];
        arguments.extend(self.service.iter().map(|name| format!("--service={name}")));
        arguments.extend(select::in_namespace(&self.service_namespace));
        arguments.extend(
            self.client
                .iter()
                .map(|client| format!("--client={client}")),
        );
        arguments.extend(
            self.reason
                .iter()
                .map(|reason| format!("--reason={reason}")),
        );
        arguments.extend(self.since.iter().map(|since| format!("--since={since}")));
        let switches = [
            (self.unserved, "--unserved"),
            (self.decisions, "--decisions"),
            (self.output == Output::Json, "--output=json"),
        ];
        arguments.extend(
            switches
                .iter()
                .filter(|(is_set, _)| *is_set)
                .map(|(_, switch)| (*switch).to_owned()),
        );
        arguments
    }

    /// Formats a line of the node; as text without the node's name.
    fn form(&self, node: &str, line: &str) -> Result<String> {
        match self.output {
            Output::Text => Ok(escaped(line)),
            Output::Json => {
                let event: Value = serde_json::from_str(line).context("a line is not JSON")?;
                Ok(escaped_json(
                    &json!({ "node": node, "event": event }).to_string(),
                ))
            }
        }
    }

    /// Prints a line. Returns false if the reader has closed the pipe.
    fn print(&self, node: &str, line: &str, width: usize) -> Result<bool> {
        let mut stdout = stdout().lock();
        let written = match self.output {
            Output::Text => writeln!(stdout, "{node:width$}  {line}"),
            Output::Json => writeln!(stdout, "{line}"),
        };
        match written.and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
            result => result.map(|()| true).context("write to standard output"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::time::Duration;

    use tokio::io::{AsyncWriteExt, simplex};

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn connection_that_breaks_off_ends_the_stream_behind_its_lines() {
        let (stdout, mut out) = simplex(64);
        let (stderr, _err) = simplex(64);
        out.write_all(b"one\ntwo\nthr").await.unwrap();
        let mut lines = Vec::new();
        let events = hand_on(stdout, async |line| {
            lines.push(line);
            Ok(())
        });
        let ended = timeout(MINUTE, until_end(events, stderr, ready(None)))
            .await
            .unwrap();
        assert_eq!(ended.unwrap_err().to_string(), BROKEN);
        assert_eq!(lines, ["one", "two"]);
    }

    #[tokio::test]
    async fn line_without_end_is_an_error() {
        let events = hand_on(tokio::io::repeat(b'a'), async |_| Ok(()));
        let ended = timeout(MINUTE, until_end(events, tokio::io::empty(), pending()))
            .await
            .unwrap();
        assert_eq!(
            ended.unwrap_err().to_string(),
            "a line is longer than 64 KiB"
        );
    }

    #[tokio::test]
    async fn words_are_read_while_the_stream_runs() {
        let (stdout, mut out) = simplex(64);
        let (stderr, mut err) = simplex(64);
        let node = async {
            err.write_all(&[b'w'; 1_000]).await?;
            out.write_all(b"one\n").await?;
            out.shutdown().await?;
            err.shutdown().await
        };
        let events = hand_on(stdout, async |_| Ok(()));
        let ended = until_end(events, stderr, ready(Some(Status::default())));
        let (ended, node) = timeout(MINUTE, async { tokio::join!(ended, node) })
            .await
            .unwrap();
        node.unwrap();
        assert_eq!(ended.unwrap().len(), 1_000);
    }

    #[test]
    fn line_that_is_no_json_is_an_error_of_its_node() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: MonitorArgs,
        }
        let line: Line = clap::Parser::parse_from(["monitor", "--output=json"]);
        assert_eq!(
            line.args.form("n1", "{\"a\":1}").unwrap(),
            "{\"event\":{\"a\":1},\"node\":\"n1\"}"
        );
        assert!(line.args.form("n1", "not JSON").is_err());
    }
}
