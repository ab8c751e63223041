//! kube-proxy itself in a large cluster.

use std::fs::File;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::unistd::Pid;

use super::Options;
use super::figure::{By, Found, What};
use super::kpx::Probe;
use super::place::{PODS, Place, dial};
use crate::bench::{SLICES_SINCE, minor};
use crate::control::cluster::{Cluster, NODE, NODE_IP};
use crate::control::fixture::Fixture;
use crate::control::process::Process;

/// The time between two looks whether it serves.
const LOOK: Duration = Duration::from_millis(10);

/// Measures kube-proxy itself, from its lists until the probe is served: it writes all rules at once.
pub(super) fn measure(options: &Options, by: By, cluster: &Cluster, put: &mut impl FnMut(What, Found)) -> Result<()> {
    let program = options.kube_proxy.as_ref().context("no kube-proxy was given")?;
    let mode = if by == By::KubeProxyIptables { "iptables" } else { "nftables" };
    let fixture = Fixture::new(cluster)?;
    let place = Place::around(&fixture.netns, NODE_IP)?;
    let probe = Probe::add(&fixture, cluster.services)?;
    let is_old = minor(program)? < SLICES_SINCE;
    if is_old {
        (0..cluster.services).try_for_each(|nth| fixture.server.apply_as_is(&cluster.endpoints_object(nth, None)))?;
        fixture.server.apply_as_is(&probe.endpoints_object())?;
    }
    let dir = tempfile::tempdir().context("make a folder")?;
    let log = File::create(dir.path().join("log")).context("create a log")?;
    let mut command = Command::new(program);
    command.arg("--kubeconfig").arg(fixture.kubeconfig());
    command.args(["--hostname-override", NODE, "--proxy-mode", mode, "--cluster-cidr", PODS]);
    // Settings of the whole machine are not its to change.
    command.args(["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"]);
    command.args(["--conntrack-tcp-timeout-close-wait=0"]);
    command.args(is_old.then_some("--feature-gates=EndpointSliceProxying=false"));
    let (bytes_before, started) = (fixture.server.meter().bytes_sent(), Instant::now());
    let mut child = fixture.netns.spawn(command.stdout(log.try_clone()?).stderr(log))?;
    let process = Process(Pid::from_raw(child.id().cast_signed()));
    let served = loop {
        if place.client.run(|| dial(probe.frontend())).is_ok() {
            break Some(Instant::now());
        }
        if started.elapsed() > options.limit {
            break None;
        }
        thread::sleep(LOOK);
    };
    let listed = fixture.server.meter().last_list();
    let found = served.zip(listed).map_or(Found::NotWithin(options.limit.as_secs_f64()), |(served, listed)| {
        served.saturating_duration_since(listed).into()
    });
    put(What::Programmed, found);
    put(What::StartBytes, ((fixture.server.meter().bytes_sent() - bytes_before) as f64 / f64::from(1 << 20)).into());
    let memory = process.memory()?;
    put(What::Resident, (memory.resident as f64 / f64::from(1 << 20)).into());
    put(What::PeakResident, (memory.peak as f64 / f64::from(1 << 20)).into());
    put(What::StartCpu, process.cpu()?.into());
    child.kill()?;
    child.wait()?;
    Ok(())
}
