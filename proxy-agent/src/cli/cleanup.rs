//! `kpx cleanup`: removes what kpx and kube-proxy left on a host.

mod drain;
mod ipvs;
mod keep;
mod kube_proxy;
pub(crate) mod kube_proxy_sysctls;
mod stand_by;

use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use ipnet::IpNet;
use nix::unistd::Uid;

use crate::config::duration::GoDuration;
use crate::leftovers;
use crate::settings::Settings;
use proxy_datapath::object;
use proxy_datapath::{BPF_DIR, check_netns, lock_if_there, may_open_by_id, serves};
use proxy_net as net;
use proxy_net::changes::{Changes, Undo, Wanted};
use proxy_net::lock::{self, Leaving};
use proxy_net::{Handle, filter};
use proxy_view::RUN_DIR;
use proxy_view::client::Client;
use proxy_view::output::print;

use kube_proxy_sysctls::{kube_proxys_excluded, kube_proxys_sysctls};

/// Remove everything that kpx left on this host. Needs root.
///
/// On a node, Services stay reachable after kpx exits, and the next kpx takes over its state. This
/// command is for the final removal; it also removes the leftovers of other versions.
#[derive(Args, Debug)]
pub(crate) struct CleanupArgs {
    /// Run directory of that kpx, with the record of its changes.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
    /// Folder of that kpx in a BPF file system.
    #[arg(long, value_name = "DIR", default_value = BPF_DIR)]
    bpf_dir: PathBuf,
    /// Remove even the state of a running kpx, which then restores it: stop that kpx soon.
    #[arg(long)]
    force: bool,
    /// Remove only kube-proxy's leftovers: chains and tables; for mode ipvs also virtual servers
    /// (their connections end), ipsets, the device kube-ipvs0 and the strictARP settings. Requires
    /// a running kpx, since the node would otherwise lose its Services. With --force, also kpx's
    /// leftovers.
    #[arg(long)]
    kube_proxy: bool,
    /// First leave new flows to kube-proxy's rules, which must exist, and wait until the open flows
    /// have ended.
    #[arg(long, conflicts_with_all = ["kube_proxy", "force"])]
    drain: bool,
    /// Maximum wait; flows that are still open are then cut.
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "5m",
        requires = "drain"
    )]
    timeout: GoDuration,
    /// Keep running, and drain each time that kpx has exited and kube-proxy has served in its place
    /// for this long.
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true, default_missing_value = "30s", requires = "drain")]
    stand_by: Option<GoDuration>,
    /// Networks whose IPVS virtual servers stay (`ipvs.excludeCIDRs`). Default: those of the
    /// kube-proxy that runs here.
    #[arg(
        long,
        value_name = "CIDR",
        value_delimiter = ',',
        requires = "kube_proxy"
    )]
    ipvs_exclude_cidrs: Vec<IpNet>,
    /// True if kube-proxy's flag `--cleanup` asked for this.
    #[arg(skip)]
    as_kube_proxy: bool,
}

impl CleanupArgs {
    /// Returns the arguments for `kube-proxy --cleanup`: remove kube-proxy's leftovers, and kpx's
    /// leftovers unless kpx runs.
    pub(crate) fn as_kube_proxy(settings: &Settings) -> Self {
        let run_dir = settings.run_dir.clone();
        let bpf_dir = settings.bpf_dir.clone();
        let timeout = GoDuration::ZERO;
        Self {
            run_dir,
            bpf_dir,
            force: false,
            kube_proxy: true,
            drain: false,
            timeout,
            stand_by: None,
            ipvs_exclude_cidrs: settings.ipvs_excluded.clone(),
            as_kube_proxy: true,
        }
    }

    /// Returns the networks whose IPVS virtual servers stay.
    fn excluded(&self) -> Vec<IpNet> {
        match self.ipvs_exclude_cidrs.is_empty() {
            true => kube_proxys_excluded(),
            false => self.ipvs_exclude_cidrs.clone(),
        }
    }

    /// Returns true if kpx's own state stays.
    fn is_for_kube_proxy_alone(&self) -> bool {
        self.kube_proxy && !self.force && !self.as_kube_proxy
    }
}

