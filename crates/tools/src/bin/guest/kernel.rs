//! Prepares a fresh kernel: mounts file systems, loads modules. Collects its warnings at the end.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;

use anyhow::{Context, Result};
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::libc::O_NONBLOCK;
use nix::mount::{MsFlags, mount};

const MODULES: &str = "/lib/modules";

/// Types of file systems, and their mount points.
const MOUNTS: &[(&str, &str)] = &[
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/run"),
    ("tmpfs", "/tmp"),
    ("cgroup2", "/sys/fs/cgroup"),
    ("bpf", "/sys/fs/bpf"),
];

/// The kernel log's words for a fault.
const COMPLAINTS: &[&str] = &[
    "BUG:",
    "WARNING:",
    "Oops",
    "general protection fault",
    "refcount_t:",
    "unregister_netdevice: waiting",
    "self-detected stall",
    "blocked for more than",
    "Out of memory",
];

pub(super) fn mount_all() -> Result<()> {
    for (kind, at) in MOUNTS {
        mount(
            Some(*kind),
            *at,
            Some(*kind),
            MsFlags::empty(),
            None::<&str>,
        )
        .with_context(|| format!("mount {at}"))?;
    }
    Ok(())
}

pub(super) fn release() -> Result<String> {
    let release =
        fs::read_to_string("/proc/sys/kernel/osrelease").context("read the kernel's version")?;
    Ok(release.trim().to_owned())
}

/// Loads the available modules, and returns the names of missing modules.
pub(super) fn load_modules() -> Result<Vec<String>> {
    let lines = |name: &str| -> Result<Vec<String>> {
        let path = format!("{MODULES}/{name}");
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        Ok(text.lines().map(str::to_owned).collect())
    };
    for name in lines("order")? {
        let path = format!("{MODULES}/{name}.ko");
        let file = File::open(&path).with_context(|| format!("open {path}"))?;
        finit_module(&file, c"", ModuleInitFlags::empty())
            .with_context(|| format!("load the module {name}"))?;
    }
    lines("missing")
}

/// Returns true if the kernel supports netkit devices, which are not a module.
pub(super) fn makes_netkit() -> Result<bool> {
    let ip = |words: &str| {
        Command::new("/bin/ip")
            .args(words.split(' '))
            .output()
            .context("run ip")
    };
    let makes = ip("link add probe type netkit")?.status.success();
    ip("link del probe")?;
    Ok(makes)
}

/// Returns the warnings in the kernel's log.
pub(super) fn complaints() -> Result<Vec<String>> {
    let mut log = File::options()
        .read(true)
        .custom_flags(O_NONBLOCK)
        .open("/dev/kmsg")
        .context("open the log")?;
    let mut complaints = Vec::new();
    let mut record = [0; 8192];
    loop {
        match log.read(&mut record) {
            Ok(length) => {
                let text = String::from_utf8_lossy(&record[..length]).into_owned();
                if COMPLAINTS.iter().any(|complaint| text.contains(complaint)) {
                    complaints.push(text.lines().next().unwrap_or_default().to_owned());
                }
            }
            // Older records were overwritten: the next read continues after them.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(complaints),
            Err(error) => return Err(error).context("read the kernel's log"),
        }
    }
}
