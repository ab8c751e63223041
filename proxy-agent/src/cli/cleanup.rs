//! `kpx cleanup`: takes away what a dead kpx left, and what kube-proxy left.

mod kube_proxy;

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};
use clap::Args;
use nix::net::if_::if_nameindex;

use super::output::print;
use crate::control;
use crate::net::filter::{self, Filter};
use crate::net::{self, Handle, anchor, pod_route, rule};
use crate::node::Node;

/// Remove from this host what a kpx left that was killed. Needs root.
///
/// A kpx that ends regularly takes everything with it, and one that starts takes over what it finds: this is for a host
/// that kpx is to leave for good.
#[derive(Args, Debug)]
pub(crate) struct CleanupArgs {
    /// Also if a kpx runs: it makes anew what it misses, so stop it soon.
    #[arg(long)]
    force: bool,
    /// Remove what kube-proxy left, too: its chains and tables, and its device kube-ipvs0.
    #[arg(long)]
    kube_proxy: bool,
}

impl CleanupArgs {
    /// What kube-proxy's `--cleanup` means: everything of everyone, unless a kpx runs.
    pub(crate) const AS_KUBE_PROXY: Self = Self { force: false, kube_proxy: true };
}

/// Says each thing that was removed, also if the next one fails.
pub(crate) async fn cleanup(args: &CleanupArgs) -> Result<()> {
    let lock = control::lock();
    if !args.force {
        lock.as_ref().map_err(|error| anyhow::anyhow!("{error:#}: stop it first, or say --force"))?;
    }
    let mut removed = Removed::default();
    let (driver, handle) = net::connect()?;
    let result = tokio::select! {
        result = all(&handle, args.kube_proxy, &mut removed) => result,
        () = driver => bail!("the netlink socket has failed"),
    };
    print(&removed.text())?;
    result
}

/// What was removed so far.
#[derive(Debug, Default)]
struct Removed(Vec<String>);

impl Removed {
    fn add(&mut self, what: impl Into<String>) {
        self.0.push(what.into());
    }

    fn text(&self) -> String {
        if self.0.is_empty() {
            return "nothing to remove\n".to_owned();
        }
        self.0.iter().fold(String::new(), |mut text, what| {
            // A String takes all that is written to it.
            let _written = writeln!(text, "removed {what}");
            text
        })
    }
}

async fn all(handle: &Handle, kube_proxy: bool, removed: &mut Removed) -> Result<()> {
    let (rules, anchor) = (rule::count(handle).await?, anchor::exists(handle).await?);
    let pod_routes = pod_route::count(handle).await?;
    Node::clean(handle).await?;
    if rules > 0 {
        removed.add(format!("{rules} routing rules of preference {}", rule::PREFERENCE));
    }
    if pod_routes > 0 {
        removed.add(format!("{pod_routes} routes to pods"));
    }
    if anchor {
        removed.add(format!("the devices {} and {}, and the routes through them", anchor::NAME, anchor::PEER));
    }
    for device in if_nameindex().context("list the devices")?.iter() {
        let name = device.name().to_string_lossy().into_owned();
        filters(handle, device.index(), &name, removed).await?;
    }
    if kube_proxy {
        kube_proxy::remove(handle, removed).await?;
    }
    Ok(())
}

/// Our filters, and the qdisc if it has no other's. TCX links ended with their process.
async fn filters(handle: &Handle, ifindex: u32, device: &str, removed: &mut Removed) -> Result<()> {
    let (ours, others): (Vec<Filter>, Vec<Filter>) =
        filter::list(handle, ifindex).await?.into_iter().partition(Filter::is_ours);
    for filter in &ours {
        filter::remove(handle, filter).await.with_context(|| format!("clean {device}"))?;
        removed.add(format!("the filter {} at {}'s {}", filter.name, device, filter.hook.name()));
    }
    if !ours.is_empty() && others.is_empty() && filter::remove_qdisc(handle, ifindex).await? {
        removed.add(format!("the clsact qdisc of {device}"));
    }
    Ok(())
}