/// Removes the leftovers. Prints what is removed, even if a later step fails.
pub(crate) async fn cleanup(args: &CleanupArgs) -> Result<()> {
    ensure!(
        Uid::effective().is_root(),
        "kpx cleanup changes this host, which takes root (sudo)"
    );
    let (driver, handle) = net::connect()?;
    let work = async {
        match args.stand_by {
            Some(time) => {
                stand_by::stand_by(args, time.std().context("--stand-by is negative")?, &handle)
                    .await
            }
            None => match once(args, lock::take(), &handle).await? {
                Outcome::Done => Ok(()),
                Outcome::Left => {
                    bail!(
                        "kpx is starting on this node and takes over what is left: nothing was removed"
                    )
                }
            },
        }
    };
    tokio::select! {
        result = work => result,
        () = driver => bail!("the netlink socket has failed"),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    /// An agent that is starting has taken over everything.
    Left,
}

async fn once(args: &CleanupArgs, lock: Result<UnixListener>, handle: &Handle) -> Result<Outcome> {
    let kpx_runs = lock.is_err();
    // The socket outlives the lock: an agent that starts during the cleanup waits at the socket.
    let mut leaving = (args.drain && lock.is_ok())
        .then(Leaving::listen)
        .and_then(|listens| {
            listens
                .inspect_err(|error| {
                    eprintln!("a kpx that starts has to wait for the end: {error}")
                })
                .ok()
        });
    let mut removed = Removed::default();
    let alone = args.is_for_kube_proxy_alone();
    if !(alone || args.force) {
        lock.as_ref()
            .map_err(|error| anyhow!("{error:#}: stop it first, or pass --force"))?;
    }
    let result = match alone {
        true => ensure_served(args, kpx_runs, handle)
            .await
            .map(|()| Outcome::Done),
        false => ours(args, handle, leaving.as_mut(), &mut removed).await,
    };
    let result = match result {
        Ok(Outcome::Done) if args.kube_proxy => {
            kube_proxy::remove(handle, &args.excluded(), &mut removed)
                .await
                .map(|()| Outcome::Done)
        }
        result => result,
    };
    // The lock prevents the start of an agent until the cleanup ends.
    drop(lock);
    if matches!(result, Ok(Outcome::Left)) {
        return result;
    }
    if result.is_ok() || !removed.is_empty() {
        print(&removed.text())?;
    }
    result
}

/// Fails unless kpx serves this node: a running agent is healthy, or the attached programs have
/// tables.
async fn ensure_served(args: &CleanupArgs, kpx_runs: bool, handle: &Handle) -> Result<()> {
    if kpx_runs
        && Client::new(&args.run_dir)
            .status()
            .await
            .is_ok_and(|status| status.healthy)
    {
        return Ok(());
    }
    let is_served = may_open_by_id() && serves(object::embedded()?, &filter::ours(handle).await?)?;
    ensure!(
        is_served,
        "kpx does not serve this node, which would lose its Services without kube-proxy's rules: start kpx, wait until `kpx status` is healthy, and retry; or pass --force, which also removes kpx's leftovers"
    );
    Ok(())
}

async fn ours(
    args: &CleanupArgs,
    handle: &Handle,
    leaving: Option<&mut Leaving>,
    removed: &mut Removed,
) -> Result<Outcome> {
    let folder_lock = lock_if_there(&args.bpf_dir);
    let _folder_lock = if args.force { None } else { folder_lock? };
    if !args.force {
        check_netns(&args.bpf_dir)?;
    }
    let timeout = args.timeout.std().context("--timeout is negative")?;
    if args.drain {
        let asked = async {
            match leaving {
                Some(leaving) => leaving.asked().await,
                None => std::future::pending().await,
            }
        };
        let is_empty = tokio::select! {
            is_empty = drain::drain(&args.bpf_dir, timeout, handle) => is_empty?,
            asked = asked => {
                asked.context("wait for a kpx")?;
                eprintln!("draining: a kpx starts, and serves on");
                return Ok(Outcome::Left);
            }
        };
        if !is_empty {
            eprintln!("draining: the timeout has passed, the remaining flows are cut");
        }
    }
    let changes = Changes::new(&args.run_dir);
    let wanted = if args.kube_proxy {
        Wanted::default()
    } else {
        kube_proxys_sysctls()
    };
    let mut say = |done| match done {
        Undo::Removed(what) => removed.add(what),
        Undo::Left(what) => removed.note(format!("left as it is: {what}")),
    };
    leftovers::remove(handle, &changes, &args.bpf_dir, &wanted, &mut say).await?;
    match (args.kube_proxy, args.drain) {
        (true, _) => {}
        (false, true) => keep::remove_if_superfluous(removed)?,
        (false, false) => keep::remove(removed)?,
    }
    if !args.kube_proxy {
        keep::name_left(removed).await?;
    }
    Ok(Outcome::Done)
}

#[derive(Debug, Default)]
struct Removed {
    removed: Vec<String>,
    /// The remarks to print after the removed items.
    notes: Vec<String>,
}

impl Removed {
    fn add(&mut self, what: impl Into<String>) {
        self.removed.push(what.into());
    }

    /// Adds a number of items, unless it is 0.
    fn count(&mut self, number: usize, things: &str) {
        if number > 0 {
            self.add(format!("{number} {things}"));
        }
    }

    /// Records an object created to keep kube-proxy's connections open.
    fn keep(&mut self, what: &str) {
        self.note(format!(
            "made {what}, which keeps kube-proxy's connections open: kpx cleanup removes it"
        ));
    }

    fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    fn notes(&self, word: &str) -> bool {
        self.notes.iter().any(|note| note.contains(word))
    }

    fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.notes.is_empty()
    }

    fn text(&self) -> String {
        let removed = match self.removed.is_empty() {
            true => "nothing to remove\n".to_owned(),
            false => self
                .removed
                .iter()
                .map(|what| format!("removed {what}\n"))
                .collect(),
        };
        self.notes
            .iter()
            .fold(removed, |text, note| text + note + "\n")
    }
}
