//! Reads and sets kernel parameters of this thread's network namespace.

use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;
use std::{fs, io};

use anyhow::{Context, ensure};
use tracing::info;

pub fn has_ipv6() -> bool {
    path("ipv6").is_ok_and(|path| path.exists())
}

/// Reads a parameter. `key` is a path below `net`, such as `ipv4/conf/lo/accept_local`. Returns
/// `None` if the kernel has no such parameter.
pub fn read(key: &str) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(path(key)?) {
        Ok(value) => Ok(Some(value.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read sysctl net/{key}")),
    }
}

/// Writes a parameter if its value differs, so correct sysctls may be read-only.
pub fn write(key: &str, value: &str) -> anyhow::Result<()> {
    if let Some(old) = set(key, value)? {
        info!(key, old, value, "sysctl set");
    }
    Ok(())
}

/// Writes like [`write()`], without a log line. Returns the previous value; `None` if it was equal.
pub fn set(key: &str, value: &str) -> anyhow::Result<Option<String>> {
    let old = read(key)?.with_context(|| format!("the kernel has no sysctl net/{key}"))?;
    if old == value {
        return Ok(None);
    }
    // With the newline the kernel accepts an empty value.
    fs::write(path(key)?, format!("{value}\n"))
        .with_context(|| format!("set sysctl net/{key} to {value}, it is {old}"))?;
    Ok(Some(old))
}

/// Returns a parameter's path. Container runtimes mount /proc/sys read-only, so pods mount the
/// host's /proc/sys at another path. Both paths show the reader's network namespace.
///
/// A key from a file must not escape the directory, because kpx writes there as root.
fn path(key: &str) -> anyhow::Result<PathBuf> {
    static ROOT: LazyLock<&Path> = LazyLock::new(|| {
        let [own, hosts] = ["/proc/sys/net", "/host/proc/sys/net"].map(Path::new);
        if hosts.is_dir() { hosts } else { own }
    });
    let is_below = Path::new(key)
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    ensure!(
        is_below && !key.is_empty(),
        "{key:?} is not a sysctl below net"
    );
    Ok(ROOT.join(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_stays_below_net() {
        assert!(
            path("ipv4/conf/lo/accept_local")
                .unwrap()
                .ends_with("proc/sys/net/ipv4/conf/lo/accept_local")
        );
        for key in [
            "",
            "/etc/passwd",
            "../kernel/core_pattern",
            "ipv4/../../kernel/core_pattern",
            "ipv4/..",
        ] {
            assert!(path(key).is_err(), "{key}");
            assert!(read(key).is_err() && write(key, "1").is_err(), "{key}");
        }
    }
}
