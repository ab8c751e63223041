//! Network namespaces: created by name, like `ip netns`, and entered by threads.
//!
//! A socket belongs to the namespace that created it, even if another thread uses it later. So no
//! living thread changes its namespace: [`NetNs::run`] enters the namespace in a fresh thread,
//! which ends with the closure.

use std::fs::{self, File};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use proxy_datapath::BPF_DIR;

use crate::agent::{DEADLINE, wait_until};

/// The time limit for a connection to a server in another namespace.
const CONNECT: Duration = Duration::from_secs(5);

/// The folder of `ip netns` names.
const NAMES: &str = "/run/netns";

/// The lock for creating and deleting namespaces in this process. The removal of all namespaces
/// never releases it.
static CHANGING: Mutex<()> = Mutex::new(());

/// A network namespace with lo up, deleted with this value.
#[derive(Debug)]
pub struct NetNs {
    name: String,
    file: File,
}

impl NetNs {
    pub fn create(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        mount_bpf_fs()?;
        let changing = changing();
        check(
            Command::new("ip").args(["netns", "add", &name]).output(),
            &format!("add namespace {name}"),
        )?;
        drop(changing);
        let path = format!("{NAMES}/{name}");
        let file = File::open(&path).with_context(|| format!("open {path}"))?;
        let netns = Self { name, file };
        // Addresses are usable at once, and IPv6 sends nothing by itself.
        for key in [
            "accept_dad",
            "dad_transmits",
            "router_solicitations",
            "accept_ra",
        ] {
            netns.sysctl(&format!("ipv6/conf/default/{key}"), "0")?;
        }
        netns.ip("link set lo up")?;
        Ok(netns)
    }

    /// Creates a machine: a namespace with eth0 at 192.0.2.1/24 and fd00::1/64, and default routes.
    /// The other end of eth0 is `wire`.
    pub fn machine(name: &str) -> Result<Self> {
        let netns = Self::create(format!("kpx-{}-{name}", std::process::id()))?;
        netns.wire()?;
        netns.ip("addr add 192.0.2.1/24 dev eth0
             addr add fd00::1/64 dev eth0 nodad
             route add default via 192.0.2.254
             route add default via fd00::fe")?;
        Ok(netns)
    }

    /// Creates a machine with eth0 at 192.0.2.1/24, without a default route.
    pub fn machine_v4(name: &str) -> Result<Self> {
        let netns = Self::create(format!("kpx-{}-{name}", std::process::id()))?;
        netns.wire()?;
        netns.ip("addr add 192.0.2.1/24 dev eth0")?;
        Ok(netns)
    }

    /// Adds eth0 without an address. Its other end is `wire`.
    pub fn wire(&self) -> Result<()> {
        self.ip("link add eth0 type veth peer name wire\nlink set wire up\nlink set eth0 up")
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the folder for pins of a kpx in this namespace, removed with the namespace. In a
    /// container it may act as the whole BPF file system.
    pub fn bpf_dir(&self) -> PathBuf {
        bpf_dir(&self.name)
    }

    /// Calls `f` on a fresh thread inside this namespace.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            setns(&self.file, CloneFlags::CLONE_NEWNET)
                .expect("root may enter a namespace that it holds open");
            f()
        };
        thread::scope(|scope| scope.spawn(inside).join())
            .unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Calls `f` on a thread that stays inside this namespace, even after this value is dropped.
    pub fn thread<T: Send + 'static>(
        &self,
        name: &str,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        let file = self
            .file
            .try_clone()
            .with_context(|| format!("duplicate the handle on {}", self.name))?;
        let inside = move || {
            setns(file, CloneFlags::CLONE_NEWNET)
                .expect("root may enter a namespace that it holds open");
            f()
        };
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(inside)
            .with_context(|| format!("start thread {name}"))
    }

