//! The agent's netlink code against this machine's kernel. Each test has its own network
//! namespaces.

mod anchor;
mod health_checks;
mod links;
mod routes;
mod rules;

use std::fs;
use std::sync::mpsc;
use std::thread;

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, unshare};
use proxy_net::{Handle, connect};
use serde_json::Value;
use testbed::agent::DEADLINE;
use tokio::process::Command;
use tokio::time::timeout;

/// Runs a test in its own network namespace, which has only lo. Everything that its thread starts
/// is there too.
pub(crate) fn in_netns(test: impl Future<Output = Result<()>> + Send + 'static) {
    let body = move || {
        unshare(CloneFlags::CLONE_NEWNET).context("unshare needs root")?;
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(test)
    };
    if let Err(error) = thread::spawn(body).join().expect("the test panicked") {
        panic!("{error:?}");
    }
}

/// A network namespace that lives as long as this value.
pub(crate) struct Netns {
    /// A thread in the namespace.
    pub(crate) tid: i32,
    _keep: mpsc::Sender<()>,
}

impl Netns {
    pub(crate) fn new() -> Self {
        let (keep, end) = mpsc::channel::<()>();
        let (report, reported) = mpsc::channel();
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("unshare needs root");
            report
                .send(nix::unistd::gettid().as_raw())
                .expect("the maker waits");
            let _: Result<(), _> = end.recv();
        });
        Self {
            tid: reported.recv().expect("no network namespace"),
            _keep: keep,
        }
    }
}

/// Runs an `ip` command in the network namespace of this thread.
pub(crate) async fn ip(command: &str) -> Result<()> {
    run(command, &[]).await.map(drop)
}

/// Makes eth0 with 192.0.2.1/24 and fd00::1/64, and no default route.
pub(crate) async fn node() -> Result<()> {
    for command in [
        "link set lo up",
        "link add eth0 type veth peer name peer0",
        "link set peer0 up",
        "link set eth0 up",
        "addr add 192.0.2.1/24 dev eth0",
        "addr add fd00::1/64 dev eth0 nodad",
    ] {
        ip(command).await?;
    }
    Ok(())
}

/// Waits until the kernel has the local route of an IPv6 address. A kernel worker adds it after the
/// address, and late on a busy machine.
pub(crate) async fn is_local(addr: &str) -> Result<()> {
    let wanted = format!("local {addr} ");
    let appears = async {
        while !String::from_utf8_lossy(&run("-6 route show table local", &[]).await?)
            .contains(&wanted)
        {}
        anyhow::Ok(())
    };
    timeout(DEADLINE, appears)
        .await
        .with_context(|| format!("{addr} has no local route"))?
}

pub(crate) async fn ip_json(command: &str) -> Result<Value> {
    let out = run(command, &["-j"]).await?;
    if out.is_empty() {
        Ok(Value::Array(Vec::new()))
    } else {
        Ok(serde_json::from_slice(&out)?)
    }
}

pub(crate) async fn run(command: &str, options: &[&str]) -> Result<Vec<u8>> {
    let out = Command::new("ip")
        .args(options)
        .args(command.split_whitespace())
        .output()
        .await?;
    ensure!(
        out.status.success(),
        "ip {command}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(out.stdout)
}

pub(crate) fn handle() -> Result<Handle> {
    let (connection, handle) = connect()?;
    tokio::spawn(connection);
    Ok(handle)
}

pub(crate) fn sysctl(key: &str) -> Result<String> {
    let path = format!("/proc/sys/net/{key}");
    Ok(fs::read_to_string(&path)
        .with_context(|| path)?
        .trim()
        .to_owned())
}
