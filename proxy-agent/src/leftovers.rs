//! Removes everything that kpx instances have left on a host.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use nix::net::if_::if_nameindex;

use crate::node::Node;
use proxy_datapath as datapath;
use proxy_net::changes::{Changes, Undo, Wanted};
use proxy_net::filter::{self, Filter};
use proxy_net::{Handle, anchor, pod_route, rule, tunnel};

/// Removes all leftovers, and calls `done` for each. A failure does not stop the rest. Sysctls that
/// other programs have `wanted` stay.
pub async fn remove(
    handle: &Handle,
    changes: &Changes,
    bpf_dir: &Path,
    wanted: &Wanted,
    done: &mut dyn FnMut(Undo),
) -> Result<()> {
    let removed = &mut |what| done(Undo::Removed(what));
    // First the routes and rules that send packets to the programs.
    let routes = remove_routes(handle, removed).await;
    let pins = datapath::remove(bpf_dir, removed);
    // This read precedes the list's deletion, which reports an unreadable list.
    let made = changes.qdiscs().unwrap_or_default();
    let filters = filters(handle, &made, removed).await;
    let undone = changes.undo(wanted, done).context("change parameters back");
    routes.and(pins).and(filters).and(undone)
}

async fn remove_routes(handle: &Handle, removed: &mut dyn FnMut(String)) -> Result<()> {
    let rules = rule::count(handle).await?;
    let anchor = anchor::exists(handle).await?;
    let tunnels = tunnel::exists(handle).await?;
    let pod_routes = pod_route::count(handle).await?;
    Node::clean(handle).await?;
    if rules > 0 {
        removed(format!("{rules} routing rules"));
    }
    if pod_routes > 0 {
        removed(format!("{pod_routes} routes to pods"));
    }
    if tunnels {
        removed(format!(
            "the tunnel devices {}",
            tunnel::NAMES.join(" and ")
        ));
    }
    if anchor {
        removed(format!(
            "the devices {} and {}, and the routes through them",
            anchor::NAME,
            anchor::PEER
        ));
    }
    Ok(())
}

/// Removes kpx's filters from all devices, and kpx's own qdiscs unless other programs use them. A
/// device that vanishes counts as clean.
async fn filters(
    handle: &Handle,
    made: &BTreeSet<u32>,
    removed: &mut dyn FnMut(String),
) -> Result<()> {
    let mut result = Ok(());
    for device in if_nameindex().context("list the devices")?.iter() {
        let ifindex = device.index();
        let name = device.name().to_string_lossy().into_owned();
        let cleaned = filters_of(handle, ifindex, &name, made.contains(&ifindex), removed).await;
        let is_there = || {
            if_nameindex()
                .is_ok_and(|devices| devices.iter().any(|device| device.index() == ifindex))
        };
        if cleaned.is_err() && is_there() {
            result = result.and(cleaned);
        }
    }
    result
}

async fn filters_of(
    handle: &Handle,
    ifindex: u32,
    name: &str,
    is_made: bool,
    removed: &mut dyn FnMut(String),
) -> Result<()> {
    let listed = filter::list(handle, ifindex).await?;
    let (ours, others): (Vec<Filter>, Vec<Filter>) = listed.into_iter().partition(Filter::is_ours);
    for filter in &ours {
        filter::remove(handle, filter)
            .await
            .with_context(|| format!("clean {name}"))?;
        removed(format!(
            "the filter {} at {name}'s {}",
            filter.name,
            filter.hook.name()
        ));
    }
    if others.is_empty() && is_made && filter::remove_qdisc(handle, ifindex).await? {
        removed(format!("the clsact qdisc of {name}"));
    }
    Ok(())
}
