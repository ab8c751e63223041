//! Starts and stops the cluster.

use std::collections::BTreeMap;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::command::output;
use crate::init::Plan;
use crate::migration::IMAGE;
use crate::network::{API_PORT, CONTROL4};
use crate::parts::Parts;
use crate::state::{State, dir, start_time};
use crate::{addons, control_plane, images, network, nodes, parts};

#[derive(Args)]
// `test` has options of its own beside these.
#[group(id = "cluster")]
pub(crate) struct Options {
    /// The number of nodes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
    pub(crate) nodes: u8,
    /// The plugin that connects pods
    #[arg(long, value_enum, default_value_t = Cni::Bridge)]
    pub(crate) cni: Cni,
    /// What serves Services
    #[arg(long, value_enum, default_value_t = Proxy::Kpx)]
    pub(crate) proxy: Proxy,
    /// The minor version of Kubernetes
    #[arg(long, default_value = parts::DEFAULT_KUBERNETES)]
    pub(crate) kubernetes: String,
    /// An archive with kpx's image, as `cargo xtask dist` makes it
    #[arg(long)]
    pub(crate) image: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Cni {
    /// The plugin `bridge`, and routes between the nodes
    Bridge,
    /// The plugin `ptp`, and routes between the nodes
    Ptp,
    /// The plugin `bridge`; kube-router announces the IPv4 routes, and enforces network policies
    KubeRouter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Proxy {
    /// kpx by its own manifests
    Kpx,
    /// kube-proxy of the cluster's version in mode nftables
    KubeProxyNftables,
    /// kube-proxy of the cluster's version in mode iptables
    KubeProxyIptables,
}

impl Proxy {
    fn mode(self) -> &'static str {
        match self {
            Self::KubeProxyIptables => "iptables",
            Self::Kpx | Self::KubeProxyNftables => "nftables",
        }
    }
}

/// The time limit for a step that waits for a program.
const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) fn up(options: &Options) -> Result<()> {
    let _lock = lock()?;
    if State::read()?.is_some_and(|state| state.is_alive()) {
        bail!("a cluster is running: `cargo xtask cluster down` stops it");
    }
    match &options.image {
        Some(image) => ensure!(image.is_file(), "--image {}: no such file", image.display()),
        None => ensure!(options.proxy != Proxy::Kpx, "--proxy kpx takes an --image"),
    }
    let parts = parts::build(&options.kubernetes)?;
    let images = parts.program("images.tar");
    step("make images", || images::archive(&parts, &images))?;
    let started = Instant::now();
    clean()?;
    // It has the keys of the cluster.
    fs::DirBuilder::new()
        .mode(0o700)
        .create(dir())
        .with_context(|| format!("make {}", dir().display()))?;
    for folder in ["kubernetes", "logs", "held", "etcd"] {
        let folder = dir().join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    }
    let nodes = network::nodes(options.nodes);
    let listener = TcpListener::bind("127.0.0.1:0").context("listen on loopback")?;
    let port = listener.local_addr()?.port();
    step("make certificates", || {
        control_plane::prepare(&parts, &nodes, port, options.proxy.mode())
    })?;
    let state = step("start the control plane and the nodes", || {
        start(options, &parts, &nodes, listener)
    })?;
    step("import images", || {
        import(&parts, &nodes, &images, options.image.as_ref())
    })?;
    step("add kubeadm's objects and the proxy", || {
        until("the API server is ready", || {
            output(state.kubectl().args(["get", "--raw=/readyz"])).map(drop)
        })?;
        addons::apply(&state, &parts, &nodes, options.cni, options.proxy)
    })?;
    step("wait for the nodes and CoreDNS", || addons::wait(&state))?;
    println!(
        "Started in {} s: {} nodes, Kubernetes {}.",
        started.elapsed().as_secs(),
        nodes.len(),
        parts.kubernetes
    );
    println!("    export KUBECONFIG={}", state.admin().display());
    println!("    cargo xtask cluster kubectl get pods -A");
    println!("    cargo xtask cluster exec n1 -- ip route");
    println!("    cargo xtask cluster down");
    Ok(())
}

/// Keeps a second `up` or `down` away.
fn lock() -> Result<fs::File> {
    let path = "/run/lock/kpx-cluster";
    let file = fs::File::create(path).with_context(|| format!("make {path}"))?;
    file.try_lock()
        .with_context(|| format!("another command starts or stops the cluster ({path})"))?;
    Ok(file)
}

pub(crate) fn down() -> Result<()> {
    let _lock = lock()?;
    if let Some(state) = State::read()?.filter(State::is_alive) {
        kill(Pid::from_raw(state.pid), Signal::SIGKILL).context("end the cluster")?;
        until("the cluster's processes have ended", || {
            ensure!(!state.is_alive(), "{} runs", state.pid);
            Ok(())
        })?;
    }
    clean()
}

/// Removes what a cluster leaves behind: its folder, its control groups, the kubelets' sysctls.
fn clean() -> Result<()> {
    for (path, value) in State::read()?.unwrap_or_default().sysctls {
        fs::write(&path, value).with_context(|| format!("write {}", path.display()))?;
    }
    until("the control groups are gone", || {
        for hierarchy in ["/sys/fs/cgroup".into()]
            .into_iter()
            .chain(folders(Path::new("/sys/fs/cgroup")))
        {
            remove_group(&hierarchy.join("kpx-cluster"))?;
        }
        Ok(())
    })?;
    match fs::remove_dir_all(dir()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", dir().display()))
        }
        _ => Ok(()),
    }
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir() && !path.is_symlink())
        .collect()
}

