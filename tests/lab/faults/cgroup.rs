//! A cgroup with limits, for one process.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use nix::unistd::Pid;

/// Where the hierarchies of version 1 are, each by the name of its controller; that of version 2 is the folder itself.
const ROOT: &str = "/sys/fs/cgroup";

/// A cgroup of one controller. Dropping it removes it, once its process has ended.
pub(crate) struct Limits {
    path: PathBuf,
}

/// A limit's file in version 1, and in version 2.
pub(crate) struct Limit {
    controller: &'static str,
    files: [&'static str; 2],
}

pub(crate) const MEMORY: Limit = Limit { controller: "memory", files: ["memory.limit_in_bytes", "memory.max"] };
/// The microseconds of each tenth of a second.
pub(crate) const CPU: Limit = Limit { controller: "cpu", files: ["cpu.cfs_quota_us", "cpu.max"] };

impl Limits {
    /// Moves a process into a cgroup of its own with this limit.
    pub(crate) fn around(pid: Pid, limit: &Limit, value: u64) -> Result<Self> {
        let v1 = Path::new(ROOT).join(limit.controller);
        let name = format!("kpx-test-{}-{pid}", limit.controller);
        let (path, file) = if v1.is_dir() {
            (v1.join(name), limit.files[0])
        } else if Path::new(ROOT).join("cgroup.controllers").exists() {
            let control = Path::new(ROOT).join("cgroup.subtree_control");
            fs::write(&control, format!("+{}", limit.controller))
                .with_context(|| format!("write {}", control.display()))?;
            (Path::new(ROOT).join(name), limit.files[1])
        } else {
            bail!("no controller {} in {ROOT}", limit.controller);
        };
        fs::create_dir(&path).with_context(|| format!("create {}", path.display()))?;
        let limits = Self { path };
        limits.write(file, &value.to_string())?;
        limits.write("cgroup.procs", &pid.to_string())?;
        Ok(limits)
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let file = self.path.join(file);
        fs::write(&file, value).with_context(|| format!("write {value} to {}", file.display()))
    }
}

impl Drop for Limits {
    fn drop(&mut self) {
        // A process that is left goes to the parent.
        let left = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        for pid in left.split_whitespace() {
            let _ = fs::write(self.path.join("../cgroup.procs"), pid);
        }
        if let Err(error) = fs::remove_dir(&self.path) {
            eprintln!("{} is left over: {error}", self.path.display());
        }
    }
}
