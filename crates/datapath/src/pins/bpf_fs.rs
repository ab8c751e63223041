//! Finds the owner of the BPF file system that contains the pins. The host's outlives a container,
//! a container's own does not.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{major, minor};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

pub(super) const MOUNT_POINT: &str = "/sys/fs/bpf";

/// The owner of a BPF file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BpfFs {
    Host,
    /// This container: the file system disappears with it.
    Container,
    /// The host or this container.
    Unknown,
}

/// Mounts a BPF file system at the usual place if there is none, which requires CAP_SYS_ADMIN.
/// Returns the file system's owner. Call this before giving up capabilities: reading the namespaces
/// of process 1 requires all capabilities of process 1.
pub fn ensure_bpf_fs(root: &Path) -> Result<BpfFs> {
    if is_on_bpf_fs(root)? {
        return owner(root);
    }
    ensure!(
        root.starts_with(MOUNT_POINT),
        "{} is not in a BPF file system: mount one there, or use a folder below {MOUNT_POINT}",
        root.display()
    );
    // The lock prevents two processes from mounting at the same time, which would hide the first
    // mount.
    let mount_point = File::open(MOUNT_POINT).with_context(|| format!("open {MOUNT_POINT}"))?;
    let _lock = Flock::lock(mount_point, FlockArg::LockExclusive)
        .map_err(|(_, errno)| errno)
        .with_context(|| format!("lock {MOUNT_POINT}"))?;
    if is_on_bpf_fs(root)? {
        return owner(root);
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("bpf"), MOUNT_POINT, Some("bpf"), flags, Some("mode=0700")).with_context(|| {
        format!("no BPF file system is mounted at {MOUNT_POINT}, and this kpx may not mount one: `mount -t bpf -o mode=0700 bpf {MOUNT_POINT}`")
    })?;
    Ok(if is_in_namespaces_of_the_host() {
        BpfFs::Host
    } else {
        BpfFs::Container
    })
}

fn owner(root: &Path) -> Result<BpfFs> {
    if is_in_namespaces_of_the_host() {
        return Ok(BpfFs::Host);
    }
    let dev = there(root)?
        .metadata()
        .with_context(|| format!("look at {}", root.display()))?
        .dev();
    let dev = format!("{}:{}", major(dev), minor(dev));
    // Process 1 is the host's init only in the host's PID namespace.
    let mounts_of = |process| fs::read_to_string(format!("/proc/{process}/mountinfo")).ok();
    let of_host = mounts_of("1").filter(|_| is_in_pid_namespace_of_the_host());
    let own = mounts_of("self").unwrap_or_default();
    Ok(judge(&dev, of_host.as_deref(), &own))
}

/// Determines the owner from the mounts of the host's process 1 (`of_host`), or from this process's
/// mounts (`own`) if they are unavailable.
fn judge(dev: &str, of_host: Option<&str>, own: &str) -> BpfFs {
    let is_there = |mounts: &str| {
        mounts
            .lines()
            .any(|line| line.split(' ').nth(2) == Some(dev))
    };
    // Optional fields precede the separator. A mount made in a container has no master in another
    // mount namespace.
    let follows = |line: &str| {
        line.split(' ')
            .skip(6)
            .take_while(|field| *field != "-")
            .any(|f| f.starts_with("master:"))
    };
    let mut mounts = own
        .lines()
        .filter(|line| line.split(' ').nth(2) == Some(dev));
    match of_host {
        Some(mounts) if is_there(mounts) => BpfFs::Host,
        Some(_) => BpfFs::Container,
        None if mounts.any(follows) => BpfFs::Host,
        None => BpfFs::Unknown,
    }
}

fn is_in_pid_namespace_of_the_host() -> bool {
    /// The inode number of the initial PID namespace, PROC_PID_INIT_INO of linux/proc_ns.h.
    const INITIAL_PID_NS: &str = "pid:[4026531836]";
    fs::read_link("/proc/self/ns/pid").is_ok_and(|ns| ns == Path::new(INITIAL_PID_NS))
}

/// Returns false in a container, as far as this process can detect.
fn is_in_namespaces_of_the_host() -> bool {
    let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    is_in_pid_namespace_of_the_host() && of("1").is_some_and(|ns| Some(ns) == of("self"))
}

pub(super) fn is_on_bpf_fs(path: &Path) -> Result<bool> {
    let there = there(path)?;
    let fs = statfs(there)
        .with_context(|| format!("read the file system type of {}", there.display()))?;
    Ok(fs.filesystem_type() == BPF_FS_MAGIC)
}

/// Returns the path, or the closest existing directory above it.
fn there(path: &Path) -> Result<&Path> {
    path.ancestors()
        .find(|dir| dir.exists())
        .with_context(|| format!("no folder above {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_system_is_the_hosts_if_the_host_has_it_or_it_follows_another_mount() {
        let mount = |dev: &str, fields: &str| {
            format!("36 35 {dev} / /sys/fs/bpf rw,nosuid{fields} - bpf bpf rw,mode=700\n")
        };
        let host = mount("0:30", " shared:9");
        let cases = [
            ("0:30", Some(host.as_str()), mount("0:30", ""), BpfFs::Host),
            ("0:77", Some(&host), mount("0:77", ""), BpfFs::Container),
            ("0:30", None, mount("0:30", " master:9"), BpfFs::Host),
            (
                "0:30",
                None,
                mount("0:30", " shared:4 master:9"),
                BpfFs::Host,
            ),
            ("0:30", None, mount("0:30", ""), BpfFs::Unknown),
            ("0:30", None, mount("0:30", " shared:4"), BpfFs::Unknown),
            ("0:30", None, mount("0:77", " master:9"), BpfFs::Unknown),
            ("0:30", None, String::new(), BpfFs::Unknown),
        ];
        for (dev, of_host, own, wanted) in cases {
            assert_eq!(
                judge(dev, of_host, &own),
                wanted,
                "{dev} among {own:?}, the host's {of_host:?}"
            );
        }
    }
}
