//! `kpx cleanup`: takes away what a dead kpx left, and what kube-proxy left.

mod drain;
mod keep;
mod kube_proxy;

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;

use super::output::print;
use crate::config::duration::GoDuration;
use crate::datapath::{BPF_DIR, check_netns, lock_if_there};
use crate::net::Handle;
use crate::net::changes::Changes;
use crate::run::RUN_DIR;
use crate::settings::Settings;
use crate::{control, leftovers, net};

/// Remove from this host everything that a kpx left. Needs root.
///
/// On a node services stay reachable when kpx ends, and a kpx that starts takes over what it finds: this is for a host that
/// kpx is to leave for good. What other versions of kpx left is removed, too.
#[derive(Args, Debug)]
pub(crate) struct CleanupArgs {
    /// The run directory of that kpx, where it noted what it changed.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
    /// Its folder in a BPF file system.
    #[arg(long, value_name = "DIR", default_value = BPF_DIR)]
    bpf_dir: PathBuf,
    /// Also what is a running kpx's: it makes anew what it misses, so stop it soon.
    #[arg(long)]
    force: bool,
    /// Remove what kube-proxy left, too: its chains and tables, and its device kube-ipvs0. While a kpx runs, only that.
    #[arg(long)]
    kube_proxy: bool,
    /// First leave all that is new to kube-proxy's rules, which must be there, and wait for what is open to end.
    #[arg(long, conflicts_with_all = ["kube_proxy", "force"])]
    drain: bool,
    /// Wait no longer than this; what is still open then is cut.
    #[arg(long, value_name = "DURATION", default_value = "5m", requires = "drain")]
    timeout: GoDuration,
    /// A kpx that runs is no reason to refuse.
    #[arg(skip = true)]
    beside_kpx: bool,
}

impl CleanupArgs {
    /// What kube-proxy's `--cleanup` means: everything of everyone, unless a kpx runs.
    pub(crate) fn as_kube_proxy(settings: &Settings) -> Self {
        let (run_dir, bpf_dir) = (settings.run_dir.clone(), settings.bpf_dir.clone());
        let timeout = GoDuration::ZERO;
        Self { run_dir, bpf_dir, force: false, kube_proxy: true, drain: false, timeout, beside_kpx: false }
    }
}

/// Says each thing that was removed, also if the next one fails.
pub(crate) async fn cleanup(args: &CleanupArgs) -> Result<()> {
    let lock = control::lock();
    let kpx_runs = lock.is_err() && !args.force;
    if kpx_runs && !(args.kube_proxy && args.beside_kpx) {
        lock.as_ref().map_err(|error| anyhow!("{error:#}: stop it first, or say --force"))?;
    }
    let mut removed = Removed::default();
    let (driver, handle) = net::connect()?;
    let work = async {
        if !kpx_runs {
            ours(args, &handle, &mut removed).await?;
        }
        if args.kube_proxy {
            kube_proxy::remove(&handle, &mut removed).await?;
        }
        Ok(())
    };
    let result = tokio::select! {
        result = work => result,
        () = driver => bail!("the netlink socket has failed"),
    };
    print(&removed.text())?;
    result
}

async fn ours(args: &CleanupArgs, handle: &Handle, removed: &mut Removed) -> Result<()> {
    let folder_lock = lock_if_there(&args.bpf_dir);
    let _folder_lock = if args.force { None } else { folder_lock? };
    if !args.force {
        check_netns(&args.bpf_dir)?;
    }
    let timeout = args.timeout.std().context("--timeout is less than nothing")?;
    if args.drain && !drain::drain(&args.bpf_dir, timeout).await? {
        eprintln!("draining: the time is up, the rest is cut");
    }
    let changes = Changes::new(&args.run_dir);
    leftovers::remove(handle, &changes, &args.bpf_dir, &mut |what| removed.add(what)).await?;
    if !args.kube_proxy && !args.drain {
        keep::remove(removed)?;
    }
    Ok(())
}

/// What was removed so far.
#[derive(Debug, Default)]
struct Removed {
    removed: Vec<String>,
    /// What was made, and why.
    kept: Vec<String>,
}

impl Removed {
    fn add(&mut self, what: impl Into<String>) {
        self.removed.push(what.into());
    }

    /// For the sake of connections that kube-proxy opened.
    fn keep(&mut self, what: impl Into<String>) {
        self.kept.push(what.into());
    }

    fn text(&self) -> String {
        if self.removed.is_empty() {
            return "nothing to remove\n".to_owned();
        }
        let removed = self.removed.iter().map(|what| format!("removed {what}\n"));
        let kept = self
            .kept
            .iter()
            .map(|what| format!("made {what}, by which connections of kube-proxy go on: kpx cleanup removes it\n"));
        removed.chain(kept).collect()
    }
}
