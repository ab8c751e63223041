//! kube-proxy itself, with the tests' API server.

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

/// The first minor version that has the nftables mode without setting a feature gate.
pub const NFTABLES_SINCE: u32 = 31;
/// The first minor version that reads EndpointSlices v1. Older versions get Endpoints.
const SLICES_SINCE: u32 = 22;
/// The interval over which kube-proxy must be idle.
const QUIET: Duration = Duration::from_secs(3);
/// The CPU time that an idle kube-proxy may take in that interval, for timers and watches.
const FEW: Duration = Duration::from_millis(100);

/// A running kube-proxy. Drop kills it and its tools; its rules end with the namespace.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    log: PathBuf,
}

/// Its settings. `mode` and `pods` are values of `--proxy-mode` and `--cluster-cidr`.
pub(crate) struct Arguments<'a> {
    pub(crate) kubeconfig: &'a Path,
    pub(crate) node: &'a str,
    pub(crate) mode: &'a str,
    pub(crate) pods: &'a str,
}

impl Running {
    /// Starts kube-proxy in a namespace, with its output in the file `log`.
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
        // The machine's global sysctls stay unchanged.
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

    /// Fails with the last output if it has ended.
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

    /// Waits until it is idle. It writes its rules again after the first time, which takes seconds
    /// with many Services.
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

    /// Returns the CPU time of it and of the tools that it has run.
    pub(crate) fn spent(&self) -> Result<Duration> {
        self.process().cpu_with_children()
    }

    pub(crate) fn process(&self) -> Process {
        Process(Pid::from_raw(self.child.id().cast_signed()))
    }
}

/// Returns true if a kube-proxy reads EndpointSlices rather than Endpoints.
pub(crate) fn reads_slices(program: &Path) -> Result<bool> {
    Ok(minor(program)? >= SLICES_SINCE)
}

/// A kube-proxy on n1 of a lab.
#[derive(Debug)]
pub(super) struct KubeProxy<'a> {
    pub(super) running: Running,
    _lab: &'a Lab,
    /// The objects that it watches.
    _cluster: Cluster,
}

impl<'a> KubeProxy<'a> {
    /// `mode` is a value of `--proxy-mode`.
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

/// Parses the minor version in kube-proxy's `Kubernetes v1.20.2`.
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
