//! Dials from the pods and from this process, until all replies are right or the time is over.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::join_all;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::cases::{Dial, Expect, From};
use super::objects::{CONTAINER, TestPod};
use super::stage::Stage;
use crate::exec::{self, Answer};
use crate::pods::NodePod;
use crate::probe::{Outcome, Protocol, Reply, Target, dial_all};

const ANSWER: Duration = Duration::from_secs(2);
/// Time limit for an answer that should not arrive.
const SILENCE: Duration = Duration::from_secs(1);
/// The maximum number of destinations per command: its arguments must fit into a URL.
const PER_COMMAND: usize = 50;
/// Time limit for a command, which dials its destinations in parallel, each up to 24 times.
const COMMAND: Duration = Duration::from_secs(90);
/// Maximum size of a command's output in bytes.
const LONGEST: u64 = 4 << 20;
/// The port of kpx's `/healthz`, which shows whether this process reaches a node.
const HEALTH: u16 = 10_256;

/// The result of a dial. The error describes the difference to the expected replies.
pub(super) type Judged = Result<(), String>;

/// Repeats failed dials until all pass or `settle` is over, then dials all once more. The last
/// round counts.
pub(super) async fn run(stage: &Stage<'_>, dials: &[Dial], settle: Duration) -> Vec<Judged> {
    let until = Instant::now() + settle;
    let mut open: Vec<usize> = (0..dials.len()).collect();
    loop {
        let judged = round(stage, dials, &open).await;
        open = open
            .into_iter()
            .zip(judged)
            .filter_map(|(index, judged)| judged.is_err().then_some(index))
            .collect();
        if open.is_empty() || Instant::now() >= until {
            break;
        }
    }
    round(stage, dials, &(0..dials.len()).collect::<Vec<_>>()).await
}

/// Dials each destination once. The clients dial in parallel.
async fn round(stage: &Stage<'_>, dials: &[Dial], wanted: &[usize]) -> Vec<Judged> {
    let mut by_client: BTreeMap<(Option<usize>, bool), Vec<usize>> = BTreeMap::new();
    for index in wanted {
        let dial = &dials[*index];
        by_client
            .entry((dial.client, dial.expect.is_answered()))
            .or_default()
            .push(*index);
    }
    let commands = by_client
        .iter()
        .flat_map(|(key, indices)| indices.chunks(PER_COMMAND).map(move |part| (key, part)));
    let runs = commands.map(|((client, is_answered), part)| async move {
        let targets: Vec<Target> = part
            .iter()
            .map(|index| dials[*index].target.clone())
            .collect();
        let limit = if *is_answered { ANSWER } else { SILENCE };
        let replies = match client {
            Some(pod) => dial_in(stage, *pod, &targets, limit)
                .await
                .map_err(|error| format!("{error:#}")),
            None => Ok(dial_all(&targets, limit).await),
        };
        let judge = |(place, index): (usize, &usize)| {
            let judged = replies
                .as_ref()
                .map_err(Clone::clone)
                .and_then(|all| dials[*index].expect.judge(&all[place]));
            (*index, judged)
        };
        part.iter().enumerate().map(judge).collect::<Vec<_>>()
    });
    let judged: BTreeMap<usize, Judged> = join_all(runs).await.into_iter().flatten().collect();
    wanted
        .iter()
        .map(|index| {
            judged
                .get(index)
                .cloned()
                .unwrap_or_else(|| Err("not dialled".to_owned()))
        })
        .collect()
}

/// Dials from a pod, by a command in the pod.
async fn dial_in(
    stage: &Stage<'_>,
    pod: usize,
    targets: &[Target],
    limit: Duration,
) -> Result<Vec<Vec<Reply>>> {
    let mut arguments = vec![
        "probe".to_owned(),
        "dial".to_owned(),
        format!("--millis={}", limit.as_millis()),
    ];
    arguments.extend(targets.iter().map(ToString::to_string));
    let replies: Vec<Vec<Reply>> = command_in(stage, &stage.pods[pod], &arguments, COMMAND).await?;
    ensure!(
        replies.len() == targets.len(),
        "the pod's kpx has {} of {} replies",
        replies.len(),
        targets.len()
    );
    Ok(replies)
}

/// Runs kpx in a pod of the test, and returns its answer.
pub(super) async fn command_in<T: DeserializeOwned>(
    stage: &Stage<'_>,
    pod: &TestPod,
    arguments: &[String],
    limit: Duration,
) -> Result<T> {
    let at = NodePod {
        node: pod.node.clone(),
        namespace: stage.namespace.clone(),
        pod: pod.name.clone(),
        container: Some(CONTAINER.to_owned()),
        image: None,
        absent: None,
    };
    let Answer {
        code,
        stdout,
        stderr,
    } = exec::run(&stage.client, &at, arguments, limit, LONGEST).await?;
    ensure!(code == 0, "kpx probe ended with {code}: {}", stderr.trim());
    serde_json::from_slice(&stdout).context("kpx in the pod answers in an unknown form")
}

/// Returns the addresses that neither answer this process nor refuse its connections.
pub(super) async fn unreached(dials: &[Dial]) -> Vec<IpAddr> {
    let outside = dials
        .iter()
        .filter(|dial| dial.from == From::Outside)
        .filter_map(|dial| dial.target.ip());
    let mut addresses: Vec<_> = outside.collect();
    addresses.sort();
    addresses.dedup();
    let targets = addresses
        .iter()
        .map(|ip| Target::new(Protocol::Tcp, std::net::SocketAddr::new(*ip, HEALTH)));
    let replies = dial_all(&targets.collect::<Vec<_>>(), ANSWER).await;
    let is_unreached = |replies: &Vec<Reply>| {
        replies
            .iter()
            .all(|reply| matches!(reply.outcome, Outcome::Silent | Outcome::Unreachable))
    };
    addresses
        .into_iter()
        .zip(&replies)
        .filter(|(_, replies)| is_unreached(replies))
        .map(|(ip, _)| ip)
        .collect()
}

/// Returns kpx's decision for such a packet on the client's node.
pub(super) async fn decision(stage: &Stage<'_>, dial: &Dial) -> Option<String> {
    let pod = &stage.pods[dial.client?];
    let to = dial.target.ip()?;
    let from = match dial.from {
        From::Node => format!("node/{}", pod.node),
        _ => pod
            .ips
            .iter()
            .find(|ip| ip.is_ipv4() == to.is_ipv4())?
            .to_string(),
    };
    let at = stage.kpx.iter().find(|at| at.node == pod.node)?;
    let to = format!("--to={}/{}", dial.target.to, dial.target.protocol);
    let arguments = [
        "trace".to_owned(),
        format!("--from={from}"),
        to,
        "--output=json".to_owned(),
    ];
    let answer = exec::run(&stage.client, at, &arguments, COMMAND, LONGEST).await;
    let Ok(Answer {
        code: 0, stdout, ..
    }) = answer
    else {
        return None;
    };
    let trace: Value = serde_json::from_slice(&stdout).ok()?;
    let outcome = &trace["outcome"];
    let word = |field: &str| outcome[field].as_str().unwrap_or_default();
    Some(match (outcome["backend"]["at"].as_str(), word("reason")) {
        (Some(backend), _) => format!("{} to {backend}", word("verdict")),
        (None, reason) => format!("{} ({reason}): {}", word("verdict"), word("explanation")),
    })
}

impl Expect {
    fn is_answered(self) -> bool {
        !matches!(self, Self::Silent | Self::Closed)
    }
}
