//! The running cluster's folder, and the entrances into its namespaces.

use std::collections::BTreeMap;
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
    /// The process whose end ends the cluster, the parent of the cluster's first process, and its
    /// start time in clock ticks since boot: a later process may get the same id.
    pub(crate) pid: i32,
    pub(crate) started: u64,
    /// The folder of the genuine programs.
    pub(crate) parts: PathBuf,
    pub(crate) kubernetes: String,
    pub(crate) nodes: Vec<String>,
    /// The values of `--cni` and `--proxy`.
    pub(crate) cni: String,
    pub(crate) proxy: String,
    /// The sysctls of the whole machine that kubelets change, by path, with their earlier values.
    pub(crate) sysctls: BTreeMap<PathBuf, String>,
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
        let half = path.with_extension("half");
        fs::write(&half, serde_json::to_vec_pretty(self)?)
            .and_then(|()| fs::rename(&half, &path))
            .with_context(|| format!("write {}", path.display()))
    }

    pub(crate) fn is_alive(&self) -> bool {
        start_time(self.pid) == Some(self.started)
    }

    /// Returns the cluster's first process.
    pub(crate) fn first(&self) -> Result<i32> {
        let path = format!("/proc/{0}/task/{0}/children", self.pid);
        let children = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        children
            .trim()
            .parse()
            .with_context(|| format!("{path} names no process"))
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
                nsenter.arg(format!("--target={}", self.first()?));
                nsenter.args(["--mount", "--net", "--pid"]);
            }
            "x" => {
                nsenter.arg(format!("--target={}", self.first()?));
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
        find_node(self.first()?, node)
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

/// Finds the first process of a node by its command line, `kpx-cluster init PLAN`, among the
/// descendants of the cluster's first process: other users can have the same command line.
fn find_node(first: i32, node: &str) -> Result<i32> {
    let plan = plan_of(node);
    let mut open = vec![first];
    while let Some(pid) = open.pop() {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if is_init(&line, &plan) {
            return Ok(pid);
        }
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        open.extend(
            children
                .split_whitespace()
                .filter_map(|pid| pid.parse::<i32>().ok()),
        );
    }
    bail!("no first process of {node} runs: see logs/{node}-init.log in {DIR}")
}

/// The commands that enter the namespaces have more words.
fn is_init(command_line: &[u8], plan: &Path) -> bool {
    let words: Vec<_> = command_line.split(|byte| *byte == 0).collect();
    matches!(words.as_slice(), [_, b"init", path, b""] if *path == plan.as_os_str().as_encoded_bytes())
}

/// Returns the start time of a process in clock ticks since boot. A process that ended has none, even
/// if its parent, which `test` is, has not waited for it.
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may have spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    fields.next().filter(|state| *state != "Z")?;
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_process_is_known_by_its_whole_command_line() {
        let plan = Path::new("/var/lib/kpx-cluster/n1/plan.json");
        for (line, is) in [
            (
                "kpx-cluster\0init\0/var/lib/kpx-cluster/n1/plan.json\0",
                true,
            ),
            (
                "kpx-cluster\0init\0/var/lib/kpx-cluster/n2/plan.json\0",
                false,
            ),
            (
                "unshare\0kpx-cluster\0init\0/var/lib/kpx-cluster/n1/plan.json\0",
                false,
            ),
            ("", false),
        ] {
            assert_eq!(is_init(line.as_bytes(), plan), is, "{line:?}");
        }
    }

    #[test]
    fn start_time_of_this_process_stays() {
        let this = i32::try_from(std::process::id()).unwrap();
        assert!(start_time(this).is_some());
        assert_eq!(start_time(this), start_time(this));
        assert_eq!(start_time(0), None);
    }

    #[test]
    fn ended_process_has_no_start_time() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        while start_time(pid).is_some() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
    }
}
