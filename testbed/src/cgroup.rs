//! A test's own cgroup, which holds this process for as long as the value lives. Programs attached there meet no other
//! process's sockets.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

/// The places of the hierarchy of version 2: alone, beside version 1, and the one where this module mounts it.
const MOUNTED: [&str; 3] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/run/kpx-test-cgroup2"];
/// A process writes 0 for itself.
const PROCS: &str = "cgroup.procs";

#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    /// Where this process was.
    before: PathBuf,
    /// One test at a time: the kernel moves a process with all of its threads, other tests' as well.
    _alone: MutexGuard<'static, ()>,
}

impl Cgroup {
    /// Every thread of this process goes along. Waits while another test has entered.
    pub fn enter() -> Result<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let root = root()?;
        let all = fs::read_to_string("/proc/self/cgroup").context("read this process's cgroups")?;
        let before = all.lines().find_map(|line| line.strip_prefix("0::/")).context("no cgroup of version 2")?;
        let this =
            Self { path: root.join(format!("kpx-test-{}", std::process::id())), before: root.join(before), _alone };
        fs::create_dir_all(&this.path).with_context(|| format!("create {}", this.path.display()))?;
        join(&this.path)?;
        Ok(this)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let left = join(&self.before).and_then(|()| Ok(fs::remove_dir(&self.path)?));
        if let Err(error) = left {
            tracing::warn!(%error, path = %self.path.display(), "cgroup is left over");
        }
    }
}

fn join(cgroup: &Path) -> Result<()> {
    fs::write(cgroup.join(PROCS), "0").with_context(|| format!("join {}", cgroup.display()))
}

fn root() -> Result<PathBuf> {
    for path in MOUNTED {
        if statfs(path).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC) {
            return Ok(path.into());
        }
    }
    let own = MOUNTED[MOUNTED.len() - 1];
    fs::create_dir_all(own).with_context(|| format!("create {own}"))?;
    let mounted = mount(Some("cgroup2"), own, Some("cgroup2"), MsFlags::empty(), None::<&str>);
    mounted.with_context(|| format!("mount {own}"))?;
    Ok(own.into())
}
