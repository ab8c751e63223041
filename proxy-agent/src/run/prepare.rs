//! Does all work that needs more capabilities than serving, before they are dropped.

use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::{Context, Result, bail};
use tokio::runtime::Builder;
use tracing::warn;

use crate::control;
use crate::settings::Settings;
use proxy_datapath::{Cgroup, Pins, ensure_bpf_fs, ensure_no_hidden_links};
use proxy_net as net;
use proxy_net::filter::{self, Filter};
use proxy_net::kernel::{MEND_PREEMPTION, Preemption};
use proxy_net::lock;

pub struct Prepared {
    /// The lock that prevents another kpx instance in this network namespace.
    pub lock: UnixListener,
    /// The pins, with the maps of an earlier run if present.
    pub pins: Pins,
    /// The cgroup whose sockets are translated, or why it is missing. `None` if no socket is
    /// translated.
    pub cgroup: Option<Result<Cgroup>>,
    /// The socket for other processes of this machine.
    pub socket: UnixListener,
}

/// Prepares the host. Refuses a kernel whose programs may preempt each other: they would mix up
/// packets.
///
/// Reads the source's configuration before it changes the host. Locks this network namespace before
/// it looks for maps: the directory of pins may be private to this container, and its lock would
/// then stop no other kpx instance.
///
/// The process must have only one thread, and this function starts none.
pub fn prepare(settings: &Settings, object: &[u8]) -> Result<Prepared> {
    if let Err(why) = Preemption::read(Path::new("/"))?.verdict() {
        bail!("this kernel is {why}; {MEND_PREEMPTION}");
    }
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    runtime
        .block_on(settings.source.check())
        .context("the source")?;
    let lock = lock::take_over()?;
    let cgroup = cgroup(settings).transpose()?;
    let pins = Pins::open(&settings.bpf_dir, ensure_bpf_fs(&settings.bpf_dir)?)?;
    let has_maps = pins.has_maps()?;
    // An earlier agent of this container has left visible pins.
    if pins.is_ours_alone() && !has_maps {
        ensure_no_hidden_links()?;
    }
    if !has_maps {
        recover(&pins, object, &runtime.block_on(filters())?)?;
    }
    let socket = control::listen(&settings.run_dir, settings.socket_group)?;
    Ok(Prepared {
        lock,
        pins,
        cgroup,
        socket,
    })
}

/// Opens the cgroup of the settings; `None` if no socket is translated. The outer error means that
/// the settings require the cgroup.
fn cgroup(settings: &Settings) -> Option<Result<Result<Cgroup>>> {
    let root = settings.cgroup_root.as_deref();
    settings.sockets.map(|sockets| match sockets.is_optional {
        true => Ok(Cgroup::find(root)),
        false => Cgroup::find_or_mount(root).map(Ok),
    })
}

/// Pins the maps of a predecessor whose pins are gone.
fn recover(pins: &Pins, object: &[u8], filters: &[(String, Filter)]) -> Result<()> {
    if pins.may_open_by_id() {
        return pins
            .recover(object, filters)
            .context("find the maps of the programs on this node");
    }
    if !filters.is_empty() {
        warn!(
            "the maps of the programs on this node are not pinned, and finding them needs CAP_SYS_ADMIN: open connections are cut"
        );
    }
    Ok(())
}

async fn filters() -> Result<Vec<(String, Filter)>> {
    let (driver, handle) = net::connect()?;
    tokio::select! {
        filters = filter::ours(&handle) => filters,
        () = driver => bail!("the netlink socket has failed"),
    }
}
