//! The running cluster's folder, and the entrances into its namespaces.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

/// The folder of the one cluster that this machine can have.
const DIR: &str = "/var/lib/kpx-cluster";

/// The cluster, as `up` made it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
// `down` stops a cluster that an older program started.
#[serde(default)]
pub(crate) struct State {
    /// The process whose end ends the cluster, and its start time in clock ticks since boot: a
    /// later process may get the same id.
    pub(crate) pid: i32,
    pub(crate) started: u64,
    /// The folder of the genuine programs.
    pub(crate) parts: PathBuf,
    pub(crate) kubernetes: String,
    pub(crate) nodes: Vec<String>,
    /// The values of `--cni` and `--proxy`.
    pub(crate) cni: String,
    pub(crate) proxy: String,
}

pub(crate) fn dir() -> &'static Path {
    Path::new(DIR)
}

/// Returns the kubeconfig of the administrator for processes in the cluster's own network.
pub(crate) fn admin_inside() -> PathBuf {
    dir().join("kubernetes/super-admin.conf")
}

impl State {
    pub(crate) fn running() -> Result<Self> {
        Self::read()?
            .filter(Self::is_alive)
            .context("no cluster is running: `cargo xtask cluster up` starts one")
    }

    /// Returns the last cluster, running or not.
    pub(crate) fn read() -> Result<Option<Self>> {
        let path = dir().join("cluster.json");
        match fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            read => {
                let text = read.with_context(|| format!("read {}", path.display()))?;
                let state = serde_json::from_slice(&text)
                    .with_context(|| format!("read {}", path.display()))?;
                Ok(Some(state))
            }
        }
    }

    pub(crate) fn write(&self) -> Result<()> {
        let path = dir().join("cluster.json");
        fs::write(&path, serde_json::to_vec_pretty(self)?)
            .with_context(|| format!("write {}", path.display()))
    }

    pub(crate) fn is_alive(&self) -> bool {
        start_time(self.pid) == Some(self.started)
    }

    /// Returns the administrator's kubeconfig for processes of this machine.
    pub(crate) fn admin(&self) -> PathBuf {
        dir().join("admin.conf")
    }

    pub(crate) fn kubectl(&self) -> Command {
        let mut kubectl = Command::new(self.parts.join("kubectl"));
        kubectl.env("KUBECONFIG", self.admin());
        kubectl
    }

    pub(crate) fn kubectl_of_user(&self, args: &[OsString]) -> Result<ExitCode> {
        code(self.kubectl().args(args))
    }

    /// Returns a command that runs `program` in the control plane's network (`control`), on a node,
    /// or on the client outside (`x`).
    pub(crate) fn enter(
        &self,
        host: &str,
        program: impl AsRef<std::ffi::OsStr>,
    ) -> Result<Command> {
        let mut nsenter = Command::new("nsenter");
        match host {
            "control" => {
                nsenter.arg(format!("--target={}", self.pid));
                nsenter.args(["--mount", "--net", "--pid"]);
            }
            "x" => {
                nsenter.arg(format!("--target={}", self.pid));
                nsenter.args(["--mount", "--pid", "--net"]);
                nsenter.args(["nsenter", "--net=/run/netns/x"]);
            }
            node if self.nodes.iter().any(|name| name == node) => {
                nsenter.arg(format!("--target={}", self.node_pid(node)?));
                nsenter.args(["--mount", "--net", "--pid", "--uts", "--ipc", "--cgroup"]);
            }
            _ => bail!(
                "{host} is no host of the cluster: control, {}, x",
                self.nodes.join(", ")
            ),
        }
        nsenter.arg("--").arg(program);
        Ok(nsenter)
    }

    /// Returns the first process of a node.
    pub(crate) fn node_pid(&self, node: &str) -> Result<i32> {
        ensure!(
            self.nodes.iter().any(|name| name == node),
            "{node} is no node of the cluster"
        );
        find_node(node)
    }

    pub(crate) fn exec_of_user(&self, host: &str, command: &[OsString]) -> Result<ExitCode> {
        let (program, args) = command.split_first().context("no command")?;
        let mut command = self.enter(host, program)?;
        if host == "control" || host == "x" {
            command.env("KUBECONFIG", admin_inside());
        }
        code(command.args(args))
    }
}

fn code(command: &mut Command) -> Result<ExitCode> {
    let status = command
        .status()
        .with_context(|| format!("run {command:?}"))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Returns the plan of a node's first process.
pub(crate) fn plan_of(node: &str) -> PathBuf {
    dir().join(node).join("plan.json")
}

/// Finds the first process of a node by its command line, `kpx-cluster init PLAN`.
fn find_node(node: &str) -> Result<i32> {
    let plan = plan_of(node);
    let wanted = format!("\0init\0{}\0", plan.display());
    for entry in fs::read_dir("/proc").context("read /proc")? {
        let entry = entry.context("read /proc")?;
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        // The commands that enter the namespaces have more words.
        if line.ends_with(&wanted) && line.matches('\0').count() == 3 {
            return Ok(pid);
        }
    }
    bail!("no first process of {node} runs")
}

/// Returns the start time of a process in clock ticks since boot.
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may have spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}
