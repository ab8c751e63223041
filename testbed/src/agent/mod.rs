//! Drives the binary `kpx`: starts it on a node, asks how it is, ends it.

mod cluster;
mod objects;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

pub use self::cluster::{Cluster, Source, api_server};
pub use self::objects::{Hint, Object, SERVICE_PORT, Service, node};
use crate::lab::{Family, Host, Lab, Node, SERVICE_CIDR};

/// How long an agent may take to become healthy, with 50,000 Services on a slow machine, and to end.
const DEADLINE: Duration = Duration::from_secs(180);

/// A `kpx` that runs on a node, or on a host outside of the cluster. Killed with this value; see [`Agent::stop`] for its regular end.
#[derive(Debug)]
pub struct Agent<'a> {
    host: &'a Host,
    child: Child,
    run_dir: PathBuf,
    log: PathBuf,
}

impl<'a> Agent<'a> {
    /// Starts kpx on a node and waits until it says that the node is served.
    pub fn start(lab: &'a Lab, node: &'a Node, source: Source) -> Result<Self> {
        Self::start_with(lab, node, source, &[])
    }

    /// As [`Agent::start`], with more arguments.
    pub fn start_with(lab: &'a Lab, node: &'a Node, source: Source, args: &[String]) -> Result<Self> {
        let mut agent = Self::launch(lab, &node.host, source, args)?;
        let name = node.host.name;
        agent.wait_for("healthy").with_context(|| format!("start kpx on {name}; its log:\n{}", agent.log()))?;
        Ok(agent)
    }

    /// Starts kpx in mode host and waits until it knows the cluster, whether it reaches all of it or not.
    pub fn start_outside(lab: &'a Lab, host: &'a Host, source: Source, args: &[&str]) -> Result<Self> {
        let args: Vec<String> = ["--mode", "host"].iter().chain(args).map(|&arg| arg.to_owned()).collect();
        let mut agent = Self::launch(lab, host, source, &args)?;
        let name = host.name;
        agent.wait_for("complete").with_context(|| format!("start kpx on {name}; its log:\n{}", agent.log()))?;
        Ok(agent)
    }

    fn launch(lab: &Lab, host: &'a Host, source: Source, args: &[String]) -> Result<Self> {
        let name = host.name;
        let run_dir = lab.dir().join(format!("{name}-run"));
        let log = lab.dir().join(format!("{name}.log"));
        fs::create_dir_all(&run_dir).with_context(|| format!("create {}", run_dir.display()))?;
        let output = File::options().create(true).append(true).open(&log);
        let output = output.with_context(|| format!("open {}", log.display()))?;
        let mut command = Command::new(binary()?);
        command.arg("run").arg("--node-name").arg(name).arg("--run-dir").arg(&run_dir);
        command.arg("--bpf-dir").arg(host.ns.bpf_dir());
        match source {
            Source::Manifests(dir) => command.arg("--manifests").arg(dir),
            Source::Kubeconfig(file) => command.arg("--kubeconfig").arg(file),
        };
        for family in Family::ALL {
            command.arg("--service-cidr").arg(SERVICE_CIDR.cidr(family));
        }
        command.args(args);
        let child = host.ns.spawn(command.stdout(output.try_clone()?).stderr(output))?;
        Ok(Self { host, child, run_dir, log })
    }

    /// What `kpx status` says.
    pub fn status(&self) -> Result<Value> {
        let mut command = Command::new(binary()?);
        command.arg("status").arg("--run-dir").arg(&self.run_dir).args(["--output", "json"]);
        // It fails when kpx is not healthy, and says why all the same.
        let output = self.host.ns.run(|| command.output()).with_context(|| format!("run {command:?}"))?;
        serde_json::from_slice(&output.stdout).with_context(|| format!("{command:?}: {output:?}"))
    }

    /// Ends kpx as Kubernetes would; anything but a clean exit is an error.
    pub fn stop(mut self) -> Result<()> {
        kill(self.pid(), Signal::SIGTERM).context("send SIGTERM to kpx")?;
        let mut ended: Option<ExitStatus> = None;
        wait_until(DEADLINE, "kpx ends", || {
            ended = self.child.try_wait()?;
            Ok(ended.is_some())
        })?;
        let status = ended.context("kpx has ended")?;
        ensure!(status.success(), "kpx on {}: {status}; its log:\n{}", self.host.name, self.log());
        Ok(())
    }

    /// What kpx has written so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_else(|error| format!("{}: {error}", self.log.display()))
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Until the status has `what`.
    fn wait_for(&mut self, what: &str) -> Result<()> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("it ended: {status}");
            }
            let status = self.status();
            if matches!(&status, Ok(status) if status[what] == true) {
                return Ok(());
            }
            if started.elapsed() > DEADLINE {
                bail!("not {what} within {DEADLINE:?}: {status:?}");
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for Agent<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill(); // It may have been stopped already.
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("--- log of kpx on {}:\n{}", self.host.name, self.log());
        }
    }
}

const POLL: Duration = Duration::from_millis(20);

/// Waits until `condition` holds; an error once `deadline` has passed, or at once if the condition cannot be told.
pub fn wait_until(deadline: Duration, what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let started = Instant::now();
    while !condition()? {
        ensure!(started.elapsed() < deadline, "waited {deadline:?} in vain until {what}");
        thread::sleep(POLL);
    }
    Ok(())
}

/// The binary under test.
pub fn binary() -> Result<PathBuf> {
    let path = match std::env::var_os("KPX_BIN") {
        Some(path) => PathBuf::from(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/debug/kpx"),
    };
    path.canonicalize().with_context(|| format!("no kpx at {}: build it, or set KPX_BIN", path.display()))
}
