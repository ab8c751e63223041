//! A mount namespace of a test's own.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::netns;

/// The command that mounts a BPF file system at the usual place.
pub const MOUNT_BPF: &str = "mount -t bpf -o mode=0700 bpf /sys/fs/bpf";

/// A mount namespace with its own BPF file system, removed with this value.
#[derive(Debug)]
pub struct Mounts {
    holder: Child,
}

impl Mounts {
    pub fn new() -> Result<Self> {
        let script = format!(
            "while umount --lazy /sys/fs/bpf 2>&-; do :; done; {MOUNT_BPF} && echo ready && exec sleep infinity"
        );
        let mut unshare = Command::new("unshare");
        unshare
            .args(["--mount", "--propagation", "private", "sh", "-c", &script])
            .stdout(Stdio::piped());
        let mut this = Self {
            holder: unshare.spawn().context("start unshare")?,
        };
        let mut line = String::new();
        BufReader::new(this.holder.stdout.take().context("its output")?).read_line(&mut line)?;
        ensure!(line.trim() == "ready", "{line}");
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt"));
        ensure!(
            namespace(&this.holder.id().to_string())? != namespace("self")?,
            "the mounts are this process's"
        );
        Ok(this)
    }

    /// Returns a command that runs its arguments there.
    pub fn enter(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &self.holder.id().to_string()]);
        command
    }

    pub fn sh(&self, script: &str) -> Result<()> {
        netns::check(self.enter().args(["sh", "-c", script]).output(), script).map(drop)
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
