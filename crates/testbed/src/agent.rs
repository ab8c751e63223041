//! Drives the binary `kpx`: starts it on a node, reads its status, stops it.

mod cluster;
mod objects;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proxy_view::status::Status;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tempfile::TempDir;

pub use self::cluster::{Cluster, Source, api_server, api_server_at};
pub use self::objects::{Hint, Object, SERVICE_PORT, Service, node};
use crate::http::get_at_socket;
use crate::lab::{Family, Host, Lab, Node, SERVICE_CIDR};
use crate::netns::NetNs;

/// The time limit for any condition that a test waits for, on a slow and busy machine. Only a test
/// that fails waits for so long.
pub const DEADLINE: Duration = Duration::from_secs(90);
/// The time limit for an agent to become healthy with 50,000 Services on a slow machine, and to
/// end.
const START: Duration = Duration::from_secs(180);
const MANIFESTS: &str = "manifests";

/// The namespace of an agent: borrowed, or its own.
#[derive(Debug)]
pub enum Namespace<'a> {
    Borrowed(&'a NetNs),
    Owned(NetNs),
}

impl<'a> From<&'a NetNs> for Namespace<'a> {
    fn from(ns: &'a NetNs) -> Self {
        Self::Borrowed(ns)
    }
}

impl From<NetNs> for Namespace<'_> {
    fn from(ns: NetNs) -> Self {
        Self::Owned(ns)
    }
}

impl Deref for Namespace<'_> {
    type Target = NetNs;

    fn deref(&self) -> &NetNs {
        match self {
            Self::Borrowed(ns) => ns,
            Self::Owned(ns) => ns,
        }
    }
}

/// A running `kpx`. A drop kills the process; [`Agent::stop`] ends it regularly.
#[derive(Debug)]
pub struct Agent<'a> {
    ns: Namespace<'a>,
    child: Child,
    run_dir: PathBuf,
    log: PathBuf,
    /// The folder of an agent outside a lab.
    home: Option<TempDir>,
}

impl<'a> Agent<'a> {
    /// Starts kpx on a lab's node and waits until it is healthy.
    pub fn start(lab: &'a Lab, node: &'a Node, source: Source) -> Result<Self> {
        Self::start_with(lab, node, source, &[])
    }

    /// Starts kpx like [`Agent::start`], with additional arguments.
    pub fn start_with(
        lab: &'a Lab,
        node: &'a Node,
        source: Source,
        args: &[String],
    ) -> Result<Self> {
        Self::launch(lab, &node.host, source, args)?.healthy()
    }

    /// Starts kpx in host mode and waits until it has read the cluster, reachable or not.
    pub fn start_outside(
        lab: &'a Lab,
        host: &'a Host,
        source: Source,
        args: &[&str],
    ) -> Result<Self> {
        let args: Vec<String> = ["--mode", "host"]
            .iter()
            .chain(args)
            .map(|&arg| arg.to_owned())
            .collect();
        Self::launch(lab, host, source, &args)?.having("complete")
    }

    fn launch(lab: &Lab, host: &'a Host, source: Source, args: &[String]) -> Result<Self> {
        Self::launch_by(None, lab, host, source, args)
    }

    /// Starts kpx on a lab's host through a command that executes its arguments. Does not wait.
    pub fn launch_by(
        by: Option<Command>,
        lab: &Lab,
        host: &'a Host,
        source: Source,
        args: &[impl AsRef<OsStr>],
    ) -> Result<Self> {
        let run_dir = lab.dir().join(format!("{}-run", host.name));
        fs::create_dir_all(&run_dir).with_context(|| format!("create {}", run_dir.display()))?;
        let mut command = run(host.name, source, &run_dir, &host.ns)?;
        for family in Family::ALL {
            command.arg("--service-cidr").arg(SERVICE_CIDR.cidr(family));
        }
        command.args(args);
        if let Some(mut by) = by {
            by.arg(command.get_program()).args(command.get_args());
            command = by;
        }
        Self::spawn(
            &host.ns,
            command,
            &run_dir,
            &lab.dir().join(format!("{}.log", host.name)),
        )
    }

