//! Sessions as text: the seed of a cluster, and what happens in it, a line each.
//!
//! ```text
//! # why it is kept
//! cluster 17
//! packet ingress:eth0 in mark=0x0 segments=0 0200…
//! age 45
//! endpoints 99
//! weights 7
//! fast opens lease pod-bare
//! packet egress:pod0 in:eth1 mark=0x0 segments=0 0200…
//! misplaced packet ingress:pod0 in mark=0x0 segments=0 0200…
//! ```

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use testbed::reference::place::Device;

use crate::fast::Fast;
use crate::model::{At, MADE_HERE, Sent, hex, made_here, unhex};
use crate::steps::Step;
use crate::stranger::Pretence;

pub(crate) fn write(why: &str, cluster: u64, steps: &[Step]) -> String {
    let mut text = why
        .lines()
        .map(|line| format!("# {line}\n"))
        .collect::<String>();
    let _infallible = writeln!(text, "cluster {cluster}");
    for step in steps {
        let _infallible = match step {
            Step::Age(secs) => writeln!(text, "age {secs}"),
            Step::Endpoints(seed) => writeln!(text, "endpoints {seed}"),
            Step::Weights(seed) => writeln!(text, "weights {seed}"),
            Step::Fast(fast) => writeln!(text, "fast {}", fast.words()),
            Step::Packet(sent) => writeln!(text, "{}", packet(sent)),
            Step::Stranger(pretence) => {
                writeln!(text, "{} {}", pretence.name(), packet(&pretence.sent))
            }
        };
    }
    text
}

/// Writes a packet as a line.
pub(crate) fn packet(sent: &Sent) -> String {
    let by = sent.by.map(|device| format!("in:{}", device.name()));
    let at = at(sent.at);
    let whose = by
        .as_deref()
        .unwrap_or(if sent.came_in { "in" } else { "own" });
    format!(
        "packet {at} {whose} mark={:#x} segments={} {}",
        sent.mark,
        sent.segments,
        hex(&sent.frame)
    )
}

/// Parses the cluster's seed and the steps.
pub(crate) fn read(text: &str) -> Result<(u64, Vec<Step>)> {
    let mut cluster = None;
    let mut steps = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match line.split_whitespace().collect::<Vec<_>>().as_slice() {
            [] => {}
            ["cluster", seed] => cluster = Some(seed.parse()?),
            ["age", secs] => steps.push(Step::Age(secs.parse()?)),
            ["endpoints", seed] => steps.push(Step::Endpoints(seed.parse()?)),
            ["weights", seed] => steps.push(Step::Weights(seed.parse()?)),
            ["fast", words @ ..] => steps.push(Step::Fast(Fast::read(words)?)),
            ["packet", rest @ ..] => steps.push(Step::Packet(sent(rest)?)),
            [name, "packet", rest @ ..] => {
                steps.push(Step::Stranger(Pretence::named(name, sent(rest)?)?))
            }
            _ => bail!("{line}: not a step"),
        }
    }
    Ok((cluster.context("no cluster")?, steps))
}

fn sent(words: &[&str]) -> Result<Sent> {
    let [at, whose, mark, segments, frame] = words else {
        bail!("{words:?}: not a packet")
    };
    let (came_in, by) = match whose.split_once(':') {
        Some((_, by)) => (true, Some(device(by)?)),
        None => (*whose == "in", None),
    };
    let mark = mark.strip_prefix("mark=0x").context("mark=")?;
    let segments = segments.strip_prefix("segments=").context("segments=")?;
    Ok(Sent {
        at: place(at)?,
        came_in,
        by,
        mark: u32::from_str_radix(mark, 16)? & !MADE_HERE | made_here(came_in),
        segments: segments.parse()?,
        frame: unhex(frame)?,
    })
}

fn at(at: At) -> String {
    match at {
        At::Ingress(device) => format!("ingress:{}", device.name()),
        At::Egress(device) => format!("egress:{}", device.name()),
        At::Anchor => "anchor".to_owned(),
        At::Lo => "lo".to_owned(),
    }
}

fn device(name: &str) -> Result<Device> {
    let found = Device::ALL.into_iter().find(|device| device.name() == name);
    found.with_context(|| format!("{name}: no device"))
}

fn place(text: &str) -> Result<At> {
    Ok(match text.split_once(':') {
        Some(("ingress", name)) => At::Ingress(device(name)?),
        Some(("egress", name)) => At::Egress(device(name)?),
        None if text == "anchor" => At::Anchor,
        None if text == "lo" => At::Lo,
        _ => bail!("{text}: no hook"),
    })
}