    /// Starts a process inside this namespace.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        self.run(|| command.spawn())
            .with_context(|| format!("start {command:?} in {}", self.name))
    }

    /// Runs a process inside this namespace to its end. Returns an error with its output if it
    /// fails.
    pub fn exec(&self, command: &mut Command) -> Result<String> {
        let output = self.run(|| command.output());
        check(output, &format!("{command:?} in {}", self.name))
    }

    /// Runs lines of `ip` commands without the word `ip`; empty lines are allowed.
    pub fn ip(&self, lines: &str) -> Result<()> {
        self.feed(Command::new("ip").args(["-batch", "-"]), lines)
    }

    /// Waits until the kernel treats all IPv6 addresses as local. It adds the local routes with a
    /// delay; before that, a route points to the address's device.
    pub fn settle(&self) -> Result<()> {
        let ip = |words: &str| self.exec(Command::new("ip").args(words.split(' ')));
        wait_until(DEADLINE, "IPv6 addresses are local", || {
            let addresses = ip("-6 -o addr show scope global")?;
            let routes = ip("-6 route show table local")?;
            let address =
                |line: &str| Some(line.split_once("inet6 ")?.1.split_once('/')?.0.to_owned());
            let is_local = |address: String| routes.contains(&format!("local {address} "));
            Ok(addresses.lines().filter_map(address).all(is_local))
        })
    }

    /// Applies an nftables ruleset.
    pub fn nft(&self, rules: &str) -> Result<()> {
        self.feed(Command::new("nft").args(["-f", "-"]), rules)
    }

    /// Writes a sysctl of this namespace; `key` is a path below `/proc/sys/net`.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/net/{key}");
        self.run(|| fs::write(&path, value))
            .with_context(|| format!("write {value} to {path} in {}", self.name))
    }

    /// Reads a file that depends on the reader's namespace.
    pub fn read(&self, path: &str) -> Result<String> {
        self.run(|| fs::read_to_string(path))
            .with_context(|| format!("read {path} in {}", self.name))
    }

    fn feed(&self, command: &mut Command, input: &str) -> Result<()> {
        let mut child = self.spawn(
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped()),
        )?;
        let written = child
            .stdin
            .take()
            .context("open standard input")?
            .write_all(input.as_bytes());
        check(
            child.wait_with_output(),
            &format!("{command:?} in {} with input:\n{input}", self.name),
        )?;
        written.with_context(|| format!("write to {command:?}"))
    }
}

impl Drop for NetNs {
    fn drop(&mut self) {
        let _changing = changing();
        if let Err(error) = remove(&self.name) {
            tracing::warn!(%error, name = self.name, "namespace is left over");
        }
    }
}

/// Takes the lock for creating and deleting namespaces.
pub(crate) fn changing() -> MutexGuard<'static, ()> {
    CHANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the names of all namespaces of this machine.
pub fn names() -> Result<Vec<String>> {
    let Ok(entries) = fs::read_dir(NAMES) else {
        return Ok(Vec::new()); // No namespace exists yet.
    };
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Mounts the BPF file system, like systemd at boot.
fn mount_bpf_fs() -> Result<()> {
    const DIR: &str = "/sys/fs/bpf";
    let _changing = changing();
    if statfs(DIR)
        .with_context(|| format!("look at {DIR}"))?
        .filesystem_type()
        != BPF_FS_MAGIC
    {
        mount(
            Some("bpf"),
            DIR,
            Some("bpf"),
            MsFlags::empty(),
            None::<&str>,
        )
        .with_context(|| format!("mount {DIR}"))?;
    }
    Ok(())
}

/// A BPF file system reserves names with dots.
fn bpf_dir(name: &str) -> PathBuf {
    PathBuf::from(format!("/sys/fs/bpf/kpx-test-{}", name.replace('.', "_")))
}

/// Returns the processes inside a namespace.
pub fn pids(name: &str) -> Result<Vec<i32>> {
    let text = check(
        Command::new("ip").args(["netns", "pids", name]).output(),
        &format!("list processes in {name}"),
    )?;
    text.split_whitespace()
        .map(|pid| pid.parse().with_context(|| format!("process id {pid}")))
        .collect()
}

/// Removes a namespace with the pins of its kpx, which would otherwise be lost.
pub fn remove(name: &str) -> Result<()> {
    let in_container = Path::new(BPF_DIR)
        .file_name()
        .context("a folder in the BPF file system")?;
    let dir = bpf_dir(name);
    for dir in [dir.join(in_container), dir] {
        proxy_datapath::remove(&dir, &mut |_| {})?;
    }
    check(
        Command::new("ip").args(["netns", "del", name]).output(),
        &format!("delete namespace {name}"),
    )
    .map(drop)
}

/// Returns the standard output of a command, or an error if it fails.
pub fn check(output: std::io::Result<Output>, what: &str) -> Result<String> {
    let output = output.with_context(|| what.to_owned())?;
    if !output.status.success() {
        bail!(
            "{what}: {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    ensure!(
        output.stdout.is_ascii() || std::str::from_utf8(&output.stdout).is_ok(),
        "{what}: output is not text"
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Connects from the network namespace at a path.
pub(crate) fn connect_in(namespace: &str, to: SocketAddr) -> Result<TcpStream> {
    let net = File::open(namespace).with_context(|| format!("open {namespace}"))?;
    let connect = || {
        setns(net, CloneFlags::CLONE_NEWNET).context("enter the network namespace")?;
        TcpStream::connect_timeout(&to, CONNECT).with_context(|| format!("connect to {to}"))
    };
    // A separate thread, because it stays in that namespace.
    thread::scope(|scope| {
        scope
            .spawn(connect)
            .join()
            .unwrap_or_else(|_| bail!("the thread panicked"))
    })
}
