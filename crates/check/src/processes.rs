//! Finds kube-proxy and kpx among the processes of this host.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use proxy_net::lock;

/// The process name of kube-proxy, as in `/proc/PID/comm`.
const KUBE_PROXY: &str = "kube-proxy";

/// Returns the ids of processes named kube-proxy in this network namespace, except a kpx of that
/// name, which holds kpx's lock.
pub fn kube_proxies() -> Result<Vec<u32>> {
    let lock = lock_socket()?;
    let namespace = fs::read_link("/proc/self/ns/net").context("read the network namespace")?;
    let is_here =
        |id: &u32| fs::read_link(format!("/proc/{id}/ns/net")).is_ok_and(|of| of == namespace);
    // A process may end while its files are read.
    let is_kube_proxy = |id: &u32| {
        let name = fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
        name.trim() == KUBE_PROXY
            && is_here(id)
            && !lock.as_ref().is_some_and(|lock| holds(*id, lock))
    };
    Ok(processes()?.filter(is_kube_proxy).collect())
}

/// Returns true if a kpx instance runs in this network namespace. Reads who holds the lock, because
/// taking the lock could block a starting kpx.
pub fn holds_lock() -> Result<bool> {
    Ok(lock_socket()?.is_some())
}

/// Returns the process id of the kpx instance in this network namespace.
pub(crate) fn kpx() -> Result<Option<u32>> {
    let Some(lock) = lock_socket()? else {
        return Ok(None);
    };
    Ok(processes()?.find(|process| holds(*process, &lock)))
}

fn processes() -> Result<impl Iterator<Item = u32>> {
    let processes = fs::read_dir("/proc")
        .context("list the processes")?
        .flatten();
    Ok(processes.filter_map(|process| process.file_name().to_str()?.parse().ok()))
}

/// Returns the lock's socket, in the form of a link in `/proc/PID/fd`.
fn lock_socket() -> Result<Option<String>> {
    let sockets = fs::read_to_string("/proc/net/unix").context("list the sockets")?;
    let mut locks = sockets
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let lock = locks
        .find(|columns| columns.last().and_then(|name| name.strip_prefix('@')) == Some(lock::NAME));
    Ok(lock.and_then(|columns| Some(format!("socket:[{}]", columns.iter().rev().nth(1)?))))
}

fn holds(process: u32, socket: &str) -> bool {
    let files = fs::read_dir(format!("/proc/{process}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    files
        .filter_map(|file| fs::read_link(file.path()).ok())
        .any(|target| target == Path::new(socket))
}
