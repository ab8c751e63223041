//! kube-proxy itself, fed by the tests' own API server.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result};

use super::services;
use crate::kube_rules::Rules;
use testbed::agent::{Cluster, Object, Source, idle, wait_until};
use testbed::lab::{CLUSTER_PODS, Family, Lab};
use testbed::netns::check;

/// The first minor version that has the mode nftables without a feature gate.
pub const NFTABLES_SINCE: u32 = 31;
/// The first minor version that reads EndpointSlices of version v1. Older ones read Endpoints here.
pub(crate) const SLICES_SINCE: u32 = 22;
/// The time over which kube-proxy's rest is measured.
const QUIET: Duration = Duration::from_secs(3);
/// The ticks that it may take meanwhile, for its timers and watches.
const FEW: u64 = 10;

/// A kube-proxy on n1, killed with this value; its rules go with the namespace.
#[derive(Debug)]
pub(super) struct KubeProxy<'a> {
    child: Child,
    _lab: &'a Lab,
    /// Which it watches.
    _cluster: Cluster,
}

impl<'a> KubeProxy<'a> {
    /// `mode` as `--proxy-mode` takes it.
    pub(super) fn start(lab: &'a Lab, program: &Path, mode: &str, rules: &Rules) -> Result<Self> {
        let cluster = Cluster::with_api_server(lab)?;
        let reads_slices = minor(program)? >= SLICES_SINCE;
        let endpoints = if reads_slices { Vec::new() } else { services::endpoints(rules) };
        let objects = services::objects(lab, rules).into_iter().chain(endpoints);
        objects.map(Object).try_for_each(|object| cluster.put(&object))?;
        let (Source::Kubeconfig(path) | Source::Manifests(path)) = cluster.source();
        let log = lab.dir().join("kube-proxy.log");
        let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(path);
        command.args(["--hostname-override", lab.n1.host.name, "--proxy-mode", mode]);
        command.args(["--cluster-cidr", &CLUSTER_PODS.cidr(Family::V4)]);
        // Settings of the whole machine are not its to change.
        command.args(["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"]);
        command.args(["--conntrack-tcp-timeout-close-wait=0"]);
        command.args((!reads_slices).then_some("--feature-gates=EndpointSliceProxying=false"));
        let child = lab.n1.host.ns.spawn(command.stdout(output.try_clone()?).stderr(output))?;
        Ok(Self { child, _lab: lab, _cluster: cluster })
    }

    /// Waits until it rests. Its rules are written again after the first time, and that takes seconds with many Services.
    pub(super) fn rest(&self, within: Duration) -> Result<()> {
        let mut before = self.ticks()?;
        wait_until(within, "kube-proxy rests", || {
            idle(QUIET)?;
            let now = self.ticks()?;
            let spent = now - std::mem::replace(&mut before, now);
            Ok(spent <= FEW)
        })
    }

    /// Returns the processor time of it and of the tools that it has run, in ticks (see proc(5), stat).
    fn ticks(&self) -> Result<u64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).context("kube-proxy has ended")?;
        let fields = stat.rsplit(')').next().context("a stat without a name")?.split_whitespace();
        // User and system time, and those of children that were waited for: the 14th to 17th field of all.
        fields.skip(11).take(4).map(|field| Ok(field.parse::<u64>()?)).sum()
    }
}

/// Returns the minor version of a kube-proxy, which says `Kubernetes v1.20.2`.
pub fn minor(program: &Path) -> Result<u32> {
    let said = check(Command::new(program).arg("--version").output(), "ask kube-proxy for its version")?;
    let minor = said.split('.').nth(1).and_then(|minor| minor.parse().ok());
    minor.with_context(|| format!("{} says {}", program.display(), said.trim()))
}

impl Drop for KubeProxy<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill(); // It may have ended by itself.
        let _ = self.child.wait();
    }
}
