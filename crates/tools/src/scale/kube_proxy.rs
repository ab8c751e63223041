//! kube-proxy itself in a large cluster: its start, and its changes.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Options;
use super::figure::{By, Found, What};
use super::kpx::{Probe, idle, past, put_followed, waits};
use super::load::Streams;
use super::place::{PODS, Place, dial};
use super::rules::{FOLLOWED, kernel_memory};
use crate::bench::kube_proxy::{Arguments, Running, reads_slices};
use crate::control::cluster::{Cluster, NODE, NODE_IP, newcomer};
use crate::control::fixture::Fixture;

/// The time between two looks whether it serves.
const LOOK: Duration = Duration::from_millis(10);

/// Measures kube-proxy itself, from its lists until the probe is served: it writes all rules at
/// once.
pub(super) fn measure(
    options: &Options,
    by: By,
    cluster: &Cluster,
    put: &mut impl FnMut(What, Found),
) -> Result<()> {
    let program = options
        .kube_proxy
        .as_ref()
        .context("no kube-proxy was given")?;
    let mode = if by == By::KubeProxyIptables {
        "iptables"
    } else {
        "nftables"
    };
    let fixture = Fixture::new(cluster)?;
    let place = Place::around(&fixture.netns, NODE_IP)?;
    let probe = Probe::add(&fixture, cluster.services)?;
    let is_old = !reads_slices(program)?;
    if is_old {
        (0..cluster.services).try_for_each(|nth| {
            fixture
                .server
                .apply_as_is(&cluster.endpoints_object(nth, None))
        })?;
        fixture
            .server
            .apply_as_is(&probe.endpoints_object(newcomer(0)))?;
    }
    let dir = tempfile::tempdir().context("make a folder")?;
    let streams = Streams::start(&place, past(cluster))?;
    let memory_before = kernel_memory()?;
    let bytes_before = fixture.server.meter().bytes_sent();
    let started = Instant::now();
    let arguments = Arguments {
        kubeconfig: &fixture.kubeconfig(),
        node: NODE,
        mode,
        pods: PODS,
    };
    let mut running = Running::start(&fixture.netns, program, &arguments, &dir.path().join("log"))?;
    let served = loop {
        if place.client.run(|| dial(probe.frontend())).is_ok() {
            break Some(Instant::now());
        }
        running.check()?;
        if started.elapsed() > options.limit {
            break None;
        }
        thread::sleep(LOOK);
    };
    waits(streams, [What::StartWait, What::StartWaitBeside], put)?;
    let listed = fixture.server.meter().last_list();
    let found = served.zip(listed).map_or(
        Found::NotWithin(options.limit.as_secs_f64()),
        |(served, listed)| served.saturating_duration_since(listed).into(),
    );
    put(What::Programmed, found);
    put(
        What::StartBytes,
        Found::mebibytes(fixture.server.meter().bytes_sent() - bytes_before),
    );
    if served.is_none() {
        return Ok(());
    }
    // The tool that wrote the rules may not have ended yet, and it may write all of them once more.
    running.rest(options.limit)?;
    let memory = running.process().memory()?;
    put(What::Resident, Found::mebibytes(memory.resident));
    put(What::PeakResident, Found::mebibytes(memory.peak));
    put(What::StartCpu, running.spent()?.into());
    // An old one knows no endpoint of the Service that connections stay open with.
    if !is_old {
        put(
            What::IdleCpu,
            idle(running.process(), &place, &probe, options)?,
        );
    }
    put(
        What::KernelMemory,
        (kernel_memory()?.saturating_sub(memory_before) as f64 / 1024.0).into(),
    );
    let follow = |nth| probe.follow(&fixture, &place, nth, is_old, options.limit);
    put_followed((0..FOLLOWED).map(follow).collect::<Result<_>>()?, put);
    Ok(())
}
