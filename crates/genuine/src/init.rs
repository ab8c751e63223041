//! The first process of a process namespace: runs a script, starts programs, and starts each again
//! after its end. The end of this process ends all of them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// A shell script, run first, and its variables.
    pub(crate) setup: String,
    pub(crate) variables: BTreeMap<String, String>,
    pub(crate) programs: Vec<Program>,
    /// A file that appears once the programs are started.
    pub(crate) ready: PathBuf,
    /// Connections to the listener at standard input go on to this address.
    pub(crate) forward: Option<SocketAddr>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) command: Vec<String>,
    pub(crate) log: PathBuf,
}

/// The time between two looks at the programs.
const PAUSE: Duration = Duration::from_millis(500);

pub(crate) fn run(plan: &Path) -> Result<()> {
    let text = fs::read(plan).with_context(|| format!("read {}", plan.display()))?;
    let plan: Plan =
        serde_json::from_slice(&text).with_context(|| format!("read {}", plan.display()))?;
    let status = Command::new("sh")
        .args(["-euc", &plan.setup])
        .envs(&plan.variables)
        .status()
        .context("run the script that sets up")?;
    ensure!(
        status.success(),
        "the script that sets up failed ({status})"
    );
    if let Some(to) = plan.forward {
        let listener = io::stdin().as_fd().try_clone_to_owned();
        let listener = TcpListener::from(listener.context("duplicate the listener")?);
        thread::spawn(move || accept(&listener, to));
    }
    let mut running = BTreeMap::new();
    for program in &plan.programs {
        running.insert(start(program)?, program.clone());
    }
    fs::write(&plan.ready, "").with_context(|| format!("write {}", plan.ready.display()))?;
    let mut ended = Vec::new();
    loop {
        thread::sleep(PAUSE);
        ended.retain(|program: &Program| {
            if held(&program.name).exists() {
                return true;
            }
            match start(program) {
                Ok(pid) => {
                    running.insert(pid, program.clone());
                    false
                }
                Err(error) => {
                    eprintln!("{error:#}");
                    true
                }
            }
        });
        // Other processes that end are orphans of the programs.
        while let Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) =
            waitpid(None, Some(WaitPidFlag::WNOHANG))
        {
            ended.extend(running.remove(&pid.as_raw().unsigned_abs()));
        }
    }
}

/// Returns the file that keeps a program from being started again while it exists.
pub(crate) fn held(name: &str) -> PathBuf {
    crate::state::dir().join("held").join(name)
}

fn start(program: &Program) -> Result<u32> {
    let log = File::options()
        .create(true)
        .append(true)
        .open(&program.log)
        .with_context(|| format!("open {}", program.log.display()))?;
    let (name, args) = program.command.split_first().context("an empty command")?;
    let child = Command::new(name)
        .args(args)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("duplicate the log")?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("start {name}"))?;
    Ok(child.id())
}

fn accept(listener: &TcpListener, to: SocketAddr) {
    for client in listener.incoming() {
        let forwarded =
            client.and_then(|client| thread::Builder::new().spawn(move || forward(&client, to)));
        if let Err(error) = forwarded {
            eprintln!("forward to {to}: {error}");
            thread::sleep(PAUSE);
        }
    }
}

fn forward(client: &TcpStream, to: SocketAddr) -> io::Result<()> {
    let server = TcpStream::connect(to)?;
    let copy = |mut from: &TcpStream, mut to: &TcpStream| {
        let copied = io::copy(&mut from, &mut to);
        let _closed = to.shutdown(std::net::Shutdown::Write);
        copied
    };
    thread::scope(|scope| {
        scope.spawn(|| copy(client, &server));
        copy(&server, client).map(drop)
    })
}
