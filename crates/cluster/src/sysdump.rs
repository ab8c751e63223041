//! `kpx sysdump` and `kubectl kpx sysdump`: an archive with the data of a bug report, without
//! secrets.

mod archive;
mod host;
mod objects;

use std::fs::{self, File};
use std::future::Future;
use std::io::{self, IsTerminal, Write, stderr, stdout};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::ExitCode;

use anyhow::{Context, Error, Result, bail, ensure};
use clap::Args;
use futures::StreamExt;
use jiff::Timestamp;
use proxy_view::RUN_DIR;
use tokio::signal::unix::{SignalKind, signal};

use crate::answers::{name_failed, run_all};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;
use archive::Archive;

/// Time limit in seconds for a node's archive, and for the API server.
const TIMEOUT: u64 = 180;
/// Maximum size of a node's archive in bytes.
const LONGEST: u64 = 64 << 20;
const LEFT_OUT: &str = "Left out: Secrets, tokens, contents of kubeconfigs, the environment of processes, values of environment variables in \
                        objects, the kernel's command line.\nInside: names and addresses of Services, pods and nodes; rules and routes of nodes; with --flows the addresses of \
                        clients.\n";

/// Write an archive of this node for a bug report. Needs root.
///
/// CONTENTS in the archive lists each part with its command, and the omitted parts. A failing part
/// does not stop the rest.
#[derive(Args, Debug)]
pub struct SysdumpArgs {
    /// Archive file, or - for standard output. Default: kpx-sysdump-NODE-TIME.tar.gz in the current
    /// folder.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Include all flows with client addresses, instead of their number.
    #[arg(long)]
    flows: bool,
    /// Run directory of the agent.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
}

/// Write an archive of the nodes and of kpx's objects for a bug report.
///
/// The folder nodes/NODE has the archive of each node. CONTENTS lists each part with its command,
/// and the omitted parts.
#[derive(Args, Debug)]
pub(crate) struct ClusterSysdumpArgs {
    /// The archive, or - for standard output; by default kpx-sysdump-cluster-TIME.tar.gz here.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Include all flows with client addresses, instead of their number.
    #[arg(long)]
    flows: bool,
    /// The number of lines of each agent's log.
    #[arg(long, value_name = "N", default_value_t = 5_000)]
    log_lines: u32,
}

/// Writes the archive of this node.
pub async fn sysdump(args: &SysdumpArgs) -> Result<()> {
    unless_stopped(of_host(args)).await
}

async fn of_host(args: &SysdumpArgs) -> Result<()> {
    let node = nix::unistd::gethostname()
        .context("read the name of this host")?
        .to_string_lossy()
        .into_owned();
    let output = Output::open(args.output.as_deref(), &node)?;
    let title = format!("kpx sysdump of host {node}, {}", Timestamp::now());
    let mut archive = Archive::new(output.writer()?, &format!("{title}\n{LEFT_OUT}"));
    let no_agent = host::gather(&mut archive, &args.run_dir, args.flows).await?;
    let failed = archive.finish()?;
    output.finish(&failed, no_agent.as_ref())
}

/// Writes the archive of the nodes and of kpx's objects.
pub(crate) async fn of_cluster(
    connect: &ConnectArgs,
    args: &ClusterSysdumpArgs,
) -> Result<ExitCode> {
    unless_stopped(of_nodes(connect, args)).await
}

