//! kube-proxy's rules in a large cluster, loaded by kube-proxy's tools.

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::unistd::Pid;
use testbed::netns::NetNs;

use super::Options;
use super::figure::{By, Found, What};
use super::kpx::{FOLLOWS, Probe, past, put_followed, waits};
use super::load::Streams;
use super::place::{CLIENT, PODS, Place};
use crate::control::cluster::{Cluster, NODE_IP, SERVICE_CIDR, newcomer};
use crate::control::fixture::node;
use crate::control::process::Process;
use crate::kube_rules::{Rules, ServicePort};

/// The number of changes with a measured first packet: some tools load a whole table per change.
pub(super) const FOLLOWED: u32 = 5;
/// Time between two checks of a tool.
const LOOK: Duration = Duration::from_millis(10);

/// The kernel's memory is stable if it changes by fewer KiB within `AT_REST`. `RESTLESS` limits the
/// wait.
const STILL: u64 = 1_024;
const AT_REST: Duration = Duration::from_millis(300);
const RESTLESS: Duration = Duration::from_secs(10);

/// The resources of a tool's run.
pub(super) struct Ran {
    took: Duration,
    cpu: Duration,
    /// In bytes.
    peak: u64,
}

/// Returns the rules of the cluster and of the probe with the given endpoint.
pub(super) fn rules(
    ports: impl Iterator<Item = ServicePort>,
    probe: &Probe,
    endpoint: Ipv4Addr,
) -> Rules {
    Rules {
        pods: PODS.to_owned(),
        services: SERVICE_CIDR.to_owned(),
        node: NODE_IP,
        local: vec![CLIENT],
        ports: ports.chain(probe.ports(endpoint)).collect(),
    }
}

pub(super) fn command(by: By) -> Command {
    let (name, arguments): (_, &[&str]) = match by {
        By::IptablesLegacy => ("iptables-legacy-restore", &["--wait", "--noflush"]),
        By::IptablesNft => ("iptables-nft-restore", &["--wait", "--noflush"]),
        _ => ("nft", &["-f", "-"]),
    };
    let mut command = Command::new(name);
    command.args(arguments);
    command
}

pub(super) fn measure(
    options: &Options,
    by: By,
    cluster: &Cluster,
    put: &mut impl FnMut(What, Found),
) -> Result<()> {
    let node = node()?;
    let place = Place::around(&node, NODE_IP)?;
    let probe = Probe::after(cluster.services);
    let rules = rules(
        (0..cluster.services).map(|nth| cluster.port(nth, None)),
        &probe,
        newcomer(0),
    );
    let text = if by == By::Nftables {
        rules.nftables()
    } else {
        rules.iptables()
    };
    let streams = Streams::start(&place, past(cluster))?;
    let memory_before = kernel_memory()?;
    let ran = feed(&node, command(by), &text, options.limit)?;
    drop(text);
    waits(streams, [What::StartWait, What::StartWaitBeside], put)?;
    let Some(ran) = ran else {
        put(
            What::Programmed,
            Found::NotWithin(options.limit.as_secs_f64()),
        );
        return Ok(());
    };
    put(What::Programmed, ran.took.into());
    put(What::StartCpu, ran.cpu.into());
    put(What::PeakResident, Found::mebibytes(ran.peak));
    put(
        What::KernelMemory,
        (kernel_memory()?.saturating_sub(memory_before) as f64 / 1024.0).into(),
    );
    probe.wait(&place)?;
    let follow = |nth| follow(options, by, &place, &rules, &probe, nth);
    put_followed((0..FOLLOWED).map(follow).collect::<Result<_>>()?, put);
    Ok(())
}

/// Changes the probe's endpoint like kube-proxy, by the rules of that Service alone, and returns
/// the time to the first packet that follows. The time begins with the tool, without kube-proxy's
/// own part.
fn follow(
    options: &Options,
    by: By,
    place: &Place,
    rules: &Rules,
    probe: &Probe,
    nth: u32,
) -> Result<Duration> {
    let addr = |nth: u32| {
        if nth == 0 {
            newcomer(0)
        } else {
            newcomer(99 + nth)
        }
    };
    let [before, _] = probe.ports(addr(nth));
    let [now, _] = probe.ports(addr(nth + 1));
    let gone: &[SocketAddrV4] = &before.endpoints;
    let text = if by == By::Nftables {
        rules.nftables_change(&now, gone)
    } else {
        rules.iptables_change(&now, gone)
    };
    probe.first_packet(place, addr(nth + 1), FOLLOWS, || {
        let ran = feed(place.node, command(by), &text, options.limit)?;
        ran.map(drop)
            .with_context(|| format!("a change took longer than {:?}", options.limit))
    })
}

/// Runs a tool with `text` as its input. Returns `None` if it exceeded `limit` and was killed.
pub(super) fn feed(
    node: &NetNs,
    mut command: Command,
    text: &str,
    limit: Duration,
) -> Result<Option<Ran>> {
    let cpu_before = cpu_of_children()?;
    let started = Instant::now();
    let mut child = node.spawn(
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped()),
    )?;
    let mut input = child.stdin.take().context("open standard input")?;
    let (ended, peak) = thread::scope(|scope| {
        scope.spawn(move || input.write_all(text.as_bytes())); // A tool that stops reading reports why.
        wait(&mut child, limit)
    })?;
    let took = started.elapsed();
    let output = child.wait_with_output()?;
    if !ended {
        return Ok(None);
    }
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{command:?}: {}",
            said.lines().take(3).collect::<Vec<_>>().join("; ")
        );
    }
    Ok(Some(Ran {
        took,
        cpu: cpu_of_children()?.saturating_sub(cpu_before),
        peak,
    }))
}

/// Waits until a process ends, or kills it at the limit. Returns whether it ended by itself, and
/// its peak memory.
fn wait(child: &mut Child, limit: Duration) -> Result<(bool, u64)> {
    let started = Instant::now();
    let mut peak = 0;
    let process = Process(Pid::from_raw(child.id().cast_signed()));
    while child.try_wait()?.is_none() {
        peak = process
            .memory()
            .map_or(peak, |memory| memory.peak.max(peak));
        if started.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Ok((false, peak));
        }
        thread::sleep(LOOK);
    }
    Ok((true, peak))
}

fn cpu_of_children() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("ask for the CPU time of children")?;
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Ok(Duration::from_micros(micros.cast_unsigned()))
}

/// Returns the kernel's own memory in KiB, without reclaimable memory. Waits until it is stable:
/// the kernel frees an earlier node's memory asynchronously.
pub(super) fn kernel_memory() -> Result<u64> {
    let started = Instant::now();
    let mut before = now_in_use()?;
    loop {
        thread::sleep(AT_REST);
        let now = now_in_use()?;
        if now.abs_diff(before) < STILL || started.elapsed() > RESTLESS {
            return Ok(now);
        }
        before = now;
    }
}

fn now_in_use() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let fields = ["SUnreclaim:", "VmallocUsed:", "Percpu:"];
    fields
        .iter()
        .map(|name| field(name).with_context(|| format!("no {name} in /proc/meminfo")))
        .sum()
}
