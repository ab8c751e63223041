//! A cgroup that limits a process.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use nix::unistd::Pid;

/// The mount point of cgroups: version 2 directly, version 1 in a folder per controller.
const ROOT: &str = "/sys/fs/cgroup";

/// A cgroup of one controller. A drop removes it once its process has ended.
#[derive(Debug)]
pub struct Limits {
    path: PathBuf,
    /// The name of the limit's file.
    file: &'static str,
}

/// A limit's files in version 1 and in version 2.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    controller: &'static str,
    files: [&'static str; 2],
}

/// In bytes.
pub const MEMORY: Limit = Limit {
    controller: "memory",
    files: ["memory.limit_in_bytes", "memory.max"],
};
/// In microseconds per 100 ms.
pub const CPU: Limit = Limit {
    controller: "cpu",
    files: ["cpu.cfs_quota_us", "cpu.max"],
};

impl Limits {
    /// Moves a process into a new cgroup with this limit.
    pub fn around(pid: Pid, limit: &Limit, value: u64) -> Result<Self> {
        let limits = Self::new(&pid.to_string(), limit)?;
        limits.set(value)?;
        limits.write("cgroup.procs", &pid.to_string())?;
        Ok(limits)
    }

    /// Creates a cgroup without a limit.
    pub fn new(name: &str, limit: &Limit) -> Result<Self> {
        let v1 = Path::new(ROOT).join(limit.controller);
        let name = format!("kpx-test-{}-{name}", limit.controller);
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
        Ok(Self { path, file })
    }

    pub fn set(&self, value: u64) -> Result<()> {
        self.write(self.file, &value.to_string())
    }

    /// Returns the file that a process joins by writing its id.
    pub fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Moves all processes out. Their memory still counts here.
    pub fn leave(&self) -> Result<()> {
        let parent = self.path.parent().context("a parent")?.join("cgroup.procs");
        let text = fs::read_to_string(self.procs())
            .with_context(|| format!("read {}", self.procs().display()))?;
        text.split_whitespace()
            .try_for_each(|pid| fs::write(&parent, pid).with_context(|| format!("move {pid}")))
    }

    /// Returns the bytes that the processes use.
    pub fn memory(&self) -> Result<u64> {
        let files = ["memory.usage_in_bytes", "memory.current"].map(|file| self.path.join(file));
        let file = files
            .iter()
            .find(|file| file.exists())
            .context("a cgroup of memory")?;
        Ok(fs::read_to_string(file)?.trim().parse()?)
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let file = self.path.join(file);
        fs::write(&file, value).with_context(|| format!("write {value} to {}", file.display()))
    }
}

impl Drop for Limits {
    fn drop(&mut self) {
        let _ = self.leave();
        if let Err(error) = fs::remove_dir(&self.path) {
            eprintln!("{} is left over: {error}", self.path.display());
        }
    }
}