/// Removes a control group and the groups inside.
fn remove_group(path: &Path) -> Result<()> {
    if !path.is_dir() {
        return Ok(());
    }
    for folder in folders(path) {
        remove_group(&folder)?;
    }
    fs::remove_dir(path).with_context(|| format!("remove {}", path.display()))
}

/// Starts the first process of the machine, which starts everything else.
fn start(
    options: &Options,
    parts: &Parts,
    nodes: &[network::Node],
    listener: TcpListener,
) -> Result<State> {
    let variables = nodes::variables(parts, nodes);
    let pause = images::pause(parts)?;
    let mut programs = control_plane::programs(parts);
    for node in nodes {
        programs.push(nodes::prepare(
            parts,
            node,
            &variables,
            options.cni,
            &pause,
        )?);
    }
    let plan = Plan {
        setup: concat!(
            include_str!("scripts/connect.sh"),
            include_str!("scripts/machine.sh")
        )
        .to_owned(),
        variables,
        programs,
        ready: dir().join("ready"),
        forward: Some(SocketAddr::from((CONTROL4, API_PORT))),
    };
    let path = dir().join("plan.json");
    fs::write(&path, serde_json::to_vec_pretty(&plan)?)
        .with_context(|| format!("write {}", path.display()))?;
    let log = fs::File::create(dir().join("logs/init.log")).context("make the log")?;
    let mut unshare = Command::new("unshare");
    unshare
        .args([
            "--fork",
            "--kill-child",
            "--pid",
            "--mount-proc",
            "--mount",
            "--net",
            "--",
        ])
        .arg(std::env::current_exe().context("find this program")?)
        .arg("init")
        .arg(&path)
        .stdin(OwnedFd::from(listener))
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0);
    let sysctls = sysctls();
    let mut unshare = unshare.spawn().context("run unshare")?;
    let pid = i32::try_from(unshare.id())?;
    let state = State {
        pid,
        started: start_time(pid).context("unshare ended")?,
        parts: parts.dir().to_owned(),
        kubernetes: parts.kubernetes.clone(),
        nodes: nodes.iter().map(|node| node.name.clone()).collect(),
        cni: name_of(options.cni),
        proxy: name_of(options.proxy),
        sysctls,
    };
    state.write()?;
    let log = dir().join("logs/init.log");
    until("the first process has set up", || {
        // The outer error ends the wait.
        let ended = unshare.try_wait().context("wait for unshare")?;
        Ok(match ended {
            Some(status) => Some(Err(anyhow!(
                "the first process ended ({status}): {}",
                fs::read_to_string(&log).unwrap_or_default()
            ))),
            None => {
                ensure!(plan.ready.exists(), "see {}", log.display());
                None
            }
        })
    })?
    .unwrap_or(Ok(()))?;
    Ok(state)
}

/// Returns the sysctls of the whole machine that kubelets change, with their values.
fn sysctls() -> BTreeMap<PathBuf, String> {
    [
        "vm/overcommit_memory",
        "vm/panic_on_oom",
        "kernel/panic",
        "kernel/panic_on_oops",
        "kernel/keys/root_maxkeys",
        "kernel/keys/root_maxbytes",
    ]
    .into_iter()
    .map(|name| Path::new("/proc/sys").join(name))
    .filter_map(|path| {
        let value = fs::read_to_string(&path).ok()?;
        Some((path, value.trim().to_owned()))
    })
    .collect()
}

/// Returns the value on the command line.
pub(crate) fn name_of(value: impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default()
}

/// Imports the cluster's images, and the image in the archive `kpx`, into each node.
fn import(
    parts: &Parts,
    nodes: &[network::Node],
    images: &PathBuf,
    kpx: Option<&PathBuf>,
) -> Result<()> {
    let archives = [Some(images), kpx];
    let into = |node: &network::Node| {
        until(&format!("containerd of {} runs", node.name), || {
            let mut ctr = Command::new(parts.program("ctr"));
            ctr.arg("--address")
                .arg(nodes::containerd_socket(&node.name));
            output(ctr.arg("version")).map(drop)
        })?;
        for archive in archives.into_iter().flatten() {
            output(&mut nodes::import(parts, &node.name, archive))?;
        }
        let Some(image) = kpx else {
            return Ok(());
        };
        let names = output(&mut nodes::images(parts, &node.name))?;
        ensure!(
            names.lines().any(|name| name == IMAGE),
            "--image {}: the archive has no image {IMAGE}, which the manifests name",
            image.display()
        );
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = nodes
            .iter()
            .map(|node| scope.spawn(|| into(node)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("an import panicked"))?)
    })
}

fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    eprintln!("==> {name}");
    let started = Instant::now();
    let result = work()?;
    eprintln!("    {name}: {:.1} s", started.elapsed().as_secs_f64());
    Ok(result)
}

/// Repeats a check until it succeeds, or returns its last error.
pub(crate) fn until<T>(what: &str, check: impl FnMut() -> Result<T>) -> Result<T> {
    until_within(DEADLINE, what, check)
}

pub(crate) fn until_within<T>(
    deadline: Duration,
    what: &str,
    mut check: impl FnMut() -> Result<T>,
) -> Result<T> {
    let started = Instant::now();
    loop {
        match check() {
            Ok(done) => return Ok(done),
            Err(error) if started.elapsed() > deadline => {
                return Err(error).with_context(|| format!("waited until {what}"));
            }
            Err(_) => sleep(Duration::from_millis(200)),
        }
    }
}
