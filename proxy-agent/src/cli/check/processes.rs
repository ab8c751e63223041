//! Looks for kube-proxy among the processes of this host.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// As the kernel shortens names (`comm`).
const KUBE_PROXY: &str = "kube-proxy";
/// kpx's lock: see [`crate::control::lock`].
const LOCK: &str = "@kpx";

/// Process ids of what is called kube-proxy. A kpx may be called so, too: it holds kpx's lock.
pub(super) fn kube_proxies() -> Result<Vec<u32>> {
    let lock = lock()?;
    let processes = fs::read_dir("/proc").context("list the processes")?.flatten();
    let ids = processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok());
    // A process may end while it is looked at.
    let is_kube_proxy = |id: &u32| {
        let name = fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
        name.trim() == KUBE_PROXY && !lock.as_ref().is_some_and(|lock| holds(*id, lock))
    };
    Ok(ids.filter(is_kube_proxy).collect())
}

/// The socket that is the lock, as a process's open files show it.
fn lock() -> Result<Option<String>> {
    let sockets = fs::read_to_string("/proc/net/unix").context("list the sockets")?;
    let mut locks = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let lock = locks.find(|columns| columns.last() == Some(&LOCK));
    Ok(lock.and_then(|columns| Some(format!("socket:[{}]", columns.iter().rev().nth(1)?))))
}

fn holds(process: u32, socket: &str) -> bool {
    let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    files.filter_map(|file| fs::read_link(file.path()).ok()).any(|target| target == Path::new(socket))
}
