//! `kubectl kpx connectivity-test`: creates servers and clients in the cluster, and tests which
//! destinations the clients reach.

mod cases;
mod forwarding;
mod namespace;
mod objects;
mod report;
mod run;
mod stage;

use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use proxy_view::output::OutputArgs;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

use crate::connect::ConnectArgs;
use crate::pods;
use cases::Plan;
use forwarding::Forwarding;
use report::Report;
use stage::{DIALS, Stage, TIMEOUT};

/// The default number of nodes.
const NODES: usize = 2;

/// Test every kind of Service in the cluster with temporary pods.
///
/// Creates a namespace with servers, clients and Services on two nodes, dials from pods, nodes and
/// here, and removes everything, also after Ctrl-C. The pods run kpx's own image. Each case is a
/// row: passed, failed, or skipped with the reason.
///
/// Exit status: 0 if no case failed, else 1.
#[derive(Args, Debug)]
pub(crate) struct ConnectivityArgs {
    /// Image of the test's pods, with kpx at /usr/local/bin/kpx. Default: the image of kpx's own
    /// pod.
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    /// Namespace of the test, created by it. Default: kpx-connectivity-NUMBER.
    #[arg(long, value_name = "NAMESPACE")]
    test_namespace: Option<String>,
    /// Address for a Service of type LoadBalancer, one per family: unused, and routed to a node
    /// from outside.
    #[arg(long, value_name = "IP")]
    load_balancer_ip: Vec<IpAddr>,
    /// ExternalIP for a Service, one per family: unused, and routed to a node from outside.
    #[arg(long, value_name = "IP")]
    external_ip: Vec<IpAddr>,
    /// Also test whether the network carries the packets of `--external-forwarding dsr`, which may be
    /// off: nodes send IPIP to each other, and send this machine datagrams with other nodes'
    /// addresses and the given addresses. The test's pods in the nodes' networks get NET_RAW.
    #[arg(long)]
    external_forwarding: bool,
    /// Seconds until the Services must work; later failures count.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=60))]
    settle: u64,
    /// Keep the namespace and its pods; the next run removes them.
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn connectivity_test(
    connect: &ConnectArgs,
    args: &ConnectivityArgs,
) -> Result<ExitCode> {
    let client = connect.client().await?;
    let mut kpx = pods::find(&client, connect, &connect.node).await?;
    if let Some((at, absent)) = kpx
        .iter()
        .find_map(|at| Some((at, at.absent.as_ref()?)))
        .filter(|_| !connect.node.is_empty())
    {
        bail!("{}: {absent}", at.node);
    }
    kpx.retain(|at| at.absent.is_none());
    if connect.node.is_empty() && !connect.all_nodes {
        kpx.truncate(NODES);
    }
    ensure!(!kpx.is_empty(), "no node runs kpx");
    let namespace = args.test_namespace.clone().unwrap_or_else(fresh_name);
    let mut stage = Stage::new(client, connect, kpx, namespace)?;
    stage.remove_leftovers().await?;
    // The signals are caught before the first object exists, so that every exit removes the
    // objects.
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let limit = connect.timeout(TIMEOUT) + Duration::from_secs(DIALS);
    let report = tokio::select! {
        done = timeout(limit, work(&mut stage, args)) => {
            done.map_err(|_| anyhow!("the test did not end within {} s", limit.as_secs())).flatten()
        }
        _ = term.recv() => Err(anyhow!("stopped by SIGTERM")),
        _ = int.recv() => Err(anyhow!("stopped by Ctrl-C")),
    };
    let removed = stage.close(args.keep).await;
    let code = report.and_then(|report| report.print(&args.output));
    match (code, removed) {
        (Err(error), Err(left)) => Err(error.context(format!("{left:#}"))),
        (Ok(_), Err(left)) => {
            Err(left).context("the test has ended, but its namespace still exists")
        }
        (code, Ok(())) => code,
    }
}

async fn work(stage: &mut Stage<'_>, args: &ConnectivityArgs) -> Result<Report> {
    stage.build(args).await?;
    let plan = Plan::of(stage);
    let judged = run::run(stage, &plan.dials, Duration::from_secs(args.settle)).await;
    let forwarding = match args.external_forwarding {
        true => Forwarding::run(stage, args).await,
        false => Forwarding::default(),
    };
    Ok(Report::of(stage, plan, judged, forwarding).await)
}

/// Returns a new name for the run's namespace, made of the time.
fn fresh_name() -> String {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    format!("kpx-connectivity-{:x}", now.as_micros() & 0xffff_ffff)
}
