//! Runs commands in a container like a container runtime: in its namespaces, with its capabilities.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};
use caps::{CapSet, CapsHashSet};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::prctl::set_no_new_privs;
use nix::unistd::{Pid, chdir, chroot, fchdir};

use crate::apiserver::Container;
use crate::netns::connect_in;

/// A container, with the data for commands in it.
#[derive(Clone, Debug)]
pub struct Inside {
    pub(super) pid: Pid,
    pub(super) env: BTreeMap<String, String>,
    pub(super) capabilities: CapsHashSet,
    pub(super) no_new_privileges: bool,
    /// The uid; `None` for root.
    pub(super) user: Option<u32>,
    pub(super) log: PathBuf,
}

impl Container for Inside {
    fn exec(&self, command: &[String]) -> Result<Child> {
        // A separate thread, because it keeps the namespaces and capabilities.
        thread::scope(|scope| {
            scope
                .spawn(|| self.spawn(command))
                .join()
                .unwrap_or_else(|_| bail!("the thread panicked"))
        })
    }

    fn connect(&self, port: u16) -> Result<TcpStream> {
        let path = format!("/proc/{}/ns/net", self.pid);
        connect_in(&path, (Ipv4Addr::LOCALHOST, port).into())
    }

    fn log(&self) -> Result<String> {
        fs::read_to_string(&self.log).with_context(|| format!("read {}", self.log.display()))
    }
}

impl Inside {
    fn spawn(&self, command: &[String]) -> Result<Child> {
        let (program, arguments) = command.split_first().context("a command")?;
        let open = |what: &str| {
            let path = format!("/proc/{}/{what}", self.pid);
            File::open(&path).with_context(|| format!("open {path}"))
        };
        let net = open("ns/net")?;
        let mounts = open("ns/mnt")?;
        let root = open("root")?;
        // Entering a mount namespace takes an unshared root.
        unshare(CloneFlags::CLONE_FS).context("part from the other threads")?;
        setns(net, CloneFlags::CLONE_NEWNET).context("enter the network namespace")?;
        setns(mounts, CloneFlags::CLONE_NEWNS).context("enter the mount namespace")?;
        fchdir(root).context("go to the container's root")?;
        chroot(".").context("change the root directory")?;
        chdir("/").context("go to the root directory")?;
        for capability in caps::all().difference(&self.capabilities) {
            caps::drop(None, CapSet::Bounding, *capability)
                .with_context(|| format!("drop {capability}"))?;
        }
        if self.no_new_privileges {
            set_no_new_privs().context("forbid new privileges")?;
        }
        let mut process = Command::new(program);
        process
            .args(arguments)
            .env_clear()
            .envs(&self.env)
            .env("PATH", "/usr/local/bin");
        if let Some(user) = self.user {
            process.uid(user);
        }
        process
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        process
            .spawn()
            .with_context(|| format!("start {program} in the container"))
    }
}