    /// Starts kpx as n1 in a namespace, with manifests in its own folder, and waits until it
    /// answers.
    pub fn start_alone(
        ns: impl Into<Namespace<'a>>,
        manifests: &[(&str, &str)],
        arguments: &str,
    ) -> Result<Self> {
        let home = TempDir::with_prefix("kpx-").context("make a folder")?;
        let folder = home.path().join(MANIFESTS);
        fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        for (name, manifest) in manifests {
            fs::write(folder.join(format!("{name}.yaml")), manifest)?;
        }
        let mut agent = Self::launch_in(ns, Source::Manifests(&folder), home.path(), arguments)?;
        agent.home = Some(home);
        agent.answering()
    }

    /// Starts kpx as n1 in a namespace, with run directory and log in `dir`.
    pub fn launch_in(
        ns: impl Into<Namespace<'a>>,
        source: Source,
        dir: &Path,
        arguments: &str,
    ) -> Result<Self> {
        let ns = ns.into();
        let run_dir = dir.join("run");
        let mut command = run("n1", source, &run_dir, &ns)?;
        command.args(arguments.split_whitespace());
        Self::spawn(ns, command, &run_dir, &dir.join("log"))
    }

    /// Starts a command that becomes kpx, and appends its output to `log`.
    pub fn spawn(
        ns: impl Into<Namespace<'a>>,
        mut command: Command,
        run_dir: &Path,
        log: &Path,
    ) -> Result<Self> {
        let ns = ns.into();
        let output = File::options().create(true).append(true).open(log);
        let output = output.with_context(|| format!("open {}", log.display()))?;
        let child = ns.spawn(command.stdout(output.try_clone()?).stderr(output))?;
        Ok(Self {
            ns,
            child,
            run_dir: run_dir.to_owned(),
            log: log.to_owned(),
            home: None,
        })
    }

    /// Waits until kpx answers `kpx status`.
    pub fn answering(mut self) -> Result<Self> {
        self.wait_for("an answer", |_| true)?;
        Ok(self)
    }

    /// Waits until kpx is healthy.
    pub fn healthy(self) -> Result<Self> {
        self.having("healthy")
    }

    pub fn having(mut self, field: &str) -> Result<Self> {
        self.wait_for(field, |status| status[field] == true)?;
        Ok(self)
    }

    /// Writes a manifest of an agent from [`Agent::start_alone`]. The rename keeps kpx from reading
    /// a partial file.
    pub fn put(&self, name: &str, manifest: &str) -> Result<()> {
        let folder = self.manifests()?;
        fs::write(folder.join("new"), manifest)?;
        Ok(fs::rename(
            folder.join("new"),
            folder.join(format!("{name}.yaml")),
        )?)
    }

    /// Removes a manifest of an agent from [`Agent::start_alone`].
    pub fn delete(&self, name: &str) -> Result<()> {
        Ok(fs::remove_file(
            self.manifests()?.join(format!("{name}.yaml")),
        )?)
    }

    /// Returns the manifests folder of an agent from [`Agent::start_alone`].
    pub fn manifests(&self) -> Result<PathBuf> {
        Ok(self
            .home
            .as_ref()
            .context("an agent with manifests of its own")?
            .path()
            .join(MANIFESTS))
    }

    /// Returns the output of `kpx status` as JSON.
    pub fn status(&self) -> Result<Value> {
        status(&self.run_dir)
    }

    /// Returns the status in the agent's own type.
    pub fn typed_status(&self) -> Result<Status> {
        status(&self.run_dir)
    }

    /// Returns the text of the problem with this name, if the status has it.
    pub fn problem(&self, what: &str) -> Result<Option<String>> {
        let problems = self.typed_status()?.problems.into_iter();
        Ok(problems
            .filter(|problem| problem.what == what)
            .map(|problem| problem.why)
            .next())
    }

    /// Waits until the status meets a condition.
    pub fn wait(&self, limit: Duration, what: &str, holds: impl Fn(&Status) -> bool) -> Result<()> {
        wait_until(limit, what, || Ok(holds(&self.typed_status()?)))
            .with_context(|| format!("{:?}\n{}", self.typed_status(), self.log()))
    }

