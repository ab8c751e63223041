//! kube-proxy itself, fed by the tests' own API server.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::services;
use crate::control::process::Process;
use crate::kube_rules::Rules;
use testbed::agent::{Cluster, Object, Source, idle, wait_until};
use testbed::lab::{CLUSTER_PODS, Family, Lab};
use testbed::netns::{NetNs, check};

/// The first minor version that has the mode nftables without a feature gate.
pub const NFTABLES_SINCE: u32 = 31;
/// The first minor version that reads EndpointSlices of version v1. Older ones read Endpoints here.
const SLICES_SINCE: u32 = 22;
/// The time over which kube-proxy's rest is measured.
const QUIET: Duration = Duration::from_secs(3);
/// The processor time that it may take meanwhile, for its timers and watches.
const FEW: Duration = Duration::from_millis(100);

/// A kube-proxy, killed with this value and with the tools that it runs; its rules go with the
/// namespace.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    log: PathBuf,
}

/// What it is told. `mode` and `pods` are as `--proxy-mode` and `--cluster-cidr` take them.
pub(crate) struct Arguments<'a> {
    pub(crate) kubeconfig: &'a Path,
    pub(crate) node: &'a str,
    pub(crate) mode: &'a str,
    pub(crate) pods: &'a str,
}

impl Running {
    /// Starts it in a namespace, with its output in the file `log`.
    pub(crate) fn start(
        ns: &NetNs,
        program: &Path,
        arguments: &Arguments<'_>,
        log: &Path,
    ) -> Result<Self> {
        let output = File::create(log).with_context(|| format!("create {}", log.display()))?;
        let mut command = Command::new(program);
        command.arg("--kubeconfig").arg(arguments.kubeconfig);
        command.args([
            "--hostname-override",
            arguments.node,
            "--proxy-mode",
            arguments.mode,
            "--cluster-cidr",
            arguments.pods,
        ]);
        // Settings of the whole machine are not its to change.
        command.args([
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
        ]);
        command.args(["--conntrack-tcp-timeout-close-wait=0"]);
        command.args(
            (!reads_slices(program)?).then_some("--feature-gates=EndpointSliceProxying=false"),
        );
        let child = ns.spawn(
            command
                .stdout(output.try_clone()?)
                .stderr(output)
                .process_group(0),
        )?;
        Ok(Self {
            child,
            log: log.to_owned(),
        })
    }

    /// Fails if it has ended, with what it said last.
    pub(crate) fn check(&mut self) -> Result<()> {
        let Some(status) = self.child.try_wait()? else {
            return Ok(());
        };
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let last = log.lines().rev().take(3).collect::<Vec<_>>();
        bail!(
            "kube-proxy has ended, {status}: {}",
            last.into_iter().rev().collect::<Vec<_>>().join("; ")
        )
    }

    /// Waits until it rests. Its rules are written again after the first time, and that takes
    /// seconds with many Services.
    pub(crate) fn rest(&mut self, within: Duration) -> Result<()> {
        let mut before = self.spent()?;
        wait_until(within, "kube-proxy rests", || {
            idle(QUIET)?;
            self.check()?;
            let now = self.spent()?;
            let spent = now.saturating_sub(std::mem::replace(&mut before, now));
            Ok(spent <= FEW)
        })
    }

    /// Returns the processor time of it and of the tools that it has run.
    pub(crate) fn spent(&self) -> Result<Duration> {
        self.process().cpu_with_children()
    }

    pub(crate) fn process(&self) -> Process {
        Process(Pid::from_raw(self.child.id().cast_signed()))
    }
}

/// Returns whether a kube-proxy reads EndpointSlices; it reads Endpoints otherwise.
pub(crate) fn reads_slices(program: &Path) -> Result<bool> {
    Ok(minor(program)? >= SLICES_SINCE)
}

/// A kube-proxy on n1 of a lab.
#[derive(Debug)]
pub(super) struct KubeProxy<'a> {
    pub(super) running: Running,
    _lab: &'a Lab,
    /// Which it watches.
    _cluster: Cluster,
}

impl<'a> KubeProxy<'a> {
    /// `mode` as `--proxy-mode` takes it.
    pub(super) fn start(lab: &'a Lab, program: &Path, mode: &str, rules: &Rules) -> Result<Self> {
        let cluster = Cluster::with_api_server(lab)?;
        let endpoints = if reads_slices(program)? {
            Vec::new()
        } else {
            services::endpoints(rules)
        };
        let objects = services::objects(lab, rules).into_iter().chain(endpoints);
        objects
            .map(Object)
            .try_for_each(|object| cluster.put(&object))?;
        let (Source::Kubeconfig(kubeconfig) | Source::Manifests(kubeconfig)) = cluster.source();
        let arguments = Arguments {
            kubeconfig,
            node: lab.n1.host.name,
            mode,
            pods: &CLUSTER_PODS.cidr(Family::V4),
        };
        let running = Running::start(
            &lab.n1.host.ns,
            program,
            &arguments,
            &lab.dir().join("kube-proxy.log"),
        )?;
        Ok(Self {
            running,
            _lab: lab,
            _cluster: cluster,
        })
    }
}

/// Returns the minor version of a kube-proxy, which says `Kubernetes v1.20.2`.
pub fn minor(program: &Path) -> Result<u32> {
    let said = check(
        Command::new(program).arg("--version").output(),
        "ask kube-proxy for its version",
    )?;
    let minor = said.split('.').nth(1).and_then(|minor| minor.parse().ok());
    minor.with_context(|| format!("{} says {}", program.display(), said.trim()))
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = killpg(self.process().0, Signal::SIGKILL); // All may have ended by themselves.
        let _ = self.child.wait();
    }
}