async fn of_nodes(connect: &ConnectArgs, args: &ClusterSysdumpArgs) -> Result<ExitCode> {
    let cluster = Cluster::find(connect).await?;
    let output = Output::open(args.output.as_deref(), "cluster")?;
    let title = format!(
        "kpx sysdump of {} nodes, {}",
        cluster.nodes.len(),
        Timestamp::now()
    );
    let mut archive = Archive::new(output.writer()?, &format!("{title}\n{LEFT_OUT}"));
    objects::gather(&mut archive, &cluster, connect, args.log_lines).await?;
    let mut arguments = vec!["sysdump".to_owned(), "--output=-".to_owned()];
    arguments.extend(args.flows.then(|| "--flows".to_owned()));
    let mut failed = Vec::new();
    {
        let mut answers = pin!(run_all(
            &cluster,
            connect,
            &arguments,
            connect.timeout(TIMEOUT),
            LONGEST
        ));
        while let Some((at, answer)) = answers.next().await {
            let folder = format!("nodes/{}", at.node);
            let taken = match answer {
                Ok(answer) if answer.code == 0 => archive.add_all(&folder, &answer.stdout),
                Ok(answer) => Err(anyhow::anyhow!(
                    "kpx ended with {}: {}",
                    answer.code,
                    answer.stderr.trim()
                )),
                Err(error) => Err(error),
            };
            if let Err(error) = taken {
                archive.add(
                    &folder,
                    "kpx sysdump in the pod",
                    Err(anyhow::anyhow!("{error:#}")),
                )?;
                failed.push((at.node, error));
            }
        }
    }
    let parts = archive.finish()?;
    output.finish(&parts, None)?;
    let named: Vec<_> = failed
        .iter()
        .map(|(node, error)| (node.as_str(), error))
        .collect();
    name_failed(cluster.nodes.len(), &named);
    Ok(if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs `work` until it ends, or Ctrl-C or SIGTERM cancels it. Cancelling removes the partial
/// archive.
async fn unless_stopped<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    // The signals are caught before `work` creates the file: an uncaught signal would end the
    // process and leave the file.
    let mut interrupted = signal(SignalKind::interrupt()).context("wait for Ctrl-C")?;
    let mut terminated = signal(SignalKind::terminate()).context("wait for SIGTERM")?;
    tokio::select! {
        result = work => result,
        _ = interrupted.recv() => bail!("stopped; no archive was written"),
        _ = terminated.recv() => bail!("stopped; no archive was written"),
    }
}

enum Output {
    Stdout,
    /// A file that has a temporary name until it is complete.
    File {
        path: PathBuf,
        partial: PathBuf,
    },
}

impl Output {
    fn open(given: Option<&Path>, what: &str) -> Result<Self> {
        if given == Some(Path::new("-")) {
            ensure!(
                !stdout().is_terminal(),
                "an archive is not for a terminal: --output names a file"
            );
            return Ok(Self::Stdout);
        }
        let time = Timestamp::now().strftime("%Y%m%dT%H%M%SZ");
        let path = given.map_or_else(
            || PathBuf::from(format!("kpx-sysdump-{what}-{time}.tar.gz")),
            PathBuf::from,
        );
        let name = path
            .file_name()
            .with_context(|| format!("{} names no file", path.display()))?;
        let partial = path.with_file_name(format!(
            ".{}.{}.partial",
            name.to_string_lossy(),
            std::process::id()
        ));
        is_free(&path)?;
        Ok(Self::File { path, partial })
    }

    /// Returns the writer. The file must not exist before, and only its owner may read it.
    fn writer(&self) -> Result<Box<dyn Write + Send>> {
        match self {
            Self::Stdout => Ok(Box::new(io::BufWriter::new(stdout()))),
            Self::File { partial, .. } => {
                let file = File::options()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(partial);
                Ok(Box::new(file.with_context(|| {
                    format!("create {}", partial.display())
                })?))
            }
        }
    }

    /// Renames the complete archive, and reports its name and its missing parts. `no_agent` is the
    /// reason why the parts of an agent are missing.
    fn finish(self, failed: &[String], no_agent: Option<&Error>) -> Result<()> {
        let Self::File { path, partial } = &self else {
            return Ok(());
        };
        is_free(path)?;
        fs::rename(partial, path).with_context(|| format!("create {}", path.display()))?;
        let mut text = format!(
            "{} is written; look through it before you send it on\n",
            path.display()
        );
        if let Some(error) = no_agent {
            text += &format!("{error:#}\n");
        }
        if !failed.is_empty() {
            text += &format!(
                "it lacks {}; see the file CONTENTS for the cause\n",
                failed.join(", ")
            );
        }
        // A closed standard error leaves no place to report a failure.
        let _written = stderr().write_all(text.as_bytes());
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Self::File { partial, .. } = self {
            let _ = fs::remove_file(partial); // A complete archive is already renamed.
        }
    }
}

fn is_free(path: &Path) -> Result<()> {
    ensure!(
        path.symlink_metadata().is_err(),
        "{} is there already",
        path.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::{Signal, raise};

    use super::*;

    #[tokio::test]
    async fn signal_during_the_work_leaves_no_archive() {
        let path = std::env::temp_dir().join(format!("kpx-stopped-{}.tar.gz", std::process::id()));
        let output = Output::open(Some(&path), "n1").unwrap();
        let Output::File { partial, .. } = &output else {
            unreachable!()
        };
        let partial = partial.clone();
        let work = async {
            output.writer().unwrap().write_all(b"half").unwrap();
            raise(Signal::SIGINT).unwrap();
            let output = output;
            std::future::pending::<()>().await;
            output.finish(&[], None)
        };
        let limit = std::time::Duration::from_secs(30);
        assert!(
            tokio::time::timeout(limit, unless_stopped(work))
                .await
                .unwrap()
                .is_err()
        );
        assert!(!partial.exists() && !path.exists());
    }

    #[test]
    fn archive_has_its_name_only_when_it_is_whole() {
        let folder = std::env::temp_dir().join(format!("kpx-sysdump-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let names = || -> Vec<_> {
            fs::read_dir(&folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect()
        };
        let path = folder.join("dump.tar.gz");
        let open = || Output::open(Some(&path), "n1");
        let stopped = open().unwrap();
        stopped.writer().unwrap().write_all(b"half").unwrap();
        assert!(names().len() == 1 && !path.exists());
        drop(stopped);
        assert!(names().is_empty());
        let whole = open().unwrap();
        whole.writer().unwrap().write_all(b"whole").unwrap();
        whole.finish(&[], None).unwrap();
        assert_eq!(names(), ["dump.tar.gz"]);
        assert!(open().is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
