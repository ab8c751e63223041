//! Removes labs when their process ends in any way.
//!
//! A lab's name has its process id, so removal works after a kill.

use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};

use crate::netns;

const PREFIX: &str = "kpx-";

/// True if a signal is the expected end.
static KEPT: AtomicBool = AtomicBool::new(false);

/// Returns the id of a process's `nth` lab, from 0: `1234`, `1234.1`.
pub(super) fn lab_id(pid: u32, nth: u32) -> String {
    if nth == 0 {
        pid.to_string()
    } else {
        format!("{pid}.{nth}")
    }
}

pub(super) fn lab_dir(id: &str) -> PathBuf {
    std::env::temp_dir().join(format!("{PREFIX}{id}"))
}

pub(super) fn ns_name(id: &str, host: &str) -> String {
    format!("{PREFIX}{id}-{host}")
}

/// Kills the processes in all labs of a process and removes the labs.
pub fn remove_labs_of(pid: u32) -> Result<()> {
    for name in netns::names()?
        .iter()
        .filter(|name| owner(name) == Some(pid))
    {
        for inside in netns::pids(name)?
            .into_iter()
            .map(Pid::from_raw)
            .filter(|inside| *inside != Pid::this())
        {
            let _ = kill(inside, Signal::SIGKILL); // It may have ended already.
        }
        netns::remove(name)?;
    }
    for name in temporary_names()?
        .iter()
        .filter(|name| owner(name) == Some(pid))
    {
        let dir = std::env::temp_dir().join(name);
        fs::remove_dir_all(&dir).with_context(|| format!("remove {}", dir.display()))?;
    }
    Ok(())
}

/// Removes the labs of dead processes.
pub(super) fn remove_stale_labs() -> Result<()> {
    let names = netns::names()?.into_iter().chain(temporary_names()?);
    let mut owners: Vec<u32> = names.filter_map(|name| owner(&name)).collect();
    owners.sort_unstable();
    owners.dedup();
    for pid in owners
        .into_iter()
        .filter(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    {
        if let Err(error) = remove_labs_of(pid) {
            // Another starting process may be removing the same lab.
            tracing::warn!(%error, pid, "stale lab is left over");
        }
    }
    Ok(())
}

/// Makes SIGINT and SIGTERM remove this process's labs before they end it.
pub(super) fn remove_on_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_io()
                .build();
            let number = runtime.map(|runtime| runtime.block_on(wait_for_signal()));
            match number {
                Ok(Ok(number)) => {
                    // Held to the end, so that no other thread creates or removes namespaces.
                    let _changing = netns::changing();
                    let removed = remove_labs_of(std::process::id());
                    match &removed {
                        Ok(()) if KEPT.load(Ordering::Relaxed) => {
                            println!("\nall namespaces are removed");
                            std::process::exit(0);
                        }
                        Ok(()) => {}
                        Err(error) => eprintln!("remove the lab: {error:#}"),
                    }
                    std::process::exit(128 + number);
                }
                Ok(Err(error)) | Err(error) => {
                    tracing::warn!(%error, "signals will not remove the lab")
                }
            }
        });
    });
}

/// Keeps this process's labs until a signal removes them and ends the process with success; `say`
/// announces this.
pub fn keep_until_signal(say: impl FnOnce() -> Result<()>) -> Result<Infallible> {
    // Set this first: a signal may follow the announcement at once.
    KEPT.store(true, Ordering::Relaxed);
    say()?;
    loop {
        thread::park();
    }
}

async fn wait_for_signal() -> std::io::Result<i32> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => Ok(SignalKind::interrupt().as_raw_value()),
        _ = terminate.recv() => Ok(SignalKind::terminate().as_raw_value()),
    }
}

fn temporary_names() -> Result<Vec<String>> {
    let entries = fs::read_dir(std::env::temp_dir()).context("read the temporary directory")?;
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Returns the process id in the name of a lab's namespace or directory.
fn owner(name: &str) -> Option<u32> {
    let rest = name.strip_prefix(PREFIX)?;
    rest.split(['-', '.']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_owner() {
        assert_eq!(owner(&ns_name(&lab_id(1234, 0), "n1")), Some(1234));
        assert_eq!(owner(&ns_name(&lab_id(1234, 2), "p1a")), Some(1234));
        assert_eq!(owner("kpx-probe-1"), None);
        assert_eq!(owner("cni-1234"), None);
    }
}