    /// Ends kpx as Kubernetes does. Returns an error unless kpx exits with success.
    pub fn stop(mut self) -> Result<()> {
        kill(self.pid(), Signal::SIGTERM).context("send SIGTERM to kpx")?;
        let status = self.ended(START)?;
        ensure!(
            status.success(),
            "kpx in {}: {status}; its log:\n{}",
            self.ns.name(),
            self.log()
        );
        ensure!(
            !proxy_view::socket(&self.run_dir).exists(),
            "kpx in {} left its socket",
            self.ns.name()
        );
        Ok(())
    }

    /// Kills kpx, as the kernel does when memory runs out.
    pub fn crash(mut self) -> Result<()> {
        self.kill()
    }

    /// Kills kpx and keeps its namespace and folder.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Returns the exit status of kpx, if it has ended.
    pub fn exited(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits until kpx ends by itself.
    pub fn ended(&mut self, limit: Duration) -> Result<ExitStatus> {
        let mut ended: Option<ExitStatus> = None;
        wait_until(limit, "kpx ends", || {
            ended = self.exited()?;
            Ok(ended.is_some())
        })
        .with_context(|| self.log())?;
        ended.context("kpx has ended")
    }

    /// Returns the output of kpx so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log)
            .unwrap_or_else(|error| format!("{}: {error}", self.log.display()))
    }

    pub fn ns(&self) -> &NetNs {
        &self.ns
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Waits for a status. Returns an error if kpx ends.
    fn wait_for(&mut self, what: &str, holds: impl Fn(&Value) -> bool) -> Result<()> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.exited()? {
                bail!(
                    "kpx in {} ended: {status}; its log:\n{}",
                    self.ns.name(),
                    self.log()
                );
            }
            let status = self.status();
            if status.as_ref().is_ok_and(&holds) {
                return Ok(());
            }
            if started.elapsed() > START {
                bail!(
                    "kpx in {}: no {what} within {START:?}: {status:?}; its log:\n{}",
                    self.ns.name(),
                    self.log()
                );
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for Agent<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill(); // It may have ended already.
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("--- log of kpx in {}:\n{}", self.ns.name(), self.log());
        }
    }
}

/// Requests the status by socket: frequent processes of `kpx status` would use more CPU than the
/// answers.
pub(crate) fn status<T: DeserializeOwned>(run_dir: &Path) -> Result<T> {
    let answer = get_at_socket(&proxy_view::socket(run_dir), "/status")?;
    ensure!(answer.code == 200, "{answer:?}");
    serde_json::from_str(&answer.body).with_context(|| format!("the status is {}", answer.body))
}

/// Returns the command `kpx run` for a node.
pub fn run(node_name: &str, source: Source, run_dir: &Path, ns: &NetNs) -> Result<Command> {
    let mut command = Command::new(binary()?);
    command
        .args(["run", "--node-name", node_name, "--run-dir"])
        .arg(run_dir)
        .arg("--bpf-dir")
        .arg(ns.bpf_dir());
    match source {
        Source::Manifests(dir) => command.arg("--manifests").arg(dir),
        Source::Kubeconfig(file) => command.arg("--kubeconfig").arg(file),
    };
    Ok(command)
}

/// Runs a kpx command in a namespace to its end.
pub fn kpx(ns: &NetNs, arguments: &str) -> Result<Output> {
    let mut command = Command::new(binary()?);
    command
        .args(arguments.split_whitespace())
        .env_remove("RUST_LOG");
    ns.run(|| command.output())
        .with_context(|| format!("run {command:?}"))
}

const POLL: Duration = Duration::from_millis(20);

/// Waits until `condition` holds. Returns an error after `deadline`, or if `condition` fails.
pub fn wait_until(
    deadline: Duration,
    what: &str,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let started = Instant::now();
    while !condition()? {
        ensure!(
            started.elapsed() < deadline,
            "waited {deadline:?} in vain until {what}"
        );
        thread::sleep(POLL);
    }
    Ok(())
}

/// Sleeps, in tests about elapsed time.
pub fn idle(time: Duration) -> Result<()> {
    let started = Instant::now();
    wait_until(time + DEADLINE, "time has passed", || {
        Ok(started.elapsed() >= time)
    })
}

/// Returns the binary under test.
pub fn binary() -> Result<PathBuf> {
    let path = match std::env::var_os("KPX_BIN") {
        Some(path) => PathBuf::from(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/debug/kpx"),
    };
    path.canonicalize()
        .with_context(|| format!("no kpx at {}: build it, or set KPX_BIN", path.display()))
}
